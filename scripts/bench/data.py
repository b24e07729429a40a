"""Seconds and memory of each rank until a data set of many short prompts can be drawn from: a table and JSON.

    python scripts/bench/data.py [--rows 1000000] [--ranks 2] [--out FILE]

Prompts of 4 to 14 digits with their answers, the quickstart's tokenizer. Every rank is a process of its own. ``without``: each rank
reads and tokenises for itself; ``first``: with ``data.cache_dir``, which is empty; ``again``: once more. Seconds: of
``load_dataset``, the examples and a first batch of 512; then of one more batch. MiB: above what the process had before. ``own`` is
its own memory (RssAnon) when it is done, ``mapped`` pages of files (RssFile), which ranks share, ``peak`` the most of both (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import memory_mib, reset_peak
from rlhf_spmd.data.loader import Loader, load_dataset
from rlhf_spmd.data.prompts import DataConfig, PromptDataset
from rlhf_spmd.data.sort_digits import write_tokenizer
from rlhf_spmd.data.tokenizer import load_tokenizer

FIELDS = {"own": "RssAnon", "mapped": "RssFile", "peak": "VmHWM"}


def write_rows(path: Path, number: int) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for i in range(number):
            digits = str(draw.randrange(10 ** draw.randint(3, 13), 10**14))
            row = {"prompt": f"{digits}>", "answer": "".join(sorted(digits)), "data_source": "sort", "id": i}
            file.write(json.dumps(row) + "\n")


def measure_rank(directory: Path, cache: str | None) -> dict[str, float]:
    tokenizer = load_tokenizer(directory)
    tokenizer(["1>"])
    reset_peak()
    before, start = {name: memory_mib(field) for name, field in FIELDS.items()}, time.perf_counter()
    data = load_dataset(DataConfig(path=str(directory / "rows.jsonl"), cache_dir=cache), tokenizer)
    assert isinstance(data, PromptDataset)
    num_examples, loader = len(data.examples()), Loader(data, 512)
    loader.next_batch()
    ready = time.perf_counter()
    loader.next_batch()
    found = {name: memory_mib(field) - before[name] for name, field in FIELDS.items()}
    return {"seconds": ready - start, "batch_s": time.perf_counter() - ready, "examples": num_examples, **found}


def measure(directory: Path, cache: Path | None, ranks: int) -> list[dict[str, float]]:
    command = [sys.executable, __file__, "--rank-of", str(directory), *(["--cache", str(cache)] if cache else [])]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(ranks)]
    answers = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "a rank failed"
    return [json.loads(answer) for answer in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        print(json.dumps(measure_rank(args.rank_of, args.cache)))
        return
    report: dict[str, Any] = {"rows": args.rows, "ranks": args.ranks, "cases": {}}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_tokenizer(directory)
        write_rows(directory / "rows.jsonl", args.rows)
        for case in ("without", "first", "again"):
            found = measure(directory, None if case == "without" else directory / "cache", args.ranks)
            report["cases"][case] = found
            for rank, its in enumerate(found):
                told = ", ".join(f"{field} {its[field]:.0f} MiB" for field in FIELDS)
                print(
                    f"{case:8} rank {rank}: {its['seconds']:6.1f} s, a batch {1e3 * its['batch_s']:.0f} ms, {told}", flush=True
                )
        report["file_mib"] = sum(file.stat().st_size for file in (directory / "cache").glob("*.safetensors")) / 2**20
        print(
            f"the file has {report['file_mib']:.0f} MiB, the data {(directory / 'rows.jsonl').stat().st_size / 2**20:.0f} MiB"
        )
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
