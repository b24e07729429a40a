"""The ranks of a job that is alone on one machine, started by one command in the place of torchrun.

They are processes of their own with torchrun's environment and a store that outlives each of them, so a run is the one that torchrun
starts, bit for bit. The launcher says which rank was ended by a signal and returns the job's own exit code, where torchrun writes 40
lines and returns 1.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from rlhf_spmd.parallel.board import announce
from rlhf_spmd.parallel.world import LAUNCHER, Launch, choose_device

HOST = "127.0.0.1"
PATIENCE_S = 600.0  # for ranks that were told to end: a save may take as long
LOOK_S = 0.05
PASSED_ON: dict[int, int] = {number: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
PASSED_ON[signal.SIGHUP] = signal.SIGTERM  # of a terminal that is closed, which ranks in sessions of their own are not told


def usual_number() -> int:
    """Of ranks: one for each GPU. 1 without any: on CPUs each rank has the models once more in the machine's memory and takes a core
    from whoever else is there, so more of them are for the user to ask for."""
    return max(torch.cuda.device_count(), 1)


def start_ranks(command: Sequence[str], size: int) -> int:
    """Run ``command`` as ``size`` ranks and wait for all of them; the exit code of the first that failed, 0 if none did.

    Signals are passed on. Once a rank has failed the others get SIGTERM, as from torchrun, and one line names a rank that a signal has
    ended. Ranks that were told to end are killed after ``PATIENCE_S``. Raises ValueError for more ranks than there are GPUs.
    """
    choose_device(Launch(size - 1, size, size - 1, size))
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # on a port that the system picks
    ranks: list[subprocess.Popen[bytes]] = []
    told: list[float] = []  # when ranks were told to end

    def tell(number: int) -> None:
        told.append(time.monotonic())
        for rank in ranks:
            rank.send_signal(number)  # which leaves alone what has ended

    previous = {number: signal.signal(number, lambda got, _: tell(PASSED_ON[got])) for number in PASSED_ON}
    try:
        while len(ranks) < size and not told:
            environment = rank_environment(len(ranks), size, store.port)
            ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
        failed: list[int] = []
        while running := [rank for rank in ranks if rank.returncode is None]:
            for rank in running:
                if rank.poll() and not failed and rank.returncode < 0 and not told:
                    _name_killed(ranks.index(rank), rank)
                failed += [rank.returncode] if rank.returncode else []
            if failed and not told:
                tell(signal.SIGTERM)
            if told and time.monotonic() > told[0] + PATIENCE_S:
                tell(signal.SIGKILL)
            time.sleep(LOOK_S)
    finally:
        for rank in ranks:
            rank.kill()
        for number, handler in previous.items():
            signal.signal(number, handler)
    # of a rank that was killed, what the others found counts: they have a class for it
    return next((code for code in failed if code > 0), 128 - failed[0] if failed else 0)


def rank_environment(rank: int, size: int, port: int) -> Mapping[str, str]:
    """What torchrun gives a rank of one node."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    numbers |= {"MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, LAUNCHER: os.getpid()}
    texts = {"MASTER_ADDR": HOST, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    usual = {"OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    return {**usual, **os.environ, **texts, **{key: str(value) for key, value in numbers.items()}}


def _name_killed(number: int, rank: subprocess.Popen[bytes]) -> None:
    name = signal.Signals(-rank.returncode).name
    more = "; the system does that where memory runs out" if name == "SIGKILL" and sys.platform == "linux" else ""
    announce(f"rank {number} (process {rank.pid}) was ended by {name}{more}")
