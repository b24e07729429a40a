"""This process's place in the job. Only this module reads torchrun's environment."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import math
import os
import resource
import socket
import sys
import threading
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

from rlhf_spmd.kernels import capabilities, has_amx, model_device
from rlhf_spmd.kernels.cuda_settings import set_up_cuda
from rlhf_spmd.kernels.devices import gpu_identity
from rlhf_spmd.parallel.collectives import Group

_NUMBERS = count()  # numbers of worlds
LAUNCHER = "RLHF_SPMD_LAUNCHER"  # the process that started this rank in place of torchrun
SHARED_GPU = "RLHF_SPMD_SHARED_GPU"  # "1": all ranks of a node use its first GPU; only for tests, since nccl refuses it
JOB_KEY = "RLHF_SPMD_KEY"  # the key that signs messages between a job's processes: messages.py
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # number of processes that srun or mpirun started

START_S = 120.0  # until the store answers, on one machine, whose processes start together
START_NODES_S = 900.0  # on several machines, which may start one after the other
MOST_THREADS = 1024  # of a rank: more than any host has, and fewer than a process may start


@dataclass(frozen=True)
class Launch:
    """What torchrun's environment says. Without torchrun: one rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restart_count: int = 0


def read_launch() -> Launch:
    """Read torchrun's environment. Raises ValueError if its variables are not numbers."""
    env = os.environ

    def number(name: str, usual: int) -> int:
        text = env.get(name, str(usual))
        if not text.isdecimal():
            raise ValueError(f"{name}={text}: must be a whole number, as torchrun sets it; start by torchrun, or unset it")
        return int(text)

    return Launch(
        rank=number("RANK", 0),
        size=number("WORLD_SIZE", 1),
        local_rank=0 if os.environ.get(SHARED_GPU) == "1" else number("LOCAL_RANK", 0),
        local_size=number("LOCAL_WORLD_SIZE", 1),
        restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
    )


def launcher_is_process_1() -> bool:
    """True if the launcher is process 1, as in a container whose command it is."""
    return os.environ.get(LAUNCHER) == "1"


def num_tasks() -> int:
    """How many times srun or mpirun has started this command; 1 without them."""
    return max(int(text) if text.isdecimal() else 1 for text in (os.environ.get(name, "1") for name in TASKS))


def start_limit(launch: Launch) -> float:
    """Seconds that a rank waits for other processes at the start."""
    return START_S if launch.local_size == launch.size else START_NODES_S


def lone_store() -> dist.Store:
    """A key-value store that only this process sees."""
    return dist.HashStore()


def connect_store(launch: Launch, timeout_s: float | None = None) -> dist.Store:
    """The key-value store that all ranks share, also without a process group. Torchrun hosts it.

    Raises ValueError if the launcher has not said where it is, and ConnectionError if no store answers there within ``timeout_s``
    (default :func:`start_limit`).
    """
    if launch.size == 1 and not {"RANK", JOB_KEY} <= os.environ.keys():  # nobody else listens
        return lone_store()
    if missing := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        are = "are" if len(missing) > 1 else "is"
        raise ValueError(
            f"WORLD_SIZE={launch.size}, but {', '.join(missing)} {are} not set; start by torchrun, or unset WORLD_SIZE"
        )
    limit_s = start_limit(launch) if timeout_s is None else timeout_s
    timeout, where = timedelta(seconds=limit_s), f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    answers: list[dist.Store | Exception] = []

    def connect() -> None:
        try:
            store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.size, timeout=timeout))
            answers.append(store)
        except Exception as error:  # the main thread raises it
            answers.append(error)

    # torch would wait forever for another kind of service that accepts the connection and says nothing
    connecting = threading.Thread(target=connect, daemon=True)
    connecting.start()
    connecting.join(limit_s + 1.0)
    answer = answers[0] if answers else TimeoutError("what listens there does not answer as a store")
    if isinstance(answer, Exception):
        raise ConnectionError(f"no store at {where} within {limit_s:.0f} s ({answer})") from answer
    answer.set_timeout(timeout)
    return ranks_store(answer, launch.restart_count)


def ranks_store(store: dist.Store, restart_count: int = 0) -> dist.Store:
    """The part of ``store`` for the ranks of this start."""
    return dist.PrefixStore(f"rlhf_spmd/{restart_count}", store)


