"""Which attention reads the pages: ``torch`` everywhere, ``cpp`` on CPUs, ``triton`` and ``flash_attn`` on CUDA devices.

The name is chosen when a program starts, the :class:`Backend` built when its generator first needs pages.
"""

from __future__ import annotations

from functools import partial

import torch

from rlhf_spmd.generation.kv_cache import Backend
from rlhf_spmd.generation.paged_attention import KernelAttention, PagedAttention, PagedDecoding
from rlhf_spmd.kernels import ATTENTION, capabilities, choose_ops
from rlhf_spmd.kernels.devices import EXTRAS, unavailable

BACKENDS = (*ATTENTION, *EXTRAS)
FLASH_PAGE = 256  # flash-attn's pages are multiples of so many tokens


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
        ours = not capabilities(device).exact and unavailable("triton", device, dtype) is None
        return "triton" if ours else choose_ops(dtype, device, of_role, where).name
    return wanted if wanted in EXTRAS else choose_ops(dtype, device, wanted, where).name


def build_backend(name: str, dtype: torch.dtype, device: torch.device, alike: bool = False) -> Backend:
    """``name``: what :func:`choose_backend` gave. ``alike``: see :attr:`Ops.alike_chunks`. Modules that need packages which may be
    missing are imported here."""
    ops = choose_ops(dtype, device, "torch" if name in EXTRAS else name)
    if name == "triton":
        from rlhf_spmd.generation.triton_attention import TritonAttention
        from rlhf_spmd.kernels.paged_tiles import TileShape

        for_step = partial(TritonAttention.for_step, shape_of=TileShape.of_alike) if alike else TritonAttention.for_step
        return Backend(for_step, TritonAttention.decoding, ops, capturable=True)
    if name == "flash_attn":
        from rlhf_spmd.generation.flash_attention import FlashAttention

        return Backend(FlashAttention.for_step, FlashAttention.decoding, ops, capturable=True)
    if name == "cpp":
        return Backend(KernelAttention.for_step, KernelAttention.decoding, ops)
    return Backend(PagedAttention, PagedDecoding, ops)
