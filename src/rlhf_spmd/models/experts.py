"""Mixture of experts: each token goes to the few experts that the router chooses for it, one matrix product per expert.

A tensor-parallel rank holds a slice of every expert, so the result is a partial sum, as that of a dense MLP is. A token's results
are added in the order of its own choices, so its bits do not depend on the batch. An MLP beside the experts, the shared expert, is
added last. ``router_balance`` has the metrics and the loss of routers.

Experts in parallel (GShard, Lepikhin et al. 2020): the ranks of a group hold slices of E / ep experts each, rank r those from r *
E / ep on, and tokens travel. A token's row goes to the rank of each expert that it has chosen, one copy per choice, and the
expert's result comes back to its place. So a layer sends 2 * per_token * hidden numbers a token in its forward pass, of which
about the part (ep - 1) / ep leaves the rank, and as many in its backward pass. Before them go the numbers of rows, E integers:
the host must know how much it receives, so it waits for the device once per layer. An expert's product is of the same rows as on
one rank, in another order; results are summed where the token is. Each tp rank exchanges the rows for its slice of the experts
with the ranks that have the same.

In generation the ranks of tp may share whole experts (``generation.ep``). They have the same tokens, so no row travels: each computes
what its experts give, and the sum over tp that every layer ends with adds that up.

Shape legend: T tokens, E experts, n inner columns of this rank, s those of the shared expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_spmd.kernels import Ops, differentiable
from rlhf_spmd.kernels.packing import pad_rows
from rlhf_spmd.models.layer_kinds import Experts
from rlhf_spmd.parallel.collectives import Group, solo

LABEL = "expert_rows"  # under which the rows of experts in parallel are counted
COUNTS = "expert_counts"  # and the numbers of rows


class MixtureWeights(NamedTuple):
    """The matrices of one layer, in the order of ``sharding.plan_params``.

    - router [E, hidden], gate_up [fused_slices * E * 2n, hidden], down [E * hidden, fused_slices * n]
    - router_bias [E], gate_up_bias [fused_slices * E * 2n], down_bias [E * hidden], which is added on one tp rank
    - E of gate_up, down and their biases: the experts that this rank has
    - score_bias [E, 3], see :func:`~rlhf_spmd.kernels.routing.split_to_bf16_terms`
    - shared_gate_up [fused_slices * 2s, hidden], shared_down [hidden, fused_slices * s], shared_gate [1, hidden]
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
    fused_slices: int,
    choose: Callable[..., Any] | None = None,
    ep: Group | None = None,
    first: int | None = None,
) -> Tensor:
    """Return the mixture's output [T, hidden] for ``x`` [T, hidden]: this rank's part of the sum over tp.

    ``choose``: in place of ``ops.route``. ``ep``: the ranks that share the experts. ``first``: where the ranks of tp share the experts,
    the first of this rank; it computes their part alone."""
    factors, expert_ids = route(ops, x, weights, experts, choose or ops.route)
    if first is not None:
        factors, expert_ids = ops.local_choices(
            factors, expert_ids, first, len(weights.down) // x.shape[1], experts.num_experts
        )
    sorted_experts, pair_of_row, row_of_pair = ops.sort_choices(expert_ids)
    rows = ops.expert_rows(x, pair_of_row, row_of_pair, experts.experts_per_token)

    def compute(rows: Tensor, numbers: Tensor) -> Tensor:
        return apply_experts(ops, rows, numbers, weights, experts, gelu, fused_slices)

    out = at_experts(ops, rows, sorted_experts, experts.num_experts, ep or solo(), compute)
    total = ops.sum_experts(out, factors, pair_of_row, row_of_pair)
    if weights.shared_gate_up is None or weights.shared_down is None:
        return total
    inner = ops.linear(x, weights.shared_gate_up)
    shared = ops.linear(ops.gated_activation(inner.view(len(x) * fused_slices, -1), gelu).view(len(x), -1), weights.shared_down)
    return total + (shared if weights.shared_gate is None else shared * ops.sigmoid_gate(x, weights.shared_gate))


