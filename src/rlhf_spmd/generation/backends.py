"""Chooses the attention that reads the pages: ``torch`` anywhere, ``cpp`` on CPUs, ``triton`` and ``flash_attn`` on CUDA devices.

A program chooses the name when it starts. Its generator builds the :class:`Backend` when it first needs pages.
"""

from __future__ import annotations

from functools import partial

import torch

from rlhf_spmd.generation.config import check_attention, check_model_attention
from rlhf_spmd.generation.kv_cache import Backend
from rlhf_spmd.generation.paged_attention import KernelAttention, PagedAttention, PagedDecoding
from rlhf_spmd.kernels import capabilities, choose_ops
from rlhf_spmd.kernels.devices import EXTRAS, unavailable
from rlhf_spmd.models.spec import ModelSpec


def choose_backend(
    wanted: str, of_role: str, dtype: torch.dtype, device: torch.device, where: str, spec: ModelSpec | None = None
) -> str:
    """The name of the backend that ``wanted`` stands for. Raises ValueError if it cannot run here, or cannot compute the attention of
    ``spec``.

    ``auto`` is triton on CUDA devices where it can run. Elsewhere it is ``of_role``, the attention that training uses.
    """
    if spec is not None:
        check_model_attention(wanted, spec, where)
    check_attention(wanted, device, where, dtype)
    if wanted == "auto":
        ours = not capabilities(device).batch_invariant and unavailable("triton", device, dtype) is None
        return "triton" if ours else choose_ops(dtype, device, of_role, where).name
    return wanted if wanted in EXTRAS else choose_ops(dtype, device, wanted, where).name


def build_backend(name: str, dtype: torch.dtype, device: torch.device, alike: bool = False) -> Backend:
    """The backend that :func:`choose_backend` named. ``alike``: see :attr:`Ops.alike_chunks`.

    Modules that need optional packages are imported here.
    """
    ops = choose_ops(dtype, device, "torch" if name in EXTRAS else name)
    if name == "triton":
        from rlhf_spmd.generation.triton_attention import TritonAttention
        from rlhf_spmd.kernels.triton_paged_attention import TileShape

        for_step = partial(TritonAttention.for_step, shape_of=TileShape.of_alike) if alike else TritonAttention.for_step
        return Backend(for_step, TritonAttention.decoding, ops, capturable=True)
    if name == "flash_attn":
        from rlhf_spmd.generation.flash_attention import FlashAttention

        return Backend(FlashAttention.for_step, FlashAttention.decoding, ops, capturable=True)
    if name == "cpp":
        return Backend(KernelAttention.for_step, KernelAttention.decoding, ops)
    return Backend(PagedAttention, PagedDecoding, ops)
