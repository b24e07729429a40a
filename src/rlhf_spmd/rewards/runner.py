"""Calls a reward function for many rows, in processes that can be killed.

The workers are plain programs, started with exec: they share nothing with the rank but two pipes, so neither the rank's
threads, nor its device, nor its ``__main__`` come along, and a call that hangs (also inside C code) ends with the worker.
A worker is sent many calls at once and answers one by one; a call's time runs from the answer before it. A call is one row, of
a batched function the rows of this rank, or with several workers an equal share of them for each.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rlhf_spmd.rewards.binding import Row
from rlhf_spmd.rewards.config import RewardConfig

# Seconds for a worker to start and import the function's module.
START_LIMIT_S = 120.0
# Seconds beyond the time limit before a silent worker is killed. The worker measures each call itself, and by its clock an
# overrun counts exactly; this only covers the way of the answer.
GRACE_S = 0.05
# Calls sent to a worker at a time, at most: bounds what has to be sent again when it is killed.
MAX_CHUNK = 256

# Seconds to wait for the exit code of a worker that has closed its pipe.
EXIT_LIMIT_S = 10.0

# The worker sees the same modules as the rank, however the rank's sys.path came about.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rlhf_spmd.rewards.worker import main
main(sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))
"""


class RewardError(RuntimeError):
    """The reward cannot go on: a worker does not start, or too many calls fail. Ends the run with class ``reward``."""

    exit_class = "reward"  # how the run ends: parallel/program.py


@dataclass
class RewardResult:
    """What the calls of one :meth:`RewardRunner.score` gave, in the order of the rows.

    ``scores``: the function's scores, ``default`` where a call failed, None where the function does not apply, without weights.
    ``extras``: one dict per row, the other numeric entries of what the function returned. ``failures``: rows whose call raised,
    returned no finite score, or ended its worker; ``timeouts``: rows whose call overran (not in ``failures``). ``first_error``:
    message of the lowest row that failed, None without one.
    """

    scores: list[float | None]
    extras: list[dict[str, float]]
    failures: int = 0
    timeouts: int = 0
    first_error: str | None = None

    def extra_sums(self) -> dict[str, tuple[float, int]]:
        """For each extra: its sum over rows and the number of rows that have it, so that a mean over ranks can be taken."""
        sums: dict[str, tuple[float, int]] = {}
        for row in self.extras:
            for key, value in row.items():
                total, count = sums.get(key, (0.0, 0))
                sums[key] = (total + value, count + 1)
        return sums


def check_failures(config: RewardConfig, where: str, failed: int, calls: int, first_error: str, first_step: bool) -> None:
    """Raises RewardError if more than ``max_failure_rate`` of a step's rows failed, or all of the first step's.

    ``failed`` (failures and time-outs) and ``calls`` are summed over ranks, so that every rank comes to the same end.
    """
    everything = first_step and failed == calls
    if failed and (everything or failed / calls > config.max_failure_rate):
        limit = "" if everything else f", more than {where}.max_failure_rate = {config.max_failure_rate}"
        step = "the first step" if everything else "this step"
        raise RewardError(
            f"{where}.function {config.function!r} failed in {failed} of {calls} calls of {step}{limit}; first error: {first_error}"
        )


@dataclass(eq=False)
class _Worker:
    """A process, its pipes, and the rows that it has been sent and not answered, oldest first."""

    process: subprocess.Popen[bytes]
    request_fd: int
    answer_fd: int
    deadline: float
    ready: bool = False
    outgoing: memoryview = field(default_factory=lambda: memoryview(b""))
    incoming: bytes = b""
    pending: deque[int] = field(default_factory=deque)

    @property
    def busy(self) -> bool:
        """Whether an answer is due before ``deadline``."""
        return bool(self.pending) or not self.ready


def _start_worker(function: str, where: str) -> _Worker:
    request_out, request_in = os.pipe()
    answer_out, answer_in = os.pipe()
    command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), function, where]
    command += map(str, (request_out, answer_in, os.getpid()))
    # Fixed string hashing: a function that walks over a set gives the same score in every worker and after a resume.
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else subprocess.DEVNULL,
            pass_fds=(request_out, answer_in),
            process_group=0,  # its own, so that what the function started is killed with it
            env=environment,
        )
    except OSError as error:
        os.close(request_in)
        os.close(answer_out)
        raise RewardError(f"cannot start a worker for {where}.function {function!r}: {error}") from error
    finally:
        os.close(request_out)
        os.close(answer_in)
    os.set_blocking(request_in, False)
    os.set_blocking(answer_out, False)
    return _Worker(process, request_in, answer_out, time.monotonic() + START_LIMIT_S)


