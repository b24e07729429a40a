"""The process boundary of every program: bad input stops all ranks with one line, any failure ends all of them with its code.

``run_program(prepare, body)``: ``prepare`` loads and checks the input on each rank by itself, before any process group or model
exists; the ranks agree through the store that all of them succeeded; then ``body`` runs. This is the only place that catches
everything: it classes the exception, posts it on the board and turns it into an exit code.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist

from rlhf_spmd.parallel.board import Board, announce, await_all, end_process, one_line
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.watch import Limits, place
from rlhf_spmd.parallel.world import (
    Launch,
    World,
    choose_matmul,
    connect_store,
    init_world,
    launcher_is_process_1,
    read_launch,
)
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.run_dir import (
    DISK_ERRORS,
    EXIT_CODES,
    EXIT_STATUS_FILE,
    ExitStatus,
    create_run_dir,
    write_exit_status,
    writing,
)

T = TypeVar("T")

# what a broken connection to another rank looks like in an exception of gloo, nccl or the store
_CONNECTION_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "connection refused", "broken pipe", "timed out")
SAME_PRESS_S = 1.0
TELL_LATE_S = 300.0  # until ranks that are still checking their input are named
PREPARE_TIMEOUT_S = 4200.0  # for them; more than one of them may wait for another process to make a file of data.cache_dir
_CLASSES = {"config": (ValueError,), "numerics": (FloatingPointError,), "memory": (MemoryError, torch.OutOfMemoryError)}


class Preempted(Exception):
    """The run was told to end (SIGTERM, SIGUSR1, Ctrl-C) and has saved; raised by the training loop on every rank."""

    exit_class = "preempted"


@dataclass(frozen=True)
class ProgramSettings:
    """What the process boundary must know of the prepared configuration."""

    run_dir: Path | None = None
    timeout_s: float = 600.0  # the longest that one rank may keep the others waiting in a call
    threads: int = 1  # of a rank, on CPUs
    calls_apart: int = 1  # so many times as long where a rank waits for what another one does some steps later
    limits: Limits = field(default_factory=Limits)
    alike: Mapping[str, str] = field(default_factory=dict)  # what all ranks must have the same of, by its name: digests
    when_told: str = "the run saves after the steps under way and ends"  # what a body that polls does at a first Ctrl-C


@dataclass(frozen=True)
class ProgramContext(Generic[T]):
    """What ``body`` gets: the ranks, the board, and what ``prepare`` returned."""

    world: World
    board: Board
    prepared: T


def run_program(
    prepare: Callable[[], T],
    body: Callable[[ProgramContext[T]], None],
    settings: Callable[[T], ProgramSettings] = lambda prepared: ProgramSettings(),
    run_dir_hint: Path | None = None,
    saves_on_signal: bool = False,
    dry_run: Callable[[T], str] | None = None,
) -> None:
    """Runs a program to its end on this rank; returns only if it succeeded on all ranks, otherwise ends the process.

    ``prepare`` must be local (no collective). The run directory belongs to this job until its end; ``run_dir_hint`` receives
    exit_status.json when ``prepare`` fails, unless it belongs to another job.
    ``saves_on_signal``: the body polls ``board.preempted``, and returns or raises :class:`Preempted`; otherwise SIGTERM raises it.
    ``dry_run``: in place of all but ``prepare``, what it says of the prepared input is printed.
    A single process raises SystemExit instead of ending, so that it can be called from another program.
    """
    die_with_torchrun()
    choose_matmul()
    launch = read_launch()
    if dry_run is not None:
        _try_input(launch, lambda: dry_run(prepare()))

    def checked() -> tuple[T, ProgramSettings]:
        prepared = prepare()
        chosen = settings(prepared)
        if chosen.run_dir is not None:
            create_run_dir(chosen.run_dir)
            if launch.rank == 0:
                run_lock.take(chosen.run_dir)
        return prepared, chosen

    prepared, chosen, store = _agree_on_input(launch, checked, run_dir_hint)
    board = Board(launch, store, replace(chosen.limits, stall_s=chosen.timeout_s))
    board.run_dir = chosen.run_dir
    owns_group = not dist.is_initialized()
    with _signals(board, chosen.when_told if saves_on_signal else None):
        try:
            _open_run_dir(board)
            board.start()
            world = init_world(launch, store, chosen.timeout_s * chosen.calls_apart, threads=chosen.threads)
            body(ProgramContext(world, board, prepared))
            board.finish(store)
            if launch.rank == 0 and board.run_dir is not None:
                run_lock.prove(board.run_dir)
                write_exit_status(board.run_dir, ExitStatus("done", step=board.step, last_checkpoint=board.last_checkpoint))
        except BaseException as error:  # the process boundary: every ending gets a class and a code
            _fail(board, error, saves_on_signal)
    if owns_group:
        dist.destroy_process_group()
        if launch.size > 1:
            end_process(EXIT_CODES["done"])
    run_lock.release()


def classify(error: BaseException) -> str:
    """The class of an ending (a key of EXIT_CODES): the exception type's own ``exit_class``, else by built-in type."""
    own = getattr(type(error), "exit_class", None)
    if own in EXIT_CODES:
        return str(own)
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return "checkpoint"
    return next((name for name, kinds in _CLASSES.items() if isinstance(error, kinds)), "error")


