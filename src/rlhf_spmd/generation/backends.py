"""Which attention reads the pages: ``torch`` everywhere, ``cpp`` on CPUs, ``triton`` and ``flash_attn`` on CUDA devices.

Each is a class of attention contexts, made for one step; the modules of packages that may be missing are imported when chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch

from rlhf_spmd.generation.paged_attention import KernelAttention, KVCache, PagedAttention
from rlhf_spmd.generation.scheduler import Work
from rlhf_spmd.models.attention import ATTENTION, choose_attention
from rlhf_spmd.models.decoder import Attention

EXTRAS = {"triton": "triton", "flash_attn": "gpu"}  # optional packages: the extras of this one that bring them
BACKENDS = (*ATTENTION, *EXTRAS)
FLASH_PAGE = 256  # flash-attn's pages are multiples of so many tokens
MIN_CAPABILITY = (8, 0)
Over = Callable[[Sequence[Work], KVCache, int], Attention]


def unavailable(backend: str, device: torch.device, dtype: torch.dtype | None = None) -> str | None:
    """Why one of EXTRAS cannot serve here, or None. ``dtype`` None: not known yet, nor which GPU."""
    if find_spec(backend) is None:
        return f"{backend} is not installed: pip install 'rlhf_spmd[{EXTRAS[backend]}]'"
    if device.type != "cuda" and not (backend == "triton" and _interpreted()):
        return f"it needs a CUDA device, here is {device.type}"
    if dtype is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return f"it needs a GPU of compute capability {MIN_CAPABILITY}, here {torch.cuda.get_device_capability(device)}"
    if dtype == torch.float64 or (backend == "flash_attn" and dtype == torch.float32):
        return f"it does not compute {dtype}"
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


def contexts_over(cache: KVCache) -> Over:
    """What makes the attention context of a step over ``cache``: (work in the order in which its tokens are packed, the cache,
    this rank's query heads)."""
    if cache.attention == "triton":
        from rlhf_spmd.generation.triton_attention import TritonAttention

        return TritonAttention.over
    if cache.attention == "flash_attn":
        from rlhf_spmd.generation.flash_attention import FlashAttention

        return FlashAttention.over
    if cache.kernels is None:
        return PagedAttention
    found = cache.kernels
    return lambda work, cache, num_heads: KernelAttention(work, cache, found)
