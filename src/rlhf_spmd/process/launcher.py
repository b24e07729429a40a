"""Starts the ranks of a job on one machine, in place of torchrun.

Each rank is a process with torchrun's environment and a store that outlives it, so a run has the same bits as under
torchrun. The launcher names a rank that ends before the job, and returns the job's own exit code, where torchrun
writes 40 lines and returns 1. The store listens on this machine only, and the launcher makes the key that signs
messages.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from rlhf_spmd.kernels.devices import usual_settings
from rlhf_spmd.parallel.device_setup import check_gpus
from rlhf_spmd.parallel.launch import JOB_KEY, LAUNCHER, ranks_store
from rlhf_spmd.process.board import Failure
from rlhf_spmd.process.exit import announce, forget_status, ready_to_end, record_status
from rlhf_spmd.process.failure_detector import Heartbeat, group_places
from rlhf_spmd.process.messages import ALL_ENDED, DONE, FAILURE, VERDICT, ForgedMessage, Messages, key_of_start
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.run_dir import ExitStatus, newest_checkpoint, read_exit_status

HOST = "127.0.0.1"
PATIENCE_S = 600.0  # longest wait for ranks that were told to end: a save may take as long
LOOK_S = 0.05
BEAT_S = 0.7  # longer than the time between two heartbeats
# signal that the launcher gets -> signal that it sends to the ranks
FORWARDED_SIGNALS: dict[int, int] = {number: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
FORWARDED_SIGNALS[signal.SIGHUP] = signal.SIGTERM  # a closed terminal, which does not reach ranks in their own sessions


def default_num_ranks() -> int:
    """Return one rank per GPU, or 1 without GPUs.

    On CPUs every rank takes a core and another copy of the models in memory, so the user has to ask for more.
    """
    return max(torch.cuda.device_count(), 1)


@ready_to_end()
def start_ranks(command: Sequence[str], size: int, run_dir: Path | None = None) -> int:
    """Run ``command`` as ``size`` ranks and wait for them. Return the exit code of the first that failed, or 0.

    Signals are forwarded. After a failure the other ranks get SIGTERM, as from torchrun, and SIGKILL ``PATIENCE_S``
    later. A rank that ends without a report, whatever its exit code, is named in one line and in
    ``run_dir``/exit_status.json. Raises ValueError for more ranks than GPUs.
    """
    check_gpus(size, size - 1)
    key = secrets.token_hex(32)
    store, port = _serve_store()
    if run_dir is not None:
        forget_status(run_dir)
    job = _Job(Messages(ranks_store(store), key_of_start(key)), run_dir)
    handlers = {number: signal.signal(number, lambda number, _: job.forward_signal(number)) for number in FORWARDED_SIGNALS}
    try:
        while len(job.ranks) < size and not job.stop_times:
            environment = rank_environment(len(job.ranks), size, port, key)
            job.ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
        if job.stop_times:
            job.stop(signal.SIGTERM)  # the signal may have come while a rank was starting
        while job.handle_ended_ranks():
            time.sleep(LOOK_S)
    finally:
        for rank in job.ranks:
            rank.kill()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return job.close()


@dataclass
class _Job:
    """The ranks and what is known of them.

    - run_dir: where exit_status.json goes
    - ranks: their processes
    - ended: numbers of the ranks that have ended
    - exit_codes: those that are not 0, in the order of the ends
    - stop_times: when ranks were told to end
    - first_signal: name of the first signal that was forwarded
    - failure: the failure that the launcher itself has posted
    """

    messages: Messages
    run_dir: Path | None
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    exit_codes: list[int] = field(default_factory=list)
    stop_times: list[float] = field(default_factory=list)
    first_signal: str = ""
    failure: Failure | None = None

    def forward_signal(self, number: int) -> None:
        self.first_signal = self.first_signal or signal.Signals(number).name
        self.stop(FORWARDED_SIGNALS[number])

    def stop(self, number: int) -> None:
        self.stop_times.append(time.monotonic())
        for rank in self.ranks:
            rank.send_signal(number)  # does nothing if the rank has ended

    def handle_ended_ranks(self) -> bool:
        """Handle ranks that have ended. Return True while any rank is running."""
        for number, rank in enumerate(self.ranks):
            if number not in self.ended and rank.poll() is not None:
                self.ended.add(number)
                with suppress(OSError):  # processes that the user's code has left in the rank's own session
                    os.killpg(rank.pid, signal.SIGKILL)
                self.exit_codes += [rank.returncode] if rank.returncode else []
                if not self._is_explained(number, rank.returncode):
                    self._report_lost_rank(number, rank.returncode)
        if self.first_signal and not self.ranks:
            self._post(Failure("signal", f"ended by {self.first_signal} before any rank was started"))
        if (self.exit_codes or self.failure) and not self.stop_times:
            self.stop(signal.SIGTERM)
        if self.stop_times and time.monotonic() > self.stop_times[0] + PATIENCE_S:
            self.stop(signal.SIGKILL)
        return len(self.ended) < len(self.ranks)

    def _is_explained(self, number: int, code: int) -> bool:
        """Return True if the job's messages say why this rank has ended."""
        try:
            if code == 0:
                return self.messages.find(DONE if number == 0 else ALL_ENDED) is not None
            if self.messages.find(VERDICT) not in (None, "ok") or self.messages.find(FAILURE) is not None:
                return True
            # without a heartbeat, the rank refused its input before it joined the job
            return code > 0 and self.messages.find(f"board/beat/{number}") is None
        except ForgedMessage:  # the rank has reported it if it ended by itself
            return code > 0

    def _report_lost_rank(self, number: int, code: int) -> None:
        """Report a rank that has ended before the job, to the job and to people."""
        time.sleep(BEAT_S)  # until the others have published where they are
        beats = self._beats()
        places = group_places(list(beats.values())) or "in the start of the program"
        end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        line = f"rank {number} (process {self.ranks[number].pid}) {end} before the end of the program"
        if code == -signal.SIGKILL and sys.platform == "linux":
            line += ", as the system does where memory runs out"
        if self.first_signal:
            line = f"ended by {self.first_signal}"
        last_beats = [beat for rank, beat in beats.items() if rank == number and beat.name]
        last_beats += [max(beats.values(), key=lambda beat: beat.seq)] if beats else []
        call, step = (last_beats[0].name or None, last_beats[0].step) if last_beats else (None, None)
        checkpoint = newest_checkpoint(self.run_dir) if self.run_dir is not None else None
        path = None if checkpoint is None else str(checkpoint)
        self._post(Failure("signal" if self.first_signal else "lost", f"{line}: {places}", number, call, step, path))

    def _beats(self) -> dict[int, Heartbeat]:
        """Return the latest signed heartbeat of each rank that has sent one."""
        beats: dict[int, Heartbeat] = {}
        for number in range(len(self.ranks)):
            with suppress(ForgedMessage):
                text = self.messages.find(f"board/beat/{number}")
                beats |= {} if text is None else {number: Heartbeat.decode(text)}
        return beats

    def _post(self, failure: Failure) -> None:
        """Post a failure if it is the first: it becomes the job's, and the ranks' boards end them with its code."""
        refusal = json.dumps([failure.class_, failure.message, failure.rank])
        with suppress(ForgedMessage):
            if self.messages.put_first(VERDICT, refusal) not in ("ok", refusal):
                return
            if Failure.decode(self.messages.put_first(FAILURE, failure.encode())) != failure:
                return
        self.failure = self.failure or failure
        announce(failure.message)
        self._record(failure)

    def _record(self, status: ExitStatus) -> None:
        if self.run_dir is None:
            return
        with suppress(OSError):  # if the directory cannot be read, rank 0 did not come far
            owner = run_lock.other_owner(self.run_dir)
            if owner is None or owner.pid in [rank.pid for rank in self.ranks]:
                record_status(self.run_dir, status)

    def close(self) -> int:
        """Return the job's exit code. Write exit_status.json if the input was refused and rank 0 could not write it."""
        with suppress(ForgedMessage):
            verdict = self.messages.find(VERDICT) or "ok"
            if verdict != "ok" and self.run_dir is not None and read_exit_status(self.run_dir) is None:
                error_class, message, culprit = json.loads(verdict)
                self._record(ExitStatus(error_class, message, culprit))
        # for a killed rank the failure that the launcher has posted counts
        codes = [*([self.failure.code] if self.failure else []), *self.exit_codes]
        return next((code for code in codes if code > 0), 128 - self.exit_codes[0] if self.exit_codes else 0)


def _serve_store() -> tuple[dist.Store, int]:
    """Return a store on a free port of this machine's loopback: torch itself would listen on all networks."""
    with socket.create_server((HOST, 0), backlog=512) as listening:
        port: int = listening.getsockname()[1]
        descriptor = os.dup(listening.fileno())
    store = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    return store, port


def rank_environment(rank: int, size: int, port: int, key: str) -> Mapping[str, str]:
    """Return the environment that torchrun gives a rank of one node, with the key of the job."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    numbers |= {"MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, LAUNCHER: os.getpid()}
    texts = {"MASTER_ADDR": HOST, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", JOB_KEY: key}
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    defaults |= usual_settings(os.environ)
    return {**defaults, **os.environ, **texts, **{key: str(value) for key, value in numbers.items()}}