def lost_connection(error: BaseException) -> bool:
    """Whether this failure may be the consequence of another rank's: a broken or timed-out connection."""
    if isinstance(error, dist.DistError | ConnectionError):
        return True
    return type(error) is RuntimeError and any(word in str(error).lower() for word in _CONNECTION_WORDS)


def die_with_torchrun() -> None:
    """The kernel ends this process when torchrun dies, even by SIGKILL: otherwise ranks live on as orphans."""
    if sys.platform != "linux" or not dist.is_torchelastic_launched():
        return
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == 1 and not (launcher_is_process_1() or _is_container_init()):
        os._exit(EXIT_CODES["error"])  # it died before the call


def _is_container_init() -> bool:
    """Whether torchrun itself is process 1, as in a container whose command it is."""
    try:
        return b"torch" in Path("/proc/1/cmdline").read_bytes()
    except OSError:
        return True


# ---- agreeing on the input ---------------------------------------------------------------------------------------------


def _try_input(launch: Launch, check: Callable[[], str]) -> NoReturn:
    """On the first rank, print what ``check`` finds, or its line of refusal, and end with the code that a run would end with."""
    if launch.rank > 0:
        raise SystemExit(0)
    try:
        print(check())
    except (Exception, SystemExit) as error:  # the process boundary
        error_class, line, details = _refusal(Launch(), error)
        announce(line, details)
        raise SystemExit(input_exit_code(error_class)) from None
    raise SystemExit(0)


def _agree_on_input(
    launch: Launch, prepare: Callable[[], tuple[T, ProgramSettings]], run_dir_hint: Path | None
) -> tuple[T, ProgramSettings, dist.Store]:
    """Runs ``prepare`` and waits until it has succeeded on every rank. The first rank that fails prints for the job.

    Costs every rank a few store messages; nobody leaves before the others know (30 s), so that each exits with the code.
    """
    prepared: tuple[T, ProgramSettings] | None = None
    refusal: tuple[str, str, str] | None = None  # class, line, traceback
    try:
        prepared = prepare()
    except (Exception, SystemExit) as error:  # the process boundary; sys.exit() in the user's code is no end of the job
        refusal = _refusal(launch, error)
    try:
        store = connect_store(launch, timeout_s=20.0 if refusal else 60.0)
    except (RuntimeError, OSError, ValueError) as error:
        line = f"rank {launch.rank} cannot reach the store that all ranks share: {one_line(str(error))[:300]}"
        refusal = refusal or (_refusal(launch, error) if isinstance(error, ValueError) else ("hang", line, ""))
        announce(refusal[1], refusal[2])
        _exit(launch, input_exit_code(refusal[0]))
    if prepared is not None:
        here = f"rank {launch.rank} on {socket.gethostname()}"
        mine = {"--nproc-per-node": str(launch.local_size), **prepared[1].alike}
        there, first = json.loads(store.compare_set("prepare/alike", "", json.dumps([here, mine])))  # the first that came here
        for name in [name for name in {**first, **mine} if first.get(name) != mine.get(name)][:1]:
            values = f"{one_line(str(mine.get(name)))[:80]}, not {one_line(str(first.get(name)))[:80]}"
            refusal = ("config", f"{here} has another {name} than {there} ({values}): give all ranks the same", "")
    if refusal:
        record = json.dumps([*refusal[:2], launch.rank])
        if store.compare_set("prepare/verdict", "", record) == record.encode():
            announce(refusal[1], refusal[2])
    else:
        store.set(f"prepare/ok/{launch.rank}", "1")
        if store.add("prepare/ok", 1) == launch.size:
            store.compare_set("prepare/verdict", "", "ok")
    _await_input_verdict(launch, store, PREPARE_TIMEOUT_S, run_dir_hint)
    assert prepared is not None, "a refusal ends the process"
    return *prepared, store


