"""The error board: every rank's heartbeat and the one failure that ends the job, in the store that all ranks share.

Each process has one :class:`Board` with a daemon thread and its own connection to the store, so it works while the main
thread is blocked in a collective. Every half second the thread publishes a heartbeat (where the main thread is) and
looks for a failure. Rank 0's thread reads all heartbeats, the others only rank 0's, so the cost is O(ranks). It finds
lost ranks, diverged scripts and standstills (failure_detector.py). The first failure that is posted is the job's: its
rank prints one line and writes exit_status.json, then every process ends with its code. The main thread only writes
fields, about a microsecond per call.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import threading
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import torch.distributed as dist

from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.process.exit import announce, await_all, classify, end_process, one_line, record_status
from rlhf_spmd.process.failure_detector import HISTORY, WINDOW, Finding, Heartbeat, Watch, WatchLimits, describe_place
from rlhf_spmd.process.messages import ALL_ENDED, DONE, FAILURE, ForgedMessage, Messages, await_key
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.run_dir import ExitStatus, write_exit_status

MAX_JUDGES = 8  # ranks that may read all heartbeats after a timeout: most ranks time out together, and one store serves them
_CLIENT_TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class Failure(ExitStatus):
    """The failure that ends the job.

    - kill_pid, kill_host: a silent process that ranks on its host must kill; 0: none
    """

    kill_pid: int = 0
    kill_host: str = ""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Failure:
        return Failure(**json.loads(text))


class _Call(NamedTuple):
    """A call that this rank has entered.

    - seq, name, site, rows: see :meth:`Board.enter_call`
    - chain: hash of all calls up to it
    """

    seq: int
    name: str
    site: str
    rows: str
    chain: int


NO_CALL = _Call(0, "", "", "", 0)


class _CallLog:
    """The last ``HISTORY`` calls that the script has entered. The main thread writes it; the board's thread reads it without a lock."""

    def __init__(self) -> None:
        self._calls: list[_Call] = [NO_CALL] * HISTORY  # a ring buffer
        self._num_calls = 0
        self._chain = 0
        self._keys: dict[tuple[str, str], bytes] = {}

    def enter(self, seq: int, name: str, site: str, rows: str) -> None:
        """Add a call, see :meth:`Board.enter_call`."""
        key = self._keys.get((name, site))
        if key is None:
            key = self._keys[(name, site)] = f"{name}@{site}".encode()
        self._chain = zlib.crc32(rows.encode(), zlib.crc32(key, self._chain))
        self._calls[self._num_calls % HISTORY] = _Call(seq, name, site, rows, self._chain)
        self._num_calls += 1

    @property
    def last_call(self) -> tuple[int, str, str]:
        """Return sequence number, name and site of the last call; (0, "", "") before the first."""
        return self._calls[(self._num_calls - 1) % HISTORY][:3]

    def recent(self, number: int = HISTORY) -> list[_Call]:
        """Return the last calls, at most ``number``, oldest first."""
        num_calls = self._num_calls
        return [self._calls[n % HISTORY] for n in range(max(0, num_calls - number), num_calls)]


