"""Before any process group exists, all ranks agree that each of them has read and checked its input, and has the same.

The agreement goes through the store that all ranks share: every rank says that it is ready, or the first that is not says why.
"""

from __future__ import annotations

import hashlib
import json
import platform
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

import torch

from rlhf_spmd.kernels import model_device
from rlhf_spmd.parallel.world import Launch, connect_store, start_limit
from rlhf_spmd.process.ending import ToldToEnd, announce, await_all, classify, end_rank, one_line, told
from rlhf_spmd.process.messages import VERDICT, ForgedMessage, Messages, agree_on_key
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.run_dir import EXIT_CODES, ExitStatus, write_exit_status

T = TypeVar("T")

TELL_LATE_S = 300.0  # until ranks that are still checking their input are named
PREPARE_TIMEOUT_S = 4200.0  # for them; more than one of them may wait for another process to make a file of data.cache_dir
NO_KEY = "key/none"  # unsealed: why a rank has not got the key of the job
Refusal = tuple[str, str, str]  # class, line, traceback (only for defects of the program)


class EarlySignals:
    """SIGTERM, SIGUSR1 and SIGINT before there is a run. ``number``: of the one that came while nothing could be ended, 0: none."""

    def __init__(self) -> None:
        self.number = 0
        self.ends = False  # what goes on can be ended by an exception
        self._previous: dict[int, object] = {}

    def __enter__(self) -> EarlySignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._came)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.ends:
            self.ends = False
            raise ToldToEnd(f"ended by {signal.Signals(number).name} before the first step")
        self.number = self.number or number


def try_input(launch: Launch, check: Callable[[], str]) -> NoReturn:
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


def agree_on_input(
    launch: Launch,
    prepare: Callable[[], T],
    alike: Callable[[T], Mapping[str, str]],
    run_dir_hint: Path | None,
    signals: EarlySignals,
) -> tuple[T, Messages]:
    """Runs ``prepare`` and waits until it has succeeded on every rank, and all have the same ``alike`` of it, by its name. The first
    rank that fails prints for the job. Returns what ``prepare`` did, and the store with the key of the job.

    Costs every rank a few store messages; nobody leaves before the others know (30 s), so that each exits with the code.
    """
    messages, refusal = _connect(launch, run_dir_hint)
    prepared: list[T] = []
    try:
        if refusal is None:
            signals.ends = True
            if signals.number:  # it came while nothing could be ended
                raise ToldToEnd(f"ended by {signal.Signals(signals.number).name} before the first step")
            prepared.append(prepare())
    except (Exception, SystemExit) as error:  # the process boundary
        refusal = _refusal(launch, error)
    finally:
        signals.ends = False
    try:
        if prepared and refusal is None:
            own = {"--nproc-per-node": str(launch.local_size), **alike(prepared[0])}
            refusal = _differing(launch, messages, own)
            if refusal is None and launch.local_rank == 0:
                refusal = _differing(launch, messages, versions())
        _post_verdict(launch, messages, refusal)
        _await_verdict(launch, messages, PREPARE_TIMEOUT_S, run_dir_hint)
    except ForgedMessage as error:
        _end_without_key(launch, messages, refusal or _unsealed(launch, messages, error), run_dir_hint)
    except RuntimeError as error:  # torch's store clients raise nothing more precise in all versions
        if launch.local_rank == 0:
            announce(
                f"rank {launch.rank} lost the store that all ranks share before the first step: {one_line(str(error))[:300]}"
            )
        end_rank(launch, EXIT_CODES["lost"])
    finally:
        messages.forget_key_file()
    assert prepared, "a refusal ends the process"
    return prepared[0], messages


def _connect(launch: Launch, run_dir_hint: Path | None) -> tuple[Messages, Refusal | None]:
    """The store, and why this rank has not got the key of the job. Ends the process where there is no store."""
    try:
        store = connect_store(launch)
    except (RuntimeError, OSError, ValueError) as error:
        line = f"rank {launch.rank} cannot reach the store that all ranks share: {one_line(str(error))[:300]}"
        error_class, line, details = _refusal(launch, error) if isinstance(error, ValueError) else ("hang", line, "")
        announce(line, details)
        end_rank(launch, input_exit_code(error_class))
    try:
        return agree_on_key(launch, store, run_dir_hint), None
    except ValueError as error:
        refusal = _refusal(launch, error)
        store.compare_set(NO_KEY, "", json.dumps([*refusal[:2], launch.rank]))  # nothing that it seals would be believed
        return Messages(store, b""), refusal
    except RuntimeError:
        line = f"rank {launch.rank} has waited {start_limit(launch):.0f} s for rank 0 to start"
        return Messages(store, b""), ("hang", line, "")


def _unsealed(launch: Launch, messages: Messages, error: ForgedMessage) -> Refusal:
    """Why there is a message without the job's seal: a rank that has not got the key may have said so."""
    try:
        error_class, line, _ = json.loads(messages.store.get(NO_KEY)) if messages.store.check([NO_KEY]) else ("", "", 0)
    except (ValueError, TypeError):
        error_class = line = ""
    if error_class == "config":
        return error_class, one_line(str(line))[:500], ""
    return "error", f"rank {launch.rank} ends before the first step: {error}", ""


