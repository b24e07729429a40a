"""Experts in parallel: the ranks of a group hold whole experts, E / ep of them each, and tokens travel (GShard, Lepikhin et al. 2020).

Rank r of ep has the experts from r * E / ep on. A token's row goes to the rank of each expert that it has chosen, one copy per choice,
and the expert's result comes back to its place. So a layer sends 2 * per_token * hidden numbers a token in its forward pass, of which
about the part (ep - 1) / ep leaves the rank, and as many in its backward pass. Before them go the numbers of rows, E integers: the host
must know how much it receives, so it waits for the device once per layer.

An expert's product is of the same rows as on one rank, in another order; results are summed where the token is, in its own order. Each
tp rank exchanges the rows for its slice of the experts with the ranks that have the same slice.

In generation the ranks of tp may share whole experts (``generation.ep``). They have the same tokens, so no row travels: each computes
what its own experts give (``experts.mix_experts``), and the sum over tp that every layer ends with adds that up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlhf_spmd.kernels import Ops, differentiable
from rlhf_spmd.parallel.collectives import Group

LABEL = "expert_rows"  # under which the rows are counted
COUNTS = "expert_counts"  # and the numbers of rows


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
    arriving, order = arriving.sort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    arrived = ops.expert_rows(_exchange(rows, sent, received, ep), order, places, 1)
    results = ops.expert_rows(compute(arrived, arriving), places, order, 1)
    return _exchange(results, received, sent, ep)


def _exchange(x: Tensor, sent: Sequence[int], received: Sequence[int], ep: Group) -> Tensor:
    return differentiable(
        lambda x: (ep.all_to_all_rows(x, sent, received, LABEL), ()),
        lambda _, grad: (ep.all_to_all_rows(grad, received, sent, LABEL),),
        x,
    )
