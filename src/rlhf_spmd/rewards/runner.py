"""Calls a reward function for many rows, in processes that can be killed.

Workers are plain programs, started with exec. They share only pipes with the rank, not its threads, device or
``__main__``. Killing a worker ends any hanging call, even inside C code. Whatever a worker has started ends with it
(``worker_process``). Its output is passed on up to a limit.

A call is one row, or for a batched function all rows of this rank (an equal share per worker, or with ``by_group`` the
rows of one prompt), or for an async function up to ``MAX_TOGETHER`` rows. Scoring may begin before all rows are known
(``begin``). A row passes these states:

| a row is | where | it leaves by |
|---|---|---|
| uncalled | ``_uncalled_keys`` | ``_form_calls``: it joins a call |
| waiting | its call is in ``_waiting_calls`` | ``_send_calls``: a worker that is ready gets the call |
| sent | its call is in ``WorkerProcess.calls`` | ``_read_answers``, or as failed by ``_handle_death`` and ``_handle_timeout`` |
| answered | ``_results`` | ``_reset``, at the end of the step |

A worker gets many calls at once and answers them one by one; the time of a call starts at the answer before it. If the
worker is replaced, the calls behind a failed one wait again.
"""

from __future__ import annotations

import json
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from rlhf_spmd.rewards.binding import RewardRow
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.results import ReadAnswer, RewardError, RewardResult, RowResult
from rlhf_spmd.rewards.worker import START_LIMIT_S, RewardCall, WorkerOutput, WorkerProcess

# Seconds beyond the time limit before a silent worker is killed. The worker measures each call exactly; this covers the
# transfer of its answer.
GRACE_S = 0.05
CANCEL_S = 1.0  # further seconds for an async call to cancel its rows at the limit
MAX_TOGETHER = 64  # rows that one worker awaits at once
BEAT_S = 0.5  # between signs of life while the rank waits
MAX_CHUNK = 256  # calls sent to a worker at once: what must be sent again if it is killed


