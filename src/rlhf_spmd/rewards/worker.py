"""A worker process that calls one reward function again and again: the rank's side, the keeper, and the worker itself.

The rank starts a keeper, which forks the worker. The keeper runs none of the user's code. As a Linux subreaper it
adopts every orphan below it, so even a daemon of a reward function stays below it. It ends everything below when the
worker has ended, when the rank says so (``END``), or when the rank has ended in any way; then it ends as the worker
did.

Protocol: lines of JSON over two pipes. In: ``[call, rows]``, each row ``[prompt, response, columns]``. Out: once
``["ready"]`` or ``["broken", message]``, then for every line, in order, ``[call, seconds, results]``. Results are
``[score, extras]``, with the answer that the reward has read (null: none) as a third entry if it reads answers, a
message, or null (overrun) per row, or one message in place of the list. ``seconds`` is 0 if each
row had its own time limit. The next call starts as soon as an answer is written, so an answer also reports that the
next call has started. Standard input is empty, and what the function prints goes to standard error, so neither can
disturb the pipes.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import time
import traceback
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf_spmd.config.constraints import LARGEST
from rlhf_spmd.config.schema import printable
from rlhf_spmd.rewards.answers import Verdict
from rlhf_spmd.rewards.binding import OVERRUN, BoundReward
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.rewards.results import RewardError
from rlhf_spmd.rewards.sandbox import descendants, remove_unused

# Seconds for a worker to start and import the function's module.
START_LIMIT_S = 120.0
# Seconds to wait for the exit code of a worker that has closed its pipe.
EXIT_LIMIT_S = 1.0
# Seconds for the keeper to end what the function has started.
END_LIMIT_S = 10.0
# Bytes of output that wait until the rank reads them.
PIPE_BYTES = 1 << 20
# Bytes of a step's output that are shown.
MAX_OUTPUT = 1 << 16
_F_SETPIPE_SZ = 1031

# The worker has the rank's sys.path, so it sees the same modules.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from rlhf_spmd.rewards.worker import run_keeper
pipes = tuple(map(int, sys.argv[5:]))
run_keeper(int(sys.argv[4]), *pipes)
from rlhf_spmd.rewards.worker import main
main(json.loads(sys.argv[2]), sys.argv[3], *pipes)
"""


@dataclass(eq=False)
class WorkerProcess:
    """Rank side: the keeper, the pipes to its worker, and the calls that were sent and not answered, oldest first.

    ``output_fd``: what the worker prints.
    """

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
        """True if an answer is due before ``deadline``."""
        return bool(self.pending) or not self.ready

    def how_it_ended(self) -> str:
        """Returns how the worker ended, in words."""
        try:
            code = self.process.wait(EXIT_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        return f"exit code {code}" if code >= 0 else f"signal {-code}"

    def end(self) -> None:
        """Ends the worker and all that it has started."""
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
    """Starts a keeper and its worker. Raises RewardError."""
    request_out, request_in = os.pipe()
    answer_out, answer_in = os.pipe()
    output_out, output_in = os.pipe()
    command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), json.dumps(asdict(config)), where]
    command += map(str, (os.getpid(), request_out, answer_in))
    with suppress(OSError):
        fcntl.fcntl(output_in, _F_SETPIPE_SZ, PIPE_BYTES)
    # until the worker has its handlers these signals wait: they would end it, and the run with it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TOLD_TO_END)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output_in,
            stderr=output_in,
            pass_fds=(request_out, answer_in),
            process_group=0,  # signals to the rank's group are not for the worker
            # Fixed string hashing: a function that iterates over a set gives the same score in every worker and after a resume.
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


class WorkerOutput:
    """Passes what workers print on to standard error: ``MAX_OUTPUT`` bytes per step, and a count of the other lines."""

    def __init__(self, name: str) -> None:
        self.name, self._left, self._lines = name, MAX_OUTPUT, 0

    def take(self, worker: WorkerProcess) -> bool:
        """Passes on what has arrived. Returns False at the end."""
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
        """Reports how much was left out; the next step has the full limit again."""
        if self._lines:
            print(f"\n... and {self._lines} more lines of output of {self.name}", file=sys.__stderr__, flush=True)
        self._left, self._lines = MAX_OUTPUT, 0


