"""Episodes in the report: their branches, each token once, with a class for each of the three colourings."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from report_pages import Page, browse
from rlhf_spmd.agents.forest import Draws, Forest, row_tokens
from rlhf_spmd.data.messages import Message
from rlhf_spmd.telemetry.episodes import LOG_PROB_STEPS, MAX_EPISODES, MAX_TOKENS, NUM_VERSION_COLORS, shade, token_texts
from rlhf_spmd.telemetry.report import write_report
from rlhf_spmd.telemetry.run_dir import ROLLOUTS_FILE, equal_runs
from sort_digits import SPECIAL, write_tokenizer

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&"
CHARACTERS = (*SPECIAL, *map(chr, range(32, 127)))
OPTIONS: dict[str, Any] = {}


def ask(forest: Forest, messages: list[Message], answer: str, version: int) -> list[Message]:
    """A turn of characters, which follow a <bos> in a new conversation. Return the conversation with the answer."""
    parent, new = forest.attach(messages, OPTIONS)
    ids = [CHARACTERS.index(c) for message in new for c in message["content"]]
    turn = forest.add(parent, new, ids if parent else [1, *ids], OPTIONS)
    drawn = [CHARACTERS.index(c) for c in answer]
    reply = {"role": "assistant", "content": answer}
    forest.finish(
        turn, Draws(drawn, [-0.05 * 3**i for i in range(len(answer))], [version] * len(answer), "stop"), reply, OPTIONS
    )
    turn.was_delivered = True
    turn.number = len(forest.turns)
    return [*messages, reply]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def lines(forest: Forest, step: int, episode: int) -> list[dict[str, Any]]:
    """The forest's rows as rollouts.jsonl has them."""
    draws = {turn.number: turn.draws for turn in forest.turns.values() if turn.draws}
    return [
        {
            "step": step,
            "row_id": episode + number,
            "episode": episode,
            "ending": "done",
            "score": 0.25,
            "ids": row.ids,
            "mask": [*map(int, row.mask)],
            "log_probs": row.log_probs,
            "versions": [[version, end - begin] for version, begin, end in equal_runs(row.versions[1:])],
        }
        for number, row in enumerate(row_tokens(each.turns, draws) for each in forest.rows())
    ]


def branching(step: int, episode: int) -> list[dict[str, Any]]:
    """A first turn; behind it one asked twice and one asked otherwise; and a conversation that begins anew."""
    forest = Forest(f"{step}.{episode}")
    first = [*ask(forest, [user("first ask")], "common answer", 3)]
    ask(forest, [*first, user("more")], "one sibling", 3)
    ask(forest, [*first, user("more")], "on another", 4)
    ask(forest, [*first, user("moreover")], "apart", 4)
    ask(forest, [user(f"summary {HOSTILE}")], f"new root {HOSTILE}", 5)
    return lines(forest, step, episode)