class RewardRunner:
    """Scores rows with ``config.function`` in ``config.num_workers`` processes, which start at once and stay until
    ``close``.

    Use it from one thread that lasts as long as the runner: Linux kills the workers when the thread that started them
    ends. ``where``: key of the reward's configuration, for messages. Raises ValueError for a configuration that fails
    its check or has no function.
    """

    def __init__(self, config: RewardConfig, where: str = "reward") -> None:
        config.check(where)
        if config.function is None:
            raise ValueError(f"{where}.function is not set: there is nothing for the reward's worker processes to call")
        self.config = config
        self.where = where
        self.bound = config.bind(where)
        self._name = f"{where}.function {config.function!r}"
        self._output = WorkerOutput(self._name)
        self._workers: list[WorkerProcess] = []
        self._num_calls = 0
        self._reset()
        self.grow(config.num_workers)

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_workers"):
            self.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers' keepers."""
        return [worker.process.pid for worker in self._workers]

    def grow(self, num_workers: int) -> None:
        """Start workers until there are ``num_workers``. Returns at once."""
        while len(self._workers) < num_workers:
            self._workers.append(WorkerProcess(self.config, self.where, self._output.write_fd))

    def close(self) -> None:
        """Kill the workers. May be called twice."""
        if self._workers:
            while self._workers:
                self._workers.pop().end()
            self._output.end_step()
            self._output.close()

    # -- rows

    def score(
        self,
        rows: Sequence[RewardRow],
        groups: Sequence[int] | None = None,
        tick: Callable[[], None] = lambda: None,
        keys: Sequence[int] | None = None,
    ) -> RewardResult:
        """Call the function for every (prompt text, response text, row) and return the results by position in ``rows``.

        - groups: the number of each row's prompt, for ``by_group``
        - tick: called again and again during the wait
        - keys: the keys of the rows, some of which may have begun; by default their positions

        Rows must be JSON values. Raises ValueError for a row that JSON cannot hold, RewardError if a worker does not
        start; the runner is closed then.
        """
        assert self._workers, "the reward runner is closed"
        keys = range(len(rows)) if keys is None else keys
        new_positions = [i for i, key in enumerate(keys) if key not in self._rows]
        new_groups = groups and [groups[i] for i in new_positions]
        try:
            self._add_rows([keys[i] for i in new_positions], [rows[i] for i in new_positions], new_groups)
            self._form_calls(len(self._workers))
            while self._has_open_rows:
                self._exchange_once(BEAT_S, tick)
            return RewardResult([self._results[key] for key in keys], [self._row_name(key) for key in keys])
        finally:
            if self._workers:
                self._output.end_step()
            self._reset()

    def begin(self, keys: Sequence[int], rows: Sequence[RewardRow], groups: Sequence[int] | None = None) -> None:
        """Start calls for rows that :meth:`score` will ask for by ``keys``, and return at once.

        With ``by_group`` groups must be complete. Raises what :meth:`score` raises.
        """
        assert self._workers, "the reward runner is closed"
        assert self.config.by_group or not self.bound.batched, "one call takes all rows, so it cannot begin on some"
        self._add_rows(keys, rows, groups)
        self.advance()

    def advance(self) -> None:
        """Send calls and read answers of begun rows, without waiting."""
        if self._has_open_rows:
            self._exchange_once(0.0)

    def abandon(self) -> None:
        """Drop the begun rows. Workers with calls are replaced."""
        for worker in list(self._workers):
            if worker.calls:
                self._replace_worker(worker)
        self._reset()

    def _reset(self) -> None:
        """Drop all rows, for a new step."""
        self._rows: dict[int, RewardRow] = {}  # by key
        self._results: dict[int, RowResult] = {}  # by key
        self._uncalled_keys: list[int] = []  # keys of rows that are in no call yet
        self._waiting_calls: deque[RewardCall] = deque()  # calls that no worker has

    @property
    def _has_open_rows(self) -> bool:
        return len(self._results) < len(self._rows)

    def _row_name(self, key: int) -> Any:
        return self._rows[key][2].get("id", key)

    def _add_rows(self, keys: Sequence[int], rows: Sequence[RewardRow], groups: Sequence[int] | None) -> None:
        self._rows |= zip(keys, rows, strict=True)
        if self.config.by_group:
            assert groups is not None, "by_group needs the rows' groups"
            keys_of_group: dict[int, list[int]] = {}
            for key, group in zip(keys, groups, strict=True):
                keys_of_group.setdefault(group, []).append(key)
            for group_keys in keys_of_group.values():
                self._add_call(group_keys)
            return
        self._uncalled_keys += keys
        if not self.bound.is_async:  # rows that are awaited wait for an idle worker, so that as many as possible are together
            self._form_calls(len(self._workers))

    def _form_calls(self, num_workers: int) -> None:
        """Form calls for ``num_workers`` from the rows that are in no call."""
        keys = self._uncalled_keys
        self._uncalled_keys = []
        share = -(-len(keys) // num_workers) or 1
        size = share if self.bound.batched else min(share, MAX_TOGETHER) if self.bound.is_async else 1
        for first in range(0, len(keys), size):
            self._add_call(keys[first : first + size])

    def _add_call(self, keys: list[int]) -> None:
        self._waiting_calls.append(RewardCall(self._num_calls, keys))
        self._num_calls += 1

    def _end_call(self, call: RewardCall, results: list[Any] | str | None) -> None:
        """Store the results of a call: a list, or for all its rows why the call failed, or None if it took too long."""
        row_results = results if isinstance(results, list) else [results] * len(call.keys)
        for key, result in zip(call.keys, row_results, strict=True):
            if result is None:
                error = f"no score within {self.where}.timeout_s = {self.config.timeout_s}"
                self._results[key] = RowResult(self.config.default, error=error, timed_out=True)
            elif isinstance(result, str):
                self._results[key] = RowResult(self.config.default, error=result)
            else:
                score, extras, answer = result
                self._results[key] = RowResult(score, extras, None if answer is None else ReadAnswer(*answer))

    # -- workers

    def _exchange_once(self, longest_s: float, tick: Callable[[], None] = lambda: None) -> None:
        """Send waiting calls, and read answers that arrive within ``longest_s``. There must be rows without results."""
        try:
            self._send_waiting_calls()
            tick()
            answered = self._await_answers(longest_s)
            now = time.monotonic()
            for worker in list(self._workers):
                # An answer in the pipe counts, however late this process reads it.
                if worker.is_busy and now >= worker.deadline and worker not in answered:
                    self._handle_timeout(worker)
        except BaseException:
            # The workers hold rows of a step for which nobody waits any more.
            self.close()
            raise

    def _send_waiting_calls(self) -> None:
        """Send calls to the workers that have at most one."""
        # Since the last time a worker may have become ready, or died without a call (which is no call's failure).
        for worker in [worker for worker in self._workers if not worker.calls]:
            self._read_answers(worker)
        num_idle = sum(worker.is_ready and not worker.calls for worker in self._workers)
        if self._uncalled_keys and num_idle:
            self._form_calls(num_idle)
        for worker in self._workers:
            if worker.is_ready and len(worker.calls) <= 1 and self._waiting_calls:
                self._send_calls(worker)

    def _await_answers(self, longest_s: float) -> set[WorkerProcess]:
        """Wait for answers and for room in the pipes, and read the answers. Return the workers that have answered, or died."""
        poll = select.poll()
        poll.register(self._output.read_fd, select.POLLIN)
        worker_of: dict[int, WorkerProcess] = {}
        for worker in self._workers:
            worker_of |= {worker.answer_fd: worker, worker.request_fd: worker}
            poll.register(worker.answer_fd, select.POLLIN)
            if worker.outgoing:
                poll.register(worker.request_fd, select.POLLOUT)
        deadline = min(worker.deadline for worker in self._workers if worker.is_busy)
        answered: set[WorkerProcess] = set()
        for number, _ in poll.poll(1000 * min(longest_s, max(0.0, deadline - time.monotonic()))):
            if number == self._output.read_fd:
                self._output.pass_on()
            elif number == worker_of[number].answer_fd:
                answered.add(worker_of[number])
                self._read_answers(worker_of[number])
            elif worker_of[number] not in answered and worker_of[number].flush():
                self._start_clock(worker_of[number])  # it is still reading its calls, so it cannot have answered
        return answered

    def _start_clock(self, worker: WorkerProcess) -> None:
        worker.deadline = time.monotonic() + self.config.timeout_s + GRACE_S + CANCEL_S * self.bound.is_async

    def _send_calls(self, worker: WorkerProcess) -> None:
        # Guided self-scheduling: large chunks first, so that cheap calls need few round trips; small ones last, so that the
        # workers end together.
        size = max(1, min(MAX_CHUNK, -(-len(self._waiting_calls) // (2 * len(self._workers)))))
        calls = [self._waiting_calls.popleft() for _ in range(min(size, len(self._waiting_calls)))]
        requests = [f"[{call.number}, [{', '.join(map(self._as_json, call.keys))}]]\n" for call in calls]
        if not worker.calls:
            self._start_clock(worker)
        worker.calls.extend(calls)
        worker.send("".join(requests).encode())

    def _as_json(self, key: int) -> str:
        try:
            return json.dumps(self._rows[key])
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {self._row_name(key)} for {self._name} is not JSON: {error}") from error

    def _read_answers(self, worker: WorkerProcess) -> None:
        """Store the answers that have arrived from a worker."""
        lines = worker.read_lines()
        if lines is None:
            self._handle_death(worker)
            return
        for line in lines:
            try:
                answer = json.loads(line)
                if answer[0] == "broken":
                    raise RewardError(f"a reward worker cannot start: {answer[1]}")
                if answer[0] == "ready":
                    worker.is_ready = True
                    continue
                number, seconds, results = answer
                assert number == worker.calls[0].number, "an answer to another call"
                self._end_call(worker.calls[0], None if seconds > self.config.timeout_s else results)
                worker.calls.popleft()
            # The process boundary: a function that writes into all open files writes into the pipe too.
            except (ValueError, TypeError, KeyError, IndexError, AssertionError):
                self._handle_death(worker, "it wrote into the pipe of its answers")
                return
        if lines:
            self._start_clock(worker)

    def _handle_death(self, worker: WorkerProcess, end: str | None = None) -> None:
        """Fail the oldest call of a worker that has ended, and replace the worker. ``end``: how it ended, in words."""
        end = end or worker.how_it_ended()
        if not worker.is_ready:
            raise RewardError(f"a worker for {self._name} ended before it was ready ({end})")
        if worker.calls:
            self._end_call(worker.calls.popleft(), f"the worker process ended during the call ({end})")
        self._replace_worker(worker)

    def _handle_timeout(self, worker: WorkerProcess) -> None:
        """Fail the oldest call of a worker that has not answered in time, and replace the worker."""
        if not worker.is_ready:
            raise RewardError(f"a worker for {self._name} was not ready after {START_LIMIT_S:.0f} s")
        self._end_call(worker.calls.popleft(), None)
        self._replace_worker(worker)

    def _replace_worker(self, worker: WorkerProcess) -> None:
        """End a worker and start another one; the calls that it has not answered wait again."""
        self._waiting_calls.extendleft(reversed(worker.calls))
        self._workers.remove(worker)
        worker.end()
        self.grow(len(self._workers) + 1)
