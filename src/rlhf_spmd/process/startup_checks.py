"""Before any process group exists, all ranks agree that their input is good and the same.

They agree through the store that all ranks share: every rank reports that it is ready, or the first that is not says
why. Each rank reads files of its own host, which may be other copies, so ranks compare digests
(input_digests.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn, TypeVar

import torch

from rlhf_spmd.kernels import model_device
from rlhf_spmd.parallel.launch import Launch, connect_store
from rlhf_spmd.process.exit import EndedBySignal, announce, await_all, classify, end_rank, error_text, one_line
from rlhf_spmd.process.messages import VERDICT, ForgedMessage, Messages, agree_on_key, await_key
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.run_dir import EXIT_CODES, ExitStatus, write_exit_status

T = TypeVar("T")

ANNOUNCE_AFTER_S = 15.0  # of a wait at the start; then a rank prints what it waits for
ANNOUNCE_LATE_S = 300.0  # then ranks that are still checking their input are named
SIGNAL_GRACE_S = 2.0  # from a signal to the end of a rank that waits for others, which may have got the signal, too
PREPARE_TIMEOUT_S = 4200.0  # longest check of the input; a rank may wait for another process to fill data.cache_dir
NO_KEY = "key/none"  # unsigned: why a rank lacks the key of the job


class InputRefusal(NamedTuple):
    """Why a rank cannot start. ``details``: a traceback, only for defects of the program."""

    error_class: str
    line: str
    details: str = ""


class EarlySignals:
    """Holds SIGTERM, SIGUSR1 and SIGINT until there is a run.

    - number: the first signal that came, or 0
    - may_raise: True while an exception may end the code that runs
    """

    def __init__(self) -> None:
        self.number = 0
        self.may_raise = False
        self._arrival_time = 0.0
        self._awaited = ""
        self._wait_started = 0.0
        self._handlers: dict[int, object] = {}  # by signal, those to restore

    def __enter__(self) -> EarlySignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number = number
            self._arrival_time = time.monotonic()
        if self.may_raise:
            self.may_raise = False
            self.check()

    def check(self) -> None:
        """Raise EndedBySignal if a signal has come."""
        if (ending := self.ending()) is not None:
            raise ending

    def ending(self) -> EndedBySignal | None:
        """Return how the signal that came ends the program; None without one."""
        return EndedBySignal(f"ended by {signal.Signals(self.number).name} before the first step") if self.number else None

    def while_waiting(self, launch: Launch, awaited: str, announces: bool = True) -> None:
        """Check for signals while this rank waits for ``awaited``; call it again and again.

        With ``announces``, the first rank of a machine reports a long wait once. Raises EndedBySignal some time after a signal.
        """
        now = time.monotonic()
        if self.number and now - self._arrival_time > SIGNAL_GRACE_S:
            name = signal.Signals(self.number).name
            raise EndedBySignal(f"ended by {name} before the first step, while it waited for {awaited}")
        if self._awaited != awaited:
            self._awaited = awaited
            self._wait_started = now
        elif announces and launch.local_rank == 0 and now - self._wait_started > ANNOUNCE_AFTER_S:
            announce(f"rank {launch.rank} waits for {awaited}")
            self._wait_started = math.inf


def check_input(launch: Launch, check: Callable[[], str]) -> NoReturn:
    """Dry run: the first rank prints what ``check`` returns, or its refusal, and ends with the code of a real run."""
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
    must_match: Callable[[T], Mapping[str, str]],
    run_dir_hint: Path | None,
    signals: EarlySignals,
) -> tuple[T, Messages]:
    """Run ``prepare`` on every rank, and wait until all have succeeded with equal ``must_match`` values.

    Return what ``prepare`` returned, and the store with the job's key. The first rank that fails prints for the job. A
    few store messages per rank; a failing rank waits up to 30 s until the others know, so each exits with the code.

    Collective over the world: every rank of it must call, in program order.
    """
    messages, refusal = _connect(launch, run_dir_hint, signals)
    prepared: list[T] = []
    try:
        if refusal is None:
            signals.may_raise = True
            signals.check()  # one came while no exception could be raised
            prepared.append(prepare())
            signals.check()  # the user's code may have caught the exception
    except (Exception, SystemExit) as error:  # the process boundary
        refusal = _refusal(launch, signals.ending() or error)  # an import may have made another error of a signal
    finally:
        signals.may_raise = False
    try:
        if prepared and refusal is None:
            refusal = _differing(launch, messages, {"--nproc-per-node": str(launch.local_size), **must_match(prepared[0])})
            if refusal is None and launch.local_rank == 0:
                refusal = _differing(launch, messages, versions())
        _post_verdict(launch, messages, refusal)
        _await_verdict(launch, messages, PREPARE_TIMEOUT_S, run_dir_hint, signals)
    except ForgedMessage as error:
        _end_without_key(launch, messages, refusal or _explain_forged(launch, messages, error), run_dir_hint)
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


def _connect(launch: Launch, run_dir_hint: Path | None, signals: EarlySignals) -> tuple[Messages, InputRefusal | None]:
    """Return the store, and why this rank lacks the job's key (or None).

    Ends the process if there is no store, and if a signal comes while it waits.
    """
    on_wait = partial(signals.while_waiting, launch)
    try:
        store = connect_store(launch, on_wait=on_wait)
    except (EndedBySignal, ValueError) as error:
        _end(launch, _refusal(launch, error), run_dir_hint)
    except (RuntimeError, OSError) as error:
        line = f"rank {launch.rank} cannot reach the store that all ranks share: {one_line(str(error))[:300]}"
        _end(launch, InputRefusal("hang", line), run_dir_hint)
    try:
        return agree_on_key(launch, store, run_dir_hint, on_wait), None
    except EndedBySignal as error:
        _end(launch, _refusal(launch, error), run_dir_hint)
    except ValueError as error:
        refusal = _refusal(launch, error)
        store.compare_set(NO_KEY, "", json.dumps([*refusal[:2], launch.rank]))  # unsigned: this rank has no key to sign with
        return Messages(store, b""), refusal
    except TimeoutError as error:
        return Messages(store, b""), InputRefusal("hang", str(error))
    except RuntimeError as error:
        line = f"rank {launch.rank} lost the store that all ranks share: {one_line(str(error))[:300]}"
        return Messages(store, b""), InputRefusal("hang", line)


def _end(launch: Launch, refusal: InputRefusal, run_dir_hint: Path | None, prints: bool = True) -> NoReturn:
    """End this rank for a reason that it does not share with the others."""
    error_class, line, details = refusal
    if prints:
        announce(line, details)
    _record(launch, run_dir_hint, ExitStatus(error_class, one_line(line)))
    end_rank(launch, input_exit_code(error_class))


def _explain_forged(launch: Launch, messages: Messages, error: ForgedMessage) -> InputRefusal:
    """Explain a message without the signature: a rank that lacks the key may have said why."""
    try:
        error_class, line, _ = json.loads(messages.store.get(NO_KEY)) if messages.store.check([NO_KEY]) else ("", "", 0)
    except (ValueError, TypeError):
        error_class = line = ""
    if error_class == "config":
        return InputRefusal(error_class, one_line(str(line))[:500])
    return InputRefusal("error", f"rank {launch.rank} ends before the first step: {error}")


def _end_without_key(launch: Launch, messages: Messages, refusal: InputRefusal, run_dir_hint: Path | None) -> NoReturn:
    """End this rank. Post an unreadable verdict, which also ends the ranks that still wait for one."""
    with suppress(RuntimeError):
        messages.put_first(VERDICT, "")
    messages.forget_key_file()
    _end(launch, refusal, run_dir_hint, prints=launch.local_rank == 0)


@cache
def versions() -> dict[str, str]:
    """Return what must be equal on all ranks whatever they run: software versions and the kind of device, by name."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return {
        "version of Python": platform.python_version(),
        "version of torch": torch.__version__,
        "kind of device": model_device().type,
        "version of rlhf_spmd (its code)": digest.hexdigest(),
    }


