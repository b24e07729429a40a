"use strict";
// Makes the page from the JSON in #data (_run_data in report.py) and the timelines in the templates, and where it is served, anew from
// what changes (report.py). report_samples.js and report_episodes.js, which come before it in the page, make what they are named for. What a run wrote is only ever set as text, never parsed as HTML.
let DATA, RUNS, LINES, SEVERAL, NAMES, SOURCES, CLOCK;  // see show()
const TIMING = "timing_s/", VALIDATION = "Validation";
const REWARD = ["reward/total_mean", "reward/mean"], LENGTH = "response_length/mean";
const MAIN = [  // titles and metrics (names or patterns) of the panels that come first, where they exist
  ["Reward", ...REWARD],
  [VALIDATION, /^val\/(?!loss$).*(?<!@\d+)$/],  // a panel for each
  ["Loss", /\/loss$/],
  ["KL to the reference", "actor/kl"],
  ["Entropy", "actor/entropy"],
  ["Response length", LENGTH, "response_length/max"],
  ["Critic explained variance", "critic/explained_variance"],
  ["Value loss", "critic/vf_loss"],
  ["Policy loss", "actor/pg_loss"],
  ["KL of the update", "actor/ppo_kl"],
  ["Clipped fraction", /\/clip_frac$/],
  ["Gradient norm", /\/grad_norm$/],
  ["Log-prob difference to training", "rollout/log_prob_diff_max"],
  ["Tokens per second", "perf/tokens_per_s"],
  ["Model FLOPs utilisation", "perf/mfu"],
];
const SUMMARY = [  // of each the first that a run has
  ["Reward", ...REWARD],
  ["Loss", /^(?!val).*\/loss$/],
  [VALIDATION, /^val\/(?!loss$)/, "val/loss"],
  ["KL", "actor/kl"],
  ["Response length", LENGTH],
  ["Explained variance", "critic/explained_variance"],
  ["Tokens/s", "perf/tokens_per_s"],
  ["Seconds/step", TIMING + "step"],
];
const WHOLE = [1, 2, 5].flatMap((n) => [...Array(8).keys()].map((power) => n * 10 ** power)).sort((a, b) => a - b);
const SMOOTH_FROM = 20;  // points; shorter curves are shown as they are
const MAX_BARS = 150;
const POLL_MS = 5000;  // between looks at a run that goes on, if the answer is quick
const view = {x: "step", log: false, smooth: null, zoom: null, find: "", tokens: "log-prob"};  // smooth: null: by the length; zoom: ends of the horizontal axis

// ---- numbers and elements

function source(name) { return name.split("/")[0]; }
function matching(patterns) {
  return patterns.flatMap((p) => NAMES.filter((name) => p instanceof RegExp ? p.test(name) : p === name));
}
function sum(values) { return values.reduce((a, b) => a + b, 0); }
function mean(values) { return sum(values) / values.length; }
function known(values) { return (values || []).filter((value) => value !== null); }

function shown(value) {  // as text
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return typeof value === "string" ? value : JSON.stringify(value);
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", size < 1e4 ? {maximumSignificantDigits: 4} : {maximumFractionDigits: 0});
}

function el(tag, attributes, ...children) {
  const made = Object.assign(document.createElement(tag), attributes);
  made.append(...children.flat().filter((child) => child !== null && child !== ""));
  return made;
}

function color(name) { return getComputedStyle(document.body).getPropertyValue("--" + name).trim(); }
function hue(index) { return index < 10 ? `c${index}` : "other"; }
function phaseColor(name) { return (DATA.colors[name] || "var(--other)").slice(6, -1); }

function mark(text, fill) {
  const key = el("span", {className: "key"}, text);
  key.style.setProperty("--k", fill);
  return key;
}

function runMark(run) {  // in the colour of its line
  return SEVERAL ? mark(run.name, `var(--${hue(LINES.indexOf(DATA.groups[run.group] ?? run))})`) : run.name;
}
function card(...children) { return el("figure", {className: "card"}, ...children); }

