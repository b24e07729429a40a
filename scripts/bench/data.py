"""Seconds and memory of each rank until a data set of many short prompts can be drawn from: a table and JSON.

    python scripts/bench/data.py [--rows 1000000] [--ranks 2] [--out FILE]

Prompts of 4 to 14 digits with their answers, the quickstart's tokenizer. Every rank is a process of its own. ``without``: each rank
reads and tokenises for itself; ``first``: with ``data.cache_dir``, which is empty; ``again``: once more. Seconds: of
``load_dataset``, the examples and a first batch of 512; then of one more batch. MiB: above what the process had before. ``own`` is
its own memory (RssAnon) when it is done, ``mapped`` pages of files (RssFile), which ranks share, ``peak`` the most of both (VmHWM).
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import MIB, ROOT, memory_mib, reset_peak, run_case, run_parts, save, table
from rlhf_spmd.data.cached_dataset import load_dataset
from rlhf_spmd.data.loader import Loader
from rlhf_spmd.data.prompts import DataConfig, PromptDataset
from rlhf_spmd.data.tokenizer import load_tokenizer

FIELDS = {"own_mib": "RssAnon", "mapped_mib": "RssFile", "peak_mib": "VmHWM"}


def write_rows(path: Path, number: int) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for i in range(number):
            digits = str(draw.randrange(10 ** draw.randint(3, 13), 10**14))
            row = {"prompt": f"{digits}>", "answer": "".join(sorted(digits)), "data_source": "sort", "id": i}
            file.write(json.dumps(row) + "\n")


def load(directory: str, cache: str | None) -> dict[str, float]:
    tokenizer = load_tokenizer(Path(directory, "task", "model"))
    tokenizer(["1>"])
    reset_peak()
    before, start = {name: memory_mib(field) for name, field in FIELDS.items()}, time.perf_counter()
    data = load_dataset(DataConfig(path=f"{directory}/rows.jsonl", cache_dir=cache), tokenizer)
    assert isinstance(data, PromptDataset)
    num_examples, loader = len(data.examples()), Loader(data, 512)
    loader.next_batch()
    ready = time.perf_counter()
    loader.next_batch()
    found = {name: memory_mib(field) - before[name] for name, field in FIELDS.items()}
    return {"seconds": ready - start, "batch_s": time.perf_counter() - ready, "examples": num_examples, **found}


def data(rows: int = 1_000_000, ranks: int = 2, out: Path | None = None) -> None:
    report: dict[str, Any] = {"rows": rows, "ranks": ranks, "cases": {}}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(ranks) as pool:
        directory = Path(name)
        sizes = ["--sft", "1", "--train", "1", "--val", "1"]
        task = [sys.executable, str(ROOT / "examples" / "sort_digits.py"), "--out", str(directory / "task"), *sizes]
        subprocess.run(task, check=True, stdout=sys.stderr)
        write_rows(directory / "rows.jsonl", rows)
        for case in ("without", "first", "again"):
            given = {"directory": name, "cache": None if case == "without" else f"{name}/cache"}
            report["cases"][case] = list(pool.map(lambda _, given=given: run_case(load, given), range(ranks)))
        report["file_mib"] = sum(file.stat().st_size for file in (directory / "cache").glob("*.safetensors")) / MIB
        report["data_mib"] = (directory / "rows.jsonl").stat().st_size / MIB
    lines = [{"case": case, "rank": i, **found} for case, its in report["cases"].items() for i, found in enumerate(its)]
    print(table(lines, "case rank seconds batch_s own_mib mapped_mib peak_mib"))
    print(f"\nthe file has {report['file_mib']:.0f} MiB, the data {report['data_mib']:.0f} MiB")
    save(report, out)


if __name__ == "__main__":
    run_parts(data)
