"""Mixture of experts: each token goes to the few experts that the router finds likeliest for it, one matrix product per expert.

A tensor-parallel rank holds a slice of every expert, so the result is a partial sum, as that of a dense MLP is. A token's results
are added in the order of its own choices, so its bits do not depend on the batch. The load-balancing loss that pretraining adds is
not applied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_spmd.kernels import Ops
from rlhf_spmd.models.spec import Experts


def mix_experts(
    ops: Ops, x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, experts: Experts, gelu: bool, blocks: int
) -> Tensor:
    """x [T, hidden] -> [T, hidden], this rank's part of the sum.

    ``router`` [E, hidden]; ``gate_up`` [blocks * E * 2n, hidden] and ``down`` [E * hidden, blocks * n] of n inner columns, in
    the order of ``sharding.plan_params``.
    """
    count, per_token = experts.count, experts.per_token
    weights, chosen = route(ops, x, router, experts)
    sorted_experts, order = chosen.flatten().sort(stable=True)  # (token, choice) pairs by expert
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    groups = ops.expert_groups(sorted_experts, count)
    rows = ops.expert_rows(x, order, places, per_token)
    entry = gate_up.view(blocks, count, -1, x.shape[1]).transpose(0, 1)
    inner = ops.gated(ops.per_expert(rows, entry, groups).view(len(rows) * blocks, -1), gelu).view(len(rows), -1)
    out = ops.per_expert(inner, down.view(count, 1, x.shape[1], -1), groups)
    return ops.sum_experts(out, weights, order, places)


def route(ops: Ops, x: Tensor, router: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Weights, in x's dtype, and numbers of the experts of each token, [T, per_token] each. The softmax is over all experts, in
    fp32 (fp64 for fp64)."""
    logits = ops.linear(x, router)
    probabilities = torch.softmax(logits, -1, dtype=torch.promote_types(x.dtype, torch.float32))
    weights, chosen = probabilities.topk(experts.per_token, -1)
    if experts.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(x.dtype), chosen
