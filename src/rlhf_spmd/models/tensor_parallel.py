"""The tensor-parallel operations as autograd functions over a Group. A group of one rank communicates nothing.

Between two column- and row-parallel pairs every rank holds all rows (copy, reduce), or, with sequence parallelism (Korthikanti
et al. 2022), an equal part of them: gather, scatter. The sums of both forms have the same bits.

Collective over the tp group: every rank of it must call each of them, and run its backward, in program order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_spmd.parallel.collectives import Group


class _CopyToTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, label: str) -> Tensor:
        ctx.group, ctx.label = group, label
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # a copy: autograd may hand the same gradient to someone else, and all_reduce works in place
        total = grad.contiguous().clone() if ctx.group.size > 1 else grad
        return ctx.group.all_reduce(total, ctx.label), None, None


class _ReduceFromTP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, label: str) -> Tensor:
        return reduce_in_order(x, group, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def reduce_in_order(x: Tensor, group: Group, label: str) -> Tensor:
    """Sum over the group whose value at an element does not depend on where in the tensor the element lies.

    gloo's all_reduce starts each chunk of the buffer at another rank, so with more than two ranks a token's sum would
    depend on its place in the batch, and generation would differ from training in the last bits. On CPU the parts are
    therefore gathered and added in rank order; with two ranks the order does not matter, and small tensors gather faster.
    Collective over the group: every rank of it must call, in program order.
    """
    if group.size == 1:
        return x
    if x.device.type != "cpu" or (group.size == 2 and x.nbytes > 1 << 16):
        return group.all_reduce(x.contiguous().clone(), label)
    return _sum(group.all_gather(x, label))


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def _sum_own_rows(x: Tensor, group: Group, label: str) -> Tensor:
    """This rank's part [R / t, ...] of the sum of x [R, ...] over the group, with the bits of :func:`reduce_in_order`."""
    return _sum(group.all_to_all(x.view(group.size, -1, *x.shape[1:]), label).unbind())


def _all_rows(x: Tensor, group: Group, label: str) -> Tensor:
    return group.all_gather_into(x.new_empty(group.size * x.shape[0], *x.shape[1:]), x, label)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, label: str, partial: bool) -> Tensor:
        ctx.group, ctx.label, ctx.partial = group, label, partial
        return _all_rows(x, group, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.partial:
            return _sum_own_rows(grad.contiguous(), ctx.group, ctx.label), None, None, None
        return grad.chunk(ctx.group.size)[ctx.group.rank], None, None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, label: str) -> Tensor:
        ctx.group, ctx.label = group, label
        return _sum_own_rows(x, group, label)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _all_rows(grad, ctx.group, ctx.label), None, None


def copy_to_tp(x: Tensor, group: Group, label: str = "tp_grad") -> Tensor:
    """Identity whose backward sums the gradient over the group: the entry of a column-parallel matrix, or a replicated
    parameter that each rank applies to its own heads."""
    return _CopyToTP.apply(x, group, label) if group.size > 1 and torch.is_grad_enabled() else x


def reduce_from_tp(x: Tensor, group: Group, label: str = "tp_sum") -> Tensor:
    """Sum over the group whose backward is the identity: the exit of a row-parallel matrix."""
    return _ReduceFromTP.apply(x, group, label) if group.size > 1 else x


def gather_to_tp(x: Tensor, group: Group, label: str = "tp_gather") -> Tensor:
    """Every rank's rows [R / t, ...] in rank order, [R, ...], whose backward sums the gradient and leaves each rank its rows: the
    entry of a column-parallel matrix under sequence parallelism."""
    return _GatherRows.apply(x, group, label, True)


def scatter_from_tp(x: Tensor, group: Group, label: str = "tp_scatter") -> Tensor:
    """This rank's rows [R / t, ...] of the sum of x [R, ...] over the group, whose backward gathers: the exit of a row-parallel
    matrix under sequence parallelism. t divides R."""
    return _ScatterRows.apply(x, group, label)


def gather_whole(x: Tensor, group: Group, label: str = "tp_gather") -> Tensor:
    """:func:`gather_to_tp` for what every rank computes alike, so that each has the whole gradient: backward takes its rows."""
    return _GatherRows.apply(x, group, label, False)


def vocab_parallel_embedding(
    ids: Tensor, weight: Tensor, first: int, group: Group, leave: Callable[[Tensor, Group, str], Tensor] = reduce_from_tp
) -> Tensor:
    """Token ids [T] -> [T, hidden]; ``weight`` [V_local, hidden] holds the ids from ``first`` on. ``leave`` sums over the group."""
    if group.size == 1:
        return F.embedding(ids, weight)
    local = ids - first
    outside = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(outside, 0), weight)
    return leave(rows.masked_fill(outside[:, None], 0), group, "embedding")
