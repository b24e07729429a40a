"""Runs a Python program that is not trusted, in its own process.

The program has an empty directory, which is removed afterwards, the given standard input, and limits of CPU seconds,
memory, processes, open files and file sizes. It can make no socket (seccomp), so it reaches neither the network nor
local servers such as docker's or ssh-agent's.

Where Linux allows it, the program also has its own namespaces and Landlock. Then it sees no other processes, all that
it started ends with it, all mounts but its directory are read-only, and it writes only below its directory. Otherwise
(see ``isolated``) a process that leaves its session can outlive the program until the worker ends, and only a watcher
counts processes.

The program can read what the user can read. This guards against accidents and cheating, not against an attacker who
wants data.
"""

from __future__ import annotations

import errno
import functools
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
from typing import IO, Any

WATCH_S = 0.02
MAX_OUTPUT = 1 << 22  # bytes read of what the program writes
ENTRY = 1 << 16  # extra bytes counted for each file or directory: removing many takes long
PREFIX = "rlhf_spmd_program_"  # of directory names
TICKS = os.sysconf("SC_CLK_TCK")  # /proc's ticks per second
_TESTER = Path(__file__).with_name("code_tester.py")


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of a program.

    - time_s: CPU seconds of all processes together
    - wall_s: seconds of wall time, beyond which there is no verdict
    - memory_mb: address space of each process
    - processes: processes at once
    - file_mb: size of each file; the whole directory may have four times that
    """

    time_s: float = 5.0
    wall_s: float = 20.0
    memory_mb: int = 1024
    processes: int = 16
    file_mb: int = 16


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    - passed: number of tests that ended without an exception
    - output: what it wrote to standard output
    - error: the end of standard error, or why the program was ended
    - isolated: True if the program had its own namespaces
    """

    passed: int
    exit_code: int
    output: str
    error: str
    isolated: bool


def run(
    program: str | Sequence[str],
    tests: Sequence[str] = (),
    stdin: str = "",
    limits: SandboxLimits | None = None,
    names: Sequence[str] = (),
    set_up: str = "",
) -> Outcome:
    """Run ``program`` (parts in one scope), as ``__main__`` if there are no ``tests``, then each test; see ``code_tester``.

    A program that ends before its tests has passed none. Raises TimeoutError at ``limits.wall_s`` (the machine is busy,
    or the program waits), and OSError if the tester cannot start; neither says anything about the program.

    - stdin: the program's standard input
    - names: names that in tests are always the program's
    - set_up: runs before the tests
    """
    limits = limits or SandboxLimits()
    parts = [program] if isinstance(program, str) else list(program)
    job = {"program": parts, "name": "program" if tests else "__main__", "limits": asdict(limits)}
    task = {"tests": list(tests), "names": list(names), "set_up": set_up}
    with ExitStack() as opened:
        directory = tempfile.mkdtemp(prefix=PREFIX)
        opened.callback(remove_tree, directory)
        files = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(6)]
        for file, text in zip(files, (json.dumps(job), json.dumps(task), stdin), strict=False):
            file.write(text.encode(errors="replace"))
            file.seek(0)
        process = _start(directory, *files)
        try:
            end_reason = _watch(process, directory, limits)
        finally:
            _end(process)
        output, error, verdict = (_text(file) for file in files[3:])
    num_passed, isolated = _read_verdict(verdict, error[-500:].strip() or end_reason)
    return Outcome(num_passed, process.returncode, output, end_reason or error[-500:], isolated)


def _start(
    directory: str, job: IO[bytes], tests: IO[bytes], stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes], verdict: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start ``code_tester`` in ``directory`` with files for its input and output."""
    descriptors = [file.fileno() for file in (job, tests, verdict)]
    environment = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG")}
    return subprocess.Popen(
        [sys.executable, "-I", "-B", str(_TESTER), *map(str, descriptors)],
        cwd=directory,
        env={**environment, "HOME": directory, "TMPDIR": directory, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=descriptors,
        start_new_session=True,
    )


def _read_verdict(verdict: str, end_reason: str) -> tuple[int, bool]:
    """Return the number of tests that passed, and whether the program was isolated.

    Raises OSError with ``end_reason`` if the tester has not started.
    """
    start, *passed = verdict.splitlines() or [""]
    if not start.startswith("["):
        raise OSError(f"the judge of the program could not start: {end_reason}")
    isolated, without_sockets = json.loads(start)
    if not without_sockets:
        _warn_of_sockets()
    return len(set(passed) - {"0"}), isolated  # 0 is the set-up


@functools.cache
def _warn_of_sockets() -> None:
    """Warn once per process."""
    print(
        "rewards.code: this system has no seccomp, so programs that are judged can reach servers that listen at a path, such as "
        "docker's; run as a user who may not",
        file=sys.stderr,
    )


def _watch(process: subprocess.Popen[bytes], directory: str, limits: SandboxLimits) -> str:
    """Wait for the end of the program. Return why it must be ended, or "" if it has ended. Raises TimeoutError."""
    deadline = time.monotonic() + limits.wall_s
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(WATCH_S)
            return ""
        pids = descendants(process.pid, limits.processes + 2)
        cpu_s = sum(map(_cpu_seconds, (process.pid, *pids)))
        if cpu_s > limits.time_s:
            return f"it used more than {limits.time_s} s of CPU"
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the program had not ended after {limits.wall_s} s, in which it got {cpu_s:.1f} s of CPU: it waits, or the machine is "
                "busy"
            )
        if len(pids) > limits.processes + 1:
            return f"it had more than {limits.processes} processes"
        if _size(directory) > limits.file_mb << 22:
            return f"it wrote more than {4 * limits.file_mb} MiB, or too many files"


def _cpu_seconds(pid: int) -> float:
    """Return CPU seconds of a process and its reaped children; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the program and all that it has started. When the first process of a namespace ends, Linux kills the others."""
    for pid in (*reversed(descendants(process.pid, 1000)), process.pid):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int, limit: int) -> list[int]:
    """Return a process's descendants, parents before children; not many more than ``limit``."""
    pids = [pid]
    for parent in pids:
        with suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                pids += map(int, (thread / "children").read_text().split())
        if len(pids) > limit:
            break
    return pids[1:]


def _size(directory: str) -> float:
    """Return the bytes below a directory, plus ``ENTRY`` for each name; infinite if a path is too long."""
    total = 0
    folders = [directory]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    total += ENTRY + entry.stat(follow_symlinks=False).st_size
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError as error:  # otherwise it is gone or not readable
            if error.errno == errno.ENAMETOOLONG:
                return float("inf")
    return total


def remove_tree(directory: str) -> None:
    """Remove a directory of any depth: its paths may be too long for Python's rmtree. What cannot be removed stays."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
    if subprocess.run(["rm", "-rf", "--", directory], **quiet).returncode:  # the program may have changed permissions
        subprocess.run(["chmod", "-R", "u+rwx", "--", directory], **quiet)
        subprocess.run(["rm", "-rf", "--", directory], **quiet)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(MAX_OUTPUT).decode(errors="replace")
