"use strict";
// Makes the page of the JSON in #data (telemetry/report.py, _run_data) and the timelines in the templates. Text of a run is only
// ever set as text, never parsed as HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const TIMING = "timing_s/";
const SMOOTH_FROM = 20;  // points; shorter curves are shown as they are
const SPREAD = ["std", "min", "max"];  // what may stand beside a mean
const VALIDATION = "Validation";  // a panel for each of its metrics
const MAIN = [  // title and metrics of the panels that come first, each where a metric of it exists
  ["Reward", "reward/total_mean", "reward/mean"], [VALIDATION, /^val\/(?!loss$).*(?<!@\d+)$/], ["Loss", /^(?!critic).*\/loss$/],
  ["KL to the reference", "actor/kl"], ["Entropy", "actor/entropy"],
  ["Response length", "response_length/mean", "response_length/max"], ["Critic explained variance", "critic/explained_variance"],
  ["Value loss", "critic/vf_loss"], ["Policy loss", "actor/pg_loss"], ["KL of the update", "actor/ppo_kl"],
  ["Clipped fraction", /\/clip_frac$/], ["Gradient norm", /\/grad_norm$/],
  ["Log-prob difference to training", "rollout/log_prob_diff_max"], ["Tokens per second", "perf/tokens_per_s"],
];
const SUMMARY = [["Reward", "reward/total_mean", "reward/mean"], ["Loss", /^(?!critic|val).*\/loss$/], [VALIDATION, /^val\/(?!loss$)/, "val/loss"],
  ["KL", "actor/kl"], ["Response length", "response_length/mean"], ["Explained variance", "critic/explained_variance"],
  ["Tokens/s", "perf/tokens_per_s"], ["Seconds/step", TIMING + "step"]];
const NAMES = [...new Set(RUNS.flatMap((run) => Object.keys(run.metrics)))];
const SOURCES = [...new Set(["actor", "critic", "reward", "val", ...NAMES.map(source)])];
const WHOLE = [1, 2, 5].flatMap((n) => [...Array(8).keys()].map((power) => n * 10 ** power)).sort((a, b) => a - b);
const longest = Math.max(0, ...RUNS.map((run) => run.steps.length));
const CLOCK = RUNS.some((run) => run.hours.at(-1) > 2) ? ["hours", 1] : ["minutes", 60];
const view = {x: "step", log: false, smooth: longest < 40 ? 0 : Math.round(100 * (1 - 30 / longest)) / 100};

function el(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) key in made ? made[key] = value : made.setAttribute(key, value);
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function shown(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value);
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e7) ? value.toExponential(2) : value.toLocaleString("en", size < 1e4 ? {maximumSignificantDigits: 4} : {maximumFractionDigits: 0});
}

function source(name) { return name.split("/")[0]; }
function matching(patterns) { return patterns.flatMap((p) => NAMES.filter((name) => p instanceof RegExp ? p.test(name) : p === name)); }
function hue(index) { return getComputedStyle(document.body).getPropertyValue(index < 10 ? `--c${index}` : "--other").trim(); }
function color(variable) { return getComputedStyle(document.body).getPropertyValue(variable.slice(4, -1)).trim(); }
function known(values) { return (values || []).filter((value) => value !== null); }
function mean(values) { return values.reduce((sum, value) => sum + value, 0) / values.length; }
function card(...children) { return el("figure", {className: "card"}, ...children); }
function mark(text, fill) { const key = el("span", {className: "key"}, text); key.style.setProperty("--k", fill); return key; }
function runMark(run) { return RUNS.length > 1 ? mark(run.name, hue(RUNS.indexOf(run))) : run.name; }
function table(head, rows, name = "") {
  const line = (cells, tag) => el("tr", {}, cells.map((cell) => cell instanceof HTMLTableCellElement ? cell : el(tag, {}, cell)));
  return el("div", {className: "scroll"}, el("table", {className: name}, line(head, "th"), rows.map((row) => line(row, "td"))));
}
function section(title, caption, ...content) {
  const made = content.flat().filter(Boolean);
  if (made.length) document.querySelector("main").append(el("h2", {}, title), el("p", {className: "caption"}, caption), ...made);
}
function each(make) {  // of every run that has it, under its name where there are several
  return RUNS.flatMap((run) => { const made = make(run); return made ? [RUNS.length > 1 ? el("h3", {}, runMark(run)) : "", made] : []; });
}