def _end_without_key(launch: Launch, messages: Messages, refusal: Refusal, run_dir_hint: Path | None) -> NoReturn:
    """Ends this rank, and by a verdict that nobody can read those that still wait for one."""
    with suppress(RuntimeError):
        messages.put_first(VERDICT, "")
    if launch.local_rank == 0:
        announce(*refusal[1:])
    messages.forget_key_file()
    _record(launch, run_dir_hint, ExitStatus(refusal[0], one_line(refusal[1])))
    end_rank(launch, input_exit_code(refusal[0]))


@cache
def versions() -> dict[str, str]:
    """What must be alike on all ranks whatever they run: versions of the software and the kind of device, by name."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return {
        "version of Python": platform.python_version(),
        "version of torch": torch.__version__,
        "kind of device": model_device().type,
        "version of rlhf_spmd (its code)": digest.hexdigest(),
    }


def _differing(launch: Launch, messages: Messages, own: Mapping[str, str]) -> Refusal | None:
    """What this rank has another of than the first that came here."""
    here = f"rank {launch.rank} on {socket.gethostname()}"
    there, first = json.loads(messages.put_first(f"prepare/alike/{next(iter(own))}", json.dumps([here, own])))
    for name in {**first, **own}:
        if first.get(name) != own.get(name):
            values = f"{one_line(str(own.get(name)))[:80]}, not {one_line(str(first.get(name)))[:80]}"
            return "config", f"{here} has another {name} than {there} ({values}): give all ranks the same", ""
    return None


def _post_verdict(launch: Launch, messages: Messages, refusal: Refusal | None) -> None:
    if refusal:
        record = json.dumps([*refusal[:2], launch.rank])
        if messages.put_first(VERDICT, record) == record:
            announce(*refusal[1:])
        return
    ready = [f"prepare/ok/{rank}" for rank in range(launch.size)]
    messages.set(ready[launch.rank], "1")
    if messages.store.add("prepare/ok", 1) >= launch.size:
        messages.get_all(ready)  # and not only as many
        messages.put_first(VERDICT, "ok")


def _await_verdict(launch: Launch, messages: Messages, timeout_s: float, run_dir_hint: Path | None) -> None:
    store = messages.store
    for seconds, is_last in ((TELL_LATE_S, False), (max(timeout_s - TELL_LATE_S, 0.0), True)):
        try:
            store.wait([VERDICT], timedelta(seconds=seconds))
            break
        except RuntimeError:
            if store.add(f"prepare/late/{is_last}", 1) > 1:
                continue  # one of a thousand waiting ranks asks the store for each of them
            late = [r for r in range(launch.size) if not store.check([f"prepare/ok/{r}"])]
            line = f"ranks {late[:8]} did not finish checking their input within {timeout_s if is_last else TELL_LATE_S:.0f} s"
            record = json.dumps(["hang", line, None])
            if not is_last:
                announce(f"{line}; the others wait for {timeout_s:.0f} s")
            elif messages.put_first(VERDICT, record) == record:
                announce(line)
    verdict = messages.get(VERDICT)
    if verdict == "ok":
        return
    error_class, line, culprit = json.loads(verdict)
    if launch.size > 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it when the first rank leaves; the code must stay ours
    _record(launch, run_dir_hint, ExitStatus(error_class, one_line(line), rank=culprit))
    messages.forget_key_file()
    await_all(store, "prepare/known", launch.size, time.monotonic() + 30.0)
    end_rank(launch, input_exit_code(error_class))


def _record(launch: Launch, run_dir_hint: Path | None, status: ExitStatus) -> None:
    """Exit_status.json, by rank 0, whose process is the owner of the directory, if it is this job's."""
    if launch.rank == 0 and run_dir_hint is not None:
        with suppress(OSError):  # the refusal itself was told, and run_dir may be what is wrong
            if run_lock.other_owner(run_dir_hint) is None:
                write_exit_status(run_dir_hint, status)


def input_exit_code(error_class: str) -> int:
    """Bad input ends every process with 2, data too; exit_status.json tells the class."""
    return EXIT_CODES["config"] if error_class in ("config", "data") else EXIT_CODES[error_class]


def _refusal(launch: Launch, error: BaseException) -> Refusal:
    """The class, message and traceback of an exception that ``prepare`` raised."""
    error_class = classify(error)
    if error_class == "error" and isinstance(error, OSError):
        error_class = "data"  # a file that is named in the configuration and cannot be read
    origin = f" [rank {launch.rank} on {socket.gethostname()}]" if launch.size > 1 else ""
    if error_class == "signal":
        return error_class, f"{told(error)}{origin}", ""
    if error_class == "lost":
        return error_class, f"left while it checked the input: SystemExit: {told(error)}{origin}", traceback.format_exc()
    if error_class == "error":
        return error_class, f"{type(error).__name__}: {told(error)}{origin}", traceback.format_exc()
    return error_class, f"{error_class} error: {told(error)}{origin}", ""
