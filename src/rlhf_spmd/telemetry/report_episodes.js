"use strict";
// The episodes of the report: conversations of agents token by token (episodes.py). Called by report.js, whose functions it uses.
// A token has a class for each of three colourings; the class of the body says which of them is shown.

const TOKEN_COLORS = {  // what each is of, and the names of its classes, in the order of the legend
  "log-prob": {p0: "above 0.9", p1: "0.5 to 0.9", p2: "0.1 to 0.5", p3: "0.01 to 0.1", p4: "below 0.01"},
  "weights": {v0: "steps 0, 6, ...", v1: "1, 7, ...", v2: "2, 8, ...", v3: "3, 9, ...", v4: "4, 10, ...", v5: "5, 11, ..."},
  "mask": {m1: "learned", m0: "read, or learned in another row"},
};

function tokenColors() {  // the switch, with the legend of what it is on
  const legend = el("span", {className: "keys"});
  const choose = (name) => {
    view.tokens = name;
    for (const other of Object.keys(TOKEN_COLORS)) document.body.classList.toggle(`by-${other}`, other === name);
    legend.replaceChildren(...Object.entries(TOKEN_COLORS[name]).map(([key, text]) => el("span", {className: `token ${key}`}, text)));
  };
  const choices = Object.keys(TOKEN_COLORS).map((name) => el("label", {},
    el("input", {type: "radio", name: "tokens", checked: name === view.tokens, onchange: () => choose(name)}), name));
  choose(view.tokens);
  return el("div", {className: "controls tokens"}, "Colour of tokens", choices, legend);
}

function segment(its, number, all) {  // with those that go on from it inside
  const title = its.origin === null ? `Conversation ${number + 1}` : `Branch ${number + 1}, from the model's turn ${its.turns_before + 1} on`;
  const turns = its.turns.map((turn) => el("pre", {}, turn.map(([text, classes, tip]) => {
    const token = el("span", {className: `token ${classes}`}, text);
    token.dataset.tip = tip;
    return token;
  })));
  const inner = all.map((other, i) => other.origin === number ? segment(other, i, all) : null);
  return el("div", {className: "segment"}, el("h4", {}, title), turns,
    its.left_out ? el("div", {className: "extra"}, `${shown(its.left_out)} more tokens`) : null, inner);
}

function episode(its) {
  const {step, episode: id, ending, score, answer, segments} = its;
  const facts = [`step ${step}`, `episode ${id}`, ending, typeof score === "number" ? `score ${shown(score)}` : ""].filter(Boolean).join(", ");
  const roots = segments.map((one, i) => one.origin === null ? segment(one, i, segments) : null);
  return el("div", {className: "sample episode"}, el("div", {className: "score"}, facts), roots, expected(answer));
}

function episodes(run) { return run.episodes.length ? el("div", {className: "columns"}, run.episodes.map(episode)) : null; }
