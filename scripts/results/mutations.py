"""Break the source in one place at a time, and see whether a tier of the tests finds it.

python scripts/results/mutations.py --tier short --out docs/figures/mutations.json

``mutations.json`` beside this file has the breaks: half were chosen by hand, half drawn by cosmic-ray (``draw_mutations.py``). Each is
a text of one file under src/rlhf_spmd that is replaced by another one. The tests run in a copy of the repository. Files of tests that
import the mutated module come first, then those in its package's folder. A break is found by the first test that fails, or by a run
that takes too long.

``--reach DIR`` leaves out test files that never came to the mutated code (``test_costs.py --reach`` records it). Without it a break
that nothing finds takes as long as the whole tier. ``--repo DIR`` tests another checkout with the same breaks, such as an older commit.
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
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = Path("src/rlhf_spmd")
LIMIT_S = 1800.0  # of one pytest run


def files_that_reach(mutation: dict[str, str], source: str, reach: Path) -> set[str]:
    """Return the test files that came to the mutated code; those that came to the module at all if it is outside functions."""
    first = source[: source.index(mutation["old"])].count("\n") + 1
    last = first + mutation["old"].count("\n")
    lines_by_file = {
        path.name.replace("+", "/"): {
            int(line.rpartition(":")[2]) for line in set(path.read_text().split()) if line.startswith(f"{mutation['file']}:")
        }
        for path in reach.iterdir()
    }
    probes = sorted(set().union(*lines_by_file.values()))
    before = [probe for probe in probes if probe <= first]
    wanted = {*before[-1:], *(probe for probe in probes if first <= probe <= last)}
    is_python = mutation["file"].endswith(".py")
    folder = str(Path(mutation["file"]).parent)
    if not is_python:  # C++: whoever came to the package
        return {path.name.replace("+", "/") for path in reach.iterdir() if f"\n{folder}/" in path.read_text()}
    return {name for name, lines in lines_by_file.items() if lines & wanted or (lines and not before)}


def run_tests(copy: Path, files: list[str], tier: str, deselected: list[str]) -> tuple[str | None, float]:
    """Return the first failing test ("hang" for a run that takes too long, None if all pass) and the wall seconds."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider"]
    command += {"short": ["-m", "not long"], "long": ["-m", "long"], "all": []}[tier]
    command += [word for test in deselected for word in ("--deselect", test)] + files
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(copy / "src")}
    start = time.monotonic()
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return "hang", time.monotonic() - start
    failed = [
        line.split(" - ")[0].split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))
    ]
    if done.returncode not in (0, 5) and not failed:  # 5: no test of this tier
        failed = [f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}"]
    return (failed[0] if failed else None), time.monotonic() - start


def try_mutation(copy: Path, mutation: dict[str, str], tests: list[str], arguments: argparse.Namespace) -> list[Any]:
    """Return the row of one break; the copy is as before afterwards."""
    path = copy / SOURCE / mutation["file"]
    source = path.read_text()
    assert source.count(mutation["old"]) == 1, f"{mutation['name']}: {mutation['file']} does not have the text once"
    candidates = set(tests)
    if arguments.reach is not None:
        candidates &= files_that_reach(mutation, source, arguments.reach)
    module = mutation["file"].removesuffix(".py").replace("/", ".")
    importers = {test for test in candidates if module in (copy / test).read_text()}
    folder = f"tests/{Path(mutation['file']).parts[0].removesuffix('.py')}/"
    near = {test for test in candidates - importers if test.startswith(folder)}
    path.write_text(source.replace(mutation["old"], mutation["new"]))
    failed, seconds = None, 0.0
    try:
        for files in (importers, near, candidates - importers - near):
            if files and failed is None:
                failed, more = run_tests(copy, sorted(files), arguments.tier, arguments.deselect)
                seconds += more
    finally:
        path.write_text(source)
    return [
        mutation["name"],
        mutation["file"],
        mutation["origin"],
        tier_name(arguments),
        failed,
        round(seconds),
        len(candidates),
    ]


def tier_name(arguments: argparse.Namespace) -> str:
    return str(arguments.label or arguments.tier)


def write(path: Path, rows: list[list[Any]]) -> None:
    """Write the figures, one row a line, and how many breaks each tier has found."""
    counts = {tier: [row[4] is not None for row in rows if row[3] == tier] for tier in dict.fromkeys(row[3] for row in rows)}
    head = {
        "name": "Breaks of the source that the tests find",
        "date": str(date.today()),
        "machine": f"{os.cpu_count()}-core x86 virtual machine; torch for CPUs, gloo, one thread per rank",
        "command": "python scripts/results/mutations.py --tier short --out docs/figures/mutations.json",
        "columns": ["break", "file", "origin", "tier", "found by", "wall s", "test files"],
    }
    notes = [f"{tier}: {sum(found)} of {len(found)} found" for tier, found in counts.items()]
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    path.write_text(json.dumps(head, indent=2)[:-2] + f',\n  "rows": [\n{lines}\n  ],\n  "notes": {json.dumps(notes)}\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=["short", "long", "all"], default="short")
    parser.add_argument("--mutations", type=Path, default=HERE / "mutations.json")
    parser.add_argument("--repo", type=Path, default=HERE.parent.parent)
    parser.add_argument("--label", help="in place of the tier")
    parser.add_argument("--reach", type=Path, help="directory that test_costs.py --reach has written")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the breaks, from 0 on")
    parser.add_argument("--deselect", nargs="*", default=[], help="tests that fail without a break")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    mutations = json.loads(arguments.mutations.read_text())
    numbers = range(len(mutations)) if arguments.only is None else arguments.only
    rows: list[list[Any]] = json.loads(arguments.out.read_text())["rows"] if arguments.out.is_file() else []
    with tempfile.TemporaryDirectory(prefix="rlhf_spmd_mutation_") as directory:
        copy = Path(directory) / "copy"
        shutil.copytree(
            arguments.repo, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__")
        )
        (Path(directory) / "shared").symlink_to(arguments.repo.resolve().parent / "shared")
        tests = sorted(str(path.relative_to(copy)) for path in (copy / "tests").rglob("test_*.py"))
        for number in numbers:
            new = try_mutation(copy, mutations[number], tests, arguments)
            rows = [row for row in rows if (row[0], row[3]) != (new[0], new[3])] + [new]
            print(f"{number:3} {new[0][:60]:60} {new[5]:5} s  {new[4]}", flush=True)
            write(arguments.out, rows)


if __name__ == "__main__":
    main()