// ---- curves

function smoothed(values) {  // exponential average, unbiased at its start
  let total = 0, weight = 0;
  return values.map((value) => { total = view.smooth * total + value; weight = view.smooth * weight + 1; return total / weight; });
}

function curve(run, name, positive) {  // where it is known: positions, values, and the edges of the band
  const xs = view.x === "step" ? run.steps : run.hours.map((hours) => hours * CLOCK[1]), values = run.metrics[name], prefix = name.replace(/mean$/, "");
  const at = (values || []).flatMap((value, i) => value === null || positive && value <= 0 ? [] : [i]);
  const [std, low, high] = SPREAD.map((part) => prefix !== name ? run.metrics[prefix + part] : undefined);
  const edge = (sign, bound) => at.map((i) => {
    if (!std || std[i] === null) return null;
    const value = values[i] + sign * std[i], limit = bound && bound[i] !== null ? sign * Math.min(sign * value, sign * bound[i]) : value;
    return positive && limit <= 0 ? null : limit;
  });
  return {x: at.map((i) => xs[i]), y: at.map((i) => values[i]), band: std && [edge(-1, low), edge(1, high)]};
}

function near(values, at) {  // the position of the known value nearest to ``at``
  for (let i = 0; i < values.length; i++) for (const found of [at - i, at + i]) if (values[found] !== null && values[found] !== undefined) return found;
  return at;
}

function ends(plot) {  // the legend without a cursor: the last values
  if (plot.cursor.idx === null || plot.cursor.idx === undefined)
    plot.setLegend({idxs: plot.data.map((values) => near(values, values.length - 1))}, false);
}

function plotOptions(series, more) {
  const axis = {stroke: color("var(--muted)"), grid: {stroke: color("var(--rule)"), width: 1}, ticks: {show: false}, font: "11px system-ui, sans-serif"};
  return {height: 190, series, ...more, hooks: {setCursor: [ends], ready: [ends]},
    axes: [{...axis, size: 26, incrs: more.whole ? WHOLE : undefined, values: (_, ticks) => ticks.map(shown)}, {...axis, size: 54, values: (_, ticks) => ticks.map((v) => v === null ? "" : shown(v))}]};
}

function drawPanel(figure, names) {
  const tables = [], series = [{label: view.x, value: (_, v) => shown(v)}], bands = [];
  const positive = view.log && RUNS.some((run) => names.some((name) => known(run.metrics[name]).some((value) => value > 0)));
  const hidden = {class: "aside", points: {show: false}};
  const add = (x, y, options) => { tables.push([x, y]); series.push({value: (_, v) => shown(v), ...options}); };
  for (const run of RUNS) names.forEach((name, part) => {
    const {x, y, band} = curve(run, name, positive);
    if (!x.length) return;
    const stroke = hue(RUNS.length > 1 ? RUNS.indexOf(run) : SOURCES.indexOf(source(name)));
    const dash = names.slice(0, part).some((other) => RUNS.length > 1 || source(other) === source(name)) ? [5, 4] : undefined;
    const label = [RUNS.length > 1 ? run.name : "", RUNS.length > 1 && names.length === 1 ? "" : name].filter(Boolean).join(" ");
    if (band && RUNS.length === 1) {
      band.forEach((edge) => add(x, edge, {...hidden, stroke: "transparent"}));
      bands.push({series: [series.length - 1, series.length - 2], fill: stroke + "22"});
    }
    const average = view.smooth && x.length >= SMOOTH_FROM;
    if (average) add(x, y, {...hidden, stroke: stroke + "55", width: 1, dash});
    const value = (plot, _, series, i) => shown(plot.data[average ? series - 1 : series][i]);  // of the step itself
    add(x, average ? smoothed(y) : y, {label, value, stroke, width: 1.8, dash, points: {show: x.length < 2, fill: stroke}});
  });
  const options = plotOptions(series, {bands, whole: view.x === "step", width: figure.clientWidth - 28, scales: {x: {time: false}, y: {distr: positive ? 3 : 1}},
    cursor: {sync: {key: "x", scales: ["x", null]}, dataIdx: (plot, index, at) => index ? near(plot.data[index], at) : at, drag: {x: true, y: false}}});
  return tables.length ? new uPlot(options, uPlot.join(tables), figure) : null;
}

