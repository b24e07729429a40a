"""Calls the environments of many rows, in threads, while the rank goes on.

A thread cannot be killed, so a call that overruns ends the run; the threads are daemons, which keep no process alive.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from rlhf_spmd.environments.base import Environment
from rlhf_spmd.environments.config import EnvironmentConfig, resolve_class

BEAT_S = 0.1  # between looks at the clock while nothing else is to be done


class EnvironmentFailure(RuntimeError):
    """An environment raised, overran its time limit or returned nonsense. Ends the run with class ``reward``."""

    exit_class = "reward"  # how the run ends: parallel/program.py


class Answer(NamedTuple):
    """What ``reset`` (reward 0, not done) or ``step`` of a row's environment returned."""

    row_id: int
    observation: str
    reward: float
    done: bool


class EnvironmentRunner:
    """One environment for each of ``rows`` (by row id), made by its first call. Use it from one thread; ``close`` ends the threads
    that are not inside a call."""

    def __init__(self, config: EnvironmentConfig, rows: Mapping[int, Mapping[str, Any]]) -> None:
        assert config.cls is not None, "there is no environment to run"
        self._config, self._rows = config, rows
        self._build: Callable[[], Environment] = partial(resolve_class(config.cls), **config.args)
        self._environments: dict[int, Environment] = {}
        self._calls: SimpleQueue[tuple[int, str | None] | None] = SimpleQueue()
        self._answers: SimpleQueue[Answer | EnvironmentFailure] = SimpleQueue()
        self._started: dict[int, float] = {}  # row id -> when its call began, of calls under way
        self._num_threads = min(config.num_workers, len(rows))
        for _ in range(self._num_threads):
            Thread(target=self._work, name="environment", daemon=True).start()

    def reset(self, row_id: int) -> None:
        self._calls.put((row_id, None))

    def step(self, row_id: int, text: str) -> None:
        self._calls.put((row_id, text))

    def answers(self, wait: bool, tick: Callable[[], None] = lambda: None) -> list[Answer]:
        """The answers that are there; with ``wait`` at least one, which must have been asked for. ``tick`` is called while waiting.

        Raises EnvironmentFailure.
        """
        found: list[Answer] = []
        while True:
            must_wait = wait and not found
            try:
                answer = self._answers.get(block=must_wait, timeout=BEAT_S if must_wait else None)
            except Empty:
                self._check_overruns()
                if not must_wait:
                    return found
                tick()
                continue
            if isinstance(answer, EnvironmentFailure):
                raise answer
            found.append(answer)

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._calls.put(None)

    def _check_overruns(self) -> None:
        now = time.monotonic()
        for row_id, began in self._started.copy().items():
            if now - began > self._config.timeout_s:
                raise self._failure(row_id, f"has not returned within environment.timeout_s={self._config.timeout_s}")

    def _failure(self, row_id: int, what: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"environment {self._config.cls!r} of row {row_id} {what}")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            row_id, text = call
            began = self._started[row_id] = time.monotonic()
            answer: Answer | EnvironmentFailure
            try:
                answer = self._answer(row_id, text)
            # The boundary to the user's code: whatever it raises, sys.exit() included, ends the run and not this thread alone.
            except BaseException as error:
                method = "reset" if text is None else "step"
                answer = self._failure(row_id, f"failed in {method}(): {type(error).__name__}: {error}"[:2000])
            if time.monotonic() - began > self._config.timeout_s:
                answer = self._failure(row_id, f"took longer than environment.timeout_s={self._config.timeout_s}")
            del self._started[row_id]  # before the answer is there, to which the row's next call, in another thread, is due
            self._answers.put(answer)

    def _answer(self, row_id: int, text: str | None) -> Answer:
        if text is None:
            self._environments[row_id] = environment = self._build()
            observation = environment.reset(self._rows[row_id])
            reward, done = 0.0, False
        else:
            result = self._environments[row_id].step(text)
            if not (isinstance(result, tuple) and len(result) == 3):
                raise TypeError(f"it must return (observation, reward, done), not {result!r}")
            observation, reward, done = result
        if not isinstance(observation, str | None):
            raise TypeError(f"the observation must be text or None, not {observation!r}")
        if not math.isfinite(reward):
            raise ValueError(f"the reward must be a finite number, not {reward!r}")
        # half of a surrogate pair, which programs that pass on broken bytes or JSON put into a text, is no text to a tokenizer
        readable = (observation or "").encode(errors="replace").decode()
        return Answer(row_id, readable, float(reward), bool(done))
