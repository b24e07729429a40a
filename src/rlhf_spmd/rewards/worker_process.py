"""The program of a reward's worker process: a keeper, and the worker that it forks, which calls the function again and again.

The keeper runs none of the user's code. As a Linux subreaper it becomes the parent of every orphan among its descendants, also of a
daemon that a reward function starts. It kills its descendants when the worker has ended, when the rank sends ``END``, or when the rank
has ended in any way. Then it removes the directory of their temporary files and ends with the worker's exit code.

Protocol: lines of JSON. In: ``[call, rows]``, each row ``[prompt, response, columns]``. Out: once ``["ready"]`` or
``["broken", message]``, then for every line, in order, ``[call, seconds, results]``. Results are one message, or for each
row a message, null (it took too long) or ``[score, extras, answer]`` (``results.RowResult``). ``seconds`` is 0 if each row had
its own time limit. The next call starts as soon as an answer is written, so an answer also reports that the next call has
started. The function does not see the pipes: its standard input is empty, and its standard output is its standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import sysconfig
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from rlhf_spmd.config.words import printable
from rlhf_spmd.rewards.binding import OVERRUN, ReadyReward
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.results import ReadAnswer, read_answer, read_result
from rlhf_spmd.rewards.sandbox import descendants, remove_tree

END = signal.SIGRTMAX  # from the rank to the keeper; no scheduler sends it
JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # a scheduler sends them to all processes of a job
MAX_DESCENDANTS = 100_000  # to look for
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(settings: dict[str, Any], where: str, rank: int) -> None:
    """Fork the worker, which runs until its standard input is closed.

    ``settings``: the reward's configuration. ``where``: its key, for messages. ``rank``: the process that started this one.
    """
    fork_worker(rank)
    run_worker(RewardConfig(**settings), where)


# -- the keeper


def fork_worker(rank: int) -> None:
    """Fork the worker and return in it. This process stays behind as its keeper and ends with it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, (END, signal.SIGCHLD, *JOB_SIGNALS))
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    end_with(rank, END)
    directory = tempfile.mkdtemp(prefix="rlhf_spmd_worker_")
    tempfile.tempdir = os.environ["TMPDIR"] = directory
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        end_with(keeper, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, {*old_mask, *JOB_SIGNALS})  # until the worker has its handlers
        return
    os.close(0)
    os.close(1)
    statuses: dict[int, int] = {}
    while worker not in statuses and signal.sigwait((END, signal.SIGCHLD)) != END:
        with suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                statuses[child[0]] = child[1]
    with suppress(ChildProcessError):  # until no children are left; they may start others meanwhile
        while True:
            for process in descendants(keeper, MAX_DESCENDANTS):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            process, statuses[process] = os.waitpid(-1, 0)
    remove_tree(directory)
    code = os.waitstatus_to_exitcode(statuses.get(worker, 0))
    os._exit(code if code >= 0 else 128 - code)  # as a shell says that a signal ended it


def end_with(parent: int, number: int) -> None:
    """Have the kernel send a signal when the thread that started this process ends."""
    _control(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before that took effect
        os._exit(0)


def _control(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


# -- the worker


def run_worker(config: RewardConfig, where: str) -> None:
    """Limit this process, instantiate the function, and answer requests."""
    _limit(resource.RLIMIT_DATA, config.max_memory_gb)
    _limit(resource.RLIMIT_FSIZE, config.max_file_gb)
    _limit(resource.RLIMIT_CORE, 0)
    with suppress(OSError):  # if memory runs out all the same, the kernel should end this process, not the rank
        Path("/proc/self/oom_score_adj").write_text("1000")
    ignore_job_signals()
    request_fd, answer_fd = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    # A forked child must not hold the pipe open: its closing tells the rank that this process has died.
    os.register_at_fork(after_in_child=lambda: os.close(answer_fd))
    with os.fdopen(request_fd, "rb") as requests, os.fdopen(answer_fd, "wb") as answers:
        try:
            reward = config.bind(where).instantiate()
        except ValueError as error:
            _send(answers, ["broken", str(error)])
            return
        _send(answers, ["ready"])
        _serve(reward, requests, answers, config.timeout_s)


def ignore_job_signals() -> None:
    """Let the rank decide when this process ends: a scheduler signals the whole job at once.

    A handler, unlike SIG_IGN, is not inherited by programs that the user's code starts.
    """
    for number in JOB_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)


def _limit(kind: int, gib: float) -> None:
    """Set the soft limit of a resource, at most to the hard limit."""
    hard_limit = resource.getrlimit(kind)[1]
    limit = int(gib * 2**30)
    resource.setrlimit(kind, (limit if hard_limit == resource.RLIM_INFINITY else min(limit, hard_limit), hard_limit))


def _serve(reward: ReadyReward, requests: BinaryIO, answers: BinaryIO, timeout_s: float) -> None:
    worker = os.getpid()
    directory = os.open(".", os.O_RDONLY)
    rows_have_limits = reward.bound.is_async and not reward.bound.batched
    for line in requests:
        call, rows = json.loads(line)
        start = time.monotonic()
        results: Any
        try:
            results = [_row_result(value) for value in reward.call(rows, timeout_s)]
        # The process boundary: whatever the user's function raises, sys.exit() included, is that call's failure.
        except BaseException as error:
            results = error_text(error)
        if os.getpid() != worker:  # the function forked and returned twice: only its parent answers
            os._exit(0)
        seconds = 0.0 if rows_have_limits else time.monotonic() - start
        os.fchdir(directory)  # the next call must not start in the directory that this one changed to
        with suppress(OSError, ValueError, AttributeError):  # the function may have closed it
            sys.stdout.flush()
        _send(answers, [call, seconds, results])


def _send(answers: BinaryIO, message: list[Any]) -> None:
    """Write a line in full: a buffered file goes on after a signal, where ``os.write`` may return in the middle."""
    answers.write(json.dumps(message).encode() + b"\n")
    answers.flush()


def _row_result(value: Any) -> tuple[float | None, dict[str, float], ReadAnswer | None] | str | None:
    """Return a row's result as the protocol has it. None from the function means that it does not apply to the row."""
    if value is OVERRUN:
        return None
    try:
        if isinstance(value, BaseException):
            raise value
        return (None, {}, None) if value is None else (*read_result(value), read_answer(value))
    except Exception as error:  # the process boundary: the value's class is the user's too
        return error_text(error)


_printed: set[str] = set()  # places in the user's code whose tracebacks were written


def error_text(error: BaseException) -> str:
    """Return the error and where the user's code raised it. The traceback of each place is printed once."""
    libraries = (str(Path(__file__).parent), *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")), "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(libraries)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    if place and place not in _printed:
        _printed.add(place)
        lines = "".join(traceback.format_exception(error)).splitlines()
        print(*map(printable, lines), sep="\n", file=sys.stderr, flush=True)
    return f"{type(error).__name__}: {error}"[: 2000 - len(place)] + place
