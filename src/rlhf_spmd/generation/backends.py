"""Which attention reads the pages: ``torch`` everywhere, ``cpp`` on CPUs, ``triton`` and ``flash_attn`` on CUDA devices.

The name is chosen when a program starts, the :class:`Backend` built when its generator first needs pages.
"""

from __future__ import annotations

import os
import shutil
from functools import cache
from importlib.util import find_spec

import torch

from rlhf_spmd import kernels
from rlhf_spmd.generation.kv_cache import Backend
from rlhf_spmd.generation.paged_attention import KernelAttention, PagedAttention, PagedDecoding
from rlhf_spmd.models.attention import ATTENTION, choose_attention

EXTRAS = {"triton": "triton", "flash_attn": "gpu"}  # optional packages: the extras of this one that bring them
BACKENDS = (*ATTENTION, *EXTRAS)
FLASH_PAGE = 256  # flash-attn's pages are multiples of so many tokens
MIN_CAPABILITY = (8, 0)


def unavailable(backend: str, device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Why one of EXTRAS cannot serve here, or None. ``dtype`` None: not known yet, nor which GPU."""
    if find_spec(backend) is None:
        return f"{backend} is not installed: pip install 'rlhf_spmd[{EXTRAS[backend]}]'"
    if device.type != "cuda" and not (backend == "triton" and _interpreted()):
        return f"it needs a CUDA device, here is {device.type}"
    if dtype is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"it needs a GPU of compute capability {MIN_CAPABILITY}, here {torch.cuda.get_device_capability(device)}"
    if device.type == "cuda" and (why := _broken(backend)):
        return why
    if dtype == torch.float64 or (backend == "flash_attn" and dtype == torch.float32):
        return f"it does not compute {dtype}"
    return None


@cache
def _broken(backend: str) -> str | None:
    """Why an installed package does not work on this machine, or None."""
    if backend == "triton":
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


def check_backend(backend: str, device: torch.device, where: str, dtype: torch.dtype | None = None) -> None:
    """Raises ValueError where one of EXTRAS cannot serve."""
    if backend in EXTRAS and (why := unavailable(backend, device, dtype)):
        allowed = [other for other in EXTRAS if unavailable(other, device, dtype) is None]
        raise ValueError(f"{where}={backend}: {why}; allowed here: {', '.join([*ATTENTION, *allowed])}")


def choose_backend(wanted: str, of_role: str, dtype: torch.dtype, device: torch.device, where: str) -> str:
    """What ``wanted``, one of BACKENDS, comes to. ``of_role``: training's attention, which auto takes on CPUs; on CUDA devices it
    is triton where that can serve, else torch. Raises ValueError for a backend that cannot serve."""
    check_backend(wanted, device, where, dtype)
    if wanted == "auto":
        ours = device.type == "cuda" and unavailable("triton", device, dtype) is None
        return "triton" if ours else choose_attention(of_role, dtype, device, where)
    return wanted if wanted in EXTRAS else choose_attention(wanted, dtype, device, where)


def build_backend(name: str, dtype: torch.dtype, device: torch.device) -> Backend:
    """``name``: what :func:`choose_backend` gave. Modules that need packages which may be missing are imported here."""
    if name == "triton":
        from rlhf_spmd.generation.triton_attention import TritonAttention

        return Backend(TritonAttention.for_step, TritonAttention.decoding, capturable=True)
    if name == "flash_attn":
        from rlhf_spmd.generation.flash_attention import FlashAttention

        return Backend(FlashAttention.for_step, FlashAttention.decoding, capturable=True)
    if name == "cpp":
        return Backend(
            KernelAttention.for_step,
            KernelAttention.decoding,
            kernels=kernels.ready(torch.empty(0, dtype=dtype, device=device)),
        )
    return Backend(PagedAttention, PagedDecoding)
