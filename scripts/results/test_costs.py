"""What the tests take: wall and CPU seconds by file, and what each file starts.

python scripts/results/test_costs.py --tier short      # and long, then the table is complete
python scripts/results/test_costs.py --table

Writes docs/figures/tests.json: ``tiers`` has the sums, ``files`` the figures by file and tier.

- ``train_runs``: runs of training; ``rank_calls``: functions on ranks that exist; ``ranks``: how many ranks these have together
- ``programs``: processes with an interpreter of their own

``--reach DIR`` also records which blocks of the source each file comes to (see test_plugins/sitecustomize.py), in a copy of the
repository; the seconds are then a little longer. ``--repo``, ``--label``: another checkout, kept under another name than ``files``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "docs" / "figures" / "tests.json"
PLUGINS = Path(__file__).resolve().parent / "test_plugins"
TIERS = {"short": ["-m", "not long"], "long": ["-m", "long"], "all": []}


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
        start = time.monotonic()
        done = subprocess.run(
            [*command, *TIERS[tier], *more], cwd=where, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        wall = time.monotonic() - start
        print(done.stdout[-3000:])
        return wall, [json.loads(line) for line in costs.read_text().splitlines()], done.stdout.strip().splitlines()[-1]


def print_table(report: dict[str, Any], files: str) -> None:
    print("| file | short, CPU s | long, CPU s | cases | training runs | ranks | programs |\n|---|--:|--:|--:|--:|--:|--:|")
    by_cpu = sorted(report[files].items(), key=lambda entry: -sum(tier["cpu_s"] for tier in entry[1].values()))
    for name, tiers in by_cpu[:40]:
        sums = sum(
            (Counter({key: value for key, value in tier.items() if key != "file"}) for tier in tiers.values()), Counter()
        )
        cpu = [f"{tiers[tier]['cpu_s']:.0f}" if tier in tiers else "" for tier in ("short", "long")]
        print(
            f"| {name} | {' | '.join(cpu)} | {' | '.join(str(sums[key]) for key in ('cases', 'train_runs', 'ranks', 'programs'))} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=TIERS, default="short")
    parser.add_argument("--repo", type=Path, default=ROOT)
    parser.add_argument("--label", default="")
    parser.add_argument("--reach", type=Path)
    parser.add_argument("--table", action="store_true", help="print what is there, run nothing")
    arguments, more = parser.parse_known_args()
    report: dict[str, Any] = json.loads(OUT.read_text()) if OUT.is_file() else {}
    files, tiers = (f"{arguments.label}_{name}" if arguments.label else name for name in ("files", "tiers"))
    if not arguments.table:
        wall, figures, last = run(arguments.repo, arguments.tier, arguments.reach, more)
        tier = "short" if arguments.tier == "all" else arguments.tier
        report["machine"] = {"processor": platform.processor(), "cores": os.cpu_count(), "python": platform.python_version()}
        for figure in figures:
            report.setdefault(files, {}).setdefault(figure["file"], {})[tier] = {k: v for k, v in figure.items() if k != "file"}
        sums: Counter[str] = sum((Counter({k: v for k, v in figure.items() if k != "file"}) for figure in figures), Counter())
        sums["wall_s"] = round(wall)
        report.setdefault(tiers, {})[arguments.tier] = {**{key: round(value, 1) for key, value in sums.items()}, "pytest": last}
        OUT.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    print_table(report, files)


if __name__ == "__main__":
    main()
