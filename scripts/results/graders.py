"""What the graders say on real answers, before and after a change; writes ``docs/figures/graders.json``.

    python scripts/results/graders.py --data DIR [--before SRC] [--out FILE]

``--data``: a directory with ``math500``, ``deepmath``, ``gsm8k``, ``aime24``, ``humaneval`` and ``mbpp``. ``--before``: ``src`` of a
checkout from before the change; the same cases are scored by it and by this checkout, each in a process of its own. Without it, what
the file has of before stays, and so do its notes. Some cases are also scored by ``auto``, under the name of a data source.
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
    "answered",
    "no answer",
    "timed out",
]
AUTO = {  # (part, reward) -> the data source under which ``auto`` scores it too
    ("MATH-500, answers, and with another last digit", "math"): "HuggingFaceH4/MATH-500",
    ("DeepMath, answers, and those of other rows", "math"): "math_dapo",
    ("AIME 2024, in sentences of ten styles", "aime"): "aime2024",
    ("GSM8K, output of four models, the published judgement", "gsm8k"): "openai/gsm8k",
    ("letters in ten forms", "multiple_choice"): "cais/mmlu",
    ("HumanEval and MBPP, programs and broken ones", "code"): "openai_humaneval",
}
Part = tuple[str, str, list["Case"]]
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


def by_source(parts: list[Part]) -> Iterator[Part]:
    for name, reward, cases in parts:
        if source := AUTO.get((name, reward)):
            yield name, f"auto {source}", [case._replace(row={**case.row, "data_source": source}) for case in cases]


class Verdicts(NamedTuple):
    """Of a part's cases. ``scores``: None for a call that failed. ``counts``: responses in which the grader read an answer, in which it
    read none (both None if it reads no answers), and calls that overran their time."""

    scores: list[float | None]
    counts: tuple[int | None, int | None, int]


def score(parts: list[tuple[str, str, list[list[Any]]]]) -> list[Verdicts]:
    """Returns the verdicts of the graders that this process imports."""
    from rlhf_spmd.rewards.config import RewardConfig
    from rlhf_spmd.rewards.runner import RewardRunner

    verdicts = []
    for name, reward, cases in parts:
        with RewardRunner(RewardConfig(function=reward.partition(" ")[0], num_workers=2)) as runner:
            result = runner.score([(row.get("prompt", ""), response, row) for response, row, *_ in cases])
        if result.failures:
            print(f"{name} ({reward}): {result.failures} calls failed: {result.first_error}", file=sys.stderr)
        none = list(result.answers.values()).count(None)
        read = (len(result.answers) - none, none) if result.answers else (None, None)
        verdicts.append(Verdicts(result.scores, (*read, result.timeouts)))
    return verdicts


def score_apart(source: Path, parts: list[Part]) -> list[Verdicts]:
    """Returns :func:`score` of a process whose ``rlhf_spmd`` is in ``source``."""
    environment = {**os.environ, "PYTHONPATH": str(source.resolve())}
    command = [sys.executable, __file__, "--score"]
    done = subprocess.run(command, input=json.dumps(parts), stdout=subprocess.PIPE, text=True, env=environment, check=True)
    return [Verdicts(*found) for found in json.loads(done.stdout)]


def figures(
    parts: list[Part], before: list[Verdicts] | None, after: list[Verdicts], known: dict[str, Any], command: str
) -> dict[str, Any]:
    """``before``: None: what ``known``, the file so far, has of it."""
    rows, notes = [], known["notes"] if before is None else []
    known_rows = {(row[0], row[1]): (row[3], row[6]) for row in known["rows"]}
    for at, ((name, reward, cases), (new, read)) in enumerate(zip(parts, after, strict=True)):
        counts: list[int | None] = []
        for right in (True, False):
            chosen = [i for i, case in enumerate(cases) if case.right is right]
            was = known_rows.get((name, reward), (None, None))[not right]
            was = was if before is None else sum(before[at].scores[i] == 1.0 for i in chosen)
            counts += [len(chosen), was, sum(new[i] == 1.0 for i in chosen)]
        rows.append([name, reward, *counts, *read])
        if before is None:
            continue
        old = before[at].scores
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
    parts += by_source(parts)
    before, after = score_apart(given.before, parts) if given.before else None, score_apart(ROOT / "src", parts)
    known = json.loads(given.out.read_text(encoding="utf-8"))
    found = figures(parts, before, after, known, "python scripts/results/graders.py --data DIR --before SRC")
    given.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for row in found["rows"]:
        print(*row, sep=" | ")


if __name__ == "__main__":
    main()
