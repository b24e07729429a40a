"""What torch computes of the rows of a mixture's experts, on any device: a loop over the experts, biases, a gate, sums.

Shape legend: N rows by expert, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.kernels.packing import pad_rows
from rlhf_spmd.kernels.routing import sigmoid


def multiply(ops: Any, counts: Sequence[int], x: Tensor, weight: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """As ``Ops.per_expert``, of ``counts`` rows of each expert, and what the backward pass needs."""
    out = x.new_empty(len(x), weight.shape[1] * weight.shape[2])
    enough = ops.min_rows(weight[0].numel(), weight.shape[-1])
    for expert, rows in _ranges(counts):
        matrix = weight[expert].flatten(0, 1)  # a copy only if there are several blocks
        out[rows] = ops.linear(pad_rows(x[rows], enough), matrix)[: rows.stop - rows.start]
    return out, (x, weight)


def multiply_backward(
    ops: Any, counts: Sequence[int], _: object, grad: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight, memory_format=torch.contiguous_format)
    for expert, rows in _ranges(counts):
        grad_x[rows] = ops.gradient_product(grad[rows], weight[expert].flatten(0, 1))
        grad_weight[expert] = ops.gradient_product(grad[rows].t(), x[rows]).view(weight.shape[1:])
    return grad_x, grad_weight


def add_bias(rows: Tensor, bias: Tensor, experts: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """As ``Ops.add_expert_bias``."""
    return rows + bias.index_select(0, experts), (bias, experts)


def add_bias_backward(_: object, grad: Tensor, bias: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, None]:
    """By a product, which adds in a fixed order, unlike additions by index on GPUs."""
    numbers = torch.arange(len(bias), device=bias.device)
    return grad, torch.mm((experts == numbers[:, None]).to(grad.dtype), grad), None


def own_choices(weights: Tensor, chosen: Tensor, first: int, own: int, count: int) -> tuple[Tensor, Tensor]:
    """As ``Ops.own_choices``."""
    numbers = (chosen - first) % count
    return weights.masked_fill(numbers >= own, 0.0), numbers


def sort_choices(chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``Ops.sort_choices``."""
    experts, order = chosen.flatten().sort(stable=True)
    return experts, order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def gather(x: Tensor, order: Tensor, per_token: int) -> Tensor:
    """As ``Ops.expert_rows``."""
    copies = x[:, None].expand(-1, per_token, -1).reshape(-1, x.shape[1])
    return copies.index_select(0, order)  # not x[order // per_token]: its backward pass would add in no fixed order on GPUs


def sum_choices(rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """As ``Ops.sum_experts``."""
    parts = rows.index_select(0, places).view(*weights.shape, rows.shape[1]) * weights[:, :, None]
    total, *others = parts.unbind(1)
    for part in others:
        total = total + part
    return total


def sigmoid_gate(x: Tensor, weight: Tensor) -> Tensor:
    """As ``Ops.sigmoid_gate``."""
    wide = torch.promote_types(x.dtype, torch.float32)  # a sum: no product with one column is exact on CPUs
    return sigmoid((x.to(wide) * weight.to(wide)).sum(-1, keepdim=True)).to(x.dtype)


def clamped_gate(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """As ``Ops.clamped_gate``."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * sigmoid(gate * alpha) * (up + 1)


def _ranges(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of the experts that have any."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count
