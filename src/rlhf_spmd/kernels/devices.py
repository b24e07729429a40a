"""The abilities of devices. Other modules ask :func:`capabilities` for an ability by its name.

Outside the kernels of one kind and the setup of a device, only this module tells kinds of devices apart.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

EXTRAS = {"triton": "triton", "flash_attn": "gpu"}  # optional packages of GPUs: the extras of this one that bring them
MIN_CAPABILITY = (8, 0)
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is its name before torch 2.9
EXPANDABLE = "expandable_segments:True"


@dataclass(frozen=True)
class DeviceCapabilities:
    """What code may rely on, for one kind of device.

    - batch_invariant: a row's bits depend neither on the rest of the batch, nor on its position in a tensor that ranks add up, nor
      on the rank. This needs batch-invariant matrix products, for which ``Ops.is_batch_invariant`` tests.
    - streams: work is queued and the host goes on, so the host must wait before it reads a result (:func:`wait`).
    - pinned: copies to and from pinned host memory run in a stream; from other memory the host waits.
    - graphs: launches can be captured and replayed (CUDA graphs).
    - nccl: ranks exchange tensors without the host. Otherwise gloo does, which copies its inputs.
    - dtype: the dtype of models whose configuration names none.
    """

    batch_invariant: bool
    streams: bool
    pinned: bool
    graphs: bool
    nccl: bool
    dtype: torch.dtype


_CPU = DeviceCapabilities(batch_invariant=True, streams=False, pinned=False, graphs=False, nccl=False, dtype=torch.float32)
_CUDA = DeviceCapabilities(batch_invariant=False, streams=True, pinned=True, graphs=True, nccl=True, dtype=torch.bfloat16)


def capabilities(device: torch.device) -> DeviceCapabilities:
    return _CUDA if device.type == "cuda" else _CPU


def model_device() -> torch.device:
    """Return the kind of device that this process's models are on, without an index."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def has_amx() -> bool:
    """Return True if torch multiplies with AMX: the processor has it, and ONEDNN_MAX_CPU_ISA does not forbid it."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    return torch.cpu._is_amx_tile_supported() and (limit in ("", "ALL", "DEFAULT") or "AMX" in limit)


def on_device(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Return the values on ``device``.

    They reach a GPU through pinned memory: from other memory the host would wait for all queued work.
    """
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if tensor.numel() and tensor.device != device and not capabilities(tensor.device).pinned and capabilities(device).pinned:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class HostCopy:
    """An asynchronous copy of ``values`` to the host, in the current stream.

    Reading it does not wait for work that is queued later.
    """

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._values = values
        if capabilities(values.device).streams:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def has_ended(self) -> bool:
        return self._event is None or self._event.query()

    def values(self) -> Tensor:
        """Return the values, after waiting for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._values

    def tolist(self) -> list[int]:
        """Return :meth:`values` of int64 [n]."""
        values: list[int] = self.values().tolist()
        return values


def wait(device: torch.device | None = None) -> None:
    """Make the host wait for the work of the current stream of ``device``, by default ``model_device()``."""
    if capabilities(device or model_device()).streams:
        torch.cuda.current_stream(device).synchronize()


@cache
def side_stream() -> torch.cuda.Stream:
    """Return the one stream for transfers beside this process's computation.

    There is only one, because torch's allocator keeps the blocks of each stream apart.
    """
    return torch.cuda.Stream()


def free_bytes(device: torch.device, local_size: int = 1) -> float:
    """Return how much memory a rank could still take.

    On GPUs: what the driver has left, plus what torch holds unused. On CPUs: the rank's share of what the host has
    available within the limit of its container.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    with open("/proc/meminfo", encoding="ascii") as lines:
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    return min(float(available), container_bytes(Path("/sys/fs/cgroup"))) / local_size


def total_bytes(device: torch.device, local_size: int) -> float:
    """Return the memory of a rank's device when nothing is on it: all of a GPU; on CPUs :func:`free_bytes`."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return free_bytes(device, local_size)


def allocated_bytes(device: torch.device) -> int:
    """Return how much memory of a GPU this process's tensors take."""
    return torch.cuda.memory_allocated(device)


def host_bytes() -> float:
    """Return how much memory all processes of a host could still take together."""
    return free_bytes(torch.device("cpu"))