def _differing(launch: Launch, messages: Messages, values: Mapping[str, str]) -> InputRefusal | None:
    """Return a refusal if a value differs from that of the first rank that came here."""
    rank_name = f"rank {launch.rank} on {socket.gethostname()}"
    message = messages.put_first(f"prepare/must_match/{next(iter(values))}", json.dumps([rank_name, values]))
    first_rank, first_values = json.loads(message)
    for name in {**first_values, **values}:
        if first_values.get(name) != values.get(name):
            both = f"{one_line(str(values.get(name)))[:80]}, not {one_line(str(first_values.get(name)))[:80]}"
            line = f"{rank_name} has another {name} than {first_rank} ({both}): give all ranks the same"
            return InputRefusal("config", line)
    return None


def _post_verdict(launch: Launch, messages: Messages, refusal: InputRefusal | None) -> None:
    if refusal:
        record = json.dumps([*refusal[:2], launch.rank])
        if messages.put_first(VERDICT, record) == record:
            announce(*refusal[1:])
        return
    ready = [f"prepare/ok/{rank}" for rank in range(launch.size)]
    messages.set(ready[launch.rank], "1")
    if messages.store.add("prepare/ok", 1) >= launch.size:
        messages.get_all(ready)  # checks the signatures, not only the count
        messages.put_first(VERDICT, "ok")


