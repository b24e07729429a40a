"""A worker process as its rank sees it: its start, what goes in and out, its end. ``worker_process`` is the program that it runs.

The rank starts a keeper, which forks the worker and ends everything that the worker has started. Requests and answers are lines of
JSON in the process's standard input and output. What the function prints goes to a pipe that all workers of a runner share.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from typing import NamedTuple

from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.results import RewardError
from rlhf_spmd.rewards.worker_process import END, JOB_SIGNALS

START_LIMIT_S = 120.0  # for a worker to start and import the function's module
EXIT_LIMIT_S = 1.0  # to wait for the exit code of a worker that has closed its pipe
END_LIMIT_S = 10.0  # for the keeper to end what the function has started
PIPE_BYTES = 1 << 20  # of output that wait until the rank reads them
MAX_OUTPUT = 1 << 16  # bytes of a step's output that are shown
_F_SETPIPE_SZ = 1031

# The worker has the rank's sys.path, so it sees the same modules.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rlhf_spmd.rewards.worker_process import main
main(json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
"""


class RewardCall(NamedTuple):
    """One call of the function. ``keys``: the keys of its rows."""

    number: int
    keys: list[int]


class WorkerProcess:
    """A worker, the pipes to it, and the keeper that started it (``worker_process``).

    - process: the keeper, a child of the rank. It has forked the worker, which runs the user's code
    - request_fd, answer_fd: the pipes to and from the worker
    - calls: the calls that were sent and not answered, oldest first
    - deadline: when the answer to the oldest call, or the sign that the worker is ready, must be there
    - is_ready: True once the worker has imported the function
    - outgoing: bytes of requests that the pipe has not taken yet
    """

    def __init__(self, config: RewardConfig, where: str, output_fd: int) -> None:
        """Start the process. Raises RewardError."""
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), json.dumps(asdict(config)), where, str(os.getpid())]
        # until the worker has its handlers these signals wait: they would end it, and the run with it
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
        try:
            self.process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output_fd,
                process_group=0,  # signals to the rank's group are not for the worker
                # Fixed string hashing: a function that iterates over a set gives the same score in every worker and after a resume.
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
        except OSError as error:
            raise RewardError(f"cannot start a worker for {where}.function {config.function!r}: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.request_fd = self.process.stdin.fileno()
        self.answer_fd = self.process.stdout.fileno()
        for number in (self.request_fd, self.answer_fd):
            os.set_blocking(number, False)
        self.deadline = time.monotonic() + START_LIMIT_S
        self.is_ready = False
        self.calls: deque[RewardCall] = deque()
        self.outgoing = memoryview(b"")
        self._incoming = b""

    @property
    def is_busy(self) -> bool:
        """Return True if an answer is due before ``deadline``."""
        return bool(self.calls) or not self.is_ready

    def send(self, request: bytes) -> None:
        self.outgoing = memoryview(bytes(self.outgoing) + request)
        self.flush()

    def flush(self) -> bool:
        """Write what the pipe takes; never blocks, because a hanging worker does not read. Return True if it took some."""
        try:
            self.outgoing = self.outgoing[os.write(self.request_fd, self.outgoing) :]
            return True
        except BrokenPipeError:  # it has died; its answer pipe reports how
            self.outgoing = memoryview(b"")
        except BlockingIOError:
            pass
        return False

    def read_lines(self) -> list[bytes] | None:
        """Return the lines that have arrived; None if the worker has closed its pipe."""
        try:
            data = os.read(self.answer_fd, 1 << 20)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        return lines

    def how_it_ended(self) -> str:
        """Return how the worker ended, in words."""
        try:
            code = self.process.wait(EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        number = code - 128 if code > 128 else -code  # negative if a signal ended the keeper itself
        return f"signal {number}" if number in signal.valid_signals() else f"exit code {code}"

    def end(self) -> None:
        """End the worker and all that it has started."""
        self.process.send_signal(END)
        try:
            self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class WorkerOutput:
    """The pipe into which the workers of a runner print. Passes ``MAX_OUTPUT`` bytes of each step on to standard error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.read_fd, self.write_fd = os.pipe()
        with suppress(OSError):
            fcntl.fcntl(self.write_fd, _F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self.read_fd, False)
        self._bytes_left = MAX_OUTPUT
        self._num_lines_left_out = 0

    def pass_on(self) -> None:
        """Write to standard error what has arrived, up to the limit."""
        try:
            data = os.read(self.read_fd, PIPE_BYTES)
        except BlockingIOError:
            return
        visible = data[: self._bytes_left]
        self._bytes_left -= len(visible)
        self._num_lines_left_out += data.count(b"\n", len(visible))
        if visible and sys.__stderr__ is not None:
            with suppress(OSError):
                sys.__stderr__.flush()
                sys.__stderr__.buffer.write(visible)
                sys.__stderr__.buffer.flush()

    def end_step(self) -> None:
        """Show what is left and report how much was left out; the next step has the full limit again."""
        self.pass_on()
        if self._num_lines_left_out:
            print(f"\n... and {self._num_lines_left_out} more lines of output of {self.name}", file=sys.__stderr__, flush=True)
        self._bytes_left = MAX_OUTPUT
        self._num_lines_left_out = 0

    def close(self) -> None:
        os.close(self.read_fd)
        os.close(self.write_fd)