def _await_input_verdict(launch: Launch, store: dist.Store, timeout_s: float, run_dir_hint: Path | None) -> None:
    for seconds, is_last in ((TELL_LATE_S, False), (max(timeout_s - TELL_LATE_S, 0.0), True)):
        try:
            store.wait(["prepare/verdict"], timedelta(seconds=seconds))
            break
        except RuntimeError:
            if store.add(f"prepare/late/{is_last}", 1) > 1:
                continue  # one of a thousand waiting ranks asks the store for each of them
            late = [r for r in range(launch.size) if not store.check([f"prepare/ok/{r}"])]
            line = f"ranks {late[:8]} did not finish checking their input within {timeout_s if is_last else TELL_LATE_S:.0f} s"
            record = json.dumps(["hang", line, None])
            if not is_last:
                announce(f"{line}; the others wait for {timeout_s:.0f} s")
            elif store.compare_set("prepare/verdict", "", record) == record.encode():
                announce(line)
    verdict = store.get("prepare/verdict").decode()
    if verdict == "ok":
        return
    error_class, line, culprit = json.loads(verdict)
    if launch.size > 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when the first rank leaves; the code must stay ours
    if launch.rank == 0 and run_dir_hint is not None:  # whose process is the owner, if it is this job's
        with suppress(OSError):  # the refusal itself was told, and run_dir may be what is wrong
            if run_lock.other_owner(run_dir_hint) is None:
                write_exit_status(run_dir_hint, ExitStatus(error_class, line, rank=culprit))
    await_all(store, "prepare/known", launch.size, time.monotonic() + 30.0)
    _exit(launch, input_exit_code(error_class))


def input_exit_code(error_class: str) -> int:
    """Bad input ends every process with 2, data too; exit_status.json tells the class."""
    return EXIT_CODES["config"] if error_class in ("config", "data") else EXIT_CODES[error_class]


def _refusal(launch: Launch, error: BaseException) -> tuple[str, str, str]:
    """Class, line and traceback (only for defects of the program) of an exception in ``prepare``."""
    error_class = classify(error)
    if error_class == "error" and isinstance(error, OSError):
        error_class = "data"  # a file that is named in the configuration and cannot be read
    origin = f" [rank {launch.rank} on {socket.gethostname()}]" if launch.size > 1 else ""
    if error_class == "error":
        return error_class, f"{type(error).__name__}: {_told(error)}{origin}", traceback.format_exc()
    return error_class, f"{error_class} error: {_told(error)}{origin}", ""