function panel(title, names) {
  const figure = card(el("figcaption", {}, el("span", {className: "title"}, title), el("span", {className: "metric"}, RUNS.length > 1 && names.length === 1 ? names[0] : "")));
  figure.draw = () => drawPanel(figure, names);
  return figure;
}

function panels(all) { return el("div", {className: "panels"}, all.map(([title, names]) => panel(title, names))); }
function drawAll(where = document) {
  for (const figure of where.querySelectorAll("figure")) if (figure.draw && figure.clientWidth) {
    figure.plot?.destroy();
    figure.plot = figure.draw();
  }
}

function controls() {
  const choose = (label, options, set) => el("label", {}, label, el("select", {onchange: (event) => { set(event.target.value); drawAll(); }},
    options.map((option) => el("option", {}, option))));
  const share = el("output", {}, String(view.smooth));
  const slider = el("input", {type: "range", min: 0, max: 0.99, step: 0.01, value: view.smooth,
    oninput: (event) => { view.smooth = Number(event.target.value); share.value = view.smooth; drawAll(); }});
  return el("div", {className: "controls"}, choose("over ", ["step", CLOCK[0]], (x) => { view.x = x; }),
    choose("scale ", ["linear", "logarithmic"], (scale) => { view.log = scale === "logarithmic"; }), el("label", {}, "smoothing ", slider, share),
    el("span", {}, "drag: zoom, double click: back"));
}

function curves() {
  const first = MAIN.flatMap(([title, ...patterns]) => {
    const found = matching(patterns);
    return found.length ? title === VALIDATION ? found.map((name) => [`${title} ${name.slice(4)}`, [name]]) : [[title, found]] : [];
  });
  const taken = new Set(first.flatMap(([, names]) => names));
  const rest = new Map();  // by source; what stands beside a mean is one panel with it
  for (const name of NAMES.filter((name) => !taken.has(name))) {
    const of = name.replace(/\/(mean|std|min|max)$/, "");
    if (name !== of && [...taken].some((other) => other === of + "/mean")) continue;
    const group = rest.get(source(name)) || rest.set(source(name), new Map()).get(source(name));
    group.set(of, [...(group.get(of) || []), name]);
  }
  const folded = [...rest].map(([name, group]) => {
    const made = panels([...group].map(([of, names]) => [of, names.some((n) => n.endsWith("/mean")) ? names.filter((n) => !n.endsWith("/std")) : names]));
    return el("details", {ontoggle: () => drawAll(made)}, el("summary", {}, `${name} (${group.size})`), made);
  });
  section("Curves", "Bands: one standard deviation over the samples of a step. Thin: the steps themselves; bold: their exponential average.",
    NAMES.length ? el("div", {}, controls(), panels(first), el("div", {className: "folded"}, folded)) : el("p", {}, "No metrics yet."));
}

// ---- phases, timelines

