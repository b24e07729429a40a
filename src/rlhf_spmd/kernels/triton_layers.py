"""RMS norm, alone or after the residual addition, and the gated activation of the MLP, in Triton.

Each is one launch forward and one backward; gradients of norm weights are parts of PROGRAMS programs, which one more launch adds
in a fixed order. Sizes of blocks follow from a row's length alone, so a row's bits do not depend on the batch. All arithmetic is
in fp32 and rounded where torch's operations round it, without fused multiplications and additions. What differs from
:class:`~rlhf_spmd.kernels.ops.Ops` in the last bits: the order of the sums in norms, exp and rsqrt, and in the backward pass the
residual stream's gradients, which are added before they are rounded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 512  # the most of a backward pass that sums over rows: about four for each multiprocessor of a large GPU
TILE = 2048  # elements of a program of 4 warps
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


@triton.jit
def rounded(x: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Return the value rounded to the dtype that ``like`` points to."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def scaled(normal: tl.tensor, weight: tl.tensor, like: tl.tensor, UNIT_OFFSET: tl.constexpr) -> tl.tensor:
    """Return the norm's result from a normalised row, rounded as in ``Ops.norm``."""
    product = normal * (1.0 + weight) if UNIT_OFFSET else rounded(normal, like) * weight
    return rounded(product, like)


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x: tl.tensor, y: tl.tensor, weight: tl.tensor, total: tl.tensor, out: tl.tensor, scales: tl.tensor, rows: tl.tensor,
    eps: tl.tensor, N: tl.constexpr, ADDS: tl.constexpr, UNIT_OFFSET: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """Write the norm of rows [rows, N], with ``ADDS`` of x + y, which goes to ``total``; and the scales fp32 [rows]."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (column < N)[None, :]
    offset = row[:, None] * N + column[None, :]
    wide = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        wide = rounded(wide + tl.load(y + offset, mask=mask, other=0.0).to(tl.float32), total)
        tl.store(total + offset, wide.to(total.dtype.element_ty), mask=mask)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / N + eps)
    factor = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
    normed = scaled(wide * scale[:, None], factor[None, :], out, UNIT_OFFSET)
    tl.store(out + offset, normed.to(out.dtype.element_ty), mask=mask)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "per_program"])
def _norm_backward(
    grad: tl.tensor, grad_total: tl.tensor, x: tl.tensor, weight: tl.tensor, scales: tl.tensor, out: tl.tensor, parts: tl.tensor,
    rows: tl.tensor, per_program: tl.tensor, N: tl.constexpr, ADDS: tl.constexpr, UNIT_OFFSET: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of the norm's rows, with ``ADDS`` plus that of ``total``; and a part of the weight's, fp32 [programs, N]."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_N)
    factor = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        factor = 1.0 + factor
    sums = tl.zeros([BLOCK_R, BLOCK_N], tl.float32)
    first = program.to(tl.int64) * per_program
    for start in range(first, tl.minimum(first + per_program, rows), BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        mask = (row < rows)[:, None] & (column < N)[None, :]
        offset = row[:, None] * N + column[None, :]
        scale = tl.load(scales + row, mask=row < rows, other=0.0)[:, None]
        normal = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) * scale
        grad_out = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32)
        sums += grad_out * normal
        grad_normal = grad_out * factor[None, :]
        projection = tl.sum(grad_normal * normal, 1)[:, None] / N
        grad_x = (grad_normal - normal * projection) * scale
        if ADDS:
            grad_x += tl.load(grad_total + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + offset, grad_x.to(out.dtype.element_ty), mask=mask)
    tl.store(parts + program.to(tl.int64) * N + column, tl.sum(sums, 0), mask=column < N)


@triton.jit(do_not_specialize=["programs"])
def _sum_programs(
    parts: tl.tensor, out: tl.tensor, programs: tl.tensor, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
) -> None:
    """Write the sums of ``parts`` fp32 [programs, N] over the programs to ``out`` [N]."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    for first in range(0, programs, BLOCK_P):
        program = first + tl.arange(0, BLOCK_P).to(tl.int64)
        mask = (program < programs)[:, None] & (column < N)[None, :]
        sums += tl.load(parts + program[:, None] * N + column[None, :], mask=mask, other=0.0)
    tl.store(out + column, tl.sum(sums, 0).to(out.dtype.element_ty), mask=column < N)