@dataclass
class World:
    """All ranks of the job, their device, and the communicators made so far.

    Torch's ``new_group`` names communicators by counting. It counts those of the world, so all ranks must take part in each; or, with
    ``use_local_synchronization``, those of this rank, so ranks with different counts never meet. Here the name consists of ranks,
    channel and ``number``, which counts the worlds of more than one rank in this process, since torch remembers earlier names. So only
    a communicator's own ranks make it, when they need it. They do so in the same order because of program order.
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
        """The group of these ascending global ranks; None on ranks outside it. Does not communicate: see :class:`Group`.

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
        """Collective over these ranks, the first time: every one of them must call, in program order."""
        if (channel, ranks) not in self._communicators:
            name: Any = hashlib.sha1(f"{self.number} {channel} {ranks}".encode(), usedforsecurity=False).hexdigest()
            made, _ = distributed_c10d._new_process_group_helper(
                len(ranks),
                ranks.index(self.rank),
                list(ranks),
                backend_of(self.device),
                # no device_id: it would put point-to-point transfers of all groups on one communicator (pytorch#154132)
                dist.PrefixStore(f"groups/{self.number}", self.store),
                name,
                timeout=timedelta(seconds=self.timeout_s),
            )
            assert isinstance(made, dist.ProcessGroup)
            distributed_c10d._world.pg_group_ranks[made] = {rank: index for index, rank in enumerate(ranks)}
            self._communicators[channel, ranks] = made
        return self._communicators[channel, ranks]


def backend_of(device: torch.device) -> str:
    """gloo for CPU tensors; on GPUs also nccl."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def choose_device(launch: Launch) -> torch.device:
    """A GPU for each rank, or the CPU for all. Raises ValueError if there are fewer GPUs than ranks.

    A rank that sees only one GPU takes it: SLURM's ``--gpus-per-task=1`` shows each rank its own. :func:`refuse_shared_gpus` checks
    that.
    """
    if torch.cuda.is_available():
        only = torch.cuda.device_count() == 1
        check_gpus(launch.local_size if not only else 1, launch.local_rank if not only else 0)
        return torch.device("cuda", 0 if only else launch.local_rank)
    return torch.device("cpu")


def check_gpus(ranks: int, local_rank: int) -> None:
    """Raises ValueError if no GPU is left for ``local_rank``. ``ranks``: those of this node, which see the same GPUs."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < found <= local_rank:
        raise ValueError(
            f"--nproc-per-node={ranks}, but this node has {found} GPUs; start at most as many ranks, "
            f"or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on CPUs"
        )


def refuse_shared_gpus(launch: Launch, store: dist.Store, gpu: str) -> None:
    """Raises ValueError if another rank of this host has the same GPU. ``gpu``: the identity of this rank's GPU.

    Both would run, at half the speed in half the memory, until NCCL refuses. Collective over the ranks of this host, through the store:
    every rank of it must call.
    """
    if os.environ.get(SHARED_GPU) == "1":
        return
    first = launch.rank - launch.local_rank
    store.set(f"gpu/{launch.rank}", gpu)
    same = [rank for rank in range(first, first + launch.local_size) if store.get(f"gpu/{rank}").decode() == gpu]
    if len(same) > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f" (here CUDA_VISIBLE_DEVICES={visible})"
        raise ValueError(
            f"ranks {', '.join(map(str, same))} of this host have the same GPU, {gpu}{shown}; show each rank all GPUs of the host, or "
            f"one of its own (SLURM: --gpus-per-task=1), and start at most as many ranks as there are GPUs"
        )


def nccl_settings(patience_s: float) -> dict[str, str]:
    """Variables with which torch's NCCL watchdog ends a process only after the error board, which names the culprit. Pure.

    By default the watchdog's monitor waits 480 s. ``patience_s``: how long collectives may take.
    """
    return {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(math.ceil(patience_s) + 60)}


def choose_cpu_matmul() -> str:
    """Use oneDNN for float32 products if it computes in float32, twice as fast as the default. Returns the mode.

    "medium" allows oneDNN. With AMX it would round the inputs to bfloat16, so CPUs with AMX keep "highest".
    """
    mode = "highest" if has_amx() else "medium"
    torch.set_float32_matmul_precision(mode)
    return mode


