"""A process that calls one reward function again and again.

Protocol: lines of JSON over two pipes. In: ``[call, rows]``, each row ``[prompt, response, columns]``. Out: once ``["ready"]`` or
``["broken", message]``, then for every line, in order, ``[call, seconds, results]``: for each row ``[score, extras]``, a message, or
null if it overran, or one message in place of the list. ``seconds`` is 0 where each row had a time limit of its own.
The next call starts as soon as the answer to the one before is written, so an answer is also the report that the next call has
started. Standard input is empty, and what the function prints goes to standard error: neither can disturb the pipes.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
import sysconfig
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_spmd.config.schema import printable
from rlhf_spmd.rewards.binding import OVERRUN, BoundReward
from rlhf_spmd.rewards.config import FLOAT32_MAX, RewardConfig
from rlhf_spmd.rewards.keeper import TOLD_TO_END


def _number(value: Any) -> float:
    """Python and NumPy numbers, and tensors of one element; text that looks like a number is a mistake, not a score."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        hint = "; a function with an argument completions takes and returns lists" if isinstance(value, list) else ""
        said = f"{repr(value)[:80]}, a {type(value).__name__}, is not a number: a score is a float, an int or a bool"
        raise TypeError(f"{said}, or None where there is none{hint}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    if abs(number) > FLOAT32_MAX:
        raise ValueError(f"{number} is not finite in float32")
    return number


def read_result(value: Any) -> tuple[float, dict[str, float]]:
    """What a reward function returned -> score, extras. Entries beside ``score`` that are not finite in float32 are left out.

    Raises TypeError, KeyError, ValueError or OverflowError where there is no such score.
    """
    if not isinstance(value, dict):
        return _number(value), {}
    if "score" not in value:
        raise KeyError(f"the returned dict has no 'score', only {sorted(map(str, value))}")
    extras = {}
    for key, entry in value.items():
        if key != "score":
            with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # the last is a tensor's of several elements
                extras[str(key)] = _number(entry)
    return _number(value["score"]), extras


_told: set[str] = set()  # places in the user's code whose tracebacks were written


def _said(error: BaseException) -> str:
    """The error, and where the user's own code raised it; the whole traceback of each place goes to standard error, once."""
    apart = (str(Path(__file__).parent), *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")), "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(apart)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    if place and place not in _told:
        _told.add(place)
        lines = "".join(traceback.format_exception(error)).splitlines()
        print(*map(printable, lines), sep="\n", file=sys.stderr, flush=True)
    return f"{type(error).__name__}: {error}"[: 2000 - len(place)] + place


def _read(value: Any) -> tuple[float | None, dict[str, float]] | str | None:
    """A row's result as the protocol has it. None says that the function does not apply to the row."""
    if value is OVERRUN:
        return None
    try:
        if isinstance(value, BaseException):
            raise value
        return (None, {}) if value is None else read_result(value)
    except Exception as error:  # the process boundary: the value's class is the user's too
        return _said(error)


def _limit(kind: int, gib: float) -> None:
    """At most the hard limit that there is."""
    hard = resource.getrlimit(kind)[1]
    wanted = int(gib * 2**30)
    resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _serve(bound: BoundReward, requests: Any, answers: Any, timeout_s: float) -> None:
    worker, home = os.getpid(), os.open(".", os.O_RDONLY)
    each_limited = bound.is_async and not bound.batched
    for line in requests:
        call, rows = json.loads(line)
        start = time.monotonic()
        results: Any
        try:
            results = [_read(value) for value in bound.call(rows, timeout_s)]
        # The process boundary: whatever the user's function raises, sys.exit() included, is that call's failure.
        except BaseException as error:
            results = _said(error)
        if os.getpid() != worker:  # the function forked and came back twice: the answer is its parent's
            os._exit(0)
        seconds = 0.0 if each_limited else time.monotonic() - start
        os.fchdir(home)  # a function that went elsewhere does not take the next one along
        answers.write(json.dumps([call, seconds, results]).encode() + b"\n")
        answers.flush()


def main(settings: dict[str, Any], where: str, request_fd: int, answer_fd: int) -> None:
    """Runs until the request pipe is closed. ``settings``: the fields of the reward's configuration. ``where``:
    its key, for messages."""
    config = RewardConfig(**settings)
    _limit(resource.RLIMIT_DATA, config.max_memory_gb)
    _limit(resource.RLIMIT_FSIZE, config.max_file_gb)
    _limit(resource.RLIMIT_CORE, 0)
    with suppress(OSError):  # where memory runs out all the same, the kernel is to end this process and not the rank
        Path("/proc/self/oom_score_adj").write_text("1000")
    # A scheduler signals the whole job at once, but the rank decides when its workers end. A handler, unlike SIG_IGN, is not
    # inherited by programs that a reward function starts.
    for number in TOLD_TO_END:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TOLD_TO_END)
    os.set_inheritable(request_fd, False)
    os.set_inheritable(answer_fd, False)
    # What a function forks must not hold the pipe open: its end tells the rank that this process has died.
    os.register_at_fork(after_in_child=lambda: os.close(answer_fd))
    with os.fdopen(request_fd, "rb") as requests, os.fdopen(answer_fd, "wb") as answers:
        try:
            bound = config.bind(where).ready()
        except ValueError as error:
            answers.write(json.dumps(["broken", str(error)]).encode() + b"\n")
            return
        answers.write(b'["ready"]\n')
        answers.flush()
        _serve(bound, requests, answers, config.timeout_s)
