"""Runs a Python program that nobody vouches for, in a process of its own.

It has an empty directory, which is removed with all that it wrote, no standard input but what it is given, and limits of time, CPU,
memory, processes, open files and file sizes. Where Linux allows it also namespaces: no network, no sight of other processes, and
all that it started ends with it; and Landlock: it can write only below its directory. Where those are not allowed
(``isolated`` says so) it can reach the network, and a process that leaves its session can outlive it until the
worker ends. Root's processes are not counted by the kernel, but a watcher ends the program soon after it has too many. It can
read what the user can read: this is a guard against accidents and cheating, not against an attacker who wants data.
"""

from __future__ import annotations

import json
import os
import secrets
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
# A process on its way into isolation: what it does not get (by a return code) it does without. Payload and verdict are open files.
_BOOT = r"""
import ctypes, json, os, resource, struct, sys
payload, verdict = int(sys.argv[1]), int(sys.argv[2])
job = json.load(os.fdopen(payload))
libc = ctypes.CDLL(None, use_errno=True)
isolated = libc.unshare(0x10000000 | 0x40000000 | 0x20000000 | 0x08000000) == 0  # user, network, processes, IPC
if isolated:
    child = os.fork()
    if child:
        os.close(verdict)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
libc.prctl(1, 9, 0, 0, 0)  # end with the parent
os.setpriority(os.PRIO_PROCESS, 0, 10)
os.write(verdict, b"isolated\n" if isolated else b"open\n")
limits = job["limits"]
for kind, value in (
    (resource.RLIMIT_CPU, int(limits["time_s"]) + 1),
    (resource.RLIMIT_AS, limits["memory_mb"] << 20),
    (resource.RLIMIT_FSIZE, limits["file_mb"] << 20),
    (resource.RLIMIT_NPROC, limits["processes"]),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (value, value))
WRITES = 0x1FF2  # Landlock's rights to write, remove and make files
ruleset = libc.syscall(444, ctypes.byref(ctypes.c_uint64(WRITES)), ctypes.c_size_t(8), 0)
if ruleset >= 0:
    for place, rights in ((".", WRITES), ("/dev/null", 2)):
        opened = os.open(place, os.O_PATH)
        libc.syscall(445, ruleset, 1, struct.pack("=Qi", rights, opened), 0)
        os.close(opened)
    libc.prctl(38, 1, 0, 0, 0)
    libc.syscall(446, ruleset, 0)
    os.close(ruleset)
nonce, tests, program, name = job["nonce"], job["tests"], job["program"], job["name"]
scope = {"__name__": name}
sys.argv[:] = ["program.py"]
del job
exec(compile(program, "program.py", "exec"), scope)
for test in tests:
    try:
        exec(compile(test, "test.py", "exec"), scope)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}"[:500], file=sys.stderr)
    else:
        os.write(verdict, nonce.encode() + b"\n")
"""


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


def run(program: str, tests: Sequence[str] = (), stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run ``program``, as ``__main__`` if there are no ``tests``, then each test in its scope. A program that ends by itself before
    its tests has passed none."""
    limits = limits or Limits()
    nonce = secrets.token_hex(16)
    name = "program" if tests else "__main__"
    payload = {"program": program, "tests": list(tests), "name": name, "nonce": nonce, "limits": asdict(limits)}
    with ExitStack() as opened:
        directory = opened.enter_context(tempfile.TemporaryDirectory(prefix="rlhf_spmd_code_", ignore_cleanup_errors=True))
        given, read, wrote, failed, verdict = (opened.enter_context(tempfile.TemporaryFile()) for _ in range(5))
        given.write(json.dumps(payload).encode())
        read.write(stdin.encode(errors="replace"))
        given.seek(0)
        read.seek(0)
        passed_on = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "RLHF_SPMD_REWARD_WORKER")}
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _BOOT, str(given.fileno()), str(verdict.fileno())],
            cwd=directory,
            env={**passed_on, "HOME": directory, "TMPDIR": directory, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
            stdin=read,
            stdout=wrote,
            stderr=failed,
            pass_fds=(given.fileno(), verdict.fileno()),
            start_new_session=True,
        )
        try:
            why = _watch(process, Path(directory), limits)
        finally:
            _end(process)
        output, error, said = (_text(file) for file in (wrote, failed, verdict))
    lines = said.splitlines()
    code = process.returncode
    return Outcome(lines.count(nonce), code, output, why or error[-500:], "isolated" in lines[:1])


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
