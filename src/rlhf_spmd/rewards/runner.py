"""Calls a reward function for many rows, in processes that can be killed.

Workers are plain programs, started with exec. They share only pipes with the rank, so its threads, device and
``__main__`` do not come along, and killing a worker ends any hanging call, even inside C code. Whatever a worker has
started ends with it (``worker.run_keeper``). Its output is passed on up to a limit.

A worker receives many calls at once and answers them one by one; a call's time starts at the answer before it. A call
is one row, or for a batched function all rows of this rank (an equal share per worker, or with ``by_group`` the rows of
one prompt), or for an async function up to ``MAX_TOGETHER`` rows. Rows may begin before all are known (``begin``).
"""

from __future__ import annotations

import json
import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from rlhf_spmd.rewards.binding import RewardRow
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.results import RewardError, RewardResult
from rlhf_spmd.rewards.worker import START_LIMIT_S, WorkerOutput, WorkerProcess, start_worker

# Seconds beyond the time limit before a silent worker is killed. The worker measures each call exactly; this covers the
# transfer of its answer.
GRACE_S = 0.05
# Further seconds for an async call to cancel its rows at the limit.
CANCEL_S = 1.0
# Rows that one worker awaits at once.
MAX_TOGETHER = 64
# Seconds between signs of life while the rank waits.
BEAT_S = 0.5
# Most calls sent to a worker at once: bounds what must be sent again if it is killed.
MAX_CHUNK = 256


