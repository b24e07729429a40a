"""The tensor-parallel operations as autograd functions over a Group. A group of one rank communicates nothing.

Between two column- and row-parallel pairs every rank holds all rows (copy, reduce), or, with sequence parallelism (Korthikanti
et al. 2022), an equal part of them: gather, scatter. On exact devices the sums of both forms have the same bits.

Collective over the tp group: every rank of it must call each of them, and run its backward, in program order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_spmd.kernels import capabilities, differentiable
from rlhf_spmd.parallel.collectives import Group


def reduce_in_order(x: Tensor, group: Group, label: str, in_place: bool = False) -> Tensor:
    """Sum over the group whose value at an element does not depend on where in the tensor the element lies. ``in_place``: x may
    become the sum.

    gloo's all_reduce starts each chunk of the buffer at another rank, so with more than two ranks a token's sum would
    depend on its place in the batch, and generation would differ from training in the last bits. Exact devices
    therefore gather the parts and add them in rank order; with two the order does not matter, and small tensors gather faster.
    Collective over the group: every rank of it must call, in program order.
    """
    if group.size == 1:
        return x
    if not capabilities(x.device).batch_invariant or (group.size == 2 and x.nbytes > 1 << 16):
        return group.all_reduce(x.contiguous() if in_place else x.contiguous().clone(), label)
    return _sum_in_order(group.all_gather(x, label))


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def _sum_local_rows(x: Tensor, group: Group, label: str) -> Tensor:
    """Return this rank's rows [R / t, ...] of the sum of ``x`` [R, ...] over the group, on exact devices with the bits of
    :func:`reduce_in_order`."""
    if group.size > 1 and not capabilities(x.device).batch_invariant:
        return group.reduce_scatter_into(x.new_empty(x.shape[0] // group.size, *x.shape[1:]), x.contiguous(), label)
    return _sum_in_order(group.all_to_all(x.view(group.size, -1, *x.shape[1:]), label).unbind())


def _all_rows(x: Tensor, group: Group, label: str) -> Tensor:
    return group.all_gather_into(x.new_empty(group.size * x.shape[0], *x.shape[1:]), x, label)


def _node(x: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]) -> Tensor:
    return differentiable(lambda x: (forward(x), ()), lambda _, grad: (backward(grad),), x)


def copy_to_tp(x: Tensor, group: Group, label: str = "tp_grad") -> Tensor:
    """Return ``x``; the backward pass sums the gradient over the group. For the entry of a column-parallel matrix, or a replicated
    parameter that each rank applies to its heads."""
    if group.size == 1 or not torch.is_grad_enabled():
        return x
    # the sum is of a copy: autograd may hand the same gradient to someone else, and all_reduce works in place
    return _node(x, lambda x: x.view_as(x), lambda grad: group.all_reduce(grad.contiguous().clone(), label))


def reduce_from_tp(x: Tensor, group: Group, label: str = "tp_sum") -> Tensor:
    """Return the sum of ``x`` over the group; the backward pass hands on the gradient. For the exit of a row-parallel matrix. Without
    gradients the sum may overwrite ``x``."""
    in_place = not torch.is_grad_enabled()
    return x if group.size == 1 else _node(x, lambda x: reduce_in_order(x, group, label, in_place), lambda grad: grad)


def gather_to_tp(x: Tensor, group: Group, label: str = "tp_gather") -> Tensor:
    """Return the rows ``x`` [R / t, ...] of all ranks in rank order, [R, ...]; the backward pass sums the gradient and returns this
    rank's rows. For the entry of a column-parallel matrix under sequence parallelism."""
    return _node(x, lambda x: _all_rows(x, group, label), lambda grad: _sum_local_rows(grad.contiguous(), group, label))


def scatter_from_tp(x: Tensor, group: Group, label: str = "tp_scatter") -> Tensor:
    """Return this rank's rows [R / t, ...] of the sum of ``x`` [R, ...] over the group; the backward pass gathers. For the exit of a
    row-parallel matrix under sequence parallelism. t divides R."""
    return _node(x, lambda x: _sum_local_rows(x, group, label), lambda grad: _all_rows(grad, group, label))


def gather_replicated(x: Tensor, group: Group, label: str = "tp_gather") -> Tensor:
    """Return the rows of all ranks as :func:`gather_to_tp` does, for operations that every rank repeats. Each rank then has the full
    gradient, and the backward pass returns this rank's rows without a sum."""
    return _node(x, lambda x: _all_rows(x, group, label), lambda grad: grad.chunk(group.size)[group.rank])


def vocab_parallel_embedding(
    ids: Tensor, weight: Tensor, first: int, group: Group, leave: Callable[[Tensor, Group, str], Tensor] = reduce_from_tp
) -> Tensor:
    """Return the embeddings [T, hidden] of token ids ``ids`` [T]. ``weight`` [V_local, hidden] has the tokens from ``first`` on.
    ``leave`` sums over the group."""
    if group.size == 1:
        return F.embedding(ids, weight)
    local = ids - first
    outside = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(outside, 0), weight)
    return leave(rows.masked_fill(outside[:, None], 0), group, "embedding")