def apply_experts(
    ops: Ops, rows: Tensor, numbers: Tensor, weights: MixtureWeights, experts: Experts, gelu: bool, fused_slices: int
) -> Tensor:
    """Return ``rows`` [N, hidden], sorted by expert, each after its expert's MLP: [N, hidden]. ``numbers`` [N]: each row's expert, as
    its index in the weights. Rows with numbers above come last; nobody reads what is returned for them."""
    hidden = rows.shape[1]
    count = weights.down.shape[0] // hidden
    groups = ops.expert_groups(numbers, count)
    if not isinstance(groups, Tensor) and (num_local := sum(groups)) < len(rows):
        out = apply_experts(ops, rows[:num_local], numbers[:num_local], weights, experts, gelu, fused_slices)
        return pad_rows(out, len(rows))
    entry = weights.gate_up.view(fused_slices, count, -1, hidden).transpose(0, 1)
    inner = ops.per_expert(rows, entry, groups)
    if weights.gate_up_bias is not None:
        numbers = numbers.clamp(max=count - 1) if count < experts.num_experts else numbers
        bias = weights.gate_up_bias.view(fused_slices, count, -1).transpose(0, 1).reshape(count, -1)
        inner = ops.add_expert_bias(inner, bias, numbers)
    inner = inner.view(len(rows) * fused_slices, inner.shape[1] // fused_slices)  # a rank may have no rows, so sizes are said
    inner = ops.gated_activation(inner, gelu) if experts.clamp is None else ops.clamped_gate(inner, *experts.clamp)
    out = ops.per_expert(inner.view(len(rows), fused_slices * inner.shape[1]), weights.down.view(count, 1, hidden, -1), groups)
    if weights.down_bias is not None:
        out = ops.add_expert_bias(out, weights.down_bias.view(count, -1), numbers)
    return out


def route(
    ops: Ops, x: Tensor, weights: MixtureWeights, experts: Experts, choose: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Return the weights, in the dtype of ``x``, and the numbers of each token's experts: [T, per_token] each."""
    wide = torch.promote_types(x.dtype, torch.float32) if experts.wide_router else x.dtype
    logits = ops.linear(x.to(wide), weights.router.to(wide), weights.router_bias)
    return choose(logits, weights.score_bias, experts.rule, x.dtype)


def at_experts(
    ops: Ops, rows: Tensor, experts: Tensor, count: int, ep: Group, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Return the results of ``rows`` [N, hidden], in their order, computed on the ranks that have their ``experts`` [N].

    Rows are sorted by expert. ``compute(rows [M, hidden], experts [M]) -> [M, hidden]`` gets such rows, and their experts' numbers
    among the ``count / ep`` of this rank. Collective over ep: every rank of it must call, and run its backward, in program order.
    """
    if ep.size == 1:
        return compute(rows, experts)
    local = torch.arange(count // ep.size, device=rows.device)
    ends = torch.searchsorted(experts, torch.arange(count, device=rows.device), right=True)
    leaving = ends.diff(prepend=ends.new_zeros(1)).view(ep.size, -1)  # [rank, expert of it]
    coming = ep.all_to_all(leaving, COUNTS)  # [rank that sends, expert of this rank]
    sent, received = torch.stack([leaving.sum(1), coming.sum(1)]).tolist()
    arriving = local.repeat(ep.size).repeat_interleave(coming.flatten(), output_size=sum(received))
    arriving, pair_of_row, row_of_pair = ops.sort_choices(arriving)
    arrived = ops.expert_rows(_exchange(rows, sent, received, ep), pair_of_row, row_of_pair, 1)
    results = ops.expert_rows(compute(arrived, arriving), row_of_pair, pair_of_row, 1)
    return _exchange(results, received, sent, ep)


def _exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], ep: Group) -> Tensor:
    return differentiable(
        lambda x: (ep.all_to_all_rows(x, sent, received, LABEL), ()),
        lambda _, grad: (ep.all_to_all_rows(grad, received, sent, LABEL),),
        x,
    )
