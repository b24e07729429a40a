"""Mixture of experts: each token goes to the few experts that the router chooses for it, one matrix product per expert.

A tensor-parallel rank holds a slice of every expert, so the result is a partial sum, as that of a dense MLP is. With experts in
parallel (``expert_parallel``) it holds slices of some experts, or in generation some whole ones. A token's results
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
from rlhf_spmd.kernels.packing import pad_rows
from rlhf_spmd.models.expert_parallel import at_experts
from rlhf_spmd.models.layer_kinds import Experts
from rlhf_spmd.parallel.collectives import Group, solo


class MixtureWeights(NamedTuple):
    """The matrices of one layer, in the order of ``sharding.plan_params``.

    - router [E, hidden], gate_up [blocks * E * 2n, hidden], down [E * hidden, blocks * n]
    - router_bias [E], gate_up_bias [blocks * E * 2n], down_bias [E * hidden], which is added on one tp rank
    - E of gate_up, down and their biases: the experts that this rank has
    - score_bias [E, 3], see :func:`~rlhf_spmd.kernels.routing.as_parts`
    - shared_gate_up [blocks * 2s, hidden], shared_down [hidden, blocks * s], shared_gate [1, hidden]
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    router_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    score_bias: Tensor | None = None
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
    ep: Group | None = None,
    first: int | None = None,
) -> Tensor:
    """x [T, hidden] -> [T, hidden], this rank's part of the sum. ``choose``: in place of ``ops.route``. ``ep``: the ranks that share
    the experts. ``first``: the rank has whole experts, from this one on, and computes their part alone."""
    factors, chosen = route(ops, x, weights, experts, choose or ops.route)
    if first is not None:
        factors, chosen = ops.local_choices(factors, chosen, first, len(weights.down) // x.shape[1], experts.count)
    sorted_experts, order, places = ops.sort_choices(chosen)
    rows = ops.expert_rows(x, order, places, experts.per_token)

    def compute(rows: Tensor, numbers: Tensor) -> Tensor:
        return apply_experts(ops, rows, numbers, weights, experts, gelu, blocks)

    out = at_experts(ops, rows, sorted_experts, experts.count, ep or solo(), compute)
    total = ops.sum_experts(out, factors, order, places)
    if weights.shared_gate_up is None or weights.shared_down is None:
        return total
    inner = ops.linear(x, weights.shared_gate_up)
    shared = ops.linear(ops.gated(inner.view(len(x) * blocks, -1), gelu).view(len(x), -1), weights.shared_down)
    return total + (shared if weights.shared_gate is None else shared * ops.sigmoid_gate(x, weights.shared_gate))


def apply_experts(
    ops: Ops, rows: Tensor, numbers: Tensor, weights: MixtureWeights, experts: Experts, gelu: bool, blocks: int
) -> Tensor:
    """``rows`` [N, hidden] sorted by expert, each times its expert's matrices -> [N, hidden]. ``numbers`` [N]: each row's expert, by
    its place in the weights. Rows with numbers above come last; nobody reads what is returned for them."""
    hidden = rows.shape[1]
    count = weights.down.shape[0] // hidden
    groups = ops.expert_groups(numbers, count)
    if not isinstance(groups, Tensor) and (here := sum(groups)) < len(rows):
        out = apply_experts(ops, rows[:here], numbers[:here], weights, experts, gelu, blocks)
        return pad_rows(out, len(rows))
    entry = weights.gate_up.view(blocks, count, -1, hidden).transpose(0, 1)
    inner = ops.per_expert(rows, entry, groups)
    if weights.gate_up_bias is not None:
        numbers = numbers.clamp(max=count - 1) if count < experts.count else numbers
        bias = weights.gate_up_bias.view(blocks, count, -1).transpose(0, 1).reshape(count, -1)
        inner = ops.add_expert_bias(inner, bias, numbers)
    inner = inner.view(len(rows) * blocks, inner.shape[1] // blocks)  # a rank may have no rows, so sizes are said
    inner = ops.gated(inner, gelu) if experts.clamp is None else ops.clamped_gate(inner, *experts.clamp)
    out = ops.per_expert(inner.view(len(rows), blocks * inner.shape[1]), weights.down.view(count, 1, hidden, -1), groups)
    if weights.down_bias is not None:
        out = ops.add_expert_bias(out, weights.down_bias.view(count, -1), numbers)
    return out


def route(
    ops: Ops, x: Tensor, weights: MixtureWeights, experts: Experts, choose: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Weights, in x's dtype, and numbers of the experts of each token, [T, per_token] each."""
    wide = torch.promote_types(x.dtype, torch.float32) if experts.wide_router else x.dtype
    logits = ops.linear(x.to(wide), weights.router.to(wide), weights.router_bias)
    return choose(logits, weights.score_bias, experts.rule, x.dtype)
