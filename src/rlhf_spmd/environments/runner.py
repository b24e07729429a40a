"""Calls the environments of many rows in threads, while the rank goes on.

A call that fails or overruns costs its row. A thread cannot be killed, so another one takes the place of a thread whose call
overruns. The threads are daemons and keep no process alive. A process that a call forks ends with the call.
"""

from __future__ import annotations

import inspect
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread, active_count
from typing import Any, NamedTuple

from rlhf_spmd.environments.config import (
    ChatMessage,
    Environment,
    EnvironmentConfig,
    EnvironmentConfigs,
    environment_key,
    environment_of,
    resolve_class,
)
from rlhf_spmd.environments.tool_calls import TurnContext

MAX_THREADS = 4096  # of a process, beyond which no call that overruns is left alone
BEAT_S = 0.1  # between looks at the clock while waiting


class EnvironmentFailure(RuntimeError):
    """Environments failed in too many rows. Ends the run with class ``reward``."""

    exit_class = "reward"  # how the run ends: process/program.py


class Answer(NamedTuple):
    """The answer of a row's environment to ``reset`` (reward 0, not done) or ``step``.

    ``failure``: why the call failed (it raised, overran or returned nonsense), which ends the row; else None.
    """

    row_id: int
    observation: str | list[ChatMessage]
    reward: float
    done: bool
    failure: str | None = None


def failures_by_name(
    configs: EnvironmentConfigs, rows: Iterable[Mapping[str, Any]], failures: Iterable[str | None]
) -> dict[str, list[str | None]]:
    """Return the failures of each environment's rows, by its name. ``failures``: why each of the rows failed, or None."""
    by_name: dict[str, list[str | None]] = {}
    for row, failure in zip(rows, failures, strict=True):
        if (name := environment_of(configs, row)) is not None:
            by_name.setdefault(name, []).append(failure)
    return by_name


def check_failed_rows(config: EnvironmentConfig, name: str, failed: int, rows: int, first: str | None) -> None:
    """Raise EnvironmentFailure if more rows of environment ``name`` failed than its ``max_failure_rate`` allows.

    ``failed`` of ``rows`` failed; ``first``: why the first of them did.
    """
    if failed > config.max_failure_rate * rows:
        where = environment_key(name)
        limit = f"more than {where}.max_failure_rate={config.max_failure_rate}"
        raise EnvironmentFailure(f"{where} failed in {failed} of {rows} rows, {limit}; the first: {first}")


Attempt = tuple[int, int]  # row id, how often it was begun
PendingCall = tuple[Attempt, str | None, TurnContext]  # the turn (None: reset), its context


