"""Mixture of experts: each token goes to the few experts that the router chooses for it, one matrix product per expert.

A tensor-parallel rank holds a slice of every expert, so the result is a partial sum, as that of a dense MLP is. A token's results
are added in the order of its own choices, so its bits do not depend on the batch. An MLP beside the experts, the shared expert, is
added last. ``router_balance`` has the metrics and the loss of routers.

Shape legend: T tokens, E experts, n inner columns of this rank, s those of the shared expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_spmd.kernels import Ops
from rlhf_spmd.models.expert_config import Experts


class MixtureWeights(NamedTuple):
    """The matrices of one layer, in the order of ``sharding.plan_params``.

    - router [E, hidden], gate_up [blocks * E * 2n, hidden], down [E * hidden, blocks * n]
    - router_bias [E], gate_up_bias [blocks * E * 2n], down_bias [E * hidden], which is added on one tp rank
    - correction [E, 3], see :func:`~rlhf_spmd.kernels.routing.as_parts`
    - shared_gate_up [blocks * 2s, hidden], shared_down [hidden, blocks * s], shared_gate [1, hidden]
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    correction: Tensor | None = None
    shared_gate_up: Tensor | None = None
    shared_down: Tensor | None = None
    shared_gate: Tensor | None = None


def mix_experts(
    ops: Ops,
    x: Tensor,
    weights: MixtureWeights,
    experts: Experts,
    gelu: bool,
    blocks: int,
    choose: Callable[..., Any] | None = None,
) -> Tensor:
    """x [T, hidden] -> [T, hidden], this rank's part of the sum. ``choose``: in place of ``ops.route``."""
    count, per_token, hidden = experts.count, experts.per_token, x.shape[1]
    factors, chosen = route(ops, x, weights, experts, choose or ops.route)
    sorted_experts, order = chosen.flatten().sort(stable=True)  # (token, choice) pairs by expert
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    groups = ops.expert_groups(sorted_experts, count)
    rows = ops.expert_rows(x, order, places, per_token)
    entry = weights.gate_up.view(blocks, count, -1, hidden).transpose(0, 1)
    inner = ops.per_expert(rows, entry, groups)
    if weights.gate_up_bias is not None:
        bias = weights.gate_up_bias.view(blocks, count, -1).transpose(0, 1).reshape(count, -1)
        inner = ops.add_expert_bias(inner, bias, sorted_experts)
    inner = inner.view(len(rows) * blocks, -1)
    inner = ops.gated(inner, gelu) if experts.clamp is None else ops.clamped_gate(inner, *experts.clamp)
    out = ops.per_expert(inner.view(len(rows), -1), weights.down.view(count, 1, hidden, -1), groups)
    if weights.down_bias is not None:
        out = ops.add_expert_bias(out, weights.down_bias.view(count, -1), sorted_experts)
    total = ops.sum_experts(out, factors, order, places)
    if weights.shared_gate_up is None or weights.shared_down is None:
        return total
    inner = ops.linear(x, weights.shared_gate_up)
    shared = ops.linear(ops.gated(inner.view(len(x) * blocks, -1), gelu).view(len(x), -1), weights.shared_down)
    return total + (shared if weights.shared_gate is None else shared * ops.sigmoid_gate(x, weights.shared_gate))


def route(
    ops: Ops, x: Tensor, weights: MixtureWeights, experts: Experts, choose: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Weights, in x's dtype, and numbers of the experts of each token, [T, per_token] each."""
    wide = torch.promote_types(x.dtype, torch.float32) if experts.wide_router else x.dtype
    logits = ops.linear(x.to(wide), weights.router.to(wide), weights.router_bias)
    return choose(logits, weights.correction, experts.rule, x.dtype)