function table(head, rows, className) {
  const cell = (tag) => (its) => its instanceof HTMLTableCellElement ? its : el(tag, {}, its);
  const line = (cells, tag) => el("tr", {}, cells.map(cell(tag)));
  return el("div", {className: "scroll"}, el("table", {className}, line(head, "th"), rows.map((row) => line(row, "td"))));
}

function section(title, caption, ...content) {  // nothing where there is no content
  const made = content.flat().filter(Boolean);
  const head = [el("h2", {}, title), el("p", {className: "caption"}, caption)];
  if (made.length) document.querySelector("main").append(...head, ...made);
}

function each(make) {  // of every run that has it, under its name where there are several
  const named = (run, made) => SEVERAL ? [el("h3", {}, runMark(run)), made] : [made];
  return RUNS.map((run) => [run, make(run)]).flatMap(([run, made]) => made ? named(run, made) : []);
}

// ---- curves

function smoothing() {
  const longest = Math.max(0, ...RUNS.map((run) => run.steps.length));
  return view.smooth ?? (longest < 40 ? 0 : Math.round(100 * (1 - 30 / longest)) / 100);
}

function smoothed(values) {  // exponential average, unbiased at its start
  let total = 0, weight = 0;
  const share = smoothing();
  return values.map((value) => {
    total = share * total + value;
    weight = share * weight + 1;
    return total / weight;
  });
}

function curve(run, name, positive) {  // positions and values where there are some, and the lower and upper edge of the band
  const values = run.metrics[name] || [], at = [...values.keys()].filter((i) => values[i] !== null && !(positive && values[i] <= 0));
  const [std, min, max] = ["std", "min", "max"].map((part) => name.endsWith("/mean") && run.metrics[name.replace(/mean$/, part)]);
  const edge = (sign, bound) => at.map((i) => {
    if (std[i] === null) return null;
    const spread = values[i] + sign * std[i], limit = bound?.[i] ?? spread;
    const value = sign > 0 ? Math.min(spread, limit) : Math.max(spread, limit);
    return positive && value <= 0 ? null : value;
  });
  const x = at.map((i) => view.x === "step" ? run.steps[i] : run.hours[i] * CLOCK[1]);
  if (run.low) return {x, y: at.map((i) => values[i]), band: [run.low, run.high].map((its) => at.map((i) => its[name][i]))};
  return {x, y: at.map((i) => values[i]), band: std && !SEVERAL ? [edge(-1, min), edge(1, max)] : null};
}

function near(values, at) {  // the position of the known value nearest to ``at``
  for (let i = 0; i < values.length; i++) for (const found of [at - i, at + i]) if ((values[found] ?? null) !== null) return found;
  return at;
}

function lastValues(plot) {  // in the legend, where there is no cursor
  if ((plot.cursor.idx ?? null) === null) plot.setLegend({idxs: plot.data.map((its) => near(its, its.length - 1))}, false);
}

function plotOptions(series, more) {
  const grid = {stroke: color("rule"), width: 1};
  const axis = {stroke: color("muted"), grid, ticks: {show: false}, font: "11px system-ui, sans-serif"};
  const x = {...axis, size: 26, incrs: more.whole ? WHOLE : undefined, values: (_, ticks) => ticks.map(shown)};
  const y = {...axis, size: 54, values: (_, ticks) => ticks.map(shown)};
  return {height: 190, series, axes: [x, y], hooks: {setCursor: [lastValues], ready: [lastValues]}, ...more};
}