function phases(run) {
  const names = Object.keys(run.metrics).filter((name) => name.startsWith(TIMING) && name !== TIMING + "step");
  const timed = run.steps.flatMap((_, i) => names.some((name) => run.metrics[name][i] !== null) ? [i] : []);
  if (!timed.length) return null;
  const group = Math.ceil(timed.length / 150), at = timed.filter((_, i) => i % group === 0);  // neighbours whose mean is one bar
  const column = (name) => at.map((_, i) => mean(timed.slice(i * group, (i + 1) * group).map((j) => (run.metrics[name] || [])[j] ?? 0)));
  const sum = (values) => values.reduce((a, b) => a + b, 0), step = column(TIMING + "step");
  const parts = names.map((name) => [name.slice(TIMING.length), column(name)]).sort((a, b) => sum(b[1]) - sum(a[1]));
  const other = step.map((whole, i) => Math.max(0, whole - sum(parts.map(([, values]) => values[i]))));
  if (sum(other) > 0.01 * sum(step)) parts.push(["other", other]);
  const total = sum(parts.map(([, values]) => sum(values))), base = at.map(() => 0);
  const piled = parts.map(([name, values]) => [name, values, values.map((value, i) => base[i] += value)]).reverse();
  const fill = (name) => color(DATA.colors[name] || "var(--other)"), bars = uPlot.paths.bars({size: [0.85, 40]});
  const series = () => [{label: "step"}, ...piled.map(([name, values]) => ({label: `${name} ${Math.round(100 * sum(values) / total)}%`, fill: fill(name),
    stroke: fill(name), width: 0, paths: bars, points: {show: false}, value: (_, v, index, i) => shown(values[i])})),
    {label: "whole step", stroke: color("var(--text)"), points: {show: true, size: 3}, paths: () => null, value: (_, v) => shown(v)}];
  const figure = card();
  figure.draw = () => new uPlot(plotOptions(series(), {whole: true, height: 240, width: figure.clientWidth - 28, scales: {x: {time: false,
    range: (_, low, high) => [low - 0.6, high + 0.6]}, y: {range: (_, low, high) => [0, 1.05 * high]}}}),
    [at.map((i) => run.steps[i]), ...piled.map(([, , top]) => top), step], figure);
  return figure;
}

function timeline(run) {
  const drawing = document.querySelectorAll("template")[RUNS.indexOf(run)].content.cloneNode(true);
  if (!drawing.firstChild) return null;
  for (const title of drawing.querySelectorAll("title")) { title.parentNode.dataset.tip = title.textContent; title.remove(); }
  const keys = el("div", {className: "keys"}, run.timeline.keys.map((key) => mark(key, DATA.colors[key])));
  return card(el("p", {className: "caption"}, run.timeline.note), keys, el("div", {className: "scroll"}, drawing));
}

document.addEventListener("mousemove", (event) => {
  const text = event.target.dataset && event.target.dataset.tip, tip = document.getElementById("tip");
  tip.textContent = text || "";
  tip.style.visibility = text ? "visible" : "hidden";
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 4)) + "px";
  tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 4) + "px";
});

// ---- text

function sample(its, tag = "div") {
  const {step, set, row_id, prompt, response, answer, score, ...more} = its;
  const told = Object.entries(more).map(([key, value]) => `${key} ${shown(value).slice(0, 120)}`).join(", ");
  return el(tag, {className: "sample"}, el("div", {className: "score"}, typeof score === "number" ? `score ${shown(score)}` : ""),
    el("pre", {}, el("span", {className: "prompt"}, shown(prompt)), shown(response)), el("div", {className: "extra"}, told));
}

function samples(run) {
  const wanted = (run.samples[0] || []).map((its) => shown(its.prompt));
  const place = (its) => { const at = wanted.indexOf(shown(its.prompt)); return at < 0 ? wanted.length : at; };
  return run.samples.length ? el("div", {className: "columns"}, run.samples.map((column) => el("div", {}, el("h4", {}, `Step ${column[0].step}`),
    [...column].sort((a, b) => place(a) - place(b)).map((its) => sample(its))))) : null;
}