def _told(error: BaseException) -> str:
    """In one line, with what was noted on its way here."""
    return one_line(" ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))]))


# ---- running and failing -----------------------------------------------------------------------------------------------


def _open_run_dir(board: Board) -> None:
    """An exit status of an earlier start must not be taken for this one's; crashes in C code leave their stack in the log."""
    if board.run_dir is None:
        return
    if board.launch.rank == 0:
        with writing(board.run_dir / EXIT_STATUS_FILE):
            (board.run_dir / EXIT_STATUS_FILE).unlink(missing_ok=True)
    else:
        run_lock.follow(board.run_dir)
    path = board.log_path("err")
    if path is not None and board.launch.size > 1:
        with writing(path):
            faulthandler.enable(path.open("a"))


@contextmanager
def _signals(board: Board, when_told: str | None) -> Iterator[None]:
    """SIGTERM and SIGUSR1 set ``board.preempted`` (and end a body that does not poll it); restored on leaving.

    So does a first SIGINT for a body that polls; one after it ends the run at once, and SIGTERM too, which is what torchrun makes
    of a second Ctrl-C. Within ``SAME_PRESS_S`` they are the same Ctrl-C, which the terminal and torchrun both pass on.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted_at: list[float] = []

    def on_signal(number: int, frame: object) -> None:
        if board.failing or board.failure is not None:
            return
        first, board.preempted = not board.preempted, True
        if first and when_told is None:
            raise Preempted(f"ended by {signal.Signals(number).name}")
        if interrupted_at and number != signal.SIGUSR1 and time.monotonic() - interrupted_at[0] > SAME_PRESS_S:
            raise KeyboardInterrupt
        if number == signal.SIGINT and not interrupted_at:
            interrupted_at.append(time.monotonic())
            if board.launch.rank == 0:  # the streams may be in the middle of a line of their own
                os.write(2, f"interrupted: {when_told}; again: it ends at once\n".encode())

    watched = (signal.SIGTERM, signal.SIGUSR1, *((signal.SIGINT,) if when_told is not None else ()))
    previous = {number: signal.signal(number, on_signal) for number in watched}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def fail_beside(board: Board, error: BaseException, call: tuple[int, str, str]) -> NoReturn:
    """End the job from a thread that works for ``call`` (as :attr:`Board.call`) beside the main thread, which may be waiting for
    what will not come."""
    _fail(board, error, saves_on_signal=True, call=call)


def _fail(board: Board, error: BaseException, saves_on_signal: bool, call: tuple[int, str, str] | None = None) -> NoReturn:
    """Class the exception, let the job know, end this process with the code of the job's first failure."""
    text = traceback.format_exc()
    board.failing = True
    path = board.log_path("err")
    if path is not None:
        with suppress(OSError), path.open("a") as file:  # the disk may be full
            file.write(f"{text}last collectives: {RECORDER.dump()}\n")
    error_class = classify(error)
    if error_class == "config" and board.step:
        error_class = "error"  # the input was checked before the first step: this is a defect, and its traceback is shown
    # The error may be the consequence of another rank's, or of a script that the ranks do not agree on: where the board finds
    # that, it names the cause. A broken connection or a message for another call nearly always is one.
    patience_s = 6 * board.limits.beat_s
    if error_class == "hang" or (error_class == "error" and lost_connection(error)):
        error_class, patience_s = "hang", board.limits.verdict_s
    elif error_class == "preempted":
        # torchrun also sends SIGTERM to the survivors of a rank that was killed: the cause is that rank then
        patience_s = 0.0 if saves_on_signal else board.limits.suspect_s + 2.0
    waited = error_class == "hang" and "timed out" in str(error).lower()
    if board.failure is None and not (patience_s and board.await_verdict(patience_s, waited)):
        _post(board, error, error_class, text, call or board.call)
    if board.launch.size == 1:
        assert board.failure is not None, "a failure was posted"
        _exit(board.launch, board.failure.code)
    board.leave()


def _post(board: Board, error: BaseException, error_class: str, text: str, call: tuple[int, str, str]) -> None:
    seq, name, site = call
    where = place(name, seq, site, board.step)
    told = _told(error)
    if error_class == "preempted":
        line = f"preempted at step {board.step}: {told or 'saved and ended'}"
    elif isinstance(error, KeyboardInterrupt):
        line = f"interrupted in {where}"
    elif error_class == "config":
        line = f"config error: {told}"
    else:
        line = f"rank {board.launch.rank} failed in {where}: {type(error).__name__}: {told}"
        line += "; docs/troubleshooting.md says what needs less memory" * (error_class == "memory")
    defect = error_class == "error" and not isinstance(error, KeyboardInterrupt)
    board.post_error(error_class, line, details=text if defect else "", call=name)


def _exit(launch: Launch, code: int) -> NoReturn:
    if launch.size == 1:
        run_lock.release()
        raise SystemExit(code) from None
    end_process(code)