def container_bytes(root: Path) -> float:
    """Return what a container may still take: the limit of its control group, minus use without cached files.

    ``root``: directory of the control group's files, of version 2 or 1. Infinite without a limit.
    """
    for limit, used, cached in (
        (root / "memory.max", root / "memory.current", "inactive_file"),
        (root / "memory/memory.limit_in_bytes", root / "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        if limit.exists() and (maximum := limit.read_text().strip()) != "max":
            stat = dict(line.split() for line in (limit.parent / "memory.stat").read_text().splitlines())
            return float(maximum) - float(used.read_text()) + float(stat.get(cached, 0))
    return math.inf


def gpu_identity(device: torch.device) -> str:
    """Return the GPU's UUID, which all processes read alike; its index may differ between them."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


@cache
def shared_memory() -> int:
    """Return how many bytes of shared memory a program of a kernel may have on this process's GPU; without one, on an H100.

    99 KiB on A10, L40S and consumer cards, 163 KiB on an A100, 227 KiB later (CUDA's guide, "Technical specifications").
    """
    if model_device().type != "cuda":
        return 227 << 10
    of_multiprocessor: int = torch.cuda.get_device_properties().shared_memory_per_multiprocessor
    return of_multiprocessor - 1024  # which the driver takes for each program


def peak_bytes(device: torch.device) -> int:
    """Return the peak use so far: of the GPU's allocator; on CPUs the peak resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def unavailable(package: str, device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Return why the kernels of ``package``, one of EXTRAS, do not serve here, or None.

    ``dtype`` None: dtype and GPU are not known yet.
    """
    if find_spec(package) is None:
        return f"{package} is not installed: pip install -e '.[{EXTRAS[package]}]' in the project's directory"
    on_gpu = device.type == "cuda"
    if not on_gpu and not (package == "triton" and _interpreted()):
        return f"it needs a CUDA device, here is {device.type}"
    if dtype is not None and on_gpu and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"it needs a GPU of compute capability {MIN_CAPABILITY}, here {torch.cuda.get_device_capability(device)}"
    if on_gpu and (why := _broken(package)):
        return why
    if dtype == torch.float64 or (package == "flash_attn" and dtype == torch.float32):
        return f"it does not compute {dtype}"
    return None


@cache
def _broken(package: str) -> str | None:
    """Return why an installed package does not work on this machine, or None."""
    if package == "triton":
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
        return None if compiler else "triton needs a C compiler (gcc, clang, or the one that CC names)"
    try:
        from flash_attn import flash_attn_with_kvcache  # noqa: F401
    except ImportError as error:  # built for another torch, or too old
        return f"flash_attn cannot be imported: {str(error).splitlines()[0]}"
    return None


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def usual_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to ``environment``: variables that CUDA, torch's allocator and NCCL read before their first use. Pure.

    - ``CUDA_DEVICE_MAX_CONNECTIONS=32``: hardware queues for the streams of a process; CUDA's default is 8. Streams that share a queue
      wait for each other for no reason. A rank has streams for its computation, FSDP2 (four), tp, each direction of the pipeline,
      gathers and weight sync. Megatron sets 1, which on GPUs before Hopper orders a product's launch behind a collective. That does not
      suit FSDP2, whose copies would then queue behind its collectives, nor tensor parallelism here.
    - ``PYTORCH_ALLOC_CONF=expandable_segments:True``: generation and training take turns with blocks of different sizes, so blocks of
      one phase would leave holes in the next. Expandable segments are mapped page by page instead. CUDA graphs may hold such memory,
      because a private pool's pages stay mapped. CUDA IPC of tensors and NCCL's registration of user buffers would not work with them;
      neither is used here. Pinned memory has another allocator.
    - ``NCCL_GRAPH_REGISTER=0``, needed with it: NCCL would register the buffers of captured collectives by itself, and would read
      outside of them in expandable segments.
    """
    settings = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if not any(name in environment for name in ALLOCATOR):
        settings[ALLOCATOR[0]] = EXPANDABLE
    if any(EXPANDABLE in {**environment, **settings}.get(name, "") for name in ALLOCATOR):
        settings["NCCL_GRAPH_REGISTER"] = "0"
    return {name: value for name, value in settings.items() if name not in environment}


def set_up_cuda() -> None:
    """Set :func:`usual_settings` for this process and its children. To be called before anything asks for a GPU; later it does
    nothing."""
    if not torch.cuda.is_initialized():
        os.environ.update(usual_settings(os.environ))
