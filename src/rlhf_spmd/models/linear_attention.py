"""Linear attention on one tensor-parallel rank, between the two matrices that a layer has in common with attention.

A tp rank has whole key heads with their value heads, and their channels of the convolution. The norm of a head's output is the same for
all heads, so each rank has it whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlhf_spmd.kernels import DeltaShape, HasDeltaRuleStep, MixerWeights, Ops, StateRows, delta_rule
from rlhf_spmd.kernels.flash_linear_attention import FlashLinearAttention
from rlhf_spmd.models.attention import Attention, PackedAttention
from rlhf_spmd.models.layer_kinds import DeltaRule
from rlhf_spmd.models.layers import Linear, RMSNorm
from rlhf_spmd.models.tensor_parallel import copy_to_tp
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.collectives import Group


@runtime_checkable
class DeltaAttention(Protocol):
    """What linear attention needs to know of a forward pass: which tokens follow each other, and what was before them."""

    def mix(self, layer_index: int, x: Tensor, decay: Tensor, rate: Tensor, weight: Tensor, shape: DeltaShape) -> Tensor:
        """Return the outputs [T, value heads, D] of ``x`` [T, C], ``decay`` and ``rate`` [T, value heads]; see
        :func:`~rlhf_spmd.kernels.delta_rule`. ``layer_index`` counts the stage's layers with linear attention."""


@runtime_checkable
class KeepsStates(Protocol):
    """A DeltaAttention of one token of each row, whose states one operation can read and write, see ``HasDeltaRuleStep``."""

    def states_of(self, layer_index: int) -> StateRows:
        """Return the states of the layer."""


class PackedDeltaAttention:
    """All sequences of a packed batch from their first tokens on (training and scoring)."""

    def __init__(self, attention: Attention, kernels: FlashLinearAttention | None = None) -> None:
        assert isinstance(attention, PackedAttention), f"{type(attention).__name__} does not say which tokens follow each other"
        self._attention = attention
        self._kernels = kernels

    def mix(self, layer_index: int, x: Tensor, decay: Tensor, rate: Tensor, weight: Tensor, shape: DeltaShape) -> Tensor:
        packing, copies = self._attention.packing, self._attention.copies
        if copies is not None:  # a token has the same output in each sequence that begins with it
            x, decay, rate = (copies.spread(each) for each in (x, decay, rate))
        if self._kernels is not None and len(x):
            mixed, _ = self._kernels.mix(x, decay, rate, weight, shape, packing)
            return mixed if copies is None else copies.first(mixed)
        outs = []
        for part in packing.padded_groups(1, math.inf):
            valid = None if part.has_no_padding else part.valid[:, :, None]
            rows, decays, rates = (part.gather(each) for each in (x, decay, rate))
            out, _, _ = delta_rule(rows, decays, rates, weight, shape, valid, None)
            outs.append(part.without_padding(out))
        if not outs:
            return x.new_zeros(0, shape.values, shape.value_dim)
        mixed = torch.cat(outs).index_select(0, packing.group_positions(1, math.inf))
        return mixed if copies is None else copies.first(mixed)


class LinearMixer(nn.Module):
    """The convolution, the delta rule and the gated norm. ``index`` counts the stage's layers with linear attention."""

    def __init__(
        self,
        ops: Ops,
        rule: DeltaRule,
        shards: Mapping[str, ParamShard],
        index: int,
        tp: Group,
        fused_slices: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        keys, values = rule.key_heads // tp.size, rule.value_heads // tp.size
        self.shape = DeltaShape(keys, values, rule.key_dim, rule.value_dim, rule.kernel, fused_slices)
        self.ops = ops
        self.index = index
        self.tp = tp
        self.conv, self.decay, self.decay_bias = (
            Linear(shards[f"mixer.{name}.weight"].shape, False, dtype, device) for name in ("conv", "decay", "decay_bias")
        )
        self.norm = RMSNorm(ops, rule.value_dim, eps, False, dtype, device)

    def forward(self, product: Tensor, attention: DeltaAttention) -> Tensor:
        """Return the input of the last matrix [T, value heads, D]. ``product``: the first product's rows [T, columns of this rank]."""
        shape = self.shape
        if isinstance(attention, KeepsStates) and isinstance(self.ops, HasDeltaRuleStep):
            parts = self.conv.weight, self.decay.weight, self.decay_bias.weight, self.norm.weight
            return self.ops.delta_rule_step(
                product, MixerWeights(*parts, self.norm.eps), shape, attention.states_of(self.index)
            )
        widths = shape.channels, shape.values * shape.value_dim, shape.values, shape.values
        rows = len(product)
        parts = product.view(rows, shape.fused_slices, -1).split([width // shape.fused_slices for width in widths], 2)
        x, gate, rate, decay = (part.reshape(rows, -1) for part in parts)
        wide = torch.promote_types(product.dtype, torch.float32)
        decay = -self.decay.weight.to(wide).exp() * F.softplus(decay.to(wide) + self.decay_bias.weight)
        mixed = attention.mix(self.index, x, decay, rate.sigmoid(), self.conv.weight, shape)
        # each rank applies the replicated weight to its own heads only: its gradient is a sum over tp
        normed = self.ops.rms_norm(mixed, copy_to_tp(self.norm.weight, self.tp), self.norm.eps)
        return (normed.to(wide) * F.silu(gate.to(wide)).view(normed.shape)).to(product.dtype)
