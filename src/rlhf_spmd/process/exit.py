"""How a process of the job ends: the class of an exception, the lines for people, and the exit itself."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn, TextIO

import torch
import torch.distributed as dist

from rlhf_spmd.config.words import printable
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.progress import on_own_line
from rlhf_spmd.telemetry.run_dir import DISK_ERRORS, EXIT_CODES, EXIT_STATUS_FILE, ExitStatus, write_exit_status

SPARE_BYTES = 16 << 20  # address space that the end of a process may need when memory has run out
NUM_WRITERS = 2  # so that a stalled stream does not keep the run directory locked

# words in exceptions of torch, CUDA and Python's threads that mean: no memory; none has a class of its own
_MEMORY_WORDS = (
    "can't allocate memory",
    "cannot allocate memory",
    "bad_alloc",
    "out of memory",
    "alloc_failed",
    "can't start new thread",
)
# words in exceptions of gloo, nccl or the store that mean a broken connection to another rank
_CONNECTION_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe", "timed out")
_CLASSES = {
    "config": (ValueError,),
    "numerics": (FloatingPointError,),
    "memory": (MemoryError, torch.OutOfMemoryError),
    "lost": (SystemExit,),  # the user's code ended the process
}
_exit = os._exit  # a program replaces os._exit while the user's code runs


class Preempted(Exception):
    """The run was told to end (SIGTERM, SIGUSR1, Ctrl-C). The training loop raises it on every rank after it has saved."""

    exit_class = "preempted"


class EndedBySignal(Exception):
    """A signal ended the program before there was anything to save."""

    exit_class = "signal"


def classify(error: BaseException) -> str:
    """Return the class of an ending (a key of EXIT_CODES): the exception's own ``exit_class``, else by built-in type."""
    declared = getattr(type(error), "exit_class", None)
    if declared in EXIT_CODES:
        return str(declared)
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return "checkpoint"
    if isinstance(error, OSError | RuntimeError) and any(word in str(error).lower() for word in _MEMORY_WORDS):
        return "memory"
    return next((name for name, kinds in _CLASSES.items() if isinstance(error, kinds)), "error")


def lost_connection(error: BaseException) -> bool:
    """Return True if another rank may have caused this failure: a broken or timed-out connection."""
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    return type(error) is RuntimeError and any(word in str(error).lower() for word in _CONNECTION_WORDS)


def error_text(error: BaseException) -> str:
    """Return the error in one line, with the notes that were added to it."""
    return one_line(" ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))]))


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def announce(line: str, details: str = "") -> None:
    """Write ``details`` (a traceback) and one line to standard error in one piece, so that the lines of ranks do not mix."""
    detail_lines = details.rstrip().split("\n") if details else []
    lines = ["\t".join(map(printable, detail.split("\t"))) for detail in detail_lines]
    stream = _stream()
    text = on_own_line("\n".join([*lines, one_line(line)]) + "\n", stream)

    def write() -> None:
        stream.write(text)
        stream.flush()

    _run_within(5.0, write)


def forget_status(run_dir: Path) -> None:
    """Remove the exit status of an earlier start, unless the directory belongs to another job."""
    with suppress(OSError):  # the check of the input reports what is wrong with the directory
        if run_lock.other_owner(run_dir) is None:
            (run_dir / EXIT_STATUS_FILE).unlink(missing_ok=True)


def record_status(run_dir: Path, status: ExitStatus) -> None:
    """Write exit_status.json, unless the directory belongs to another job by now."""
    try:
        if run_lock.may_write_status(run_dir):
            write_exit_status(run_dir, replace(status, message=one_line(status.message)))
    except OSError as error:
        announce(str(error))


def await_all(store: dist.Store, key: str, size: int, deadline: float, ready: Callable[[], bool] = lambda: True) -> None:
    """Count this process under ``key``. Then wait until all are counted and this one is ``ready``, or until ``deadline``."""
    num_counted = store.add(key, 1)
    while not (num_counted >= size and ready()) and time.monotonic() < deadline:
        time.sleep(0.05)
        num_counted = store.add(key, 0)


def end_rank(launch: Launch, code: int) -> NoReturn:
    """End this process with ``code``; a single process raises SystemExit, so another program can call this one."""
    if launch.size == 1:
        run_lock.release()
        raise SystemExit(code) from None
    end_process(code)


def end_process(code: int) -> NoReturn:
    """End the process at once, without Python's own exit.

    That exit can block on a process group whose peers are gone. It aborts if a gloo thread still frees a tensor, which
    needs the interpreter.
    """
    _run_within(1.0, sys.stdout.flush)
    _run_within(1.0, _stream().flush)
    _run_within(5.0, run_lock.release)
    _exit(code)


@dataclass(frozen=True)
class _EndWriter:
    """Threads and memory that write the end of the process. They are made early, because without free memory a thread cannot start.

    - stream: standard error when they were made; the user's code may redirect it later
    - pid: the process that they belong to; a fork has no such threads
    - spare: memory to free when there is no more
    - actions: what the threads do next; None ends one of them
    """

    stream: TextIO
    pid: int = field(default_factory=os.getpid)
    spare: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, SPARE_BYTES))
    actions: SimpleQueue[Callable[[], object] | None] = field(default_factory=SimpleQueue)

    def run_actions(self) -> None:
        while (action := self.actions.get()) is not None:
            action()


_end_writer: _EndWriter | None = None


@contextmanager
def ready_to_end() -> Iterator[None]:
    """Inside, the process writes its end from threads that run already, to the standard error that it has at the start."""
    global _end_writer
    outer = _end_writer
    _end_writer = writer = _EndWriter(sys.stderr)
    for _ in range(NUM_WRITERS):
        threading.Thread(target=writer.run_actions, name="ending", daemon=True).start()
    try:
        yield
    finally:
        _end_writer = outer
        for _ in range(NUM_WRITERS):
            writer.actions.put(None)


def free_spare_memory() -> None:
    """Free the memory that was kept for the end of this process."""
    if _end_writer is not None and not _end_writer.spare.closed:
        _end_writer.spare.close()


def _stream() -> TextIO:
    return sys.stderr if _end_writer is None else _end_writer.stream


def _run_within(seconds: float, action: Callable[[], object]) -> None:
    """Call ``action`` and wait at most ``seconds``: a stalled pipe or disk must not block. Errors of a closed one are ignored.

    Outside :func:`ready_to_end`, and in a fork, the call has no limit.
    """
    is_over = threading.Event()

    def attempt() -> None:
        try:
            action()
        except (OSError, ValueError, MemoryError):
            pass
        finally:
            is_over.set()

    if _end_writer is None or _end_writer.pid != os.getpid():
        attempt()
    else:
        _end_writer.actions.put(attempt)
        is_over.wait(seconds)
