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


def choose_backend(wanted: str, of_role: str, dtype: torch.dtype, device: torch.device, where: str) -> AttentionName:
    """Return the name of the backend that ``wanted`` stands for. Raises ValueError if it cannot run here.

    ``auto`` is triton on CUDA devices where it can run. Elsewhere it is ``of_role``, the attention that training uses.
    """
    check_attention(wanted, device, where, dtype)
    if wanted == "auto":
        on_gpu = not capabilities(device).batch_invariant
        wanted = "triton" if on_gpu and unavailable("triton", device, dtype) is None else of_role
    if wanted == "triton":
        return "triton"
    return "cpp" if choose_ops(dtype, device, wanted, where).name == "cpp" else "torch"


def build_backend(name: str, dtype: torch.dtype, device: torch.device, alike: bool = False) -> Backend:
    """Return the backend that :func:`choose_backend` named. ``alike``: see :attr:`Ops.chunk_invariant`."""
    ops = choose_ops(dtype, device, "torch" if name == "triton" else name)
    if name == "triton":  # an optional package
        from rlhf_spmd.generation.triton_attention import TritonAttention
        from rlhf_spmd.kernels.triton_paged_attention import TileShape

        for_step = (
            partial(TritonAttention.for_step, shape_of=TileShape.of_invariant_chunks) if alike else TritonAttention.for_step
        )
        return Backend(for_step, TritonAttention.decoding, ops, capturable=True)
    if name == "cpp":
        return Backend(KernelAttention.for_step, KernelAttention.decoding, ops)
    return Backend(PagedAttention, PagedDecoding, ops)