class EnvironmentRunner:
    """Calls one environment per attempt of a row, which its first call makes. Use it from one thread.

    - configs: settings of each environment, by its name
    - names: name of each row's environment, by row id
    - rows: columns of each row, by row id
    - template: text of the chat template, if there is one
    """

    def __init__(
        self,
        configs: EnvironmentConfigs,
        names: Mapping[int, str],
        rows: Mapping[int, Mapping[str, Any]],
        template: str | None = None,
    ) -> None:
        self._configs = configs
        self._names = names
        self._rows = rows
        self._environments: dict[Attempt, Environment] = {}
        self._attempts = Counter[int]()  # of each row
        self._calls: dict[str, SimpleQueue[PendingCall | None]] = {}
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        # when the call of an attempt began; the thread that removes the entry answers the call
        self._started: dict[Attempt, float] = {}
        self._builders = {name: _builder(configs[name], template) for name in set(names.values())}
        for name, num_rows in Counter(names.values()).items():
            self._calls[name] = SimpleQueue()
            for _ in range(min(configs[name].num_workers, num_rows)):
                self._start_thread(name)

    def _start_thread(self, name: str) -> None:
        Thread(target=self._work, args=(name,), name=environment_key(name), daemon=True).start()

    def reset(self, row_id: int) -> None:
        """Begin an attempt. A call of an earlier one that overran and returns now is nobody's."""
        self._attempts[row_id] += 1
        self._calls[self._names[row_id]].put(((row_id, self._attempts[row_id]), None, TurnContext()))

    def step(self, row_id: int, text: str, context: TurnContext | None = None) -> None:
        self._calls[self._names[row_id]].put(((row_id, self._attempts[row_id]), text, context or TurnContext()))

    def answers(self, wait: bool, tick: Callable[[], None] = lambda: None) -> list[Answer]:
        """Return the answers that have arrived; with ``wait`` at least one, for which a call must be open.

        ``tick`` is called while waiting. Raises EnvironmentFailure if too many calls that overran do not return.
        """
        answers: list[Answer] = []
        while True:
            must_wait = wait and not answers
            try:
                answers.append(self._answers.get(block=must_wait, timeout=BEAT_S if must_wait else None))
            except Empty:
                self._end_overruns()
                if not must_wait:
                    return answers
                tick()

    def close(self) -> None:
        """End the threads that are not inside a call."""
        for calls in self._calls.values():
            calls.put(None)

    def _end_overruns(self) -> None:
        """Answer calls that overrun, and start a thread in place of each that is inside one."""
        for attempt, start_s in self._started.copy().items():
            row_id = attempt[0]
            name = self._names[row_id]
            limit_s = self._configs[name].timeout_s
            if time.monotonic() - start_s > limit_s and self._started.pop(attempt, None) is not None:
                if active_count() > MAX_THREADS:
                    raise EnvironmentFailure(
                        f"{active_count()} threads: calls of {environment_key(name)} that overran do not return"
                    )
                self._start_thread(name)
                reason = f"has not returned within {environment_key(name)}.timeout_s={limit_s}"
                self._answers.put(self._failure(row_id, reason))

    def _failure(self, row_id: int, reason: str) -> Answer:
        return Answer(row_id, "", 0.0, True, f"environment {self._configs[self._names[row_id]].cls!r} of row {row_id} {reason}")

    def _work(self, name: str) -> None:
        calls = self._calls[name]
        while (call := calls.get()) is not None:
            attempt = call[0]
            self._started[attempt] = time.monotonic()
            answer = self._run_call(*call)
            # before the answer, after which another thread may start the row's next call
            if self._started.pop(attempt, None) is None:
                return  # it has overrun, and another thread is in place of this one
            self._answers.put(answer)
        calls.put(None)  # for the next thread

    def _run_call(self, attempt: Attempt, text: str | None, context: TurnContext) -> Answer:
        """Return the answer to a call, also if it fails. A process that the call forked ends here."""
        process = os.getpid()
        try:
            answer = self._answer(attempt, text, context)
            status = 0
        # The boundary to the user's code: whatever it raises, sys.exit() included, ends the row, not only this thread.
        except BaseException as error:
            method = "reset" if text is None else "step"
            answer = self._failure(attempt[0], f"failed in {method}(): {error_words(error)}")
            status = _exit_status(error)
        if os.getpid() != process:  # the call forked and ended twice: only its parent answers and takes further calls
            os._exit(status)
        return answer

    def _answer(self, attempt: Attempt, text: str | None, context: TurnContext) -> Answer:
        row_id = attempt[0]
        name = self._names[row_id]
        if text is None:
            self._environments[attempt] = environment = self._builders[name]()
            return _checked(row_id, (environment.reset(self._rows[row_id]), 0.0, False), False)
        step = self._environments[attempt].step
        context = context._replace(timeout_s=self._configs[name].timeout_s)
        takes_context = "context" in inspect.signature(step).parameters
        return _checked(row_id, step(text, **({"context": context} if takes_context else {})), True)


def _checked(row_id: int, result: Any, allows_messages: bool) -> Answer:
    """Return what an environment returned as an answer that a tokenizer can read. Raises TypeError or ValueError."""
    if not (isinstance(result, tuple) and len(result) == 3):
        raise TypeError(f"it must return (observation, reward, done), not {result!r}")
    observation, reward, done = result
    if not isinstance(observation, str | None) and not (allows_messages and _are_messages(observation)):
        allowed = "text, None or messages with role and content" if allows_messages else "text or None"
        raise TypeError(f"the observation must be {allowed}, not {observation!r}")
    if not math.isfinite(reward):
        raise ValueError(f"the reward must be a finite number, not {reward!r}")
    if isinstance(observation, list):
        observation = [{key: _readable(value) for key, value in message.items()} for message in observation]
    else:
        observation = _readable(observation or "")
    return Answer(row_id, observation, float(reward), bool(done))


def error_words(error: BaseException) -> str:
    """Return the error's type and text, at most 2,000 characters; the text of the user's own errors may itself fail."""
    try:
        return f"{type(error).__name__}: {error}"[:2000]
    except Exception as text_error:  # the user's class: its text may run any code
        return f"{type(error).__name__}, whose text cannot be read: {type(text_error).__name__}"


def _exit_status(error: BaseException) -> int:
    """Return the status with which Python ends a process that raised ``error``."""
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _builder(config: EnvironmentConfig, template: str | None) -> Callable[[], Environment]:
    """Return a function that makes an environment; its class gets the chat template if it takes one."""
    cls = resolve_class(config.cls or "")
    takes_template = "chat_template" in inspect.signature(cls).parameters
    return partial(cls, **{**({"chat_template": template} if takes_template else {}), **config.args})


def _are_messages(value: object) -> bool:
    """Return True for a non-empty list of messages."""
    if not isinstance(value, list) or not value:
        return False
    return all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content")) for message in value
    )


def _readable(value: Any) -> Any:
    """Replace lone surrogates in a text, which broken bytes or JSON put there and no tokenizer reads."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value