def choose_matmul() -> None:
    """:func:`choose_cpu_matmul`, unless this process's models are on GPUs, where "medium" would allow TF32.

    For the time before there is a world: the check of the configuration asks whether products are batch-invariant.
    """
    if capabilities(model_device()).batch_invariant:
        choose_cpu_matmul()


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks up to 33 MiB.

    A head's chunk of logits (16 MiB) and gloo's copy of a gradient bucket between two ranks (32 MiB) come again in every step, and
    fresh pages cost a fault per 4 KB. Larger blocks, parameters and gradients, would leave holes too small for those of the next phase.
    """
    if sys.platform != "linux":
        return
    trim_threshold, mmap_threshold, never = -1, -3, 2**31 - 1
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # only glibc has it
        libc.mallopt(mmap_threshold, 33 << 20)
        libc.mallopt(trim_threshold, never)


def forget_old_shapes() -> None:
    """Let oneDNN, and torch with it, keep 128 compiled products instead of 1024.

    There is one per shape, of about 0.2 MB. Batches of ragged rows nearly always have new shapes, so memory would grow by hundreds
    of MB over the first hundreds of steps. Call it before the first product, which reads these variables.
    """
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, "128")


def init_world(
    launch: Launch, store: dist.Store, timeout_s: float = 600.0, device: torch.device | None = None, threads: int = 1
) -> World:
    """Start torch.distributed: gloo for CPU tensors; on GPUs also nccl.

    ``threads``: of torch and the kernels on CPUs. It must be given, because torch's results depend on it.

    On GPUs collectives have more time than ``timeout_s``: NCCL's watchdog aborts the process silently, so the error board, which names
    the culprit, must come first. A communicator waits in the store at its first use for the other ranks, which may be just as late.

    Collective over the world: every rank of it must call.
    """
    device = device or choose_device(launch)
    if launch.local_size == launch.size:
        stay_on_this_machine()
    patience_s = 2 * timeout_s + 60 if device.type == "cuda" else timeout_s
    store.set_timeout(timedelta(seconds=patience_s))
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # gloo has a socket per pair of a group's ranks
    if device.type == "cuda":
        torch.cuda.set_device(device)
        refuse_shared_gpus(launch, store, gpu_identity(device))
        for name, value in nccl_settings(patience_s).items():
            os.environ.setdefault(name, value)
        # cuDNN's attention, which newer torch prefers, compiles a plan per shape, and ragged rows always have new shapes
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        torch.set_num_threads(threads)
        choose_cpu_matmul()
        keep_freed_memory()
        forget_old_shapes()
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


def stay_on_this_machine() -> None:
    """Let gloo use the loopback device, which other machines cannot reach, unless the user names a network."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


@cache
def join_world(timeout_s: float = 3600.0) -> World:
    """The world of a script other than the programs, as long as its process lives. ``timeout_s``: see :func:`init_world`.

    Collective over the world, the first time: every rank of it must call.
    """
    set_up_cuda()
    launch = read_launch()
    return init_world(launch, connect_store(launch), timeout_s, threads=torch.get_num_threads())


def _leave() -> None:
    """Runs when Python ends a process. (The programs end theirs themselves.)"""
    _await_gloo()
    if dist.is_initialized():
        dist.destroy_process_group()


def _await_gloo(seconds: float = 5.0) -> None:
    """Wait until gloo's threads have released all tensors.

    They do so shortly after a work has ended, and need the interpreter for it. A thread that asks for it while Python is ending aborts
    the process (torch 2.13, pytorch/pytorch#190489). A thread that stays asleep, while this one leaves the interpreter to others, is
    done.
    """
    seen, deadline = None, time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = [activity for task in sorted(Path("/proc/self/task").glob("*")) if (activity := _gloo_activity(task))]
        if found == seen and all("S (sleeping)" in activity for activity in found):
            return
        seen = found
        time.sleep(0.01)


def _gloo_activity(task: Path) -> str:
    """State and context switches of a gloo thread; "" for other threads and for one that has ended."""
    with suppress(OSError):
        if (task / "comm").read_text().strip() == "pt_gloo_runloop":
            lines = (task / "status").read_text().splitlines()
            return "\n".join(line for line in lines if line.startswith(("State", "voluntary_ctxt", "nonvoluntary_ctxt")))
    return ""
