"""Log-probs and entropies from the logits of the LM head in Triton, and their gradients, each in one pass over the logits.

Both kernels apply temperature and softcap as they read. A program of the statistics walks over one row. Each lane has its own maximum
and sums, which are combined at the end, so a row's result depends on that row alone. A program of the gradients computes a
block of one row.

Shape legend: T tokens, V logits of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_spmd.kernels.ops import LogitTransform

BLOCK = 2048
# without fused multiplications and additions: variants of the kernel that compute the same number must round alike
STATISTICS: dict[str, Any] = {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": False}
GRADIENTS: dict[str, Any] = {"num_warps": 4, "num_stages": 1}


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Return tanh(x) as the softcap computes it."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit(do_not_specialize=["rows", "first"])
def _statistics(
    logits: tl.tensor, labels: tl.tensor, out: tl.tensor, stride: tl.tensor, width: tl.tensor, rows: tl.tensor, first: tl.tensor,
    scale: tl.tensor, cap: tl.tensor, scales: tl.tensor, SCALES: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the statistics of a row. SCALES: each row has its own scale, in place of ``scale``."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * stride
    if SCALES:
        scale = tl.load(scales + row)
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], -1e30, tl.float32)  # finite: what a lane without logits is multiplied by stays a number
    total = tl.full([BLOCK], 0.0, tl.float32)
    weighted = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, width, BLOCK):
        mask = start + lane < width
        x = tl.load(source + start + lane, mask=mask, other=float("-inf"))
        if CAPPED:
            x = tl.where(mask, cap * _tanh(x / cap), float("-inf"))
        x = x * scale
        ahead = x - top
        above = ahead > 0
        part = tl.exp(-tl.abs(ahead))  # of the smaller, relative to the larger one
        if ENTROPY:
            distance = tl.where(part > 0, ahead, 0.0)  # what is too far away to count may be infinite
            weighted = tl.where(above, (weighted - total * distance) * part, weighted + distance * part)
        total = tl.where(above, total * part + 1.0, total + part)
        top = tl.where(above, x, top)
    largest = tl.max(top, 0)
    part = tl.exp(top - largest)
    tl.store(out + row, largest)
    tl.store(out + rows.to(tl.int64) + row, tl.sum(total * part, 0))
    label = tl.load(labels + row).to(tl.int64) - first
    has_label = (label >= 0) & (label < width)
    x = tl.load(source + label, mask=has_label, other=0.0)
    if CAPPED:
        x = cap * _tanh(x / cap)
    tl.store(out + 2 * rows.to(tl.int64) + row, x * scale)
    if ENTROPY:
        entropy_sum = tl.sum(tl.where(part > 0, (weighted + total * (top - largest)) * part, 0.0), 0)
        tl.store(out + 3 * rows.to(tl.int64) + row, entropy_sum)
    else:
        tl.store(out + 3 * rows.to(tl.int64) + row, 0.0)


@triton.jit(do_not_specialize=["first"])
def _gradients(
    logits: tl.tensor, labels: tl.tensor, log_z: tl.tensor, grads: tl.tensor, entropies: tl.tensor, entropy_grads: tl.tensor,
    out: tl.tensor, stride: tl.tensor, width: tl.tensor, first: tl.tensor, scale: tl.tensor, cap: tl.tensor,
    CAPPED: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients of logits [T, V] from those of the labels' log-probs and, with ``ENTROPY``, of entropies [T]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(logits + row * stride + column, mask=mask, other=0.0)
    slope = tl.full([BLOCK], 1.0, tl.float32)
    if CAPPED:
        tanh = _tanh(x / cap)
        x = cap * tanh
        slope = 1.0 - tanh * tanh
    log_p = x * scale - tl.load(log_z + row)
    p = tl.exp(log_p)
    grad = tl.load(grads + row)
    grad_of_all = tl.full([BLOCK], 0.0, tl.float32) + grad
    if ENTROPY:
        grad_of_entropy = (log_p + tl.load(entropies + row)) * tl.load(entropy_grads + row)
        grad_of_all = tl.where(p > 0, grad + grad_of_entropy, 0.0)
    grad_of_label = tl.where(column == tl.load(labels + row).to(tl.int64) - first, grad, 0.0)
    grad_logits = (grad_of_label - p * grad_of_all) * slope * scale
    tl.store(out + row * width + column, grad_logits.to(out.dtype.element_ty), mask=mask)


def _check(logits: Tensor, labels: Tensor) -> None:
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, "the head's kernels read rows of fp32 logits"
    assert labels.shape == logits.shape[:1], f"labels {tuple(labels.shape)} of logits {tuple(logits.shape)}"


def logit_statistics(
    logits: Tensor, labels: Tensor, first: int, entropy: bool, transform: LogitTransform, scales: Tensor | None = None
) -> Tensor:
    """Return :meth:`~rlhf_spmd.kernels.Ops.logit_statistics` of fp32 ``logits`` [T, V] to which ``transform`` is not yet applied.

    The logits stay unchanged. ``scales`` fp32 [T]: factor of each row, in place of the temperature's inverse.
    """
    _check(logits, labels)
    rows, width = logits.shape
    out = torch.empty(4, rows, dtype=torch.float32, device=logits.device)
    if rows:
        sizes = logits.stride(0), width, rows, first, *_factors(transform)
        options = {"SCALES": scales is not None, "CAPPED": transform.softcap is not None, "ENTROPY": entropy, "BLOCK": BLOCK}
        row_scales = out if scales is None else scales  # not read
        _statistics[(rows,)](logits, labels.contiguous(), out, *sizes, row_scales, **options, **STATISTICS)
    return out


def logit_gradients(
    logits: Tensor,
    labels: Tensor,
    first: int,
    log_z: Tensor,
    grads: Tensor,
    entropy: Sequence[Tensor] | None,
    transform: LogitTransform,
    dtype: torch.dtype,
) -> Tensor:
    """Return :meth:`~rlhf_spmd.kernels.Ops.head_gradients` of fp32 ``logits`` [T, V] to which ``transform`` is not yet applied.

    Overwrites the logits if ``dtype`` is theirs.
    """
    _check(logits, labels)
    rows, width = logits.shape
    in_place = dtype == logits.dtype and logits.is_contiguous()
    out = logits if in_place else torch.empty(rows, width, dtype=dtype, device=logits.device)
    numbers = [x.contiguous() for x in (labels, log_z, grads, *(entropy or (log_z, grads)))]
    assert all(x.dtype == torch.float32 for x in numbers[1:]), "gradients of the head's numbers are fp32"
    if rows and width:
        options = {"CAPPED": transform.softcap is not None, "ENTROPY": entropy is not None, "BLOCK": BLOCK}
        grid = rows, triton.cdiv(width, BLOCK)
        _gradients[grid](logits, *numbers, out, logits.stride(0), width, first, *_factors(transform), **options, **GRADIENTS)
    return out


@triton.jit
def _cap(logits: tl.tensor, cap: tl.tensor, number: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Write the softcap of logits over them."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(logits + index, cap * _tanh(tl.load(logits + index, mask=index < number, other=0.0) / cap), mask=index < number)


def cap_logits(logits: Tensor, softcap: float) -> Tensor:
    """Return contiguous fp32 ``logits``, overwritten with their softcap, bit for bit as the statistics compute it."""
    assert logits.dtype == torch.float32 and logits.is_contiguous(), "fp32 logits that lie together"
    if logits.numel():
        grid = (triton.cdiv(logits.numel(), BLOCK),)
        _cap[grid](logits, float(softcap), logits.numel(), BLOCK, num_warps=8, enable_fp_fusion=False)
    return logits


def _factors(transform: LogitTransform) -> tuple[float, float]:
    """Return the factors of ``transform``, its temperature rounded to fp32, as generation does for a row that it draws."""
    return 1.0 / float(np.float32(transform.temperature)), 1.0 if transform.softcap is None else float(transform.softcap)
