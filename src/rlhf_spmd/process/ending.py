"""How a process of the job ends: the class of an exception, the lines for people, and the exit itself."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from rlhf_spmd.config.schema import printable
from rlhf_spmd.parallel.world import Launch
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.progress import on_own_line
from rlhf_spmd.telemetry.run_dir import DISK_ERRORS, EXIT_CODES, EXIT_STATUS_FILE, ExitStatus, write_exit_status

# what a broken connection to another rank looks like in an exception of gloo, nccl or the store
_CONNECTION_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe", "timed out")
_CLASSES = {
    "config": (ValueError,),
    "numerics": (FloatingPointError,),
    "memory": (MemoryError, torch.OutOfMemoryError),
    "lost": (SystemExit,),  # the user's code has left
}
_exit = os._exit  # which a program replaces while the user's code runs


class Preempted(Exception):
    """The run was told to end (SIGTERM, SIGUSR1, Ctrl-C) and has saved; raised by the training loop on every rank."""

    exit_class = "preempted"


class ToldToEnd(Exception):
    """A signal ended the program before there was anything to save."""

    exit_class = "signal"


def classify(error: BaseException) -> str:
    """The class of an ending (a key of EXIT_CODES): the exception type's own ``exit_class``, else by built-in type."""
    own = getattr(type(error), "exit_class", None)
    if own in EXIT_CODES:
        return str(own)
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return "checkpoint"
    return next((name for name, kinds in _CLASSES.items() if isinstance(error, kinds)), "error")


def lost_connection(error: BaseException) -> bool:
    """Whether this failure may be the consequence of another rank's: a broken or timed-out connection."""
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    return type(error) is RuntimeError and any(word in str(error).lower() for word in _CONNECTION_WORDS)


def told(error: BaseException) -> str:
    """In one line, with what was noted on its way here."""
    return one_line(" ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))]))


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def announce(line: str, details: str = "") -> None:
    """``details`` (a traceback) and one line on standard error, in one write so that ranks do not mix."""
    shown = ["\t".join(map(printable, each.split("\t"))) for each in details.rstrip().split("\n")] if details else []
    lines = [*shown, one_line(line)]
    _to_streams(lambda: sys.stderr.write(on_own_line("\n".join(lines) + "\n")), 5.0)


def forget_status(run_dir: Path) -> None:
    """An exit status of an earlier start must not be taken for this one's. Nothing where the directory belongs to another job."""
    with suppress(OSError):  # what is wrong with the directory, the check of the input will say
        if run_lock.other_owner(run_dir) is None:
            (run_dir / EXIT_STATUS_FILE).unlink(missing_ok=True)


def record_status(run_dir: Path, status: ExitStatus) -> None:
    """Write exit_status.json, unless the directory is another job's by now."""
    try:
        if run_lock.may_tell_ending(run_dir):
            write_exit_status(run_dir, replace(status, message=one_line(status.message)))
    except OSError as error:
        announce(str(error))


def await_all(store: dist.Store, key: str, size: int, deadline: float, ready: Callable[[], bool] = lambda: True) -> None:
    """Counts this process under ``key`` and waits until all are counted and this one is ``ready``, until ``deadline`` at most."""
    known = store.add(key, 1)
    while not (known >= size and ready()) and time.monotonic() < deadline:
        time.sleep(0.05)
        known = store.add(key, 0)


def end_rank(launch: Launch, code: int) -> NoReturn:
    """Ends this process with ``code``; where it is alone by SystemExit, so that a program can be called from another one."""
    if launch.size == 1:
        run_lock.release()
        raise SystemExit(code) from None
    end_process(code)


def end_process(code: int) -> NoReturn:
    """Ends the process at once. Python's own way out can be blocked by a process group whose peers are gone, and is aborted where
    a thread of gloo still lets go of a tensor, for which it needs the interpreter."""
    _to_streams(sys.stdout.flush, 1.0)
    _to_streams(run_lock.release, 5.0)
    _exit(code)


def _to_streams(write: Callable[[], object], seconds: float) -> None:
    """A reader of the pipe or a disk that has stopped blocks it for ``seconds`` at most, and one that is gone does not matter."""

    def attempt() -> None:
        with suppress(OSError, ValueError):
            write()
            sys.stderr.flush()

    writer = threading.Thread(target=attempt, daemon=True)
    try:
        writer.start()
    except RuntimeError:  # the machine gives this user no more threads: the end of a job must not fail for it
        attempt()
        return
    writer.join(seconds)
