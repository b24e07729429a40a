"""A mixture of experts on GPUs: products of all experts in one launch, by torch's grouped GEMM, which finds each expert's rows on the
device; in Triton the sums of each token's expert outputs, forward and backward.

Shape legend: T tokens, K experts of each, N = T * K rows by expert, E experts, H hidden. Rows of expert e end at ``ends[e]``, int32 [E]
on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
ALIGNED = 8  # bf16 elements of 16 bytes, of which rows of grouped products have a multiple
OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 1}


@triton.jit
def _sum_rows(
    rows: tl.tensor, weights: tl.tensor, row_of_pair: tl.tensor, out: tl.tensor, hidden: tl.tensor, K: tl.constexpr,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the sum of a token's ``K`` rows, with ``WEIGHTED`` times their weights: [T, hidden] from [T * K, hidden]."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    total = tl.full([BLOCK], 0.0, tl.float32)
    for choice in range(K):
        place = tl.load(row_of_pair + token * K + choice)
        if WEIGHTED:  # nothing was computed for experts of other ranks, whose weight is 0
            weight = tl.load(weights + token * K + choice).to(tl.float32)
            read = column < tl.where(weight != 0.0, hidden, 0)
            part = tl.load(rows + place * hidden + column, mask=read, other=0.0).to(tl.float32) * weight
        else:
            part = tl.load(rows + place * hidden + column, mask=mask, other=0.0).to(tl.float32)
        total += part
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_rows_backward(
    grad: tl.tensor, rows: tl.tensor, weights: tl.tensor, row_of_pair: tl.tensor, grad_rows: tl.tensor, grad_weights: tl.tensor,
    hidden: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of a pair's row and weight from that of its token's sum [T, hidden]."""
    pair = tl.program_id(0).to(tl.int64)
    place = tl.load(row_of_pair + pair)
    weight = tl.load(weights + pair).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    weight_grad = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, hidden, BLOCK):
        column = start + lane
        mask = column < hidden
        token_grad = tl.load(grad + pair // K * hidden + column, mask=mask, other=0.0).to(tl.float32)
        weight_grad += token_grad * tl.load(rows + place * hidden + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_rows + place * hidden + column, (token_grad * weight).to(grad_rows.dtype.element_ty), mask=mask)
    tl.store(grad_weights + pair, tl.sum(weight_grad, 0).to(grad_weights.dtype.element_ty))


@triton.jit
def _local_choices(
    weights: tl.tensor, expert_ids: tl.tensor, out: tl.tensor, local_ids: tl.tensor, size: tl.tensor, first: tl.tensor,
    num_local: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write ``Ops.local_choices``: weights [T, K] that are 0 for other ranks' experts, and ids that count from ``first``."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    local_id = tl.load(expert_ids + index, mask=mask, other=0) - first
    local_id = tl.where(local_id < 0, local_id + count, local_id)
    weight = tl.load(weights + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + index, tl.where(local_id < num_local, weight, 0.0).to(out.dtype.element_ty), mask=mask)
    tl.store(local_ids + index, local_id, mask=mask)


@triton.jit
def _rows_of_pairs(pair_of_row: tl.tensor, row_of_pair: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Write the inverse of the permutation ``pair_of_row`` [T * K]."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < size
    tl.store(row_of_pair + tl.load(pair_of_row + index, mask=mask, other=0), index.to(tl.int64), mask=mask)


@triton.jit
def _clear_idle(ends: tl.tensor, out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Write zeros to the gradients [experts, size] of experts without rows, which no product writes.

    ``ends``: each expert's last row + 1.
    """
    expert = tl.program_id(1)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if first == tl.load(ends + expert):
        offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.full([BLOCK], 0.0, tl.float32).to(out.dtype.element_ty)
        tl.store(out + expert.to(tl.int64) * size + offset, zeros, mask=offset < size)


@triton.jit
def _clamped_gate(
    gate_up: tl.tensor, grad: tl.tensor, out: tl.tensor, n: tl.tensor, alpha: tl.tensor, limit: tl.tensor, BACK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gate of a row; with ``BACK`` the gradient of the row, from the gradient of the gate."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < n
    offset = row * 2 * n + column
    raw_gate = tl.load(gate_up + offset, mask=mask, other=0.0).to(tl.float32)
    raw_up = tl.load(gate_up + offset + n, mask=mask, other=0.0).to(tl.float32)
    gate = tl.minimum(raw_gate, limit)
    up = tl.minimum(tl.maximum(raw_up, -limit), limit) + 1.0
    sigmoid = 1.0 / (1.0 + tl.exp(-alpha * gate))
    if BACK:
        grad_out = tl.load(grad + row * n + column, mask=mask, other=0.0).to(tl.float32)
        grad_gate = grad_out * up * sigmoid * (1.0 + alpha * gate * (1.0 - sigmoid))
        grad_gate = tl.where(raw_gate <= limit, grad_gate, 0.0)
        grad_up = tl.where((raw_up >= -limit) & (raw_up <= limit), grad_out * gate * sigmoid, 0.0)
        tl.store(out + offset, grad_gate.to(out.dtype.element_ty), mask=mask)
        tl.store(out + offset + n, grad_up.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(out + row * n + column, (gate * sigmoid * up).to(out.dtype.element_ty), mask=mask)


def clamped_gate(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return ``Ops.clamped_gate``, without gradients."""
    gate_up = gate_up.contiguous()
    n = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), n)
    if len(out):
        _clamped_gate[len(out), triton.cdiv(n, BLOCK)](gate_up, out, out, n, alpha, limit, BACK=False, BLOCK=BLOCK, **OPTIONS)
    return out


def clamped_gate_backward(grad: Tensor, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Return the gradient of [gate; up] from that of :func:`clamped_gate`'s result."""
    gate_up = gate_up.contiguous()
    rows, n = grad.shape
    out = torch.empty_like(gate_up)
    if rows:
        inputs = gate_up, grad.contiguous(), out, n, alpha, limit
        _clamped_gate[rows, triton.cdiv(n, BLOCK)](*inputs, BACK=True, BLOCK=BLOCK, **OPTIONS)
    return out


def local_choices(weights: Tensor, expert_ids: Tensor, first: int, num_local: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return ``Ops.local_choices``."""
    weights, expert_ids = weights.contiguous(), expert_ids.contiguous()
    out, local_ids = torch.empty_like(weights), torch.empty_like(expert_ids)
    if size := expert_ids.numel():
        grid = (triton.cdiv(size, BLOCK),)
        _local_choices[grid](weights, expert_ids, out, local_ids, size, first, num_local, num_experts, BLOCK=BLOCK, **OPTIONS)
    return out, local_ids


def rows_of_pairs(pair_of_row: Tensor) -> Tensor:
    """Return the row of each (token, choice) pair, int64 [N]: the inverse of the permutation ``pair_of_row`` int64 [N]."""
    out = torch.empty_like(pair_of_row)
    if len(pair_of_row):
        _rows_of_pairs[(triton.cdiv(len(pair_of_row), BLOCK),)](pair_of_row, out, len(pair_of_row), BLOCK=BLOCK, **OPTIONS)
    return out


def sum_rows(rows: Tensor, row_of_pair: Tensor, per_token: int, weights: Tensor | None = None) -> Tensor:
    """Return, per token, the sum of its K rows of ``rows`` [N, H] times ``weights`` [T, K]: [T, H].

    ``row_of_pair`` int64 [N]: where the rows lie. Adds in fp32, in the order of the token's choices. A row of weight 0 is not read.
    """
    assert rows.is_contiguous() and row_of_pair.is_contiguous()
    tokens = len(row_of_pair) // per_token
    hidden = rows.shape[1]
    out = rows.new_empty(tokens, hidden)
    if tokens:
        options = {"K": per_token, "WEIGHTED": weights is not None, "BLOCK": BLOCK}
        factors = rows if weights is None else weights.contiguous()
        _sum_rows[tokens, triton.cdiv(hidden, BLOCK)](rows, factors, row_of_pair, out, hidden, **options, **OPTIONS)
    return out


def sum_rows_backward(grad: Tensor, rows: Tensor, row_of_pair: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients of the rows and of the weights [T, K] from the gradient of :func:`sum_rows`'s result."""
    weights = weights.contiguous()
    grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
    if len(row_of_pair):
        inputs = grad.contiguous(), rows, weights, row_of_pair, grad_rows, grad_weights, rows.shape[1]
        _sum_rows_backward[(len(row_of_pair),)](*inputs, K=weights.shape[1], BLOCK=BLOCK, **OPTIONS)
    return grad_rows, grad_weights


def clear_idle(ends: Tensor, out: Tensor) -> None:
    """Set ``out`` [E, ...], contiguous, to 0 for experts without rows. ``ends`` int32 [E]: ends of the experts' rows."""
    size = out[0].numel()
    _clear_idle[triton.cdiv(size, BLOCK), len(ends)](ends, out, size, BLOCK=BLOCK, **OPTIONS)


def fits_grouped_product(x: Tensor, weight: Tensor) -> bool:
    """Return True if torch has a kernel for x [N, in] and ``weight`` [E, blocks, out, in] that does not wait for the host."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] not in (9, 10):
        return False
    aligned = weight.shape[2] % ALIGNED == weight.shape[3] % ALIGNED == 0 and len(x) > 0
    return aligned and x.dtype == weight.dtype == torch.bfloat16


def grouped_product(ends: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the result of :meth:`~rlhf_spmd.kernels.Ops.per_expert`, and what the backward pass needs."""
    x = x.contiguous()
    parts = [torch._grouped_mm(x, matrix.transpose(1, 2), ends) for matrix in weight.unbind(1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1), (x, weight)


def grouped_product_backward(ends: Tensor, _: object, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradients of x and of the weight.

    torch's product leaves gradients of experts without rows unwritten; they are set to 0.
    """
    parts = grad.contiguous().split(weight.shape[2], 1)
    grad_x, *others = (torch._grouped_mm(part, matrix, ends) for part, matrix in zip(parts, weight.unbind(1), strict=True))
    for other in others:
        grad_x += other
    block_grads = [torch._grouped_mm(part.t(), x, ends) for part in parts]
    grad_weight = block_grads[0][:, None] if len(block_grads) == 1 else torch.stack(block_grads, 1)
    clear_idle(ends, grad_weight)
    return grad_x, grad_weight
