"""The device of this rank: which GPU of the host it takes, or how torch computes on the CPU."""

from __future__ import annotations

import ctypes
import os
import sys

import torch
import torch.distributed as dist

from rlhf_spmd.kernels import capabilities, has_amx, model_device
from rlhf_spmd.kernels.devices import gpu_identity
from rlhf_spmd.parallel.launch import SHARED_GPU, Launch

MOST_THREADS = 1024  # the most threads of a rank: more than any host has cores, and fewer than a process may start


def choose_device(launch: Launch) -> torch.device:
    """Return a GPU of this rank's own, or the CPU if the host has no GPU. Raises ValueError if there are fewer GPUs than ranks.

    A rank that sees only one GPU takes it: SLURM's ``--gpus-per-task=1`` shows each rank its own. :func:`refuse_shared_gpus` checks
    that.
    """
    if torch.cuda.is_available():
        sees_one = torch.cuda.device_count() == 1
        check_gpus(1 if sees_one else launch.local_size, 0 if sees_one else launch.local_rank)
        return torch.device("cuda", 0 if sees_one else launch.local_rank)
    return torch.device("cpu")


def check_gpus(ranks: int, local_rank: int) -> None:
    """Raise ValueError if no GPU is left for ``local_rank``. ``ranks``: the number of ranks of this node, which see the same GPUs."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 0 < num_gpus <= local_rank:
        raise ValueError(
            f"--nproc-per-node={ranks}, but this node has {num_gpus} GPUs; start at most as many ranks, "
            f"or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on CPUs"
        )


def set_up_device(launch: Launch, store: dist.Store, device: torch.device, threads: int) -> None:
    """Set up this rank's device, before its first product. ``threads``: the threads of torch and the kernels on CPUs.

    On GPUs collective over the ranks of this host, through the store: every rank of it must call.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        refuse_shared_gpus(launch, store, gpu_identity(device))
        # cuDNN's attention, which newer torch prefers, compiles a plan per shape, and ragged rows always have new shapes
        torch.backends.cuda.enable_cudnn_sdp(False)
    else:
        torch.set_num_threads(threads)
        choose_cpu_matmul()
        keep_freed_memory()
        forget_old_shapes()


def refuse_shared_gpus(launch: Launch, store: dist.Store, gpu: str) -> None:
    """Raise ValueError if another rank of this host has the same GPU. ``gpu``: the identity of this rank's GPU.

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


def choose_cpu_matmul() -> str:
    """Use oneDNN for float32 products if it computes in float32, twice as fast as the default. Returns the mode.

    "medium" allows oneDNN. With AMX it would round the inputs to bfloat16, so CPUs with AMX keep "highest".
    """
    mode = "highest" if has_amx() else "medium"
    torch.set_float32_matmul_precision(mode)
    return mode


def choose_matmul() -> None:
    """Call :func:`choose_cpu_matmul`, unless this process's models are on GPUs, where "medium" would allow TF32.

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
