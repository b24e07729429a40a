"""Rows per second of rewards through their worker processes, and verdicts on real answers; a table and JSON.

    python scripts/bench/rewards.py --data DIR [--repeats 3] [--code] [--out FILE]

``--data``: a directory with ``gsm8k/model_solutions.jsonl.gz``, ``math500/test.jsonl``, ``humaneval/test.jsonl.gz`` and
``mbpp/all.jsonl.gz``. ``--code`` also runs the reference programs and broken ones, which takes minutes.
"""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

from measure import line, machine_facts, run_parts, save, table
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.row_values import RewardRow
from rlhf_spmd.rewards.runner import RewardRunner


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return [json.loads(line) for line in file]


def gsm8k(data: Path) -> tuple[list[RewardRow], list[bool]]:
    """Output of real models, and the published judgement. The last ``A:`` of a solution is what ``####`` is today."""
    found = read(data / "gsm8k" / "model_solutions.jsonl.gz")
    marked = [{key: "####".join(item[key].rsplit("A:", 1)) for key in ("solution", "ground_truth")} for item in found]
    rows: list[RewardRow] = [
        (item["question"], m["solution"], {"answer": m["ground_truth"]}) for item, m in zip(found, marked, strict=True)
    ]
    return rows, [bool(item["is_correct"]) for item in found]


def math500(data: Path) -> tuple[list[RewardRow], list[bool]]:
    """Every answer against itself, and with its last digit changed."""
    rows: list[RewardRow] = []
    right = []
    for item in read(data / "math500" / "test.jsonl"):
        answer, row = item["answer"], {"answer": item["answer"]}
        rows.append((item["problem"], item["solution"], row))
        right.append(True)
        at = max((i for i, character in enumerate(answer) if character in "0123456789"), default=-1)
        if at >= 0:
            other = answer[:at] + str((int(answer[at]) + 1) % 10) + answer[at + 1 :]
            rows.append((item["problem"], f"\\boxed{{{other}}}", row))
            right.append(False)
    return rows, right


def programs(data: Path) -> tuple[list[RewardRow], list[bool]]:
    """Reference solutions, and programs that end or answer wrong."""
    rows: list[RewardRow] = []
    for item in read(data / "humaneval" / "test.jsonl.gz"):
        rows += [(item["prompt"], text, item) for text in (item["canonical_solution"], "    return object()\n")]
    for item in read(data / "mbpp" / "all.jsonl.gz"):
        rows += [
            (item["text"], f"```python\n{text}\n```", item)
            for text in (item["code"], f"import os\nos._exit(0)\n{item['code']}")
        ]
    return rows, [True, False] * (len(rows) // 2)


def measure(name: str, rows: list[RewardRow], right: list[bool], num_workers: int, repeats: int) -> dict[str, Any]:
    """The best of ``repeats`` passes over all rows, after one to warm up; and the verdicts."""
    with RewardRunner(RewardConfig(function=name, num_workers=num_workers, timeout_s=60.0, default=-1.0)) as runner:
        runner.score(rows[:num_workers])
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            result = runner.score(rows)
            seconds.append(time.perf_counter() - started)
    agree = sum((score == 1.0) == true for score, true in zip(result.scores, right, strict=True))
    told = {"reward": name, "workers": num_workers, "rows": len(rows), "rows_per_s": len(rows) / min(seconds)}
    return {**told, "agree": agree, "failures": result.failures, "timeouts": result.timeouts, "seconds": seconds}


def rewards(data: Path, repeats: int = 3, code: bool = False, out: Path | None = None) -> None:
    sets = {"gsm8k": gsm8k(data), "math": math500(data), **({"code": programs(data)} if code else {})}
    columns = "reward workers rows rows_per_s agree failures timeouts"
    found = []
    print(table([], columns))
    for name, (rows, right) in sets.items():
        for workers in (1, 2):
            found.append(measure(name, rows, right, workers, 1 if name == "code" else repeats))
            print(line(found[-1], columns), flush=True)
    save({"bench": "rewards", "machine": machine_facts(), "cases": found}, out)


if __name__ == "__main__":
    run_parts(rewards)
