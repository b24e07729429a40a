"""How this process was started: torchrun's environment, and the store that torchrun hosts. No other module reads that environment."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

LAUNCHER = "RLHF_SPMD_LAUNCHER"  # the process that started this rank in place of torchrun
SHARED_GPU = "RLHF_SPMD_SHARED_GPU"  # "1": all ranks of a node use its first GPU; only for tests, since nccl refuses it
JOB_KEY = "RLHF_SPMD_KEY"  # the key that signs messages between a job's processes
TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # the number of processes that srun or mpirun started

LOOK_S = 0.25  # seconds between two looks of a rank that waits: Python hears a signal only between them
START_S = 120.0  # the longest wait in seconds for the store on one machine, whose processes start together
START_NODES_S = 900.0  # the same on several machines, which may start one after the other


@dataclass(frozen=True)
class Launch:
    """What torchrun's environment says. Without torchrun: one rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    restart_count: int = 0


def read_launch() -> Launch:
    """Return what torchrun's environment says. Raises ValueError if its variables are not numbers."""
    env = os.environ

    def number(name: str, default: int) -> int:
        text = env.get(name, str(default))
        if not text.isdecimal():
            raise ValueError(f"{name}={text}: must be a whole number, as torchrun sets it; start by torchrun, or unset it")
        return int(text)

    return Launch(
        rank=number("RANK", 0),
        size=number("WORLD_SIZE", 1),
        local_rank=0 if env.get(SHARED_GPU) == "1" else number("LOCAL_RANK", 0),
        local_size=number("LOCAL_WORLD_SIZE", 1),
        restart_count=number("TORCHELASTIC_RESTART_COUNT", 0),
    )


def launcher_is_process_1() -> bool:
    """Return True if the launcher is process 1, as in a container whose command it is."""
    return os.environ.get(LAUNCHER) == "1"


def num_tasks() -> int:
    """Return how many processes srun or mpirun has started from this command; 1 without them."""
    return max(int(text) if text.isdecimal() else 1 for text in (os.environ.get(name, "1") for name in TASKS))


def start_limit(launch: Launch) -> float:
    """Return the seconds that a rank waits for other processes at the start."""
    return START_S if launch.local_size == launch.size else START_NODES_S


def lone_store() -> dist.Store:
    """Return a key-value store that only this process sees."""
    return dist.HashStore()


def connect_store(
    launch: Launch, timeout_s: float | None = None, on_wait: Callable[[str], object] = lambda whom: None
) -> dist.Store:
    """Return the key-value store that all ranks share, with or without a process group. Torchrun hosts it.

    ``on_wait``: called several times a second while the store does not answer, with its name; it may raise.

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
    timeout = timedelta(seconds=limit_s)
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
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
    deadline = time.monotonic() + limit_s + 1.0
    while connecting.is_alive() and time.monotonic() < deadline:
        connecting.join(LOOK_S)
        on_wait(f"the store at {where}")
    answer = answers[0] if answers else TimeoutError("what listens there does not answer as a store")
    if isinstance(answer, Exception):
        raise ConnectionError(f"no store at {where} within {limit_s:.0f} s ({answer})") from answer
    answer.set_timeout(timeout)
    return ranks_store(answer, launch.restart_count)


def ranks_store(store: dist.Store, restart_count: int = 0) -> dist.Store:
    """Return the part of ``store`` that belongs to the ranks of this start of the job."""
    return dist.PrefixStore(f"rlhf_spmd/{restart_count}", store)
