"""Sums the expert outputs of each token (mixture of experts) in Triton, forward and backward.

:mod:`grouped_gemm` computes these outputs.

Shape legend: T tokens, K experts of each, N = T * K rows by expert, E experts, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 1}


@triton.jit
def _sum_rows(
    rows: tl.tensor, weights: tl.tensor, places: tl.tensor, out: tl.tensor, hidden: tl.tensor, K: tl.constexpr,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.full([BLOCK], 0.0, tl.float32)
    for choice in range(K):
        place = tl.load(places + token * K + choice)
        if WEIGHTED:  # nothing was computed for experts of other ranks, whose weight is 0
            weight = tl.load(weights + token * K + choice).to(tl.float32)
            read = column < tl.where(weight != 0.0, hidden, 0)
            part = tl.load(rows + place * hidden + column, mask=read, other=0.0).to(tl.float32) * weight
        else:
            part = tl.load(rows + place * hidden + column, mask=inside, other=0.0).to(tl.float32)
        total += part
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_rows_backward(
    grad: tl.tensor, rows: tl.tensor, weights: tl.tensor, places: tl.tensor, grad_rows: tl.tensor, grad_weights: tl.tensor,
    hidden: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    place = tl.load(places + pair)
    weight = tl.load(weights + pair).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    along = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + lane
        inside = column < hidden
        of_token = tl.load(grad + pair // K * hidden + column, mask=inside, other=0.0).to(tl.float32)
        along += of_token * tl.load(rows + place * hidden + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_rows + place * hidden + column, (of_token * weight).to(grad_rows.dtype.element_ty), mask=inside)
    tl.store(grad_weights + pair, tl.sum(along, 0).to(grad_weights.dtype.element_ty))


@triton.jit
def _own_choices(
    weights: tl.tensor, chosen: tl.tensor, out: tl.tensor, numbers: tl.tensor, size: tl.tensor, first: tl.tensor, own: tl.tensor,
    count: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    number = tl.load(chosen + at, mask=inside, other=0) - first
    number = tl.where(number < 0, number + count, number)
    weight = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, tl.where(number < own, weight, 0.0).to(out.dtype.element_ty), mask=inside)
    tl.store(numbers + at, number, mask=inside)


@triton.jit
def _places(order: tl.tensor, places: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    tl.store(places + tl.load(order + at, mask=inside, other=0), at.to(tl.int64), mask=inside)


@triton.jit
def _clear_idle(ends: tl.tensor, out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    expert = tl.program_id(1)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if first == tl.load(ends + expert):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.full([BLOCK], 0.0, tl.float32).to(out.dtype.element_ty)
        tl.store(out + expert.to(tl.int64) * size + at, zeros, mask=at < size)


@triton.jit
def _clamped_gate(
    gate_up: tl.tensor, grad: tl.tensor, out: tl.tensor, n: tl.tensor, alpha: tl.tensor, limit: tl.tensor, BACK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """The gate of a row, or BACK, the gradient of the row from that of the gate."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < n
    at = row * 2 * n + column
    given = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(gate_up + at + n, mask=inside, other=0.0).to(tl.float32)
    gate, up = tl.minimum(given, limit), tl.minimum(tl.maximum(other, -limit), limit) + 1.0
    share = 1.0 / (1.0 + tl.exp(-alpha * gate))
    if BACK:
        of_out = tl.load(grad + row * n + column, mask=inside, other=0.0).to(tl.float32)
        of_gate = of_out * up * share * (1.0 + alpha * gate * (1.0 - share))
        of_gate = tl.where(given <= limit, of_gate, 0.0)
        of_up = tl.where((other >= -limit) & (other <= limit), of_out * gate * share, 0.0)
        tl.store(out + at, of_gate.to(out.dtype.element_ty), mask=inside)
        tl.store(out + at + n, of_up.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + row * n + column, (gate * share * up).to(out.dtype.element_ty), mask=inside)


def clamped_gate(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """See ``Ops.clamped_gate``."""
    gate_up, n = gate_up.contiguous(), gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), n)
    if len(out):
        _clamped_gate[len(out), triton.cdiv(n, BLOCK)](gate_up, out, out, n, alpha, limit, BACK=False, BLOCK=BLOCK, **OPTIONS)
    return out


def clamped_gate_backward(grad: Tensor, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """The gradient of [gate; up] from that of :func:`clamped_gate`'s result."""
    gate_up, (rows, n) = gate_up.contiguous(), grad.shape
    out = torch.empty_like(gate_up)
    if rows:
        given = gate_up, grad.contiguous(), out, n, alpha, limit
        _clamped_gate[rows, triton.cdiv(n, BLOCK)](*given, BACK=True, BLOCK=BLOCK, **OPTIONS)
    return out


def own_choices(weights: Tensor, chosen: Tensor, first: int, own: int, count: int) -> tuple[Tensor, Tensor]:
    """See ``Ops.own_choices``."""
    weights, chosen, size = weights.contiguous(), chosen.contiguous(), chosen.numel()
    out, numbers = torch.empty_like(weights), torch.empty_like(chosen)
    if size:
        grid = (triton.cdiv(size, BLOCK),)
        _own_choices[grid](weights, chosen, out, numbers, size, first, own, count, BLOCK=BLOCK, **OPTIONS)
    return out, numbers


def places_of(order: Tensor) -> Tensor:
    """Where each (token, choice) pair lies: the inverse of the permutation ``order`` int64 [N]."""
    out = torch.empty_like(order)
    if len(order):
        _places[(triton.cdiv(len(order), BLOCK),)](order, out, len(order), BLOCK=BLOCK, **OPTIONS)
    return out


def sum_rows(rows: Tensor, places: Tensor, per_token: int, weights: Tensor | None = None) -> Tensor:
    """Returns, per token, the sum of its K rows of ``rows`` [N, H] times ``weights`` [T, K]: [T, H].

    ``places`` int64 [N]: where the rows lie. Adds in fp32, in the order of the token's choices. A row of weight 0 is not read.
    """
    assert rows.is_contiguous() and places.is_contiguous()
    tokens, hidden = len(places) // per_token, rows.shape[1]
    out = rows.new_empty(tokens, hidden)
    if tokens:
        options = {"K": per_token, "WEIGHTED": weights is not None, "BLOCK": BLOCK}
        told = rows if weights is None else weights.contiguous()
        _sum_rows[tokens, triton.cdiv(hidden, BLOCK)](rows, told, places, out, hidden, **options, **OPTIONS)
    return out


def sum_rows_backward(grad: Tensor, rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns gradients of the rows and of the weights [T, K] from the gradient of :func:`sum_rows`'s result."""
    weights, per_token = weights.contiguous(), weights.shape[1]
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    if len(places):
        given = grad.contiguous(), rows, weights, places, grad_rows, grad_weights, rows.shape[1]
        _sum_rows_backward[(len(places),)](*given, K=per_token, BLOCK=BLOCK, **OPTIONS)
    return grad_rows, grad_weights


def clear_idle(ends: Tensor, out: Tensor) -> None:
    """Zeroes ``out`` [E, ...], contiguous, for experts without rows. ``ends`` int32 [E]: ends of the experts' rows."""
    size = out[0].numel()
    _clear_idle[triton.cdiv(size, BLOCK), len(ends)](ends, out, size, BLOCK=BLOCK, **OPTIONS)
