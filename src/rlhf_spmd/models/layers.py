"""The holders of a block's parameters."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from rlhf_spmd.kernels import HeadShape, Ops
from rlhf_spmd.models.adapters import Adapter
from rlhf_spmd.models.tensor_parallel import copy_to_tp, reduce_from_tp
from rlhf_spmd.parallel.collectives import Group


class Linear(nn.Module):
    """``weight`` [out_local, in_local] and an optional ``bias`` [out_local], not initialised; ``lora``: an adapter of the weight, which
    may have it in fewer bits: ``weight`` is None then."""

    def __init__(
        self, shape: tuple[int, ...], bias: bool, dtype: torch.dtype, device: torch.device, lora: Adapter | None = None
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter
        quantized = lora is not None and lora.base is not None
        self.register_parameter("weight", None if quantized else nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=dtype, device=device)) if bias else None
        self.lora = lora

    def product(self, ops: Ops, x: Tensor, recomputed: bool, bias: Tensor | None = None) -> Tensor:
        """x [R, in_local] -> [R, out_local], plus ``bias``. ``recomputed``: see :meth:`Ops.linear`."""
        if self.lora is not None and (self.lora.adds or self.lora.base is not None):
            out: Tensor = self.lora(x, self.weight, bias, recomputed)
            return out
        return ops.linear(x, self.weight, bias, recomputed)


class RMSNorm(nn.Module):
    """``weight`` [n]; normalises the last dim of n elements, in fp32 for bf16 input, as transformers does.

    ``plus_one``: the factor is 1 + weight, applied before the result is rounded (Gemma).
    """

    def __init__(self, ops: Ops, size: int, eps: float, plus_one: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._rms_norm, self._add_norm = ops.rms_norm, ops.add_norm
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps, self.plus_one = eps, plus_one

    def forward(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self.eps, self.plus_one)

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, and its norm."""
        return self._add_norm(x, y, self.weight, self.eps, self.plus_one)


def split_gates(qkv: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor]:
    """[T, (2 Hq + 2 Hkv) * D] -> the same without the gates, which come last in each block, and the gates [T, Hq, D]."""
    rows, width = len(qkv), shape.queries * shape.dim // shape.blocks
    blocks = qkv.view(rows, shape.blocks, -1)
    rest, gates = blocks[:, :, :-width], blocks[:, :, -width:]
    return rest.reshape(rows, -1).contiguous(), gates.reshape(rows, shape.queries, shape.dim)


@cache
def _ones(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(size, dtype=dtype, device=device)


def norm_values(ops: Ops, qkv: Tensor, shape: HeadShape, shared: bool) -> Tensor:
    """qkv [T, (Hq + 2 Hkv) * D] -> the same, values normed by head, without weights. ``shared``: it is [T, (Hq + Hkv) * D], and what
    the keys come from serves as values."""
    rows, blocks = len(qkv), qkv.view(len(qkv), shape.blocks, -1)
    width, ends = shape.keys * shape.dim // shape.blocks, (shape.queries + shape.keys) * shape.dim // shape.blocks
    values = blocks[:, :, ends - width : ends] if shared else blocks[:, :, ends:]
    normed = ops.rms_norm(values.reshape(-1, shape.dim), _ones(shape.dim, qkv.dtype, qkv.device), shape.eps, False)
    return torch.cat([blocks[:, :, :ends], normed.view(rows, shape.blocks, width)], 2).view(rows, -1)


def whole_norms(ops: Ops, qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, shape: HeadShape, kv_copies: int, tp: Group) -> Tensor:
    """qkv [T, (Hq + 2 Hkv) * D] of this rank -> the same, its queries normed over the heads of all ranks, and its keys. ``kv_copies``:
    ranks that hold the same KV head. Collective over tp: every rank of it must call, in program order."""
    rows, blocks = len(qkv), qkv.view(len(qkv), shape.blocks, -1)
    widths = [count * shape.dim // shape.blocks for count in (shape.queries, shape.keys, shape.keys)]
    q, k, v = blocks.split(widths, 2)
    q, k = q.reshape(rows, -1), k.reshape(rows, -1)
    if tp.size == 1:
        q, k = q_norm(q), k_norm(k)
    else:
        wide = torch.promote_types(qkv.dtype, torch.float32)
        wide_q, wide_k = q.to(wide), k.to(wide)
        squares = torch.stack([wide_q.square().sum(-1), wide_k.square().sum(-1) / kv_copies], 1)
        # every rank norms its heads by the sum, so the sum's gradient is one over the ranks, too
        sums = copy_to_tp(reduce_from_tp(squares, tp, "qk_norm"), tp, "qk_norm_grad")
        sizes = q.shape[1] * tp.size, k.shape[1] * tp.size // kv_copies
        scale_q, scale_k = (torch.rsqrt(sums[:, i, None] / sizes[i] + q_norm.eps) for i in range(2))
        q, k = ((x * scale).to(qkv.dtype) for x, scale in ((wide_q, scale_q), (wide_k, scale_k)))
        q, k = q_norm.weight * q, k_norm.weight * k
    q, k = q.view(rows, shape.blocks, -1), k.view(rows, shape.blocks, -1)
    return torch.cat([q, k, v], 2).view(rows, -1)
