"""The arithmetic of models on GPUs: torch's matrix products, and Triton where torch would need many launches.

A subclass, so that :class:`~rlhf_spmd.kernels.ops.Ops` has no branches: any device can compute it, and tests compare these kernels
with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.kernels import (
    triton_delta,
    triton_draw,
    triton_experts,
    triton_filter,
    triton_latent,
    triton_layers,
    triton_lm_head,
    triton_qkv,
    triton_route,
)
from rlhf_spmd.kernels.dense_attention import LatentKeys
from rlhf_spmd.kernels.flash_attention import TorchFlash
from rlhf_spmd.kernels.flash_linear_attention import FlashLinearAttention
from rlhf_spmd.kernels.gradients import differentiable
from rlhf_spmd.kernels.layer_args import AttentionRule, HeadShape, Norms, PageTarget
from rlhf_spmd.kernels.linear_attention import DeltaShape, MixerWeights, StateRows
from rlhf_spmd.kernels.ops import GPU_CHUNK_LOGITS, UNCHANGED, LogitTransform, Ops
from rlhf_spmd.kernels.packing import Packing
from rlhf_spmd.kernels.products import Groups
from rlhf_spmd.kernels.routing import RoutingRule
from rlhf_spmd.kernels.sampling_tensors import Drawn, SamplingTensors


class GpuOps(Ops):
    """Ops in float32, bfloat16 and float16 on CUDA devices that Triton compiles for; in Triton's interpreter also on CPUs.

    ``packed``: the flash attention over packed sequences, whose name becomes the attention's. None: torch's attention over
    padded sequences. ``packed_delta``: as in Ops.
    """

    chunk_logits = GPU_CHUNK_LOGITS
    keeps_logits = True
    head_columns = 128  # products of odd widths run at less than half of the rate (H100, torch 2.11)

    def __init__(self, packed: TorchFlash | None = None, packed_delta: FlashLinearAttention | None = None) -> None:
        self._packed = packed
        self.packed_delta = packed_delta
        self.name = self.name if packed is None else packed.name

    def min_rows(self, numel: int, inner: int) -> int:
        return 1  # bits of products depend on the batch here, so there is nothing to pad for

    # -- layers

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> tuple[Tensor, Tensor]:
        def forward(x: Tensor, y: Tensor, weight: Tensor) -> tuple[tuple[Tensor, ...], Sequence[Tensor]]:
            total, out, scales = triton_layers.norm(x, y, weight, eps, unit_offset)
            return (total, out), (total, weight, scales)

        def backward(
            _: object, grad_total: Tensor, grad: Tensor, total: Tensor, weight: Tensor, scales: Tensor
        ) -> tuple[Tensor, ...]:
            grad_x, grad_weight = triton_layers.norm_backward(grad, grad_total, total, weight, scales, unit_offset)
            return grad_x, grad_x, grad_weight  # x and y have the same gradient

        total, out = differentiable(forward, backward, x, y, weight)
        return total, out

    def split_heads(
        self, qkv: Tensor, norms: Norms, cos: Tensor, sin: Tensor, shape: HeadShape
    ) -> tuple[Tensor, Tensor, Tensor]:
        def forward(qkv: Tensor, *norms: Tensor | None) -> tuple[tuple[Tensor, ...], Sequence[Tensor | None]]:
            q_weight, k_weight = norms
            return triton_qkv.split_heads(qkv, (q_weight, k_weight), cos, sin, shape), (qkv, cos, sin, *norms)

        def backward(_: object, *tensors: Any) -> tuple[Tensor | None, ...]:
            grad_q, grad_k, grad_v, qkv, cos, sin, q_weight, k_weight = tensors
            return triton_qkv.split_heads_backward((grad_q, grad_k, grad_v), qkv, (q_weight, k_weight), cos, sin, shape)

        q, k, v = differentiable(forward, backward, qkv, *norms)
        return q, k, v

    def heads_to_pages(
        self, qkv: Tensor, norms: Norms, cos: Tensor, sin: Tensor, shape: HeadShape, pages: PageTarget
    ) -> Tensor:
        return triton_qkv.split_heads(qkv, norms, cos, sin, shape, pages)[0]

    def latent_to_pages(self, q: Tensor, short: Tensor, keys: LatentKeys, pages: PageTarget) -> Tensor:
        return triton_latent.latent_to_pages(q, short, keys, pages)

    def norm(self, x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> tuple[Tensor, Tensor]:
        return triton_layers.norm(x, None, weight, eps, unit_offset)[1:]

    def norm_backward(
        self, unit_offset: bool, _: object, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        return triton_layers.norm_backward(grad, None, x, weight, scale, unit_offset)

    def gated_activation_forward(self, gate_up: Tensor, gelu: bool) -> Tensor:
        return triton_layers.gated_activation(gate_up, gelu)

    def gated_activation_backward(self, gelu: bool, _: object, grad: Tensor, gate_up: Tensor) -> tuple[Tensor]:
        return (triton_layers.gated_activation_backward(grad, gate_up, gelu),)

    def delta_rule_step(self, product: Tensor, weights: MixerWeights, shape: DeltaShape, states: StateRows) -> Tensor:
        return triton_delta.delta_rule_step(product, weights, shape, states)

    # -- packed sequences

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
        if self._packed is None or not len(q) or not self._packed.fits(q, rule):
            return super().attend_packed(q, k, v, packing, rule)
        return self._packed.attend(q, k, v, packing, rule)

    # -- the head

    def transform_logits(self, logits: Tensor, transform: LogitTransform) -> Tensor:
        return logits

    def logit_statistics(
        self, logits: Tensor, labels: Tensor, first: int, entropy: bool, transform: LogitTransform = UNCHANGED
    ) -> Tensor:
        return triton_lm_head.logit_statistics(logits, labels, first, entropy, transform)

    def head_gradients(
        self,
        logits: Tensor,
        labels: Tensor,
        first: int,
        log_z: Tensor,
        grads: Tensor,
        entropy: Sequence[Tensor] | None,
        transform: LogitTransform,
        dtype: torch.dtype,
    ) -> Tensor:
        return triton_lm_head.logit_gradients(logits, labels, first, log_z, grads, entropy, transform, dtype)

    def sum_product(self, total: Tensor, a: Tensor, b: Tensor, begins: bool) -> None:
        """Add the product as :meth:`ProductOps.sum_product` does. It adds in fp32 itself, so it needs no memory for a product."""
        if total.dtype == a.dtype:
            torch.addmm(total, a, b, beta=0 if begins else 1, out=total)
        elif begins:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)

    # -- experts: the host learns how many rows each has only where no grouped product fits

    def route(
        self, logits: Tensor, score_bias: Tensor | None, rule: RoutingRule, dtype: torch.dtype, expert_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        def forward(logits: Tensor) -> tuple[tuple[Tensor, ...], Sequence[Tensor]]:
            weights, ids = triton_route.route(logits, score_bias, rule, dtype, expert_ids)
            return (weights, ids), (logits, ids)

        def backward(_: object, grad: Tensor, __: object, logits: Tensor, ids: Tensor) -> tuple[Tensor]:
            return (triton_route.route_backward(rule, grad, logits, ids),)

        weights, ids = differentiable(forward, backward, logits)
        return weights, ids.detach()

    def local_choices(
        self, weights: Tensor, expert_ids: Tensor, first: int, num_local: int, num_experts: int
    ) -> tuple[Tensor, Tensor]:
        return triton_experts.local_choices(weights, expert_ids, first, num_local, num_experts)

    def sort_choices(self, expert_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sorted_ids, pair_of_row = expert_ids.flatten().sort(stable=True)
        return sorted_ids, pair_of_row, triton_experts.rows_of_pairs(pair_of_row)

    def sigmoid_gate(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.sigmoid(self.linear(x, weight))

    def expert_groups(self, experts: Tensor, count: int) -> Groups:
        numbers = torch.arange(count, device=experts.device)
        return torch.searchsorted(experts, numbers, right=True, out_int32=True)

    def moe_syncs_host(self, weight: Tensor) -> bool:
        return not triton_experts.fits_grouped_product(weight[0, 0], weight)

    def per_expert(self, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        assert isinstance(groups, Tensor), "rows of experts end where a tensor says"
        if not triton_experts.fits_grouped_product(x, weight):
            return super().per_expert(x, weight, groups.diff(prepend=groups.new_zeros(1)).tolist())
        forward = partial(triton_experts.grouped_product, groups)
        return differentiable(forward, partial(triton_experts.grouped_product_backward, groups), x, weight)

    def expert_rows(self, x: Tensor, pair_of_row: Tensor, row_of_pair: Tensor, per_token: int) -> Tensor:
        def backward(_: object, grad: Tensor) -> tuple[Tensor]:
            return (triton_experts.sum_rows(grad.contiguous(), row_of_pair, per_token),)

        tokens = torch.div(pair_of_row, per_token, rounding_mode="floor")
        return differentiable(lambda x: (x.index_select(0, tokens), ()), backward, x)

    def sum_experts(self, rows: Tensor, weights: Tensor, pair_of_row: Tensor, row_of_pair: Tensor) -> Tensor:
        def forward(rows: Tensor, weights: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            rows = rows.contiguous()
            return triton_experts.sum_rows(rows, row_of_pair, weights.shape[1], weights), (rows, weights)

        def backward(_: object, grad: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
            return triton_experts.sum_rows_backward(grad, rows, row_of_pair, weights)

        return differentiable(forward, backward, rows, weights)

    def clamped_gate(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        def backward(_: object, grad: Tensor, gate_up: Tensor) -> tuple[Tensor]:
            return (triton_experts.clamped_gate_backward(grad, gate_up, alpha, limit),)

        return differentiable(lambda x: (triton_experts.clamped_gate(x, alpha, limit), (x,)), backward, gate_up)

    # -- draws, as sampling_tensors.RowSampler describes them

    def draw_rows(self, scores: Tensor, logits: Tensor, settings: SamplingTensors, keys: Tensor, positions: Tensor) -> Drawn:
        keys, positions = keys.contiguous(), positions.contiguous()
        tokens = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
        at_one = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
        out = tokens, torch.empty_like(at_one) if settings.tempered else at_one, at_one
        tiles = triton_draw.sum_tiles(scores, logits, settings, logits.shape[1])
        triton_draw.pick(tiles[None], 0, 0, scores, logits, settings, keys, positions, out)
        if settings.filters and not settings.greedy:
            triton_filter.pick_filtered(tiles, scores, logits, settings, keys, positions, out)
        return out

    def tile_sums(self, scores: Tensor, logits: Tensor, settings: SamplingTensors, width: int) -> Tensor:
        return triton_draw.sum_tiles(scores, logits, settings, width)

    def draw_from_tiles(
        self,
        tiles: Tensor,
        rank: int,
        first: int,
        scores: Tensor,
        logits: Tensor,
        settings: SamplingTensors,
        keys: Tensor,
        positions: Tensor,
    ) -> Tensor:
        keys, positions = keys.contiguous(), positions.contiguous()
        out = torch.empty(3, len(scores), dtype=torch.float64, device=scores.device)
        tokens, tempered, at_one = out.unbind()
        triton_draw.pick(tiles, rank, first, scores, logits, settings, keys, positions, (tokens, tempered, at_one))
        return out
