"""A plugin of pytest: what each test file takes and starts, one JSON line a file in the file ``TEST_COSTS`` of the environment.

CPU seconds are those of the worker and of all its descendants. With ``REACH`` (see sitecustomize.py) it also tells probes and ranks
which test file they work for.
"""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

TICKS = os.sysconf("SC_CLK_TCK")


class Costs:
    """Of the test file that runs."""

    file: str | None = None
    started: ClassVar[Counter[str]] = Counter()
    began: tuple[float, float] = 0.0, 0.0

    @classmethod
    def begin(cls, file: str) -> None:
        cls.end()
        cls.file, cls.began = file, (time.monotonic(), descendant_cpu_s())
        getattr(builtins, "_reached", set[str]()).clear()

    @classmethod
    def end(cls) -> None:
        if cls.file is not None:
            wall, cpu = time.monotonic() - cls.began[0], descendant_cpu_s() - cls.began[1]
            with Path(os.environ["TEST_COSTS"]).open("a") as out:
                out.write(
                    json.dumps({"file": cls.file, "wall_s": round(wall, 1), "cpu_s": round(cpu, 1), **cls.started}) + "\n"
                )
        cls.file = None
        cls.started.clear()


def descendant_cpu_s() -> float:
    """Return the CPU seconds of this process, its descendants, and those of them that have ended and been waited for."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        parents[int(process)] = int(fields[1])
        seconds[int(process)] = sum(map(int, fields[11:15])) / TICKS

    def is_descendant(process: int) -> bool:
        while process not in (0, os.getpid()):
            process = parents.get(process, 0)
        return process != 0

    return sum(spent for process, spent in seconds.items() if is_descendant(process))


def for_test_file(world: Any, test: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run a function on a rank of a pool, whose environment is that of the test that started the pool."""
    os.environ["PYTEST_CURRENT_TEST"] = test
    getattr(builtins, "_reached", set[str]()).clear()
    return function(world, *arguments)


def count(owner: Any, name: str, note: Callable[..., None]) -> None:
    """Call ``note`` with the arguments of each call of a function."""
    plain = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return plain(*args, **kwargs)

    setattr(owner, name, counted)


def watch_starts() -> None:
    import ranks

    started, run = Costs.started, ranks.RankPool.run

    def note_program(command: Any, *_: Any, **__: Any) -> None:
        line = command if isinstance(command, str) else " ".join(map(str, command))
        started["programs" if any(word in line for word in ("python", "rlhf-spmd", "bash")) else "other_processes"] += 1

    def run_on_pool(pool: Any, function: Any, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        started.update({"rank_calls": 1, "ranks": pool.size, "train_runs": int(function.__module__ == "tasks")})
        named = os.environ.get("PYTEST_CURRENT_TEST", "none"), function, arguments
        return (
            run(pool, for_test_file, named, timeout_s) if "REACH" in os.environ else run(pool, function, arguments, timeout_s)
        )

    ranks.RankPool.run = run_on_pool  # type: ignore[method-assign]
    count(subprocess.Popen, "__init__", lambda _, *args, **kwargs: note_program(*args, **kwargs))
    count(ranks.Program, "__init__", lambda _, size, *more: started.update({"train_runs": 1, "ranks": size}))
    count(ranks, "run_command", lambda *_: started.update({"programs_without_start": 1}))
    try:
        from triton import compiler
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        return
    count(GridExecutor, "__call__", lambda *_, **__: started.update({"interpreted_kernels": 1}))
    count(compiler, "compile", lambda *_, **__: started.update({"gpu_compilations": 1}))


def pytest_collection_finish(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or not session.config.getoption("numprocesses", None):
        watch_starts()


def pytest_runtest_protocol(item: pytest.Item) -> None:
    file = str(item.path.relative_to(item.config.rootpath))
    if file != Costs.file:
        Costs.begin(file)
    Costs.started["cases"] += 1


def pytest_sessionfinish() -> None:
    Costs.end()