class Board:
    """The error board of a process.

    The program sets these fields:

    - preempted: True once the run was told to end
    - run_dir: the run directory, None while it is unknown
    - last_checkpoint: the last complete checkpoint
    - failing: True while a thread handles this rank's failure; signals then change nothing
    """

    def __init__(self, launch: Launch, store: dist.Store, limits: WatchLimits | None = None, key: bytes = b"") -> None:
        """``key`` signs the messages between ranks; see :func:`~rlhf_spmd.process.messages.agree_on_key`."""
        self.launch = launch
        self.limits = limits or WatchLimits()
        self.preempted = False
        self.failing = False
        self.run_dir: Path | None = None
        self.last_checkpoint: str | None = None
        self.step = 0
        self.failure: Failure | None = None
        # connections of the main thread, which may block, and of the thread of this board
        self._main_messages = self._messages = Messages(store, key)
        self._log = _CallLog()
        self._inside = False  # True while the script is in a call
        self._state = "starting"  # of the heartbeat
        self._num_beats = 0
        self._logged_seq = -1  # last call in the log that the store has
        self._suspect = False  # True once this rank has lost a connection
        self._wake = threading.Event()
        self._failure_known = threading.Event()
        self._main_done = threading.Event()  # set once the main thread has nothing left to do
        self._stopping = False
        self._thread: threading.Thread | None = None

    # ---- called by the main thread, which only writes fields -------------------------------------------------------

    def enter_call(self, seq: int, name: str, site: str, rows: str = "") -> None:
        """Note that the script enters its ``seq``-th call, on members and other ranks alike.

        ``site`` is ``file.py:line``. ``rows``: which rows the call takes, in words that are equal on all ranks.
        """
        self._log.enter(seq, name, site, rows)
        self._inside = True
        RECORDER.tick()

    def leave_call(self) -> None:
        self._inside = False
        RECORDER.tick()

    def set_step(self, step: int) -> None:
        self.step = step
        self._state = "running"
        RECORDER.tick()

    def tick(self) -> None:
        """Report progress inside a long call without collectives."""
        RECORDER.tick()

    @property
    def call(self) -> tuple[int, str, str]:
        """Return sequence number, name and site of the last call entered; (0, "", "") before the first."""
        return self._log.last_call

    @property
    def where(self) -> str:
        seq, name, site = self.call
        return describe_place(name if self._inside else "", seq, site, self.step)

    # ---- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; a single process needs none."""
        if self.launch.size == 1:
            return
        self._messages = _another_connection(self._messages)
        self._publish()
        self._thread = threading.Thread(target=self._run, name="board", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the script has ended on every rank, then report that the job is done.

        The report goes to exit_status.json and to the launcher; a failure elsewhere ends the process instead.

        Collective over the world: every rank of it must call, in program order.
        """
        self._inside = False
        self._state = "ended"
        RECORDER.tick()
        self._end_if_failed()
        store = self._main_messages.store
        keys = [f"board/ended/{rank}" for rank in range(self.launch.size)]
        self._main_messages.set(keys[self.launch.rank], "1")
        if store.add("board/ended", 1) >= self.launch.size:
            self._main_messages.get_all(keys)  # checks the signatures, not only the count
            self._main_messages.set(ALL_ENDED, "1")
        if not await_key(store, ALL_ENDED, self.limits.stall_s):  # the store's own wait would hear no signal
            raise ConnectionError(f"timed out: other ranks have not ended within {self.limits.stall_s:.0f} s")
        self._main_messages.get(ALL_ENDED)
        self._end_if_failed()
        self.stop()
        if self.launch.rank == 0:
            if self.run_dir is not None:
                run_lock.check_still_held(self.run_dir)
                write_exit_status(self.run_dir, ExitStatus("done", step=self.step, last_checkpoint=self.last_checkpoint))
            self._main_messages.set(DONE, "1")

    def _end_if_failed(self) -> None:
        """End this process if the job has failed. If another thread handles a failure of this rank, wait until it is posted."""
        if self.failing:
            self._failure_known.wait(self.limits.stall_s)
        elif (posted := self._main_messages.find(FAILURE)) is not None:
            self.failure = Failure.decode(posted)
        else:
            return
        self.end_with_failure()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    # ---- failures --------------------------------------------------------------------------------------------------

    def post_error(self, error_class: str, message: str, details: str = "", call: str = "") -> bool:
        """Post this rank's failure. Return True if it is the job's first.

        If so, print ``details`` and one line, and write exit_status.json. ``call``: name of the failed call, by default
        the last one entered. The process goes on until :meth:`end_with_failure`.
        """
        return self._post(self._failure_of_rank(error_class, message, call), details)

    def _failure_of_rank(self, error_class: str, message: str, call: str = "") -> Failure:
        call = call or self.call[1]
        return Failure(error_class, message, self.launch.rank, call or None, self.step, self.last_checkpoint)

    def await_verdict(self, seconds: float, timed_out: bool = False) -> bool:
        """Wait for a failure of another rank that explains this one's. Return True if there is such a failure.

        ``timed_out``: this rank's own wait timed out; then a rank that is behind it and still working is to blame.
        """
        if self._thread is None:
            return self.failure is not None
        self._suspect = True
        self._wake.set()
        try:
            return self._await_verdict(seconds, timed_out)
        except RuntimeError:  # the store is gone, or a stranger writes there: the board's thread reports it
            return self._failure_known.wait(seconds)

    def _await_verdict(self, seconds: float, timed_out: bool) -> bool:
        may_judge = timed_out and self._messages.store.add("board/waited", 1) <= MAX_JUDGES
        earlier_beats = self._beats_of(set(range(self.launch.size)) - {self.launch.rank}) if may_judge else []
        # a rank that may judge reads heartbeats twice before it posts, so the others wait longer
        if self._failure_known.wait(seconds if may_judge or not timed_out else 2 * seconds):
            return True
        pairs = zip(earlier_beats, self._beats_of([beat.rank for beat in earlier_beats]), strict=True)
        working_beats = [
            beat for earlier, beat in pairs if beat.inside and beat.seq <= self.call[0] and beat.progress > earlier.progress
        ]
        for beat in sorted(working_beats, key=lambda beat: (beat.seq, beat.rank))[:1]:
            message = (
                f"rank {beat.rank} was still at work in {beat.where} when rank {self.launch.rank} had waited for it as long as "
            )
            self._post(Failure("hang", f"{message}timeout_s allows", beat.rank, beat.name, beat.step, self.last_checkpoint))
        return bool(working_beats)

    def end_with_failure(self) -> NoReturn:
        """From the main thread: end this process with the code of the job's failure, once every living rank knows it."""
        assert self.failure is not None, "a failure was posted: post_error first"
        self._main_done.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=3 * self.limits.grace_s)  # the thread ends the process
        end_process(self.failure.code)

    def _post(self, failure: Failure, details: str = "") -> bool:
        try:
            job_failure = Failure.decode(self._messages.put_first(FAILURE, failure.encode()))
            is_first_failure = job_failure == failure
        except RuntimeError:  # the store is gone with its host, or a stranger writes there: each node reports for itself
            job_failure = failure
            is_first_failure = self.launch.local_rank == 0
        if is_first_failure:
            self._announce(failure, details)
        self.failure = job_failure
        self._failure_known.set()
        return is_first_failure

    def _announce(self, failure: Failure, details: str) -> None:
        announce(failure.message, details)
        if self.run_dir is not None:
            record_status(self.run_dir, failure)

    def _read_failure(self) -> Failure | None:
        text = self._messages.find(FAILURE)
        return None if text is None else Failure.decode(text)

    # ---- run by the board's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        ranks = range(self.launch.size) if self.launch.rank == 0 else (0,)
        watch = Watch(self.launch.rank, tuple(ranks), self.limits)
        ticks_per_look = 1 + len(ranks) // 512  # a look at 1,000 heartbeats takes 20 ms of Python's lock
        retried = False
        while not self._stopping:
            self._wake.wait(self.limits.beat_s)
            self._wake.clear()
            if self._stopping:
                return
            try:
                self._publish()
                self.failure = self._read_failure() or self.failure
                looks = self.failure is None and self._num_beats % ticks_per_look == 0
                if looks and (finding := self._look(watch)) is not None:
                    self._post(self._blame(finding))
                retried = False
            except ForgedMessage as error:
                self._post(self._failure_of_rank("error", f"rank {self.launch.rank} ends in {self.where}: {error}"))
            except (RuntimeError, MemoryError) as error:  # torch's store clients raise nothing more precise in all versions
                if self._stopping or self.failure is not None or classify(error) == "memory":
                    pass  # without memory the store is not lost; the main thread meets the same, and posts it
                elif not retried and self._reconnect():
                    retried = True
                    continue
                else:
                    self._store_lost(str(error))
            if self.failure is not None:
                self._end_from_thread(self.failure)

    def _publish(self) -> None:
        self._num_beats += 1
        recent = self._log.recent(WINDOW)
        seq, name, site = (recent[-1] if recent else NO_CALL)[:3]
        beat = Heartbeat(
            rank=self.launch.rank,
            count=self._num_beats,
            state=self._state,
            step=self.step,
            seq=seq,
            name=name,
            site=site,
            inside=self._inside,
            progress=RECORDER.sequence + RECORDER.ticks,
            pid=os.getpid(),
            host=socket.gethostname(),
            calls=tuple((entry.seq, entry.chain) for entry in recent),
        )
        if seq != self._logged_seq:  # before the heartbeat, so that the log names every call that a heartbeat mentions
            self._messages.set(f"board/log/{self.launch.rank}", json.dumps(recent))
            self._logged_seq = seq
        self._messages.set(f"board/beat/{self.launch.rank}", beat.encode())
        if self._suspect:
            self._messages.store.set("board/suspect", "1")

    def _look(self, watch: Watch) -> Finding | None:
        beats = {beat.rank: beat for beat in self._beats_of(watch.ranks)}
        calls = [(entry.seq, entry.chain) for entry in self._log.recent()]
        suspect = self._suspect or self._messages.store.check(["board/suspect"])
        return watch.judge(time.monotonic(), beats, calls, suspect, self._call_text)

    def _beats_of(self, ranks: Iterable[int]) -> list[Heartbeat]:
        """Return the heartbeats of the ranks that have started."""
        keys = [f"board/beat/{rank}" for rank in ranks]
        if not self._messages.store.check(keys):
            keys = [key for key in keys if self._messages.store.check([key])]
        return [Heartbeat.decode(text) for text in self._messages.get_all(keys)]

    def _call_text(self, rank: int, seq: int) -> tuple[str, str]:
        """Return a call of a rank and its rows, in words."""
        if rank == self.launch.rank:
            entries = self._log.recent()
        else:
            entries = [_Call(*entry) for entry in json.loads(self._messages.get(f"board/log/{rank}"))]
        texts = [(f"{entry.name} ({entry.site})", entry.rows) for entry in entries if entry.seq == seq]
        return texts[0] if texts else ("another call", "")

    def _blame(self, finding: Finding) -> Failure:
        """Return the failure for a finding."""
        beat = finding.beat
        message = finding.message
        if finding.silent:  # its last heartbeat may be older than its last call: the place of the others tells more
            message += f"; rank {self.launch.rank} is in {self.where}"
        call, step = (finding.call or beat.name or None, beat.step) if beat else (None, None)
        pid, host = (beat.pid, beat.host) if beat and finding.silent else (0, "")
        error_class = "lost" if finding.silent else "hang"
        return Failure(error_class, message, finding.rank, call, step, self.last_checkpoint, pid, host)

    def _reconnect(self) -> bool:
        try:
            self._messages = _another_connection(self._messages)
        except RuntimeError:
            return False
        return True

    def _store_lost(self, reason: str) -> None:
        message = (
            f"rank {self.launch.rank} lost the store that all ranks share, in {self.where}: "
            f"the torchrun agent of the first node is gone ({one_line(reason)[:120]})"
        )
        failure = self._failure_of_rank("lost", message)
        if self.launch.local_rank == 0:
            self._announce(failure, "")
        self.failure = failure

    def _end_from_thread(self, failure: Failure) -> NoReturn:
        """Acknowledge the failure, wait at most ``grace_s`` until the main thread and other ranks know it, then end the process."""
        self._failure_known.set()
        deadline = time.monotonic() + self.limits.grace_s
        if failure.class_ in ("hang", "lost"):
            self._dump_stacks()
        self._kill_silent_neighbour(failure)
        with suppress(RuntimeError, MemoryError):  # the store ended with its host, which knew
            await_all(self._messages.store, "board/known", self.launch.size, deadline, self._main_done.is_set)
        end_process(failure.code)

    def _dump_stacks(self) -> None:
        path = self.log_path("stack")
        if path is None:
            return
        # neither a full disk nor full memory must keep this thread from ending the process
        with suppress(OSError, MemoryError), path.open("a") as file:
            file.write(f"rank {self.launch.rank} in {self.where}; last collectives: {RECORDER.dump()}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _kill_silent_neighbour(self, failure: Failure) -> None:
        """Kill the silent process of a failure (stopped by SIGSTOP, or by a stuck driver), for which torchrun would wait 30 s."""
        if not failure.kill_pid or failure.kill_host != socket.gethostname() or failure.kill_pid == os.getpid():
            return
        try:
            parent = int(Path(f"/proc/{failure.kill_pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getppid():  # still that rank: a child of the same torchrun
                os.kill(failure.kill_pid, signal.SIGKILL)
        except (OSError, ValueError, IndexError):
            pass  # gone already

    def log_path(self, kind: str) -> Path | None:
        """Return ``run_dir/logs/rank_N.<kind>``, or None while the run directory is unknown or cannot be written."""
        if self.run_dir is None:
            return None
        try:
            (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        return self.run_dir / "logs" / f"rank_{self.launch.rank}.{kind}"


def _another_connection(messages: Messages) -> Messages:
    """Return another connection to the same store: calls on one connection wait for each other."""
    clone: dist.Store = cast(Any, messages.store).clone()  # missing in torch's stubs
    clone.set_timeout(_CLIENT_TIMEOUT)
    return replace(messages, store=clone)
