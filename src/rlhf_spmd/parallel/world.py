"""All ranks of the job: torch.distributed's start and end, and the communicators of groups of ranks."""

from __future__ import annotations

import atexit
import hashlib
import math
import os
import resource
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rlhf_spmd.kernels.devices import set_up_cuda
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.device_setup import choose_device, set_up_device
from rlhf_spmd.parallel.launch import Launch, connect_store, read_launch

_NUMBERS = count()  # numbers the worlds that this process makes


@dataclass
class World:
    """All ranks of the job, the device of this one, and the communicators made so far.

    Only the ranks of a communicator make it, when they first need it, in program order. They find each other by its name: the ranks,
    the channel and ``number``, which counts the worlds of several ranks in this process, because torch remembers earlier names.
    Torch's ``new_group`` names communicators by a counter. If it counts those of the world, all ranks must take part in each. If it
    counts those of this rank (``use_local_synchronization``), ranks with different counts never meet.
    """

    launch: Launch
    device: torch.device
    store: dist.Store
    timeout_s: float
    number: int = 0
    all: Group = field(init=False)
    _communicators: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = tuple(range(self.launch.size))
        self.all = Group("world", ranks, self.launch.rank, partial(self._communicator, ranks, ""))
        if dist.group.WORLD is not None:
            self._communicators["", ranks] = dist.group.WORLD
            self.all.connect()

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def size(self) -> int:
        return self.launch.size

    def group(self, ranks: Sequence[int], name: str, channel: str = "") -> Group | None:
        """Return the group of these ascending global ranks; None on ranks outside it. Does not communicate: see :class:`Group`.

        Groups of equal ranks share one communicator per ``channel``. Transfers on different channels never wait for each other, even if
        the backend orders those of one communicator.
        """
        members = tuple(ranks)
        # torch sorts the ranks of a group, so only ascending orders are used
        assert list(members) == sorted(members), f"group {name}: ranks {members} must ascend"
        if self.rank not in members:
            return None
        return Group(name, members, members.index(self.rank), partial(self._communicator, members, channel))

    def _communicator(self, ranks: tuple[int, ...], channel: str) -> dist.ProcessGroup:
        """Return the process group of these ranks; the first call makes it.

        Collective over these ranks, the first time: every one of them must call, in program order.
        """
        if (channel, ranks) not in self._communicators:
            name: Any = hashlib.sha1(f"{self.number} {channel} {ranks}".encode(), usedforsecurity=False).hexdigest()
            process_group, _ = distributed_c10d._new_process_group_helper(
                len(ranks),
                ranks.index(self.rank),
                list(ranks),
                backend_of(self.device),
                # no device_id: it would put point-to-point transfers of all groups on one communicator (pytorch#154132)
                dist.PrefixStore(f"groups/{self.number}", self.store),
                name,
                timeout=timedelta(seconds=self.timeout_s),
            )
            assert isinstance(process_group, dist.ProcessGroup)
            distributed_c10d._world.pg_group_ranks[process_group] = {rank: index for index, rank in enumerate(ranks)}
            self._communicators[channel, ranks] = process_group
        return self._communicators[channel, ranks]


def backend_of(device: torch.device) -> str:
    """Return torch's name for gloo; on GPUs for gloo with nccl beside it, for GPU tensors."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def init_world(
    launch: Launch, store: dist.Store, timeout_s: float = 600.0, device: torch.device | None = None, threads: int = 1
) -> World:
    """Set up this rank's device and start torch.distributed: gloo for CPU tensors; on GPUs also nccl.

    ``timeout_s``: how long a collective may take. ``threads``: the threads of torch and the kernels on CPUs, on which torch's results
    depend.

    On GPUs collectives get more than ``timeout_s``. NCCL's watchdog aborts the process silently, so the error board, which names the
    culprit, must come first. The store gets as long: a communicator waits there at its first use for other ranks.

    Collective over the world: every rank of it must call.
    """
    device = device or choose_device(launch)
    if launch.local_size == launch.size:
        stay_on_this_machine()
    patience_s = 2 * timeout_s + 60 if device.type == "cuda" else timeout_s
    store.set_timeout(timedelta(seconds=patience_s))
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))  # gloo has a socket per pair of a group's ranks
    set_up_device(launch, store, device, threads)
    if device.type == "cuda":
        for name, value in nccl_settings(patience_s).items():
            os.environ.setdefault(name, value)
    number = next(_NUMBERS) if launch.size > 1 else 0
    if not dist.is_initialized():
        dist.init_process_group(
            backend_of(device),
            store=dist.PrefixStore(f"pg/{number}", store),
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=patience_s),
        )
        atexit.register(_leave)
    return World(launch, device, store, patience_s, number)


def nccl_settings(patience_s: float) -> dict[str, str]:
    """Return variables that make torch's NCCL watchdog end a process only after the error board, which names the culprit. Pure.

    By default the watchdog's monitor waits 480 s. ``patience_s``: how long collectives may take.
    """
    return {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(math.ceil(patience_s) + 60)}


def stay_on_this_machine() -> None:
    """Let gloo use the loopback device, which other machines cannot reach, unless the user names a network."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


@cache
def join_world(timeout_s: float = 3600.0) -> World:
    """Return the world of a process that is none of the programs, such as a notebook's. ``timeout_s``: see :func:`init_world`.

    Collective over the world, the first time: every rank of it must call.
    """
    set_up_cuda()
    launch = read_launch()
    return init_world(launch, connect_store(launch), timeout_s, threads=torch.get_num_threads())


def _leave() -> None:
    """Leave torch.distributed when Python ends the process. (The programs end theirs themselves.)"""
    _await_gloo()
    if dist.is_initialized():
        dist.destroy_process_group()


def _await_gloo(seconds: float = 5.0) -> None:
    """Wait until gloo's threads have released all tensors.

    They do so shortly after a work has ended, and need the interpreter for it. A thread that asks for it while Python is ending aborts
    the process (torch 2.13, pytorch/pytorch#190489). A thread that stays asleep, while this one leaves the interpreter to others, is
    done.
    """
    last_activities = None
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        activities = [activity for task in sorted(Path("/proc/self/task").glob("*")) if (activity := _gloo_activity(task))]
        if activities == last_activities and all("S (sleeping)" in activity for activity in activities):
            return
        last_activities = activities
        time.sleep(0.01)


def _gloo_activity(task: Path) -> str:
    """Return state and context switches of a gloo thread; "" for other threads and for one that has ended."""
    with suppress(OSError):
        if (task / "comm").read_text().strip() == "pt_gloo_runloop":
            lines = (task / "status").read_text().splitlines()
            return "\n".join(line for line in lines if line.startswith(("State", "voluntary_ctxt", "nonvoluntary_ctxt")))
    return ""
