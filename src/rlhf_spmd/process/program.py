"""The process boundary of every program: bad input stops all ranks with one line, any failure ends all with its code.

``run_program(prepare, body)``: each rank loads and checks its input in ``prepare``, before any process group or model
exists. The ranks agree (startup_checks.py) that all have succeeded. Then ``body`` runs. Any exception from it gets a
class, is posted on the board, and becomes an exit code.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch.distributed as dist

from rlhf_spmd.kernels.devices import set_up_cuda
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.device_setup import choose_matmul
from rlhf_spmd.parallel.launch import launcher_is_process_1, read_launch
from rlhf_spmd.parallel.world import World, init_world
from rlhf_spmd.process.board import Board
from rlhf_spmd.process.exit import (
    Preempted,
    classify,
    end_process,
    end_rank,
    error_text,
    forget_status,
    free_spare_memory,
    lost_connection,
    ready_to_end,
)
from rlhf_spmd.process.failure_detector import WatchLimits, describe_place
from rlhf_spmd.process.startup_checks import EarlySignals, agree_on_input, check_input
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.run_dir import EXIT_CODES, EXIT_STATUS_FILE, UNWRITTEN, create_run_dir, writing

Prepared = TypeVar("Prepared")

LEAVE_S = 10.0  # in which process groups are destroyed
SAME_PRESS_S = 1.0  # terminal and torchrun both pass a Ctrl-C on: within this time they are one


@dataclass(frozen=True)
class ProgramSettings:
    """What the process boundary needs to know of the prepared configuration.

    - timeout_s: longest time that a rank may keep others waiting in a call
    - threads: threads of a rank, on CPUs
    - collective_timeout_factor: factor on ``timeout_s`` in collectives, where a rank may wait for another that is steps behind
    - must_match: values and digests that must be equal on all ranks, by name
    - interrupt_notice: printed at the first Ctrl-C if the body polls
    """

    run_dir: Path | None = None
    timeout_s: float = 600.0
    threads: int = 1
    collective_timeout_factor: int = 1
    limits: WatchLimits = field(default_factory=WatchLimits)
    must_match: Mapping[str, str] = field(default_factory=dict)
    interrupt_notice: str = "the run saves after the steps under way and ends"


@dataclass(frozen=True)
class ProgramContext(Generic[Prepared]):
    """What ``body`` gets: the ranks, the board, and what ``prepare`` returned."""

    world: World
    board: Board
    prepared: Prepared


@ready_to_end()
def run_program(
    prepare: Callable[[], Prepared],
    body: Callable[[ProgramContext[Prepared]], None],
    settings: Callable[[Prepared], ProgramSettings] = lambda prepared: ProgramSettings(),
    run_dir_hint: Path | None = None,
    saves_on_signal: bool = False,
    dry_run: Callable[[Prepared], str] | None = None,
) -> None:
    """Run a program on this rank. Return only if it has succeeded on all ranks; otherwise end the process.

    A single process raises SystemExit instead, so that another program can call it. The run directory belongs to this
    job until its end.

    - prepare: loads and checks the input, without collectives
    - body: runs after all ranks have prepared
    - settings: takes what ``prepare`` returned
    - run_dir_hint: where exit_status.json goes if ``prepare`` fails, unless that directory belongs to another job
    - saves_on_signal: the body polls ``board.preempted``, and returns or raises :class:`Preempted`; otherwise SIGTERM raises it
    - dry_run: run ``prepare`` alone, and print what ``dry_run`` returns for its result
    """
    UNWRITTEN.clear()
    die_with_torchrun()
    set_up_cuda()
    choose_matmul()
    launch = read_launch()
    if dry_run is not None:
        with _os_exit_caught():
            check_input(launch, lambda: dry_run(prepare()))

    if launch.rank == 0 and run_dir_hint is not None:
        forget_status(run_dir_hint)

    def prepare_and_lock() -> tuple[Prepared, ProgramSettings]:
        prepared = prepare()
        program_settings = settings(prepared)
        if program_settings.run_dir is not None:
            create_run_dir(program_settings.run_dir)
            if launch.rank == 0:
                run_lock.acquire(program_settings.run_dir)
        return prepared, program_settings

    with EarlySignals() as early, _os_exit_caught():
        (prepared, program_settings), messages = agree_on_input(
            launch, prepare_and_lock, lambda pair: pair[1].must_match, run_dir_hint, early
        )
    board = Board(launch, messages.store, replace(program_settings.limits, stall_s=program_settings.timeout_s), messages.key)
    board.run_dir = program_settings.run_dir
    owns_group = not dist.is_initialized()
    ending = _os_exit_caught(lambda exit_error: fail_beside(board, exit_error, board.call))
    with _signals(board, program_settings.interrupt_notice if saves_on_signal else None), ending:
        try:
            if early.number:
                signal.raise_signal(early.number)
            _open_run_dir(board)
            board.start()
            world = init_world(
                launch,
                messages.store,
                program_settings.timeout_s * program_settings.collective_timeout_factor,
                threads=program_settings.threads,
            )
            body(ProgramContext(world, board, prepared))
            board.finish()
        except BaseException as error:  # the process boundary: every ending gets a class and a code
            _fail(board, error, saves_on_signal)
    if owns_group:
        _destroy_groups()
        if launch.size > 1:
            end_process(EXIT_CODES["done"])
    run_lock.release()


def _destroy_groups() -> None:
    """Destroy the process groups, for at most LEAVE_S: the job has succeeded, and the process ends anyway.

    NCCL may wait for ever for ranks that destroy theirs in another order, or for captured graphs (pytorch#141510, pytorch#137507).
    """
    leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)


def die_with_torchrun() -> None:
    """Have the kernel kill this process when torchrun dies, even by SIGKILL; otherwise ranks would live on as orphans."""
    if sys.platform != "linux" or not dist.is_torchelastic_launched():
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1 and not (launcher_is_process_1() or _is_container_init()):
        os._exit(EXIT_CODES["error"])  # torchrun died before prctl


def _is_container_init() -> bool:
    """Return True if torchrun itself is process 1, as the command of a container."""
    try:
        return b"torch" in Path("/proc/1/cmdline").read_bytes()
    except OSError:
        return True


# ---- running and failing -----------------------------------------------------------------------------------------------


def _open_run_dir(board: Board) -> None:
    """Remove the old exit status and send stacks of crashes in C code to the rank's log."""
    if board.run_dir is None:
        return
    if board.launch.rank == 0:
        with writing(board.run_dir / EXIT_STATUS_FILE):
            (board.run_dir / EXIT_STATUS_FILE).unlink(missing_ok=True)
    else:
        run_lock.note_owner(board.run_dir)
    path = board.log_path("err")
    if path is not None and board.launch.size > 1:
        with writing(path):
            faulthandler.enable(path.open("a"))


@contextmanager
def _signals(board: Board, interrupt_notice: str | None) -> Iterator[None]:
    """Inside, SIGTERM and SIGUSR1 set ``board.preempted``, and end a body that does not poll it (``interrupt_notice`` None).

    A first SIGINT does the same for a body that polls. A later one ends the run at once; so does SIGTERM, which
    torchrun sends on a second Ctrl-C. Signals within ``SAME_PRESS_S`` count as one Ctrl-C.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupt_times: list[float] = []

    def on_signal(number: int, frame: object) -> None:
        if board.failing or board.failure is not None:
            return
        is_first = not board.preempted
        board.preempted = True
        if is_first and interrupt_notice is None:
            raise Preempted(f"ended by {signal.Signals(number).name}")
        if interrupt_times and number != signal.SIGUSR1 and time.monotonic() - interrupt_times[0] > SAME_PRESS_S:
            raise KeyboardInterrupt
        if number == signal.SIGINT and not interrupt_times:
            interrupt_times.append(time.monotonic())
            if board.launch.rank == 0:  # os.write: the signal may interrupt a stream in the middle of its own line
                os.write(2, f"interrupted: {interrupt_notice}; again: it ends at once\n".encode())

    watched = (signal.SIGTERM, signal.SIGUSR1, *((signal.SIGINT,) if interrupt_notice is not None else ()))
    previous = {number: signal.signal(number, on_signal) for number in watched}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def do_nothing(exit_error: SystemExit) -> None:
    """Let the thread that called ``os._exit`` end by the exception."""


@contextmanager
def _os_exit_caught(fail: Callable[[SystemExit], object] = do_nothing) -> Iterator[None]:
    """Inside, ``os._exit`` of the user's code raises SystemExit, which ends the job with a class and a line.

    Otherwise the shell of a single rank, which has no launcher, would read success. In another thread than the main one
    ``fail`` is called first. Forked processes end as usual.
    """
    exit_process = os._exit
    process = os.getpid()

    def leave(status: int) -> NoReturn:
        if os.getpid() != process:
            exit_process(status)
        exit_error = SystemExit(status)
        if threading.current_thread() is not threading.main_thread():
            fail(exit_error)
        raise exit_error

    module = cast(Any, os)
    module._exit = leave
    try:
        yield
    finally:
        module._exit = exit_process


def fail_beside(board: Board, error: BaseException, call: tuple[int, str, str]) -> NoReturn:
    """End the job from another thread than the main one, which may wait for what will never come.

    ``call``: the call that the thread works for, as :attr:`Board.call`.
    """
    try:
        _fail(board, error, saves_on_signal=True, call=call)
    except SystemExit as end:  # a single process: its main thread would not see the exception
        end_process(int(str(end.code)))


def _fail(board: Board, error: BaseException, saves_on_signal: bool, call: tuple[int, str, str] | None = None) -> NoReturn:
    """Classify the exception, post it, and end this process with the code of the job's first failure."""
    board.failing = True
    free_spare_memory()
    text = _traceback_of(error)
    _log_failure(board, text)
    error_class, patience_s = _class_and_patience(board, error, saves_on_signal)
    timed_out = error_class == "hang" and "timed out" in str(error).lower()
    if board.failure is None and not (patience_s and board.await_verdict(patience_s, timed_out)):
        _post(board, error, error_class, text, call or board.call)
    if board.launch.size == 1:
        assert board.failure is not None, "a failure was posted"
        end_rank(board.launch, board.failure.code)
    board.end_with_failure()


def _log_failure(board: Board, text: str) -> None:
    """Write the traceback and the last collectives to the rank's log."""
    path = board.log_path("err")
    if path is not None:
        with suppress(OSError), path.open("a") as file:  # the disk may be full
            file.write(f"{text}last collectives: {RECORDER.dump()}\n")


def _class_and_patience(board: Board, error: BaseException, saves_on_signal: bool) -> tuple[str, float]:
    """Return the class of the ending, and for how many seconds to wait for a failure of another rank that explains it.

    The cause may be another rank's error, or a script that differs between ranks; the board then names it.
    """
    error_class = classify(error)
    if error_class == "config" and board.step:
        error_class = "error"  # the input was checked before the first step: this is a defect, and its traceback is shown
    if error_class == "hang" or (error_class == "error" and lost_connection(error)):
        return "hang", board.limits.verdict_s  # a broken connection nearly always has such a cause
    if error_class == "lost":
        return error_class, 0.0  # the user's code ended this rank, whatever the others do
    if error_class == "preempted":
        # torchrun also sends SIGTERM to the survivors of a killed rank: then that rank is the cause
        return error_class, 0.0 if saves_on_signal else board.limits.suspect_s + 2.0
    return error_class, 6 * board.limits.beat_s


def _traceback_of(error: BaseException) -> str:
    """Return the traceback of ``error``, or this thread's stack and ``error`` if it was never raised."""
    if error.__traceback__ is not None:
        return "".join(traceback.format_exception(error))
    return "".join(["Stack (most recent call last):\n", *traceback.format_stack(), *traceback.format_exception_only(error)])


def _post(board: Board, error: BaseException, error_class: str, text: str, call: tuple[int, str, str]) -> None:
    seq, name, site = call
    where = describe_place(name, seq, site, board.step)
    message = error_text(error)
    if error_class == "preempted":
        line = f"preempted at step {board.step}: {message or 'saved and ended'}"
    elif isinstance(error, KeyboardInterrupt):
        line = f"interrupted in {where}"
    elif error_class == "config":
        line = f"config error: {message}"
    elif isinstance(error, SystemExit):
        line = f"rank {board.launch.rank} left in {where}, before the end of the program: SystemExit: {message}"
    else:
        line = f"rank {board.launch.rank} failed in {where}: {type(error).__name__}: {message}"
        line += "; docs/troubleshooting.md says what needs less memory" * (error_class == "memory")
    is_defect = error_class in ("error", "lost") and not isinstance(error, KeyboardInterrupt)
    board.post_error(error_class, line, details=text if is_defect else "", call=name)
