"""Print the files of tests whose long cases concern what has changed since a commit, as many as a time limit allows.

python scripts/changed_tests.py --since COMMIT --minutes 20

The subjects of a test file are itself, what it and its helpers import of this repository, and its paths in ``SUBJECTS`` below. A test
that starts a program depends on nearly everything, so what its subjects import in turn does not count: the short tier starts those
programs, too. Files with the largest share of changed subjects come first. Seconds are those of docs/figures/tests.json.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures" / "tests.json"
UNKNOWN_S = 60.0  # of a file without a figure

# What test files depend on that they do not import: file under tests/ -> patterns of paths.
SUBJECTS = {
    "project/test_bench.py": ("scripts/bench/*",),
    "project/test_launch.py": ("launch/*", "src/rlhf_spmd/process/*", "src/rlhf_spmd/parallel/launch.py"),
    "project/test_packaging.py": ("pyproject.toml", "scripts/environment.sh", "docs/quickstart.ipynb", "examples/*"),
    "training/test_checkpoint_writer.py": ("src/rlhf_spmd/checkpoint/*", "src/rlhf_spmd/training/*"),
    "training/test_resume.py": ("src/rlhf_spmd/checkpoint/*", "src/rlhf_spmd/training/*"),
    "process/*": ("src/rlhf_spmd/process/*", "src/rlhf_spmd/parallel/launch.py"),
    "kernels/*": ("src/rlhf_spmd/kernels/*",),
    "models/*": ("src/rlhf_spmd/models/*", "src/rlhf_spmd/kernels/*"),
    "generation/*": ("src/rlhf_spmd/generation/*",),
}


def changed_paths(since: str) -> set[str] | None:
    """Return the paths that differ from ``since`` to HEAD, relative to the root; None if there is no such commit."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", since, "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return set(done.stdout.split()) if done.returncode == 0 else None


@cache
def imported_paths(path: Path) -> frozenset[Path]:
    """Return the files of this repository that a Python file imports, also inside functions."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    places = [
        base / module.replace(".", "/")
        for module in modules
        for base in (ROOT / "src", ROOT / "tests" / "helpers", ROOT / "tests", ROOT / "examples")
    ]
    candidates = {place.with_suffix(".py") for place in places} | {place / "__init__.py" for place in places}
    return frozenset(candidate for candidate in candidates if candidate.is_file())


def subjects_of(test: Path) -> set[str]:
    """Return the paths, relative to the root, whose change concerns a test file; they may be patterns."""
    helpers = {path for path in imported_paths(test) if ROOT / "tests" in path.parents}
    paths = {test, *imported_paths(test)}.union(*(imported_paths(helper) for helper in helpers))
    patterns = [
        pattern
        for name, patterns in SUBJECTS.items()
        if fnmatch.fnmatch(str(test.relative_to(ROOT / "tests")), name)
        for pattern in patterns
    ]
    return {str(path.relative_to(ROOT)) for path in paths} | set(patterns)


def long_files() -> list[Path]:
    """Return the test files that have cases of the long tier. Raises SystemExit if pytest cannot collect them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-o", "addopts=", "-q", "-m", "long"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"pytest collects no long tests (exit status {done.returncode}):\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return sorted({ROOT / line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line})


def choose(
    changed: set[str] | None, tests: list[Path], seconds: dict[str, float], limit_s: float
) -> tuple[list[Path], list[Path]]:
    """Return the test files to run, and those that concern the changes and have no room. ``changed``: None stands for everything."""

    def share(test: Path) -> float:
        subjects = subjects_of(test)
        return sum(changed is None or bool(fnmatch.filter(changed, subject)) for subject in subjects) / len(subjects)

    chosen: list[Path] = []
    left_out: list[Path] = []
    for test in sorted((test for test in tests if share(test)), key=share, reverse=True):
        needed = seconds.get(str(test.relative_to(ROOT)), UNKNOWN_S)
        if needed > limit_s:
            left_out.append(test)
            continue
        chosen.append(test)
        limit_s -= needed
    return chosen, left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", required=True, help="the last commit of which all tests are known to pass")
    parser.add_argument("--minutes", type=float, default=20.0, help="wall time of the files together")
    arguments = parser.parse_args()
    rows = json.loads(FIGURES.read_text())["rows"] if FIGURES.is_file() else []
    seconds = {file: wall_s / 2 for file, tier, wall_s, *_ in rows if tier == "long"}  # two files at a time
    chosen, left_out = choose(changed_paths(arguments.since), long_files(), seconds, 60 * arguments.minutes)
    for path in chosen:
        print(path.relative_to(ROOT))
    for path in left_out:
        print(f"left out, no time: {path.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