function validations(run) {
  const {steps, samples: all} = run.validations, key = (its) => JSON.stringify([its.set, its.row_id]);
  const rows = [...new Map(all.map((its) => [key(its), its])).values()].map((first) => [
    el("td", {className: "sample"}, el("pre", {}, shown(first.prompt)), el("div", {className: "extra"}, shown(first.set))), el("pre", {}, shown(first.answer)),
    ...steps.map((step) => { const found = all.find((its) => its.step === step && key(its) === key(first)); return found ? sample({...found, prompt: ""}, "td") : ""; }),
  ]);
  return rows.length ? table(["Prompt", "Expected", ...steps.map((step) => `Step ${step}`)], rows, "validation") : null;
}

function header() {
  const main = document.querySelector("main"), columns = SUMMARY.filter(([, ...patterns]) => matching(patterns).length);
  main.append(el("h1", {}, RUNS.length > 1 ? `${RUNS.length} runs` : RUNS[0].name));
  const cell = (run, patterns) => {
    const name = matching(patterns).find((name) => run.metrics[name]), values = known(run.metrics[name]);
    if (!values.length) return "";
    const k = name.startsWith("val/") ? 1 : Math.min(5, Math.max(1, Math.floor(values.length / 2)));
    const middle = shown([...values].sort((a, b) => a - b)[Math.floor(values.length / 2)]);
    const text = /^(perf|timing_s)/.test(name) ? middle : `${shown(mean(values.slice(0, k)))} \u2192 ${shown(mean(values.slice(-k)))}`;
    return el("span", {title: name}, text);
  };
  main.append(el("p", {className: "caption"}, "Means of the first and last 5 steps; of validation the first and last; of speed medians."), table(
    ["Run", "State", "Steps", ...columns.map(([title]) => title)], RUNS.map((run) => [runMark(run),
      el("span", {className: "badge " + run.status.kind}, run.status.text), run.facts.Steps || "", ...columns.map(([, ...patterns]) => cell(run, patterns))]), "summary"));
  for (const run of RUNS) if (run.status.message) main.append(el("div", {className: "message " + run.status.kind}, run.status.message));
}

function facts() {
  const keysOf = (of) => [...new Set(RUNS.flatMap((run) => Object.keys(of(run))))], config = (run) => run.config, keys = keysOf(config);
  const lines = (keys, of) => table(["", ...RUNS.map(runMark)], keys.map((key) => [key, ...RUNS.map((run) => of(run)[key] ?? "")]), "mono");
  const folded = (title, keys) => keys.length ? el("details", {}, el("summary", {}, `${title}, ${keys.length} values`), lines(keys, config)) : null;
  const different = keys.filter((key) => RUNS.some((run) => run.config[key] !== RUNS[0].config[key]));
  const everywhere = different.filter((key) => RUNS.every((run) => key in run.config));
  const told = (run) => ({...run.facts, "Run directory": run.directory});
  section("How it was made", "", lines(keysOf(told), told));
  section("Configuration", RUNS.length > 1 ? "Keys with different values; folded those that not every run has." : "", everywhere.length ? lines(everywhere, config) : null,
    folded("in some of the runs", different.filter((key) => !everywhere.includes(key))), folded("config.yaml", keys));
}

document.body.append(el("div", {id: "tip"}));
header();
curves();
section("Time per step", "Seconds of each phase; the mark is the whole step; of a long run a bar is the mean of neighbours. Phases that run at the same time pile up above it.", each(phases));
section("Timeline", "Thin strips: communication and waiting. The whole trace is trace.json, which Perfetto opens.", each(timeline));
section("Validation samples", "Responses to the same prompts at every validation. All are in validation.jsonl.", each(validations));
section("Samples", "What the actor wrote at the start and at the end. All that were kept are in rollouts.jsonl.", each(samples));
section("Checkpoints", "", each((run) => run.artifacts.length ? table(["Directory", "State", "Size"], run.artifacts, "mono") : null));
facts();
drawAll();
addEventListener("resize", () => drawAll());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());
