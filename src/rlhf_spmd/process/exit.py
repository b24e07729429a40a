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
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.progress import on_own_line
from rlhf_spmd.telemetry.run_dir import DISK_ERRORS, EXIT_CODES, EXIT_STATUS_FILE, ExitStatus, write_exit_status

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
    """The run was told to end (SIGTERM, SIGUSR1, Ctrl-C) and has saved; the training loop raises it on every rank."""

    exit_class = "preempted"


class ToldToEnd(Exception):
    """A signal ended the program before there was anything to save."""

    exit_class = "signal"


def classify(error: BaseException) -> str:
    """Returns the class of an ending (a key of EXIT_CODES): the exception's own ``exit_class``, else by built-in type."""
    own = getattr(type(error), "exit_class", None)
    if own in EXIT_CODES:
        return str(own)
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return "checkpoint"
    return next((name for name, kinds in _CLASSES.items() if isinstance(error, kinds)), "error")


def lost_connection(error: BaseException) -> bool:
    """True if another rank may have caused this failure: a broken or timed-out connection."""
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    return type(error) is RuntimeError and any(word in str(error).lower() for word in _CONNECTION_WORDS)


def error_text(error: BaseException) -> str:
    """Returns the error in one line, with the notes that were added to it."""
    return one_line(" ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))]))


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def announce(line: str, details: str = "") -> None:
    """Writes ``details`` (a traceback) and one line to standard error, at once, so that ranks do not mix."""
    shown = ["\t".join(map(printable, each.split("\t"))) for each in details.rstrip().split("\n")] if details else []
    lines = [*shown, one_line(line)]
    _to_streams(lambda: sys.stderr.write(on_own_line("\n".join(lines) + "\n")), 5.0)


def forget_status(run_dir: Path) -> None:
    """Removes the exit status of an earlier start, unless the directory belongs to another job."""
    with suppress(OSError):  # the check of the input reports what is wrong with the directory
        if run_lock.other_owner(run_dir) is None:
            (run_dir / EXIT_STATUS_FILE).unlink(missing_ok=True)


def record_status(run_dir: Path, status: ExitStatus) -> None:
    """Writes exit_status.json, unless the directory belongs to another job by now."""
    try:
        if run_lock.may_write_status(run_dir):
            write_exit_status(run_dir, replace(status, message=one_line(status.message)))
    except OSError as error:
        announce(str(error))


def await_all(store: dist.Store, key: str, size: int, deadline: float, ready: Callable[[], bool] = lambda: True) -> None:
    """Counts this process under ``key``; waits until all are counted and this one is ``ready``, or until ``deadline``."""
    known = store.add(key, 1)
    while not (known >= size and ready()) and time.monotonic() < deadline:
        time.sleep(0.05)
        known = store.add(key, 0)


def end_rank(launch: Launch, code: int) -> NoReturn:
    """Ends this process with ``code``; a single process raises SystemExit, so another program can call this one."""
    if launch.size == 1:
        run_lock.release()
        raise SystemExit(code) from None
    end_process(code)


def end_process(code: int) -> NoReturn:
    """Ends the process at once, without Python's own exit.

    That exit can block on a process group whose peers are gone. It aborts if a gloo thread still frees a tensor, which
    needs the interpreter.
    """
    _to_streams(sys.stdout.flush, 1.0)
    _to_streams(run_lock.release, 5.0)
    _exit(code)


def _to_streams(write: Callable[[], object], seconds: float) -> None:
    """Writes to streams for at most ``seconds``: a stalled pipe or disk must not block, and a closed one does not matter."""

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