END = signal.SIGRTMAX  # no scheduler sends it
TOLD_TO_END = (signal.SIGTERM, signal.SIGINT)  # a scheduler sends them to all processes of a job
MOST = 100_000  # descendants to look for
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def run_keeper(parent: int, *pipes: int) -> None:
    """Forks the worker and returns in it; this process stays behind as its keeper.

    ``pipes``: those that only the worker keeps. ``parent``: the rank. The worker ends with the keeper.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (END, signal.SIGCHLD, *TOLD_TO_END))
    _control(_PR_SET_CHILD_SUBREAPER, 1)
    _end_with(parent, END)
    keeper, worker = os.getpid(), os.fork()
    if worker == 0:
        _end_with(keeper, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, {*before, *TOLD_TO_END})  # until the worker has its handlers
        return
    for number in pipes:
        os.close(number)
    remove_unused()
    ended: dict[int, int] = {}
    while worker not in ended and signal.sigwait((END, signal.SIGCHLD)) != END:
        _wait(ended, os.WNOHANG)
    while True:
        for process in descendants(keeper, MOST):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if not _wait(ended, 0):
            _end_as(ended.get(worker, 0))


def _end_with(parent: int, number: int) -> None:
    """Has the kernel send a signal when the thread that started this process ends."""
    _control(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before that took effect
        os._exit(0)


def _control(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _wait(ended: dict[int, int], how: int) -> bool:
    """Adds an ended child and its status, with WNOHANG all of them. Returns False if there are no children."""
    try:
        while (found := os.waitpid(-1, how))[0]:
            ended[found[0]] = found[1]
            if not how:
                break
    except ChildProcessError:
        return False
    return True


def _end_as(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (-code,))
        os.kill(os.getpid(), -code)
    os._exit(code)


def _number(value: Any) -> float:
    """Accepts Python and NumPy numbers and one-element tensors; text that looks like a number is a mistake, not a score."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        hint = "; a function with an argument completions takes and returns lists" if isinstance(value, list) else ""
        said = f"{repr(value)[:80]}, a {type(value).__name__}, is not a number: a score is a float, an int or a bool"
        raise TypeError(f"{said}, or None where there is none{hint}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    if abs(number) > LARGEST[float]:
        raise ValueError(f"{number} is not finite in float32")
    return number


def read_result(value: Any) -> tuple[float, dict[str, float]]:
    """Returns (score, extras) from what a reward function returned. Extras that are not finite in float32 are left out.

    Raises TypeError, KeyError, ValueError or OverflowError if there is no valid score.
    """
    if not isinstance(value, dict):
        return _number(value), {}
    if "score" not in value:
        raise KeyError(f"the returned dict has no 'score', only {sorted(map(str, value))}")
    extras = {}
    for key, entry in value.items():
        if key != "score":
            with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
                extras[str(key)] = _number(entry)
    return _number(value["score"]), extras


def read_answer(value: Any) -> list[str | None]:
    """Returns the answer that a reward function has read in the response, None if it found none; empty if it says nothing
    of answers. It is that of a :class:`Verdict`, or verl's entry ``pred`` of a dict."""
    if isinstance(value, Verdict):
        return [value.answer]
    if isinstance(value, dict) and "pred" in value:
        return [None if value["pred"] is None else str(value["pred"])]
    return []


_told: set[str] = set()  # places in the user's code whose tracebacks were written


def _said(error: BaseException) -> str:
    """Returns the error and where the user's code raised it. The traceback of each place is printed once."""
    apart = (str(Path(__file__).parent), *(sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")), "<")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(apart)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    if place and place not in _told:
        _told.add(place)
        lines = "".join(traceback.format_exception(error)).splitlines()
        print(*map(printable, lines), sep="\n", file=sys.stderr, flush=True)
    return f"{type(error).__name__}: {error}"[: 2000 - len(place)] + place


def _read(value: Any) -> tuple[Any, ...] | str | None:
    """Returns a row's result as the protocol has it. None from the function means that it does not apply to the row."""
    if value is OVERRUN:
        return None
    try:
        if isinstance(value, BaseException):
            raise value
        return (None, {}) if value is None else (*read_result(value), *read_answer(value))
    except Exception as error:  # the process boundary: the value's class is the user's too
        return _said(error)


def _limit(kind: int, gib: float) -> None:
    """Sets a limit, at most the present hard limit."""
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
        if os.getpid() != worker:  # the function forked and returned twice: only its parent answers
            os._exit(0)
        seconds = 0.0 if each_limited else time.monotonic() - start
        os.fchdir(home)  # the next call must not start in the directory that this one changed to
        answers.write(json.dumps([call, seconds, results]).encode() + b"\n")
        answers.flush()


def main(settings: dict[str, Any], where: str, request_fd: int, answer_fd: int) -> None:
    """Runs until the request pipe is closed. ``settings``: the reward's configuration. ``where``: its key, for messages."""
    config = RewardConfig(**settings)
    _limit(resource.RLIMIT_DATA, config.max_memory_gb)
    _limit(resource.RLIMIT_FSIZE, config.max_file_gb)
    _limit(resource.RLIMIT_CORE, 0)
    with suppress(OSError):  # if memory runs out all the same, the kernel should end this process, not the rank
        Path("/proc/self/oom_score_adj").write_text("1000")
    # A scheduler signals the whole job at once, but the rank decides when its workers end. A handler, unlike SIG_IGN, is not
    # inherited by programs that a reward function starts.
    for number in TOLD_TO_END:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TOLD_TO_END)
    os.set_inheritable(request_fd, False)
    os.set_inheritable(answer_fd, False)
    # A forked child must not hold the pipe open: its closing tells the rank that this process has died.
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
