"""Runs a Python program that nobody vouches for, in a process of its own.

It has an empty directory, which is removed with all that it wrote, no standard input but what it is given, and limits of time, CPU,
memory, processes, open files and file sizes. Where Linux allows it also namespaces: no network, no sight of other processes, and
all that it started ends with it, all mounts but its directory read-only; and Landlock: it can write only below its directory. Where
those are not allowed (``isolated`` says so) it can reach the network, and a process that leaves its session can outlive it until the
worker ends. Root's processes are not counted by the kernel, but a watcher ends the program soon after it has too many. It can
read what the user can read: this is a guard against accidents and cheating, not against an attacker who wants data.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

WATCH_S = 0.02
MAX_OUTPUT = 1 << 22  # bytes read of what the program writes
_JUDGE = Path(__file__).with_name("code_judge.py")


@dataclass(frozen=True)
class Limits:
    """``time_s``: wall clock and CPU seconds; ``memory_mb``: address space of each process; ``file_mb``: of each file, and four
    times that of all in the directory."""

    time_s: float = 5.0
    memory_mb: int = 1024
    processes: int = 16
    file_mb: int = 16


@dataclass(frozen=True)
class Outcome:
    """``passed``: number of tests that ended without an exception. ``error``: the last of what went to standard error, or why the
    program was ended. ``isolated``: it had namespaces of its own."""

    passed: int
    exit_code: int
    output: str
    error: str
    isolated: bool


def run(
    program: str | Sequence[str],
    tests: Sequence[str] = (),
    stdin: str = "",
    limits: Limits | None = None,
    names: Sequence[str] = (),
    before: str = "",
) -> Outcome:
    """Run ``program`` (parts in one scope), as ``__main__`` if there are no ``tests``, then each test, see ``code_judge``. A program
    that ends by itself before its tests has passed none. ``names``: in the tests always the program's. ``before``: runs before
    the tests, where they do.
    """
    limits = limits or Limits()
    parts, name = [program] if isinstance(program, str) else list(program), "program" if tests else "__main__"
    job = {"program": parts, "name": name, "limits": asdict(limits)}
    judged = {"tests": list(tests), "names": list(names), "before": before}
    with ExitStack() as opened:
        directory = opened.enter_context(tempfile.TemporaryDirectory(prefix="rlhf_spmd_code_", ignore_cleanup_errors=True))
        files = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(6)]
        given, asked, read, wrote, failed, verdict = files
        for file, text in ((given, json.dumps(job)), (asked, json.dumps(judged)), (read, stdin)):
            file.write(text.encode(errors="replace"))
            file.seek(0)
        passed_on = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "RLHF_SPMD_REWARD_WORKER")}
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(_JUDGE), *(str(file.fileno()) for file in (given, asked, verdict))],
            cwd=directory,
            env={**passed_on, "HOME": directory, "TMPDIR": directory, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            stdin=read,
            stdout=wrote,
            stderr=failed,
            pass_fds=(given.fileno(), asked.fileno(), verdict.fileno()),
            start_new_session=True,
        )
        try:
            why = _watch(process, Path(directory), limits)
        finally:
            _end(process)
        output, error, said = (_text(file) for file in (wrote, failed, verdict))
    first, *passed = said.splitlines() or [""]
    done = set(map(int, passed)) - {0}  # 0 is what comes before the tests
    return Outcome(len(done), process.returncode, output, why or error[-500:], first == "isolated")


def _watch(process: subprocess.Popen[bytes], directory: Path, limits: Limits) -> str:
    """Wait for the end, or for the reason to end it."""
    end = time.monotonic() + limits.time_s
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(WATCH_S)
            return ""
        if time.monotonic() > end:
            return f"it took longer than {limits.time_s} s"
        if len(_descendants(process.pid, limits.processes + 2)) > limits.processes + 1:
            return f"it had more than {limits.processes} processes"
        if _size(directory) > limits.file_mb << 22:
            return f"it wrote more than {4 * limits.file_mb} MiB"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the program with what it has started: the first process of a namespace takes all others along."""
    for pid in (*reversed(_descendants(process.pid, 1000)), process.pid):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int, most: int) -> list[int]:
    """Of a process, parents before children; not many more than ``most``."""
    found = [pid]
    for parent in found:
        with suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
        if len(found) > most:
            break
    return found[1:]


def _size(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _text(file: object) -> str:
    file.seek(0)  # type: ignore[attr-defined]
    return str(file.read(MAX_OUTPUT).decode(errors="replace"))  # type: ignore[attr-defined]