function drawPanel(figure, names) {
  const tables = [], series = [{label: view.x, value: (_, value) => shown(value)}], bands = [];
  const positive = view.log && RUNS.some((run) => names.some((name) => known(run.metrics[name]).some((value) => value > 0)));
  const add = (x, y, options) => { tables.push([x, y]); series.push({value: (_, value) => shown(value), ...options}); };
  const aside = {class: "aside", points: {show: false}};  // not in the legend
  for (const run of LINES) for (const [part, name] of names.entries()) {
    const {x, y, band} = curve(run, name, positive);
    if (!x.length) continue;
    const stroke = color(hue(SEVERAL ? LINES.indexOf(run) : SOURCES.indexOf(source(name))));
    const dash = names.slice(0, part).some((other) => SEVERAL || source(other) === source(name)) ? [5, 4] : undefined;
    const label = SEVERAL ? run.name + (names.length > 1 ? " " + name : "") : name;
    if (band) {
      for (const edge of band) add(x, edge, {...aside, stroke: "transparent"});
      bands.push({series: [series.length - 1, series.length - 2], fill: stroke + "22"});
    }
    const average = smoothing() && x.length >= SMOOTH_FROM;
    if (average) add(x, y, {...aside, stroke: stroke + "55", width: 1, dash});
    const value = (plot, _, index, i) => shown(plot.data[average ? index - 1 : index][i]);  // of the step itself
    add(x, average ? smoothed(y) : y, {label, value, stroke, width: 1.8, dash, points: {show: x.length < 2, fill: stroke}});
  }
  for (const {best, ...run} of LINES) if (best && names.includes(best.name)) {
    const x = view.x === "step" ? best.step : run.hours[run.steps.indexOf(best.step)] * CLOCK[1], stroke = color("text");
    if (x !== undefined && !isNaN(x)) add([x], [best.value], {...aside, stroke, paths: () => null, points: {show: true, size: 9, width: 2}});
  }
  const range = (_, low, high) => low !== high || low === null ? uPlot.rangeNum(low ?? 0, high ?? 1, 0.1, true)
    : low ? [low - Math.abs(low) / 10, low + Math.abs(low) / 10] : [-1, 1];  // of one value, such as 0: it in the middle
  const scales = {x: {time: false}, y: positive ? {distr: 3} : {range}};
  const cursor = {sync: {key: "x", scales: ["x", null]}, dataIdx: (plot, index, i) => index ? near(plot.data[index], i) : i};
  const options = plotOptions(series, {bands, scales, cursor, whole: view.x === "step", width: figure.clientWidth - 28});
  if (!tables.length) return null;
  options.hooks.setSelect = [({select: {left, width}, posToVal}) => {
    if (width) view.zoom = {min: posToVal(left, "x"), max: posToVal(left + width, "x")};
  }];
  figure.ondblclick = () => { view.zoom = null; };
  const plot = new uPlot(options, uPlot.join(tables), figure);
  if (view.zoom) plot.setScale("x", view.zoom);
  return plot;
}

function panels(all) {  // of pairs of title and metrics
  return el("div", {className: "panels"}, all.map(([title, names]) => {
    const best = RUNS[0].best, marked = !SEVERAL && best && names.includes(best.name);
    const told = marked ? `best ${shown(best.value)} at step ${best.step}` : SEVERAL && names.length === 1 ? names[0] : "";
    const figure = card(el("figcaption", {}, el("span", {className: "title"}, title), el("span", {className: "metric"}, told)));
    figure.dataset.found = [title, ...names].join(" ").toLowerCase();
    return Object.assign(figure, {draw: () => drawPanel(figure, names)});
  }));
}

function drawAll(where = document) {  // those that can be seen
  for (const figure of where.querySelectorAll("figure")) if (figure.draw && figure.clientWidth) {
    figure.plot?.destroy();
    figure.plot = figure.draw();
  }
}

function sift() {  // shows the panels in which every word of what is looked for stands
  const words = view.find.toLowerCase().split(/\s+/).filter(Boolean);
  for (const figure of document.querySelectorAll(".panels figure")) {
    figure.hidden = !words.every((word) => figure.dataset.found.includes(word));
  }
  for (const fold of document.querySelectorAll(".folded details")) {
    fold.hidden = !fold.querySelector("figure:not([hidden])");
    if (words.length && !fold.open) fold.open = fold.dataset.opened = true;
    if (!words.length && fold.dataset.opened) fold.open = false, delete fold.dataset.opened;
  }
  drawAll();
}