class RewardRunner:
    """Scores rows with ``config.function`` in ``config.num_workers`` processes, which start at once and stay until
    ``close``.

    Use it from one thread that lasts as long as the runner: Linux kills the workers when the thread that started them
    ends. ``where``: key of the reward's configuration, for messages. Raises ValueError for a config that fails its
    check or has no function.
    """

    def __init__(self, config: RewardConfig, where: str = "reward") -> None:
        config.check(where)
        if config.function is None:
            raise ValueError(f"{where}.function is not set: there is nothing for the reward's worker processes to call")
        self.config, self.where = config, where
        self.bound = config.bind(where)
        self._name = f"{where}.function {config.function!r}"
        self._output = WorkerOutput(self._name)
        self._selector = selectors.DefaultSelector()
        self._workers: list[WorkerProcess] = []
        self._forget()
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
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def grow(self, num_workers: int) -> None:
        """Starts workers until there are ``num_workers``. Returns at once."""
        while len(self._workers) < num_workers:
            self._add_worker()

    def close(self) -> None:
        """Kills the workers. May be called twice."""
        while self._workers:
            self._remove_worker(self._workers[0])
        self._selector.close()
        self._output.end_step()

    def score(
        self,
        rows: Sequence[RewardRow],
        groups: Sequence[int] | None = None,
        tick: Callable[[], None] = lambda: None,
        keys: Sequence[int] | None = None,
    ) -> RewardResult:
        """Calls the function for every (prompt text, response text, row) and returns the results by position in ``rows``.

        Rows must be JSON values. ``groups``: number of each row's prompt, for ``by_group``. ``tick`` is called again
        and again during the wait. ``keys``: keys of the rows, some of which may have begun. Raises ValueError for a row
        that JSON cannot hold, RewardError if a worker does not start; the runner is closed then.
        """
        assert self._workers, "the reward runner is closed"
        keys = range(len(rows)) if keys is None else keys
        new = [i for i, key in enumerate(keys) if key not in self._at]
        try:
            self._add([keys[i] for i in new], [rows[i] for i in new], groups and [groups[i] for i in new])
            self._form_calls(len(self._workers))
            while self._step.unanswered:
                self._turn(BEAT_S, tick)
            return self._step.select_rows([self._at[key] for key in keys])
        finally:
            for worker in self._workers:
                self._output.take(worker)
            self._output.end_step()
            self._forget()

    def begin(self, keys: Sequence[int], rows: Sequence[RewardRow], groups: Sequence[int] | None = None) -> None:
        """Starts calls for rows that :meth:`score` will ask for by ``keys``; :meth:`pump` drives them. Returns at once.

        With ``by_group`` groups must be complete. Raises what :meth:`score` raises.
        """
        assert self._workers, "the reward runner is closed"
        assert self.config.by_group or not self.bound.batched, "one call takes all rows, so it cannot begin on some"
        self._add(keys, rows, groups)
        self.pump()

    def pump(self) -> None:
        """Drives the begun calls, without waiting."""
        if self._step.unanswered or self._apart:
            self._turn(0.0)

    def drop(self) -> None:
        """Forgets begun rows; running calls end with their workers."""
        for worker in list(self._workers):
            if worker.pending:
                self._replace_worker(worker)
        self._forget()

    def _forget(self) -> None:
        """Starts a new step."""
        self._step = RewardResult(self.config.default, f"no score within {self.where}.timeout_s = {self.config.timeout_s}")
        self._rows: list[RewardRow] = []
        self._at: dict[int, int] = {}  # key -> row
        self._apart: list[int] = []  # rows that are in no call yet
        self._waiting: deque[int] = deque()  # calls that no worker has

    def _add(self, keys: Sequence[int], rows: Sequence[RewardRow], groups: Sequence[int] | None) -> None:
        added = self._step.add_rows([row.get("id", at) for at, (_, _, row) in enumerate(rows, len(self._rows))])
        self._rows += rows
        self._at |= zip(keys, added, strict=True)
        if self.config.by_group:
            assert groups is not None, "by_group needs the rows' groups"
            of_group: dict[int, list[int]] = {}
            for row, group in zip(added, groups, strict=True):
                of_group.setdefault(group, []).append(row)
            self._waiting += self._step.add_calls(list(of_group.values()))
            return
        self._apart += added
        if not self.bound.is_async:
            self._form_calls(len(self._workers))

    def _form_calls(self, num_workers: int) -> None:
        """Forms calls for ``num_workers`` from the rows that are in no call."""
        rows, self._apart = self._apart, []
        share = -(-len(rows) // num_workers) or 1
        size = share if self.bound.batched else min(share, MAX_TOGETHER) if self.bound.is_async else 1
        self._waiting += self._step.add_calls([rows[first : first + size] for first in range(0, len(rows), size)])

    @property
    def _patience_s(self) -> float:
        """Seconds until the worker of a running call is killed."""
        return self.config.timeout_s + GRACE_S + CANCEL_S * self.bound.is_async

    def _turn(self, most_s: float, tick: Callable[[], None] = lambda: None) -> None:
        """Feeds workers and takes answers that arrive within ``most_s``; there must be open calls or rows."""
        try:
            self._exchange(most_s, tick)
        except BaseException:
            # The workers hold rows of a step for which nobody waits any more.
            self.close()
            raise

    def _exchange(self, most_s: float, tick: Callable[[], None]) -> None:
        # Since the last time a worker may have become ready, or died idle (which is no call's failure).
        for worker in [worker for worker in self._workers if not worker.pending]:
            self._receive(worker)
        # Single rows wait for an idle worker, so that as many as possible are awaited together.
        if self._apart and (free := sum(worker.ready and not worker.pending for worker in self._workers)):
            self._form_calls(free)
        # A worker that dies while it is fed is replaced below; its successor is fed in the next round.
        for worker in self._workers:
            if worker.ready and len(worker.pending) <= 1 and self._waiting:
                self._send(worker)
        deadline = min(worker.deadline for worker in self._workers if worker.busy)
        answered = set()
        tick()
        for key, mask in self._selector.select(min(most_s, max(0.0, deadline - time.monotonic()))):
            if mask & selectors.EVENT_WRITE:
                self._flush(key.data)
            if key.fd == key.data.output_fd:
                self._pass_on(key.data)
            elif mask & selectors.EVENT_READ:
                answered.add(key.data)
                self._receive(key.data)
        now = time.monotonic()
        for worker in list(self._workers):
            # An answer in the pipe counts, however late this process reads it.
            if worker.busy and now >= worker.deadline and worker not in answered:
                self._overrun(worker)

    def _add_worker(self) -> None:
        worker = start_worker(self.config, self.where)
        self._workers.append(worker)
        for number in (worker.answer_fd, worker.output_fd):
            self._selector.register(number, selectors.EVENT_READ, worker)

    def _pass_on(self, worker: WorkerProcess) -> None:
        """Passes on what the worker printed."""
        if worker in self._workers and not self._output.take(worker):
            self._selector.unregister(worker.output_fd)

    def _remove_worker(self, worker: WorkerProcess) -> None:
        self._workers.remove(worker)
        if worker.outgoing:
            self._selector.unregister(worker.request_fd)
        self._selector.unregister(worker.answer_fd)
        with suppress(KeyError):  # the worker has closed its standard error
            self._selector.unregister(worker.output_fd)
        self._output.take(worker)
        worker.end()

    def _replace_worker(self, worker: WorkerProcess) -> None:
        self._waiting.extendleft(reversed(worker.pending))
        self._remove_worker(worker)
        self._add_worker()

    def _send(self, worker: WorkerProcess) -> None:
        # Guided self-scheduling: large chunks first, so that cheap calls need few round trips; small ones last, so that the
        # workers end together.
        size = max(1, min(MAX_CHUNK, -(-len(self._waiting) // (2 * len(self._workers)))))
        calls = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
        lines = [f"[{call}, [{', '.join(self._as_json(index) for index in self._step.calls[call])}]]" for call in calls]
        if not worker.pending:
            worker.deadline = time.monotonic() + self._patience_s
        worker.pending.extend(calls)
        was_empty = not worker.outgoing
        worker.outgoing = memoryview(bytes(worker.outgoing) + ("\n".join(lines) + "\n").encode())
        if was_empty:
            self._selector.register(worker.request_fd, selectors.EVENT_WRITE, worker)
        self._flush(worker)

    def _as_json(self, index: int) -> str:
        try:
            return json.dumps(self._rows[index])
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {self._step.names[index]} for {self._name} is not JSON: {error}") from error

    def _flush(self, worker: WorkerProcess) -> None:
        """Writes what the pipe takes; never blocks, because a hanging worker does not read."""
        if worker not in self._workers or not worker.outgoing:
            return
        try:
            worker.outgoing = worker.outgoing[os.write(worker.request_fd, worker.outgoing) :]
            worker.deadline = time.monotonic() + self._patience_s  # it is reading: it cannot answer what it has not got
        except BlockingIOError:
            return
        except BrokenPipeError:  # it has died; its answer pipe reports how
            worker.outgoing = worker.outgoing[:0]
        if not worker.outgoing:
            self._selector.unregister(worker.request_fd)

    def _receive(self, worker: WorkerProcess) -> None:
        if worker not in self._workers:
            return
        try:
            data = os.read(worker.answer_fd, 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self._died(worker)
            return
        *lines, worker.incoming = (worker.incoming + data).split(b"\n")
        for line in lines:
            try:
                answer = json.loads(line)
                if answer[0] == "broken":
                    raise RewardError(f"a reward worker cannot start: {answer[1]}")
                if answer[0] == "ready":
                    worker.ready = True
                    continue
                assert answer[0] == worker.pending[0], "an answer to another call"
                call, seconds, results = answer
                self._step.take(call, None if seconds > self.config.timeout_s else results)
                worker.pending.popleft()
            # The process boundary: a function that writes into all open files writes into the pipe too.
            except (ValueError, TypeError, KeyError, IndexError, AssertionError):
                self._died(worker, "it wrote into the pipe of its answers")
                return
        worker.deadline = time.monotonic() + self._patience_s

    def _died(self, worker: WorkerProcess, how: str | None = None) -> None:
        how = how or worker.how_it_ended()
        if not worker.ready:
            raise RewardError(f"a worker for {self._name} ended before it was ready ({how})")
        if worker.pending:
            self._step.take(worker.pending.popleft(), f"the worker process ended during the call ({how})")
        self._replace_worker(worker)

    def _overrun(self, worker: WorkerProcess) -> None:
        if not worker.ready:
            raise RewardError(f"a worker for {self._name} was not ready after {START_LIMIT_S:.0f} s")
        self._step.take(worker.pending.popleft(), None)
        self._replace_worker(worker)
