"""Chooses the attention that reads the pages: ``torch`` anywhere, ``cpp`` on CPUs, ``triton`` on CUDA devices.

A program chooses the name when it starts. Its generator builds the :class:`Backend` when it first needs pages.
"""

from __future__ import annotations

from functools import partial

import torch

from rlhf_spmd.generation.config import AttentionName, check_attention
from rlhf_spmd.generation.kv_cache import Backend
from rlhf_spmd.generation.paged_attention import KernelAttention, PagedAttention, PagedDecoding
from rlhf_spmd.kernels import capabilities, choose_ops
from rlhf_spmd.kernels.devices import unavailable


def choose_backend(attention: str, role_attention: str, dtype: torch.dtype, device: torch.device, where: str) -> AttentionName:
    """Return the name of the backend that ``attention`` stands for. Raises ValueError if it cannot run here.

    ``auto`` is triton on CUDA devices where it can run. Elsewhere it is ``role_attention``, which training uses.
    """
    check_attention(attention, device, where, dtype)
    if attention == "auto":
        on_gpu = not capabilities(device).batch_invariant
        attention = "triton" if on_gpu and unavailable("triton", device, dtype) is None else role_attention
    if attention == "triton":
        return "triton"
    return "cpp" if choose_ops(dtype, device, attention, where).name == "cpp" else "torch"


def build_backend(name: str, dtype: torch.dtype, device: torch.device, chunk_invariant: bool = False) -> Backend:
    """Return the backend that :func:`choose_backend` named. ``chunk_invariant``: see :attr:`Ops.chunk_invariant`."""
    ops = choose_ops(dtype, device, "torch" if name == "triton" else name)
    if name == "triton":  # an optional package
        from rlhf_spmd.generation.triton_attention import TritonAttention
        from rlhf_spmd.kernels.triton_paged_attention import TileShape

        shape_of = TileShape.of_invariant_chunks if chunk_invariant else TileShape.of_chunks
        return Backend(partial(TritonAttention.for_step, shape_of=shape_of), TritonAttention.decoding, ops, capturable=True)
    if name == "cpp":
        return Backend(KernelAttention.for_step, KernelAttention.decoding, ops)
    return Backend(PagedAttention, PagedDecoding, ops)