function controls() {
  const choice = (label, options, chosen, set) => {
    const onchange = (event) => { set(event.target.value); drawAll(); };
    const made = options.map((option, i) => el("option", {selected: i === Number(chosen)}, option));
    return el("label", {}, label, el("select", {onchange}, made));
  };
  const share = el("output", {}, String(smoothing()));
  const oninput = (event) => { share.value = view.smooth = Number(event.target.value); drawAll(); };
  const slider = el("input", {type: "range", min: 0, max: 0.99, step: 0.01, value: smoothing(), oninput});
  const find = el("input", {type: "search", placeholder: "find a metric", value: view.find});
  find.oninput = () => { view.find = find.value; sift(); };
  return el("div", {className: "controls"}, find,
    choice("over ", ["step", CLOCK[0]], view.x !== "step", (x) => { view.x = x; view.zoom = null; }),
    choice("scale ", ["linear", "logarithmic"], view.log, (scale) => { view.log = scale !== "linear"; }),
    el("label", {}, "smoothing ", slider, share), "drag: zoom, double click: back");
}

function curves() {
  const same = (one, other) => RUNS.every(({metrics}) => String(metrics[one]) === String(metrics[other]));
  const once = (names) => names.filter((name) => name !== "actor/pg_loss" || !same(name, "actor/loss"));  // nothing is added to it
  const first = MAIN.flatMap(([title, ...patterns]) => {
    const names = once(matching(patterns));
    if (title === VALIDATION) return names.map((name) => [`${title} ${name.slice(4)}`, [name]]);
    return names.length ? [[title, names]] : [];
  });
  const taken = new Set(first.flatMap(([, names]) => names)), groups = {};  // groups: by source, then by title
  for (const name of once(NAMES).filter((name) => !taken.has(name))) {
    const title = name.replace(/\/(mean|std|min|max)$/, "");  // which stand in one panel, std as the band of the mean
    if (name === title + "/std" && NAMES.includes(title + "/mean") || name !== title && taken.has(title + "/mean")) continue;
    ((groups[source(name)] ??= {})[title] ??= []).push(name);
  }
  const folded = Object.entries(groups).map(([name, group]) => {
    const made = panels(Object.entries(group));
    return el("details", {open: !first.length, ontoggle: () => drawAll(made)}, el("summary", {}, `${name} (${Object.keys(group).length})`), made);
  });
  const caption = "Thin: the steps themselves; bold: their exponential average."
    + (DATA.groups.length ? " Of runs that differ in their seed alone the mean; bands: from the lowest to the highest."
      : SEVERAL ? "" : " Bands: one standard deviation over the samples of a step.");
  const content = el("div", {}, controls(), panels(first), el("div", {className: "folded"}, folded));
  section("Curves", caption, NAMES.length ? content : el("p", {}, "No metrics yet."));
}

// ---- phases, timelines

