"use strict";
// The samples of the report: who said what, with what score. Called by report.js, whose functions it uses.

function said(turns, whole, className, speaker) {  // turns: pairs of who speaks and what; without them the whole, by ``speaker`` if any
  const parts = turns || [[speaker, whole]];
  return parts.map(([who, text]) => el("span", {className: who === "environment" ? "prompt" : className},
    who ? el("span", {className: "who"}, `${who}: `) : "", shown(text), who ? "\n" : ""));
}

function expected(answer) { return (answer ?? null) === null ? null : el("div", {className: "extra"}, `expected ${shown(answer)}`); }

function sample(its, tag) {
  const {step, set, row_id, prompt, messages, response, turns, answer, score, ...more} = its;
  const told = Object.entries(more).map(([key, value]) => `${key} ${shown(value).slice(0, 120)}`).join(", ");
  return el(tag, {className: "sample"},
    el("div", {className: "score"}, typeof score === "number" ? `score ${shown(score)}` : ""),
    el("pre", {}, said(messages?.map(({role, content}) => [role, content]), prompt, "prompt"), said(turns, response, "response", messages && "model")),
    tag === "td" ? null : expected(answer),  // which a table says once, of all steps
    el("div", {className: "extra"}, told));
}

function stepTitle(run, step) { return `Step ${step}${run.best?.step === step ? ", the best" : ""}`; }

function samples(run) {  // of the first and the last step; of both in the order of the first one's prompts
  const wanted = (run.samples[0] || []).map((its) => shown(its.prompt)).reverse();
  const columns = run.samples.map((its) => [...its].sort((a, b) => wanted.indexOf(shown(b.prompt)) - wanted.indexOf(shown(a.prompt))));
  const drawn = columns.map((its) => el("div", {}, el("h4", {}, stepTitle(run, its[0].step)), its.map((one) => sample(one, "div"))));
  return drawn.length ? el("div", {className: "columns"}, drawn) : null;
}

function validations(run) {
  const {steps, samples: all} = run.validations, key = (its) => JSON.stringify([its.set, its.row_id]);
  const sets = new Set(all.map((its) => its.set)).size;
  const rows = [...new Map(all.map((its) => [key(its), its])).values()].map((one) => {
    const its = new Map(all.filter((other) => key(other) === key(one)).map((other) => [other.step, other]));
    const set = sets > 1 ? el("div", {className: "extra"}, `of ${one.set}`) : null;
    const prompt = el("td", {className: "sample"}, el("pre", {}, shown(one.prompt)), expected(one.answer), set);
    const cells = steps.map((step) => its.has(step) ? sample({...its.get(step), prompt: ""}, "td") : "");
    return [prompt, ...cells];
  });
  return rows.length ? table(["Prompt", ...steps.map((step) => stepTitle(run, step))], rows, "validation") : null;
}
