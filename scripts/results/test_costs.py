"""What the tests take: wall and CPU seconds by file, and what each file starts.

python scripts/results/test_costs.py --tier short      # and long, then the table is complete
python scripts/results/test_costs.py --table           # prints the dearest files of docs/figures/tests.json, runs nothing

- ``training runs``: of the training program's two halves, or the whole program; ``rank calls``: functions on ranks that exist;
  ``ranks``: how many ranks both have together
- ``programs``: processes with an interpreter of their own

``--reach DIR`` also records which blocks of the source each file comes to (see test_plugins/sitecustomize.py), in a copy of the
repository; the seconds are then a little longer. ``--repo`` and ``--label``: another checkout, whose rows have the label as their tier.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "docs" / "figures" / "tests.json"
PLUGINS = Path(__file__).resolve().parent / "test_plugins"
TIERS = {"short": ["-m", "not long"], "long": ["-m", "long"], "all": []}
# columns after the file and the tier, and their names in what the plugin writes
COLUMNS = {
    "wall s": "wall_s",
    "CPU s": "cpu_s",
    "cases": "cases",
    "training runs": "train_runs",
    "rank calls": "rank_calls",
    "ranks": "ranks",
    "programs": "programs",
    "interpreted kernels": "interpreted_kernels",
    "GPU compilations": "gpu_compilations",
}
Row = list[Any]


def run(repo: Path, tier: str, reach: Path | None, more: list[str]) -> tuple[float, list[dict[str, Any]], str]:
    """Return the wall seconds, the figures of each file, and pytest's last line."""
    with tempfile.TemporaryDirectory(prefix="rlhf_spmd_costs_") as directory:
        costs, where = Path(directory) / "costs.jsonl", repo
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TEST_COSTS": str(costs)}
        environment["PYTHONPATH"] = str(PLUGINS)
        if reach is not None:
            reach.mkdir(parents=True, exist_ok=True)
            where = Path(directory) / "copy"
            shutil.copytree(repo, where, symlinks=True, ignore=shutil.ignore_patterns(".venv", "runs", "__pycache__"))
            (Path(directory) / "shared").symlink_to(
                repo.resolve().parent / "shared"
            )  # what tests look for beside the repository
            environment |= {"REACH": str(reach.resolve()), "PYTHONPATH": f"{where / 'src'}:{PLUGINS}"}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "2",
            "--dist",
            "loadfile",
            "--no-loadscope-reorder",
            "-p",
            "cost_plugin",
        ]
        command += [*TIERS[tier], *more]
        start = time.monotonic()
        done = subprocess.run(command, cwd=where, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        wall = time.monotonic() - start
        print(done.stdout[-3000:])
        return wall, [json.loads(line) for line in costs.read_text().splitlines()], done.stdout.strip().splitlines()[-1]


def rows_of(costs: list[dict[str, Any]], tier: str, wall_s: float) -> list[Row]:
    """Return a row of each file, and before them that of all files, whose wall time is the run's."""
    sums: Counter[str] = Counter()
    for cost in costs:
        sums.update({key: value for key, value in cost.items() if key != "file"})
    sums["wall_s"] = wall_s  # type: ignore[assignment]
    everything = {"file": "all files", **sums}
    ordered = sorted(costs, key=lambda cost: -cost["cpu_s"])
    return [[cost["file"], tier, *(round(cost.get(name, 0)) for name in COLUMNS.values())] for cost in (everything, *ordered)]


def write(rows: list[Row], notes: list[str]) -> None:
    """Write the figures, one row a line."""
    cores = os.cpu_count()
    head = {
        "name": "What the tests take, by file and tier",
        "date": str(date.today()),
        "machine": f"{cores}-core x86 virtual machine; torch for CPUs, gloo, one thread per rank",
        "command": "python scripts/results/test_costs.py --tier short",
        "columns": ["file", "tier", *COLUMNS],
    }
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    text = json.dumps(head, indent=2)[:-2] + f',\n  "rows": [\n{lines}\n  ],\n  "notes": {json.dumps(notes)}\n}}\n'
    OUT.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=TIERS, default="short")
    parser.add_argument("--repo", type=Path, default=ROOT)
    parser.add_argument("--label", help="in place of the tier")
    parser.add_argument("--reach", type=Path)
    parser.add_argument("--table", action="store_true", help="print what is there, run nothing")
    arguments, more = parser.parse_known_args()
    report: dict[str, Any] = json.loads(OUT.read_text()) if OUT.is_file() else {"rows": [], "notes": []}
    rows: list[Row] = report["rows"]
    if not arguments.table:
        tier = arguments.label or arguments.tier
        wall_s, costs, last_line = run(arguments.repo, arguments.tier, arguments.reach, more)
        rows = [row for row in rows if row[1] != tier] + rows_of(costs, tier, wall_s)
        notes = [note for note in report["notes"] if not note.startswith(f"{tier}: ")]
        write(rows, [*notes, f"{tier}: {last_line}"])
    print(f"| file | tier | {' | '.join(COLUMNS)} |\n|---|---|{'--:|' * len(COLUMNS)}")
    for row in sorted(rows, key=lambda row: -row[3])[:40]:
        print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