function phases(run) {
  const names = Object.keys(run.metrics).filter((name) => name.startsWith(TIMING) && name !== TIMING + "step");
  const timed = [...run.steps.keys()].filter((i) => names.some((name) => run.metrics[name][i] !== null));
  if (!timed.length) return null;
  const group = Math.ceil(timed.length / MAX_BARS), bars = timed.filter((_, i) => i % group === 0);
  const column = (name) => bars.map((_, bar) =>
    mean(timed.slice(bar * group, (bar + 1) * group).map((i) => run.metrics[name]?.[i] ?? 0)));
  const whole = column(TIMING + "step");
  const parts = names.map((name) => [name.slice(TIMING.length), column(name)]).sort((a, b) => sum(b[1]) - sum(a[1]));
  const other = whole.map((seconds, bar) => Math.max(0, seconds - sum(parts.map(([, values]) => values[bar]))));
  if (sum(other) > 0.01 * sum(whole)) parts.push(["other", other]);
  const total = sum(parts.map(([, values]) => sum(values))), height = bars.map(() => 0);
  // bars that reach from 0 to the top of their part, the highest drawn first
  const piled = parts.map(([name, values]) => [name, values, values.map((value, bar) => height[bar] += value)]).reverse();
  const figure = card(), paths = uPlot.paths.bars({size: [0.85, 40]});
  figure.draw = () => {
    const series = [{label: "step"}];
    for (const [name, values] of piled) {
      const fill = color(phaseColor(name)), label = `${name} ${Math.round(100 * sum(values) / total)}%`;
      series.push({label, fill, stroke: fill, width: 0, paths, points: {show: false}, value: (_, v, index, i) => shown(values[i])});
    }
    const value = (_, seconds) => shown(seconds);
    series.push({label: "whole step", stroke: color("text"), points: {show: true, size: 3}, paths: () => null, value});
    const x = {time: false, range: (_, low, high) => [low - 0.6, high + 0.6]}, y = {range: (_, low, high) => [0, 1.05 * high]};
    const options = plotOptions(series, {whole: true, height: 240, width: figure.clientWidth - 28, scales: {x, y}});
    return new uPlot(options, [bars.map((i) => run.steps[i]), ...piled.map(([, , tops]) => tops), whole], figure);
  };
  return figure;
}

function timeline(run) {
  const drawing = document.querySelectorAll("template")[RUNS.indexOf(run)].content.cloneNode(true);
  if (!drawing.firstChild) return null;
  for (const title of drawing.querySelectorAll("title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  const keys = run.timeline.keys.map((key) => mark(key, DATA.colors[key]));
  const note = el("p", {className: "caption"}, run.timeline.note);
  return card(note, el("div", {className: "keys"}, keys), el("div", {className: "scroll"}, drawing));
}

const tip = el("div", {id: "tip"});
document.addEventListener("mousemove", (event) => {
  tip.textContent = event.target.dataset?.tip || "";
  tip.style.visibility = tip.textContent ? "visible" : "hidden";
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 4)) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4) + "px";
});

// ---- tables

function summary() {
  const columns = SUMMARY.filter(([, ...patterns]) => matching(patterns).length);
  const cell = (run, patterns) => {
    const name = matching(patterns).find((name) => run.metrics[name]), values = known(run.metrics[name]);
    if (!values.length) return "";
    const k = name.startsWith("val/") ? 1 : Math.min(5, Math.max(1, Math.floor(values.length / 2)));
    const ends = [values.slice(0, k), values.slice(-k)].map((its) => shown(mean(its))).join(" \u2192 ");
    const median = shown([...values].sort((a, b) => a - b)[Math.floor(values.length / 2)]);
    return el("span", {title: name}, /^(perf|timing_s)/.test(name) ? median : ends);
  };
  const rows = RUNS.map((run) => [runMark(run), el("span", {className: "badge " + run.status.kind}, run.status.text),
    run.facts.Steps || "", ...columns.map(([, ...patterns]) => cell(run, patterns))]);
  const caption = "Means of the first and last 5 steps; of validation the first and last; of speed medians.";
  document.querySelector("main").append(
    el("h1", {}, SEVERAL ? `${RUNS.length} runs` : RUNS[0].name), el("p", {className: "caption"}, caption),
    table(["Run", "State", "Steps", ...columns.map(([title]) => title)], rows, "summary"),
    ...RUNS.flatMap(({status}) => status.message ? [el("div", {className: "message " + status.kind}, status.message)] : []),
    ...RUNS.flatMap((run) => run.signals.map((text) => el("div", {className: "message warn"}, SEVERAL ? run.name + ", " : "", text))));
}

