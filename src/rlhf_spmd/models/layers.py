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
    """A matrix and its bias, not initialised.

    - weight: [out_local, in_local]; None where the adapter has it in fewer bits
    - bias: [out_local]; None without biases
    - lora: an adapter of the weight
    """

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
        """Return the product of ``x`` [R, in_local], plus ``bias``: [R, out_local]. ``recomputed``: see :meth:`Ops.linear`."""
        if self.lora is not None and (self.lora.adds or self.lora.base is not None):
            out: Tensor = self.lora(x, self.weight, bias, recomputed)
            return out
        return ops.linear(x, self.weight, bias, recomputed)


class RMSNorm(nn.Module):
    """A norm of the last dim, with ``weight`` [n]. bf16 input is normalised in fp32, as transformers does.

    ``unit_offset``: the factor is 1 + weight, applied before the result is rounded (Gemma).
    """

    def __init__(self, ops: Ops, size: int, eps: float, unit_offset: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._rms_norm, self._add_norm = ops.rms_norm, ops.add_norm
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps, self.unit_offset = eps, unit_offset

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of ``x`` [..., n]."""
        return self._rms_norm(x, self.weight, self.eps, self.unit_offset)

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + y, and the norm of the sum."""
        return self._add_norm(x, y, self.weight, self.eps, self.unit_offset)


def split_gates(qkv: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor]:
    """Return ``qkv`` [T, (2 Hq + 2 Hkv) * D] without its gates, [T, (Hq + 2 Hkv) * D], and the gates [T, Hq, D]. They come last in each
    fused slice."""
    rows = len(qkv)
    slices = qkv.view(rows, shape.fused_slices, -1)
    width = shape.queries * shape.dim // shape.fused_slices
    rest, gates = slices[:, :, :-width], slices[:, :, -width:]
    return rest.reshape(rows, -1).contiguous(), gates.reshape(rows, shape.queries, shape.dim)


@cache
def _ones(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(size, dtype=dtype, device=device)


def norm_values(ops: Ops, qkv: Tensor, shape: HeadShape, shared: bool) -> Tensor:
    """Return ``qkv`` [T, (Hq + 2 Hkv) * D] with the values of each head normed, without weights. ``shared``: ``qkv`` is
    [T, (Hq + Hkv) * D], and the values come from its keys."""
    rows = len(qkv)
    slices = qkv.view(rows, shape.fused_slices, -1)
    width = shape.keys * shape.dim // shape.fused_slices
    end_of_keys = (shape.queries + shape.keys) * shape.dim // shape.fused_slices
    values = slices[:, :, end_of_keys - width : end_of_keys] if shared else slices[:, :, end_of_keys:]
    normed = ops.rms_norm(values.reshape(-1, shape.dim), _ones(shape.dim, qkv.dtype, qkv.device), shape.eps, False)
    return torch.cat([slices[:, :, :end_of_keys], normed.view(rows, shape.fused_slices, width)], 2).view(rows, -1)


def norm_over_all_heads(
    ops: Ops, qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, shape: HeadShape, kv_copies: int, tp: Group
) -> Tensor:
    """Return this rank's ``qkv`` [T, (Hq + 2 Hkv) * D] with queries and keys normed over the heads of all ranks.

    ``kv_copies``: number of ranks that hold the same KV head. Collective over tp: every rank of it must call, in program order."""
    rows = len(qkv)
    slices = qkv.view(rows, shape.fused_slices, -1)
    widths = [count * shape.dim // shape.fused_slices for count in (shape.queries, shape.keys, shape.keys)]
    q, k, v = slices.split(widths, 2)
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
    q, k = q.view(rows, shape.fused_slices, -1), k.view(rows, shape.fused_slices, -1)
    return torch.cat([q, k, v], 2).view(rows, -1)
