"""A worker's process and its pipes, as the rank sees them."""

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
from dataclasses import asdict, dataclass, field

from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.keeper import END, TOLD_TO_END
from rlhf_spmd.rewards.results import RewardError

# Seconds for a worker to start and import the function's module.
START_LIMIT_S = 120.0
# Seconds to wait for the exit code of a worker that has closed its pipe.
EXIT_LIMIT_S = 1.0
# Seconds for the keeper to end what the function has started.
END_LIMIT_S = 10.0
# Bytes of output that wait until the rank comes to it: it may be at something else.
PIPE_BYTES = 1 << 20
# Bytes of a step's output that are shown.
MAX_OUTPUT = 1 << 16
_F_SETPIPE_SZ = 1031

# The worker sees the same modules as the rank, however the rank's sys.path came about.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rlhf_spmd.rewards.keeper import keep
pipes = tuple(map(int, sys.argv[5:]))
keep(int(sys.argv[4]), *pipes)
from rlhf_spmd.rewards.worker import main
main(json.loads(sys.argv[2]), sys.argv[3], *pipes)
"""


@dataclass(eq=False)
class WorkerProcess:
    """The keeper, the pipes to its worker, and the calls that this has been sent and not answered, oldest first. ``output_fd``: what it
    prints."""

    process: subprocess.Popen[bytes]
    request_fd: int
    answer_fd: int
    output_fd: int
    deadline: float
    ready: bool = False
    outgoing: memoryview = field(default_factory=lambda: memoryview(b""))
    incoming: bytes = b""
    pending: deque[int] = field(default_factory=deque)

    @property
    def busy(self) -> bool:
        """Whether an answer is due before ``deadline``."""
        return bool(self.pending) or not self.ready

    def how_it_ended(self) -> str:
        """In words."""
        try:
            code = self.process.wait(EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    def end(self) -> None:
        """With all that it has started."""
        self.process.send_signal(END)
        try:
            self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for number in (self.request_fd, self.answer_fd, self.output_fd):
            os.close(number)


def start_worker(config: RewardConfig, where: str) -> WorkerProcess:
    """Raises RewardError."""
    request_out, request_in = os.pipe()
    answer_out, answer_in = os.pipe()
    output_out, output_in = os.pipe()
    command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), json.dumps(asdict(config)), where]
    command += map(str, (os.getpid(), request_out, answer_in))
    with suppress(OSError):
        fcntl.fcntl(output_in, _F_SETPIPE_SZ, PIPE_BYTES)
    # from here on until the worker has its handlers they wait: they would end it, and with it the run
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TOLD_TO_END)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output_in,
            stderr=output_in,
            pass_fds=(request_out, answer_in),
            process_group=0,  # what is sent to the rank's group is not for it
            # Fixed string hashing: a function that walks over a set gives the same score in every worker and after a resume.
            env={**os.environ, "PYTHONHASHSEED": "0"},
        )
    except OSError as error:
        for number in (request_in, answer_out, output_out):
            os.close(number)
        raise RewardError(f"cannot start a worker for {where}.function {config.function!r}: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in (request_out, answer_in, output_in):
            os.close(number)
    for number in (request_in, answer_out, output_out):
        os.set_blocking(number, False)
    return WorkerProcess(process, request_in, answer_out, output_out, time.monotonic() + START_LIMIT_S)


class Output:
    """What workers print, passed on to standard error: of a step ``MAX_OUTPUT`` bytes, and of the others how many lines they are."""

    def __init__(self, name: str) -> None:
        self.name, self._left, self._lines = name, MAX_OUTPUT, 0

    def take(self, worker: WorkerProcess) -> bool:
        """What is there. False at the end."""
        try:
            data = os.read(worker.output_fd, PIPE_BYTES)
        except BlockingIOError:
            return True
        shown = data[: self._left]
        self._left -= len(shown)
        self._lines += data.count(b"\n", len(shown))
        if shown and sys.__stderr__ is not None:
            with suppress(OSError):
                sys.__stderr__.flush()
                sys.__stderr__.buffer.write(shown)
                sys.__stderr__.buffer.flush()
        return bool(data)

    def end_step(self) -> None:
        """Say how much was left out; the next step has all of the limit."""
        if self._lines:
            print(f"\n... and {self._lines} more lines of output of {self.name}", file=sys.__stderr__, flush=True)
        self._left, self._lines = MAX_OUTPUT, 0