const config = (run) => run.config, facts = (run) => ({...run.facts, "Run directory": run.directory});
function keysOf(of) { return [...new Set(RUNS.flatMap((run) => Object.keys(of(run))))]; }
function compared(keys, of) { return table(["", ...RUNS.map(runMark)], keys.map((key) => [key, ...RUNS.map((run) => of(run)[key] ?? "")]), "mono"); }
function folded(title, keys) {
  return keys.length ? el("details", {}, el("summary", {}, `${title}, ${keys.length} values`), compared(keys, config)) : null;
}

function differences() {
  const different = keysOf(config).filter((key) => key !== "run.dir" && RUNS.some((run) => run.config[key] !== RUNS[0].config[key]));
  const shared = different.filter((key) => RUNS.every((run) => key in run.config));
  section("What differs", "Keys of the configurations; folded those that not every run has.",
    shared.length ? compared(shared, config) : null, folded("in some of the runs", different.filter((key) => !shared.includes(key))));
}

function settings() {
  section("How it was made", "", compared(keysOf(facts), facts));
  section("Configuration", "", folded("config.yaml", keysOf(config)));
}

// ---- the page, and again when its runs go on

function show(data) {
  DATA = data, RUNS = data.runs, SEVERAL = RUNS.length > 1;
  LINES = [...data.groups, ...RUNS.filter((run) => run.group === undefined)];
  NAMES = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))];
  SOURCES = [...new Set(["actor", "critic", "reward", "val", ...NAMES.map(source)])];  // of one run, a colour for each
  CLOCK = RUNS.some((run) => run.hours.at(-1) > 2) ? ["hours", 1] : ["minutes", 60];
  const tables = () => [...document.querySelectorAll(".scroll:has(.validation)")];
  const places = tables().map((it) => it.scrollLeft);
  const title = (fold) => fold.firstChild.textContent.replace(/[\d(].*/, ""), top = scrollY;
  const open = new Set([...document.querySelectorAll("details[open]")].map(title));
  for (const figure of document.querySelectorAll("figure")) figure.plot?.destroy();
  document.querySelector("main").replaceChildren();
  summary();
  differences();
  curves();
  section("Time per step", "Seconds of each phase; the mark is the whole step; of a long run a bar is the mean of neighbours. "
    + "Phases that run at the same time pile up above it.", each(phases));
  section("Timeline", "Thin strips: communication and waiting. The whole trace is trace.json, which Perfetto opens.", each(timeline));
  section("Validation samples", "Responses to the same prompts at every validation. All are in validation.jsonl.", each(validations));
  section("Samples", "What the actor wrote at the start and at the end. All that were kept are in rollouts.jsonl.", each(samples));
  section("Episodes", "Conversations with their branches, at the start and at the end: each token once. All rows that were kept are in rollouts.jsonl.",
    RUNS.some((run) => run.episodes.length) ? tokenColors() : null, each(episodes));
  section("Checkpoints", "", each(({artifacts}) => artifacts.length ? table(["Directory", "State", "Size"], artifacts, "mono") : null));
  settings();
  for (const fold of document.querySelectorAll("details")) if (open.has(title(fold))) fold.open = true;
  sift();
  tables().forEach((it, i) => { it.scrollLeft = places[i] ?? 0; });
  scrollTo(0, top);
}

async function look(known) {  // known: the text of what is shown
  const began = performance.now();
  let text = known;
  try {
    const answer = await fetch("data");
    if (!answer.ok) throw new Error(answer.status);
    text = await answer.text();
    const data = JSON.parse(text), notes = ({runs}) => runs.map((run) => run.timeline.note).join();
    if (notes(data) !== notes(DATA)) location.reload();  // timelines come with the page
    if (text !== known) show(data);
    link.textContent = "";
  } catch {
    link.textContent = "The server has ended: this is how the runs stood.";
  }
  setTimeout(look, Math.max(POLL_MS, 20 * (performance.now() - began)), text);
}

const link = el("div", {className: "link"});
document.body.append(tip, link);
show(JSON.parse(document.getElementById("data").textContent));
addEventListener("resize", () => drawAll());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());
if (DATA.live) look();