def write_run(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    (run_dir / ROLLOUTS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_tokenizer(run_dir / "export", CHARACTERS)


def text_of(segment: dict[str, Any]) -> str:
    return "".join(piece[0] for turn in segment["turns"] for piece in turn)


def test_the_tokens_of_a_branch_are_shown_once(tmp_path: Path) -> None:
    write_run(tmp_path, branching(1, 8))
    (run,) = Page(write_report(tmp_path).read_text()).runs
    (episode,) = run["episodes"]
    assert {key: episode[key] for key in ("step", "episode", "ending", "score")} == {
        "step": 1,
        "episode": 8,
        "ending": "done",
        "score": 0.25,
    }
    segments = episode["segments"]
    texts = Counter(map(text_of, segments))
    origins = {text_of(segment): segment["origin"] for segment in segments}
    whole = [text for text, origin in origins.items() if origin is None]
    assert len(segments) == 4 and len(whole) == 2
    (branched,) = (text for text in whole if "common" in text)
    assert "".join(texts).count("common answer") == 1 == "".join(texts).count("new root")
    assert f"<bos>summary {HOSTILE}new root {HOSTILE}" in whole
    parts = {"one sibling", "on another", "moreoverapart"}
    rest = parts - {next(part for part in parts if branched.endswith(part))}
    assert all(origins.get(part, origins.get(f"more{part}")) is not None for part in rest)
    learned = [piece for segment in segments for turn in segment["turns"] for piece in turn if piece[1].startswith("m1")]
    drawn = "common answer", "one sibling", "on another", "apart", f"new root {HOSTILE}"
    assert len(learned) == len("".join(drawn)), "each once, and each by itself"
    assert sorted("".join(piece[0] for piece in learned)) == sorted("".join(drawn))
    classes = {name for piece in learned for name in piece[1].split()}
    assert classes == {"m1", *(f"p{n}" for n in range(5)), "v3", "v4", "v5"}
    assert re.fullmatch(r"token \d+, log-prob -0\.05, weights of step \d", learned[0][2])


def test_shades_and_versions_have_colours_of_their_own() -> None:
    assert [shade(value) for value in (0.0, -0.05, -0.5, -2, -4, -9)] == [0, 0, 1, 2, 3, 4]
    css, script = (
        (Path(__file__).parents[2] / "src" / "rlhf_spmd" / "telemetry" / name).read_text()
        for name in ("report.css", "report_episodes.js")
    )
    names = [*(f"p{n}" for n in range(len(LOG_PROB_STEPS) + 1)), *(f"v{n}" for n in range(NUM_VERSION_COLORS)), "m1", "m0"]
    assert [name for name in names if f" .{name} " not in css or f"{name}: " not in script] == []


def test_what_is_shown_is_bounded_and_comes_from_both_ends(tmp_path: Path) -> None:
    rows = [line for step in (1, 2, 3) for episode in range(0, 80, 8) for line in branching(step, episode)]
    long = {**rows[-1], "step": 4, "episode": 0, "row_id": 0, "versions": [[3, 10**9]]}
    long |= {"ids": [40] * 5000, "mask": [0] * 2500 + [1] * 2500, "log_probs": [-0.5] * 5000}
    damaged = [
        {**long, "row_id": 9, "episode": 8, key: value} for key, value in (("ids", [-1]), ("mask", None), ("row_id", "x"))
    ]
    write_run(tmp_path, [*rows, long, *damaged])
    (run,) = Page(write_report(tmp_path).read_text()).runs
    assert [(its["step"], its["episode"]) for its in run["episodes"]] == [*((1, 8 * n) for n in range(MAX_EPISODES)), (4, 0)]
    (segment,) = run["episodes"][-1]["segments"]
    assert len(text_of(segment)) == MAX_TOKENS and segment["left_out"] == 3000
    assert not {"ids", "mask", "log_probs"} & run["samples"][0][0].keys()


def test_rows_without_agents_and_without_a_tokenizer(tmp_path: Path) -> None:
    """A row is its own episode; tokens without a text are numbers. Rows without tokens are no episodes."""
    row = {"step": 1, "row_id": 5, "prompt": "a", "ids": [1, 7], "mask": [0, 1], "log_probs": [0.0, -1.5], "versions": [[9, 1]]}
    (tmp_path / ROLLOUTS_FILE).write_text(json.dumps(row) + "\n" + json.dumps({"step": 1, "row_id": 6, "prompt": "b"}) + "\n")
    (run,) = Page(write_report(tmp_path).read_text()).runs
    ((episode),) = run["episodes"]
    assert episode["episode"] == 5
    assert episode["segments"][0]["turns"] == [
        [["[1]", "m0", "1 token, not learned here"]],
        [["[7]", "m1 p2 v3", "token 7, log-prob -1.5, weights of step 9"]],
    ]


def test_a_character_of_several_tokens_is_shown_with_the_last() -> None:
    """Tokens are bytes here."""
    text = "a\u20ac b"
    assert token_texts([*text.encode()], lambda ids: bytes(ids).decode(errors="replace")) == ["a", "", "", "\u20ac", " ", "b"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser")
def test_a_browser_nests_branches_and_runs_no_text(tmp_path: Path) -> None:
    write_run(tmp_path, branching(1, 8))
    drawn = browse(write_report(tmp_path).resolve().as_uri())
    assert "<h2>Episodes</h2>" in drawn and "<script" not in drawn and "<img" not in drawn
    tokens = re.findall(r'<span class="token m1 [^"]+" data-tip="[^"]+">(.*?)</span>', drawn)
    assert len(tokens) == len(f"common answerone siblingon anotherapartnew root {HOSTILE}")
    assert "".join(tokens[-len(HOSTILE) :]) == html.escape(HOSTILE, quote=False) or HOSTILE in html.unescape("".join(tokens))
    titles = re.findall(r"<h4>((?:Conversation|Branch) .*?)</h4>", drawn)
    assert len(titles) == 4 and titles.count("Branch 2, from the model's turn 2 on") == 1
    assert re.findall(r'<input type="radio" name="tokens">(.*?)</label>', drawn) == ["log-prob", "weights", "mask"]
