"""The ranks of a job that is alone on one machine, started by one command in the place of torchrun.

They are processes of their own with torchrun's environment and a store that outlives each of them, so a run is the one that torchrun
starts, bit for bit. The launcher names a rank that has ended before the job's end, and returns the job's own exit code, where torchrun
writes 40 lines and returns 1. Its store listens on this machine alone, and the ranks' messages are sealed with a key that it makes.
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

from rlhf_spmd.kernels.cuda_settings import usual_settings
from rlhf_spmd.parallel.world import JOB_KEY, LAUNCHER, check_gpus, ranks_store
from rlhf_spmd.process.board import Failure
from rlhf_spmd.process.ending import announce, forget_status, record_status
from rlhf_spmd.process.messages import ALL_ENDED, DONE, FAILURE, VERDICT, ForgedMessage, Messages, given_key
from rlhf_spmd.process.watch import Beat, group_places
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.run_dir import ExitStatus, newest_checkpoint, read_exit_status

HOST = "127.0.0.1"
PATIENCE_S = 600.0  # for ranks that were told to end: a save may take as long
LOOK_S = 0.05
BEAT_S = 0.7  # more than between two heartbeats of a rank
PASSED_ON: dict[int, int] = {number: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
PASSED_ON[signal.SIGHUP] = signal.SIGTERM  # of a terminal that is closed, which ranks in sessions of their own are not told


def usual_number() -> int:
    """Of ranks: one for each GPU. 1 without any: on CPUs each rank has the models once more in the machine's memory and takes a core
    from whoever else is there, so more of them are for the user to ask for."""
    return max(torch.cuda.device_count(), 1)


def start_ranks(command: Sequence[str], size: int, run_dir: Path | None = None) -> int:
    """Run ``command`` as ``size`` ranks and wait for all of them; the exit code of the first that failed, 0 if the job is done.

    Signals are passed on. Once a rank has failed the others get SIGTERM, as from torchrun. A rank that has ended without a word,
    whatever its exit code, is named in one line and in ``run_dir``/exit_status.json. Ranks that were told to end are killed after
    ``PATIENCE_S``. Raises ValueError for more ranks than there are GPUs.
    """
    check_gpus(size, size - 1)
    key = secrets.token_hex(32)
    store, port = _serve_store()
    if run_dir is not None:
        forget_status(run_dir)
    job = _Job(Messages(ranks_store(store), given_key(key)), run_dir)
    previous = {number: signal.signal(number, lambda got, _: job.pass_on(got)) for number in PASSED_ON}
    try:
        while len(job.ranks) < size and not job.told:
            environment = rank_environment(len(job.ranks), size, port, key)
            job.ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
        if job.told:
            job.tell(signal.SIGTERM)  # the signal may have come while a rank was being started
        while job.look():
            time.sleep(LOOK_S)
    finally:
        for rank in job.ranks:
            rank.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
    return job.close()


@dataclass
class _Job:
    """``run_dir``: where exit_status.json goes, if anywhere. ``failed``: exit codes of ranks other than 0, in order."""

    messages: Messages
    run_dir: Path | None
    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    failed: list[int] = field(default_factory=list)
    told: list[float] = field(default_factory=list)  # when ranks were told to end
    passed: str = ""  # name of the signal that the launcher has passed on first
    failure: Failure | None = None  # that the launcher itself has found

    def pass_on(self, number: int) -> None:
        self.passed = self.passed or signal.Signals(number).name
        self.tell(PASSED_ON[number])

    def tell(self, number: int) -> None:
        self.told.append(time.monotonic())
        for rank in self.ranks:
            rank.send_signal(number)  # which leaves alone what has ended

    def look(self) -> bool:
        """Whether there is anything to wait for: see which ranks have ended, and what that means for the others."""
        for number, rank in enumerate(self.ranks):
            if number not in self.ended and rank.poll() is not None:
                self.ended.add(number)
                self.failed += [rank.returncode] if rank.returncode else []
                if not self._is_explained(number, rank.returncode):
                    self._name(number, rank.returncode)
        if self.passed and not self.ranks:
            self._post(Failure("signal", f"ended by {self.passed} before any rank was started"))
        if (self.failed or self.failure) and not self.told:
            self.tell(signal.SIGTERM)
        if self.told and time.monotonic() > self.told[0] + PATIENCE_S:
            self.tell(signal.SIGKILL)
        return len(self.ended) < len(self.ranks)

    def _is_explained(self, number: int, code: int) -> bool:
        """Whether the job's messages say why this rank has ended."""
        try:
            if code == 0:
                return self.messages.find(DONE if number == 0 else ALL_ENDED) is not None
            if self.messages.find(VERDICT) not in (None, "ok") or self.messages.find(FAILURE) is not None:
                return True
            return (
                code > 0 and self.messages.find(f"board/beat/{number}") is None
            )  # refused by itself, before it was one of the job
        except ForgedMessage:  # which the rank has said, if it has ended by itself
            return code > 0

    def _name(self, number: int, code: int) -> None:
        """Tell the job, and people, that a rank has ended before its end."""
        time.sleep(BEAT_S)  # then the others have said where they are
        beats = self._beats()
        places = group_places(list(beats.values())) or "in the start of the program"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        line = f"rank {number} (process {self.ranks[number].pid}) {how} before the end of the program"
        if code == -signal.SIGKILL and sys.platform == "linux":
            line += ", as the system does where memory runs out"
        if self.passed:
            line = f"ended by {self.passed}"
        last = [beat for rank, beat in beats.items() if rank == number and beat.name]
        last += [max(beats.values(), key=lambda beat: beat.seq)] if beats else []
        call, step = (last[0].name or None, last[0].step) if last else (None, None)
        saved = newest_checkpoint(self.run_dir) if self.run_dir is not None else None
        error_class, place = "signal" if self.passed else "lost", None if saved is None else str(saved)
        self._post(Failure(error_class, f"{line}: {places}", number, call, step, place))

    def _beats(self) -> dict[int, Beat]:
        """The latest heartbeat of each rank that has sent one with the job's seal."""
        found: dict[int, Beat] = {}
        for number in range(len(self.ranks)):
            with suppress(ForgedMessage):
                text = self.messages.find(f"board/beat/{number}")
                found |= {} if text is None else {number: Beat.decode(text)}
        return found

    def _post(self, failure: Failure) -> None:
        """If no other failure was first: then it is the job's, and the ranks' boards end them with its code."""
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
        with suppress(OSError):  # where the directory cannot be read, rank 0 will not have come far
            owner = run_lock.other_owner(self.run_dir)
            if owner is None or owner.pid in [rank.pid for rank in self.ranks]:
                record_status(self.run_dir, status)

    def close(self) -> int:
        """The job's exit code; exit_status.json has it where rank 0 was not there to write it."""
        with suppress(ForgedMessage):
            verdict = self.messages.find(VERDICT) or "ok"
            if verdict != "ok" and self.run_dir is not None and read_exit_status(self.run_dir) is None:
                error_class, message, culprit = json.loads(verdict)
                self._record(ExitStatus(error_class, message, culprit))
        # of a rank that was killed, what was found about it counts
        found = [self.failure.code] if self.failure else []
        return next((code for code in found + self.failed if code > 0), 128 - self.failed[0] if self.failed else 0)


def _serve_store() -> tuple[dist.Store, int]:
    """On a port that the system picks, of this machine's loopback: torch itself would listen on all networks."""
    with socket.create_server((HOST, 0), backlog=512) as listening:
        port: int = listening.getsockname()[1]
        descriptor = os.dup(listening.fileno())
    store = dist.TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    return store, port


def rank_environment(rank: int, size: int, port: int, key: str) -> Mapping[str, str]:
    """What torchrun gives a rank of one node, and the key of the job."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    numbers |= {"MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, LAUNCHER: os.getpid()}
    texts = {"MASTER_ADDR": HOST, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", JOB_KEY: key}
    usual = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    usual |= usual_settings(os.environ)
    return {**usual, **os.environ, **texts, **{key: str(value) for key, value in numbers.items()}}
