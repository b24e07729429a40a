"""Mixture of experts: each token goes to the few experts that the router finds likeliest for it, one matrix product per expert.

A tensor-parallel rank holds a slice of every expert, so the result is a partial sum, as that of a dense MLP is. Exactness: the
rows of an expert are as many as its products need (``attention.exact_rows``), and a token's results are added in the order of
its own choices, so its bits do not depend on the batch. The load-balancing loss that pretraining adds is not applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlhf_spmd.models.attention import exact_rows, pad_rows
from rlhf_spmd.models.layers import multiply
from rlhf_spmd.models.spec import Experts


def mix_experts(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    experts: Experts,
    activation: Callable[[Tensor], Tensor],
    blocks: int,
) -> Tensor:
    """x [T, hidden] -> [T, hidden], this rank's part of the sum.

    ``router`` [E, hidden]; ``gate_up`` [blocks * E * 2n, hidden] and ``down`` [E * hidden, blocks * n] of n inner columns, in
    the order of ``sharding.plan_params``.
    """
    count, per_token = experts.count, experts.per_token
    weights, chosen = route(x, router, experts)
    order = chosen.flatten().argsort(stable=True)  # (token, choice) pairs by expert
    counts = torch.bincount(chosen.flatten(), minlength=count).tolist()
    copies = x[:, None].expand(-1, per_token, -1).reshape(-1, x.shape[1])
    rows = copies.index_select(0, order)  # not x[order // per_token]: its backward pass would add in no fixed order on GPUs
    entry = gate_up.view(blocks, count, -1, x.shape[1]).transpose(0, 1)
    inner = activation(_PerExpert.apply(rows, entry, counts).view(len(rows) * blocks, -1)).view(len(rows), -1)
    out = _PerExpert.apply(inner, down.view(count, 1, x.shape[1], -1), counts)
    parts = out.index_select(0, order.argsort()).view(-1, per_token, x.shape[1]) * weights[:, :, None]
    total, *others = parts.unbind(1)
    for part in others:
        total = total + part
    return total


def route(x: Tensor, router: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Weights, in x's dtype, and numbers of the experts of each token, [T, per_token] each. The softmax is over all experts, in
    fp32 (fp64 for fp64)."""
    logits = multiply(x, router)
    probabilities = torch.softmax(logits, -1, dtype=torch.promote_types(x.dtype, torch.float32))
    weights, chosen = probabilities.topk(experts.per_token, -1)
    if experts.normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(x.dtype), chosen


class _PerExpert(torch.autograd.Function):
    """x [N, in], ``counts[e]`` rows of each expert in turn, times that expert's matrix [blocks, out, in] -> [N, blocks * out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        out = x.new_empty(len(x), weight.shape[1] * weight.shape[2])
        enough = exact_rows(weight[0].numel())
        for expert, rows in _ranges(counts):
            matrix = weight[expert].flatten(0, 1)  # a copy only if there are several blocks
            out[rows] = multiply(pad_rows(x[rows], enough), matrix)[: rows.stop - rows.start]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight, memory_format=torch.contiguous_format)
        for expert, rows in _ranges(ctx.counts):
            torch.mm(grad[rows], weight[expert].flatten(0, 1), out=grad_x[rows])
            grad_weight[expert] = torch.mm(grad[rows].t(), x[rows]).view(weight.shape[1:])
        return grad_x, grad_weight, None


def _ranges(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of the experts that have any."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count
