"""A process that calls one reward function again and again.

Protocol: lines of JSON over two pipes. In: ``[index, prompt, response, row]``. Out: once ``["ready"]`` or
``["broken", message]``, then for every line, in order, ``[index, seconds, score, extras]`` or ``[index, seconds, message]``.
The next call starts as soon as the answer to the one before is written, so an answer is also the report that the next call has
started. Standard input is empty, and what the function prints goes to standard error: neither can disturb the pipes.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from rlhf_spmd.rewards.config import resolve_reward

_PR_SET_PDEATHSIG = 1


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, even inside a call that never returns."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before prctl took effect
        os._exit(0)


def _number(value: Any) -> float:
    """Python and NumPy numbers, and tensors of one element; text that looks like a number is a mistake, not a score."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"{type(value).__name__} is not a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def read_result(value: Any) -> tuple[float, dict[str, float]]:
    """What a reward function returned -> score, extras. Entries beside ``score`` that are not finite numbers are left out.

    Raises TypeError, KeyError or ValueError where there is no finite score.
    """
    if not isinstance(value, dict):
        return _number(value), {}
    if "score" not in value:
        raise KeyError(f"the returned dict has no 'score', only {sorted(map(str, value))}")
    extras = {}
    for key, entry in value.items():
        if key == "score":
            continue
        try:
            extras[str(key)] = _number(entry)
        except (TypeError, ValueError):
            continue
    return _number(value["score"]), extras


def _serve(function: Callable[[str, str, dict[str, Any]], Any], requests: Any, answers: Any) -> None:
    for line in requests:
        index, prompt, response, row = json.loads(line)
        start = time.monotonic()
        answer: list[Any]
        try:
            score, extras = read_result(function(prompt, response, row))
            answer = [index, time.monotonic() - start, score, extras]
        # The process boundary: whatever the user's function raises, sys.exit() included, is that call's failure.
        except BaseException as error:
            answer = [index, time.monotonic() - start, f"{type(error).__name__}: {error}"[:2000]]
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def main(function_name: str, request_fd: int, answer_fd: int, parent: int) -> None:
    """Runs until the request pipe is closed or the parent dies."""
    _die_with_parent(parent)
    # A scheduler signals the whole job at once, but the rank decides when its workers end. A handler, unlike SIG_IGN, is not
    # inherited by programs that a reward function starts.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    os.set_inheritable(request_fd, False)
    os.set_inheritable(answer_fd, False)
    with os.fdopen(request_fd, "rb") as requests, os.fdopen(answer_fd, "wb") as answers:
        try:
            function = resolve_reward(function_name)
        except ValueError as error:
            answers.write(json.dumps(["broken", str(error)]).encode() + b"\n")
            return
        answers.write(b'["ready"]\n')
        answers.flush()
        _serve(function, requests, answers)