def _await_verdict(
    launch: Launch, messages: Messages, timeout_s: float, run_dir_hint: Path | None, signals: EarlySignals
) -> None:
    """Return if all ranks have succeeded, else end the process. A signal during the wait is this rank's refusal."""
    store = messages.store
    on_wait = partial(signals.while_waiting, launch, "the other ranks to check their input", announces=False)
    for seconds, is_last in ((ANNOUNCE_LATE_S, False), (max(timeout_s - ANNOUNCE_LATE_S, 0.0), True)):
        try:
            if await_key(store, VERDICT, seconds, on_wait):
                break
        except EndedBySignal as error:
            _post_verdict(launch, messages, _refusal(launch, error))
            break
        if store.add(f"prepare/late/{is_last}", 1) > 1:
            continue  # only one of a thousand waiting ranks asks the store about each rank
        late = [r for r in range(launch.size) if not store.check([f"prepare/ok/{r}"])]
        line = f"ranks {late[:8]} did not finish checking their input within {timeout_s if is_last else ANNOUNCE_LATE_S:.0f} s"
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
    """Rank 0 writes exit_status.json, unless the directory belongs to another job."""
    if launch.rank == 0 and run_dir_hint is not None:
        with suppress(OSError):  # the refusal was printed already, and run_dir may be what is wrong
            if run_lock.other_owner(run_dir_hint) is None:
                write_exit_status(run_dir_hint, status)


def input_exit_code(error_class: str) -> int:
    """Return the exit code of a refusal: 2 for bad configuration and for bad data, which exit_status.json tells apart."""
    return EXIT_CODES["config"] if error_class in ("config", "data") else EXIT_CODES[error_class]


def _refusal(launch: Launch, error: BaseException) -> InputRefusal:
    """Return the refusal for an exception from ``prepare``."""
    error_class = classify(error)
    if error_class == "error" and isinstance(error, OSError):
        error_class = "data"  # an unreadable file that the configuration names
    origin = f" [rank {launch.rank} on {socket.gethostname()}]" if launch.size > 1 else ""
    if error_class == "signal":
        return InputRefusal(error_class, f"{error_text(error)}{origin}")
    if error_class == "lost":
        line = f"ended while it checked the input: SystemExit: {error_text(error)}{origin}"
        return InputRefusal(error_class, line, traceback.format_exc())
    if error_class == "error":
        return InputRefusal(error_class, f"{type(error).__name__}: {error_text(error)}{origin}", traceback.format_exc())
    return InputRefusal(error_class, f"{error_class} error: {error_text(error)}{origin}")