@triton.jit
def _activated(gate: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """Return silu or tanh's gelu, which is gate * sigmoid of ``inner``: 1 + tanh(z) is 2 * sigmoid(2 z)."""
    inner = gate
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
    return gate / (1.0 + tl.exp(-inner))


@triton.jit
def _slope(gate: tl.tensor, GELU: tl.constexpr) -> tl.tensor:
    """Return the derivative of :func:`_activated`."""
    inner = gate
    change = 1.0
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        change = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    share = 1.0 / (1.0 + tl.exp(-inner))
    return share * (1.0 + gate * change * (1.0 - share))


@triton.jit
def _gate(gate_up: tl.tensor, out: tl.tensor, N: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Write the activation of the gate times up: [T, N] from [T, 2 N]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    source = gate_up + row * (2 * N) + column
    active = rounded(_activated(tl.load(source, mask=mask, other=0.0).to(tl.float32), GELU), out)
    up = tl.load(source + N, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * N + column, (active * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gate_backward(
    grad: tl.tensor, gate_up: tl.tensor, out: tl.tensor, N: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Write the gradients of gate and up [T, 2 N] from that of their product [T, N]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    place = row * (2 * N) + column
    gate = tl.load(gate_up + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + place + N, mask=mask, other=0.0).to(tl.float32)
    grad_out = tl.load(grad + row * N + column, mask=mask, other=0.0).to(tl.float32)
    grad_gate = rounded(grad_out * up, out) * _slope(gate, GELU)
    grad_up = rounded(_activated(gate, GELU), out) * grad_out
    tl.store(out + place, grad_gate.to(out.dtype.element_ty), mask=mask)
    tl.store(out + place + N, grad_up.to(out.dtype.element_ty), mask=mask)


def rows_of(n: int) -> tuple[int, int, int]:
    """Return, for rows of ``n`` elements: rows of a program, elements of a block, warps."""
    block = triton.next_power_of_2(n)
    return max(TILE // block, 1), block, min(max(block // 512, 4), 16)


def sum_parts(parts: Tensor, like: Tensor) -> Tensor:
    """Return the sum [n] of ``parts`` fp32 [programs, n], in the dtype of the weight."""
    programs, n = parts.shape
    out = like.new_empty(n)
    _sum_programs[(triton.cdiv(n, 32),)](parts, out, programs, n, 64, 32)
    return out


def norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float, unit_offset: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + y (x itself where there is no ``y``), its norm over the last dim, and the norm's scales [..., 1] in fp32."""
    n = x.shape[-1]
    x = x.contiguous()
    other = x if y is None else y.contiguous()
    total = x if y is None else torch.empty_like(x)
    out = torch.empty_like(x)
    scales = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    block_r, block_n, warps = rows_of(n)
    sizes = n, y is not None, unit_offset, block_r, block_n
    _norm[(triton.cdiv(scales.numel(), block_r),)](
        x, other, weight, total, out, scales, scales.numel(), eps, *sizes, num_warps=warps, **OPTIONS
    )
    return total, out, scales


def norm_backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor, scales: Tensor, unit_offset: bool
) -> tuple[Tensor, Tensor]:
    """Return gradients of the norm's input ``x``, to which ``grad_total`` is added, and of the weight."""
    n = x.shape[-1]
    rows = scales.numel()
    x, grad = x.contiguous(), grad.contiguous()
    other = grad if grad_total is None else grad_total.contiguous()
    out = torch.empty_like(x)
    block_r, block_n, warps = rows_of(n)
    per_program = triton.cdiv(triton.cdiv(rows, PROGRAMS), block_r) * block_r
    programs = triton.cdiv(rows, max(per_program, 1))
    parts = x.new_empty(programs, n, dtype=torch.float32)
    sizes = n, grad_total is not None, unit_offset, block_r, block_n
    _norm_backward[(programs,)](
        grad, other, x, weight, scales, out, parts, rows, per_program, *sizes, num_warps=warps, **OPTIONS
    )
    return out, sum_parts(parts, weight)


def gated_activation(gate_up: Tensor, gelu: bool) -> Tensor:
    """Return ``Ops.gated_activation``, without gradients."""
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    rows, n = out.shape
    block = min(triton.next_power_of_2(n), TILE // 2)
    _gate[(rows, triton.cdiv(n, block))](gate_up, out, n, gelu, block, **OPTIONS)
    return out


def gated_activation_backward(grad: Tensor, gate_up: Tensor, gelu: bool) -> Tensor:
    """Return the gradient of [gate; up] from the gradient of :func:`gated_activation`'s result."""
    gate_up = gate_up.contiguous()
    out = torch.empty_like(gate_up)
    rows, n = grad.shape
    block = min(triton.next_power_of_2(n), TILE // 2)
    _gate_backward[(rows, triton.cdiv(n, block))](grad.contiguous(), gate_up, out, n, gelu, block, **OPTIONS)
    return out