def _how_it_ended(pid: int) -> str:
    """In words; leaves the process to be waited for, so that its number cannot go to another one before its group is killed."""
    limit = time.monotonic() + EXIT_LIMIT_S
    while time.monotonic() < limit:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            return f"exit code {ended.si_status}" if ended.si_code == os.CLD_EXITED else f"signal {ended.si_status}"
        time.sleep(0.001)
    return "it closed its pipe"


class RewardRunner:
    """Scores rows with ``config.function`` in ``config.num_workers`` processes, which start at once and stay until ``close``.

    Use it from one thread, which must last as long as the runner: Linux kills the workers when the thread that started them
    ends. ``where``: key of the reward's configuration, for messages.
    Raises ValueError for a config that does not pass its check or has no function.
    """

    def __init__(self, config: RewardConfig, where: str = "reward") -> None:
        config.check(where)
        if config.function is None:
            raise ValueError(f"{where}.function is not set: there is nothing for the reward's worker processes to call")
        self.config, self.where = config, where
        self.bound = config.bind(where)
        self._function = config.function
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        for _ in range(config.num_workers):
            self._add_worker()

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_workers"):
            self.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Kill the workers. Idempotent."""
        while self._workers:
            self._remove_worker(self._workers[0])
        self._selector.close()

    def score(self, rows: Sequence[Row]) -> RewardResult:
        """Call the function for every (prompt text, response text, row); the rows must be what JSON can carry.

        Returns the results by position in ``rows``, whichever worker answered first. Raises ValueError for a row that JSON
        cannot carry, RewardError if a worker does not start; the runner is closed then.
        """
        assert self._workers, "the reward runner is closed"
        step = _Step(self.config, self.where, self._calls(len(rows)), len(rows))
        try:
            self._run(step, rows)
        except BaseException:
            # The workers hold rows of a step that nobody waits for any more.
            self.close()
            raise
        return step.result()

    def _calls(self, num_rows: int) -> list[range]:
        """The rows of each call."""
        size = -(-num_rows // len(self._workers)) if self.bound.batched else 1
        return [range(first, min(first + size, num_rows)) for first in range(0, num_rows, size or 1)]

    def _run(self, step: _Step, rows: Sequence[Row]) -> None:
        waiting = deque(range(len(step.calls)))
        # What happened since the last step: a worker became ready, or died idle (which is no call's failure).
        for worker in list(self._workers):
            self._receive(worker, step, waiting)
        while step.unanswered:
            # A worker that dies while it is fed is replaced below, and its successor fed in the next round.
            for worker in self._workers:
                if worker.ready and len(worker.pending) <= 1 and waiting:
                    self._send(worker, step, rows, waiting)
            deadline = min(worker.deadline for worker in self._workers if worker.busy)
            answered = set()
            for key, mask in self._selector.select(max(0.0, deadline - time.monotonic())):
                if mask & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if mask & selectors.EVENT_READ:
                    answered.add(key.data)
                    self._receive(key.data, step, waiting)
            now = time.monotonic()
            for worker in list(self._workers):
                # An answer that lies in the pipe counts, however late this process comes to read it.
                if worker.busy and now >= worker.deadline and worker not in answered:
                    self._overrun(worker, step, waiting)

    def _add_worker(self) -> None:
        worker = _start_worker(self._function, self.where)
        self._workers.append(worker)
        self._selector.register(worker.answer_fd, selectors.EVENT_READ, worker)

    def _remove_worker(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        if worker.outgoing:
            self._selector.unregister(worker.request_fd)
        self._selector.unregister(worker.answer_fd)
        try:
            os.killpg(worker.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # the group is empty, or the process has ended and was not yet waited for
            worker.process.kill()
        worker.process.wait()
        os.close(worker.request_fd)
        os.close(worker.answer_fd)

    def _replace_worker(self, worker: _Worker, waiting: deque[int]) -> None:
        waiting.extendleft(reversed(worker.pending))
        self._remove_worker(worker)
        self._add_worker()

    def _send(self, worker: _Worker, step: _Step, rows: Sequence[Row], waiting: deque[int]) -> None:
        # Guided self-scheduling: large chunks first, so that cheap calls run without round trips; small ones last, so that
        # the workers end together.
        size = max(1, min(MAX_CHUNK, -(-len(waiting) // (2 * len(self._workers)))))
        calls = [waiting.popleft() for _ in range(min(size, len(waiting)))]
        lines = [f"[{call}, [{', '.join(self._as_json(rows, index) for index in step.calls[call])}]]" for call in calls]
        if not worker.pending:
            worker.deadline = time.monotonic() + self.config.timeout_s + GRACE_S
        worker.pending.extend(calls)
        was_empty = not worker.outgoing
        worker.outgoing = memoryview(bytes(worker.outgoing) + ("\n".join(lines) + "\n").encode())
        if was_empty:
            self._selector.register(worker.request_fd, selectors.EVENT_WRITE, worker)
        self._flush(worker)

    def _as_json(self, rows: Sequence[Row], index: int) -> str:
        try:
            return json.dumps(rows[index])
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {index} for {self.where}.function {self._function!r} is not JSON: {error}") from error

    def _flush(self, worker: _Worker) -> None:
        """Write what the pipe takes; never blocks, since a hanging worker does not read."""
        if worker not in self._workers or not worker.outgoing:
            return
        try:
            worker.outgoing = worker.outgoing[os.write(worker.request_fd, worker.outgoing) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it has died; its answer pipe tells, and says how
            worker.outgoing = worker.outgoing[:0]
        if not worker.outgoing:
            self._selector.unregister(worker.request_fd)

    def _receive(self, worker: _Worker, step: _Step, waiting: deque[int]) -> None:
        if worker not in self._workers:
            return
        try:
            data = os.read(worker.answer_fd, 1 << 20)
        except BlockingIOError:
            return
        if not data:
            self._died(worker, step, waiting)
            return
        *lines, worker.incoming = (worker.incoming + data).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            if answer[0] == "broken":
                raise RewardError(f"a reward worker cannot start: {answer[1]}")
            if answer[0] == "ready":
                worker.ready = True
                continue
            call = worker.pending.popleft()
            assert call == answer[0], f"a reward worker answered call {answer[0]}, call {call} was due"
            step.take(*answer)
        worker.deadline = time.monotonic() + self.config.timeout_s + GRACE_S

    def _died(self, worker: _Worker, step: _Step, waiting: deque[int]) -> None:
        how = _how_it_ended(worker.process.pid)
        if not worker.ready:
            raise RewardError(f"a worker for {self.where}.function {self._function!r} ended before it was ready ({how})")
        if worker.pending:
            step.fail(worker.pending.popleft(), f"the worker process ended during the call ({how})")
        self._replace_worker(worker, waiting)

    def _overrun(self, worker: _Worker, step: _Step, waiting: deque[int]) -> None:
        if not worker.ready:
            raise RewardError(
                f"a worker for {self.where}.function {self._function!r} was not ready after {START_LIMIT_S:.0f} s"
            )
        step.time_out(worker.pending.popleft())
        self._replace_worker(worker, waiting)


class _Step:
    """The results of one call of ``score`` while they come in. ``calls``: the rows of each call of the function."""

    def __init__(self, config: RewardConfig, where: str, calls: list[range], num_rows: int) -> None:
        self._config, self._where, self.calls = config, where, calls
        self._scores: list[float | None] = [config.default] * num_rows
        self._extras: list[dict[str, float]] = [{} for _ in range(num_rows)]
        self._errors: dict[int, str] = {}
        self._timeouts = 0
        self.unanswered = len(calls)

    def take(self, call: int, seconds: float, results: list[Any] | str) -> None:
        if seconds > self._config.timeout_s:
            self.time_out(call)
        elif isinstance(results, str):
            self.fail(call, results)
        else:
            self.unanswered -= 1
            for index, result in zip(self.calls[call], results, strict=True):
                if isinstance(result, str):
                    self._errors[index] = result
                else:
                    self._scores[index], self._extras[index] = result

    def fail(self, call: int, message: str) -> None:
        self._errors |= dict.fromkeys(self.calls[call], message)
        self.unanswered -= 1

    def time_out(self, call: int) -> None:
        self._timeouts += len(self.calls[call])
        self.fail(call, f"no score within {self._where}.timeout_s = {self._config.timeout_s}")

    def result(self) -> RewardResult:
        first = min(self._errors, default=None)
        message = None if first is None else f"row {first}: {self._errors[first]}"
        return RewardResult(self._scores, self._extras, len(self._errors) - self._timeouts, self._timeouts, message)
