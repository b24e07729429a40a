"""What the graders say on real answers, before and after a change; writes ``docs/figures/graders.json``.

    python scripts/results/graders.py --data DIR --before SRC [--out FILE]

``--data``: a directory with ``math500``, ``deepmath``, ``gsm8k``, ``aime24``, ``humaneval`` and ``mbpp``. ``--before``: ``src`` of a
checkout from before the change; the same cases are scored by it and by this checkout, each in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "rewards")]
COLUMNS = [
    "answers",
    "reward",
    "right rows",
    "score before",
    "score after",
    "wrong rows",
    "score before, wrong",
    "score after, wrong",
]
MOST = 40  # differences of a part that are listed one by one


class Case(NamedTuple):
    """A response, its row, and whether it is right. ``label`` names it in the list of differences."""

    response: str
    row: dict[str, Any]
    right: bool
    label: str


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [json.loads(line) for line in file]


def mathematics(data: Path) -> Iterator[tuple[str, str, list[Case]]]:
    from answer_styles import BOXED, STATED, responses

    rows = read(data / "math500" / "test.jsonl")
    for reward in ("math", "math:flexible"):
        yield "MATH-500, solutions", reward, [Case(r["solution"], {"answer": r["answer"]}, True, r["answer"]) for r in rows]
    said = "The answer is ${}$. I am confident that this answer is correct."
    cases = [Case(said.format(r["answer"]), {"answer": r["answer"]}, True, r["answer"]) for r in rows]
    yield "MATH-500, a sentence with the answer and one behind it", "math:flexible", cases
    cases = []
    for row in rows:
        answer = row["answer"]
        cases.append(Case(f"\\boxed{{ {answer} }}.", {"answer": answer}, True, answer))
        at = max((i for i, character in enumerate(answer) if character in "0123456789"), default=-1)
        if at >= 0:
            other = answer[:at] + str((int(answer[at]) + 1) % 10) + answer[at + 1 :]
            cases.append(Case(f"\\boxed{{{other}}}", {"answer": answer}, False, f"{answer} and {other}"))
    yield "MATH-500, answers, and with another last digit", "math", cases
    for reward, forms in (("math", BOXED), ("math:flexible", STATED)):
        pairs = zip(rows[:100], [*rows[1:100], rows[0]], strict=True)
        cases = [Case(text, {"answer": r["answer"]}, True, text) for r in rows[:100] for text in responses(r["answer"], forms)]
        cases += [
            Case(text, {"answer": r["answer"]}, False, text)
            for r, other in pairs
            if r["answer"] != other["answer"].removeprefix("x=")
            for text in responses(other["answer"], forms)
        ]
        yield "MATH-500, in sentences of ten styles", reward, cases
    rows = [row for part in ("train", "test") for row in read(data / "deepmath" / f"{part}.jsonl.gz")]
    cases = [Case(f"\\boxed{{{r['answer']}}}", {"answer": r["answer"]}, True, r["answer"]) for r in rows]
    for row, other in zip(rows, [*rows[1:], rows[0]], strict=True):
        if row["answer"] != other["answer"]:
            label = f"{row['answer']} and {other['answer']}"
            cases.append(Case(f"\\boxed{{{other['answer']}}}", {"answer": row["answer"]}, False, label))
    yield "DeepMath, answers, and those of other rows", "math", cases
    rows = read(data / "aime24" / "test.jsonl")
    cases = [
        Case(text, {"answer": r["answer"]}, right, text)
        for r in rows
        for right, answer in ((True, str(r["answer"])), (False, "1000"))
        for text in responses(answer, (*BOXED, *STATED))
    ]
    yield "AIME 2024, in sentences of ten styles", "aime", cases


def others(data: Path) -> Iterator[tuple[str, str, list[Case]]]:
    from test_reward_verdicts import FORMS, LETTERS

    from answer_styles import CHOICES, responses

    rows = [row for part in ("train", "test") for row in read(data / "gsm8k" / f"{part}.jsonl")]
    for reward in ("gsm8k", "gsm8k:flexible"):
        yield "GSM8K, solutions", reward, [Case(r["answer"], {"answer": r["answer"]}, True, r["answer"][-60:]) for r in rows]
    cases = []
    for row in read(data / "gsm8k" / "model_solutions.jsonl.gz"):
        response, answer = ("####".join(row[key].rsplit("A:", 1)) for key in ("solution", "ground_truth"))
        cases.append(Case(response, {"answer": answer}, bool(row["is_correct"]), response[-60:]))
    yield "GSM8K, output of four models, the published judgement", "gsm8k", cases
    cases = [
        Case(text, {"answer": answer}, answer == letter, text)
        for letter, texts in [*FORMS, *LETTERS]
        for text in texts
        for answer in "ABCD"
    ]
    yield "sentences with letters, tests/rewards", "multiple_choice", cases
    cases = [
        Case(text, {"answer": answer}, answer == letter, text)
        for letter in "ABCD"
        for text in responses(letter, CHOICES)
        for answer in "ABCD"
    ]
    yield "letters in ten forms", "multiple_choice", cases
    cases = []
    for row in read(data / "humaneval" / "test.jsonl.gz"):
        right, wrong = row["canonical_solution"], "    return object()\n"
        cases += [Case(text, row, text is right, row["task_id"]) for text in (right, wrong)]
    for row in read(data / "mbpp" / "all.jsonl.gz")[:200]:
        right, wrong = row["code"], f"import os\nos._exit(0)\n{row['code']}"
        cases += [Case(f"```python\n{text}\n```", row, text is right, str(row["task_id"])) for text in (right, wrong)]
    yield "HumanEval and MBPP, programs and broken ones", "code", cases


def score(parts: list[tuple[str, str, list[list[Any]]]]) -> list[list[float | None]]:
    """Returns the scores of each part by the graders that this process imports; None for a call that raised."""
    from rlhf_spmd.rewards.config import RewardConfig

    scores = []
    for _, reward, cases in parts:
        bound = RewardConfig(function=reward).bind("reward").ready()
        found: list[float | None] = []
        for response, row, *_ in cases:
            try:
                result = bound.call([(row.get("prompt", ""), response, row)], 60.0)[0]
                found.append(float(result["score"] if isinstance(result, dict) else result))
            except ValueError:
                found.append(None)
        scores.append(found)
    return scores


def score_apart(source: Path, parts: list[tuple[str, str, list[Case]]]) -> list[list[float | None]]:
    """Returns :func:`score` of a process whose ``rlhf_spmd`` is in ``source``."""
    environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
    command = [sys.executable, __file__, "--score"]
    done = subprocess.run(command, input=json.dumps(parts), capture_output=True, text=True, env=environment, check=True)
    scores: list[list[float | None]] = json.loads(done.stdout)
    return scores


def figures(parts: list[tuple[str, str, list[Case]]], before: list[Any], after: list[Any], command: str) -> dict[str, Any]:
    rows, notes = [], []
    for (name, reward, cases), old, new in zip(parts, before, after, strict=True):
        counts = []
        for right in (True, False):
            chosen = [i for i, case in enumerate(cases) if case.right is right]
            counts += [len(chosen), *(sum(scores[i] == 1.0 for i in chosen) for scores in (old, new))]
        rows.append([name, reward, *counts])
        changed = [(case, was, now) for case, was, now in zip(cases, old, new, strict=True) if was != now]
        kinds = [(case, was, now) for case, was, now in changed if len(changed) <= MOST or now == 0 or not case.right]
        if len(kinds) < len(changed):
            notes.append(f"{name} ({reward}): {len(changed) - len(kinds)} right rows that had no point have one.")
        for case, was, now in kinds[:MOST]:
            kind = "right" if case.right else "wrong"
            notes.append(
                f"{name} ({reward}), {kind}, {was} to {now}: {case.label[:160]!r}, answer {str(case.row.get('answer'))[:60]!r}"
            )
        if len(kinds) > MOST:
            notes.append(f"{name} ({reward}): {len(kinds) - MOST} more rows like the last {MOST}.")
    machine = f"2-core x86 virtual machine, Python {sys.version.split()[0]}; scores do not depend on it"
    keys = ["name", "date", "machine", "command", "columns", "rows", "notes"]
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return dict(zip(keys, ["Verdicts of graders", today, machine, command, COLUMNS, rows, notes], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "graders.json")
    parser.add_argument("--score", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.score:
        print(json.dumps(score(json.load(sys.stdin))))
        return
    parts = [*mathematics(given.data), *others(given.data)]
    before, after = score_apart(given.before, parts), score_apart(ROOT / "src", parts)
    found = figures(parts, before, after, "python scripts/results/graders.py --data DIR --before SRC")
    given.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for row in found["rows"]:
        print(*row, sep=" | ")


if __name__ == "__main__":
    main()
