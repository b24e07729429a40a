"""Queries, keys and values from the qkv product in Triton: norm and rotary embedding, one launch forward and one backward.

In generation the same launch writes keys and values to the cache's pages. Bits are as :mod:`triton_layers` says. q, k and v are
those of :meth:`Ops.split_heads` up to the order of the norms' sums and rsqrt; without norms they are equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_spmd.kernels.layer_args import HeadShape, Norms, PageTarget
from rlhf_spmd.kernels.triton_layers import OPTIONS, PROGRAMS, TILE, rounded, scaled, sum_parts


@triton.jit
def _place(head: tl.tensor, Q: tl.constexpr, KV: tl.constexpr, BLOCKS: tl.constexpr) -> tl.tensor:
    """Return where a head lies in a row of BLOCKS blocks. Heads are numbered: all queries, then keys, then values."""
    place = head
    if BLOCKS > 1:
        own_q: tl.constexpr = Q // BLOCKS
        own_kv: tl.constexpr = KV // BLOCKS
        value = (head >= Q + KV).to(tl.int32)
        other = head - Q - KV * value  # among the heads of keys, or of values
        kv_place = other // own_kv * (own_q + 2 * own_kv) + own_q + value * own_kv + other % own_kv
        place = tl.where(head < Q, head // own_q * (own_q + 2 * own_kv) + head % own_q, kv_place)
    return place


@triton.jit
def rotated(
    a: tl.tensor, b: tl.tensor, cos: tl.tensor, sin: tl.tensor, like: tl.tensor, BACK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return both halves rotated, or rotated back; rounds each product and sum as ``Ops.apply_rotary`` does."""
    if BACK:
        first = rounded(a * cos, like) + rounded(b * sin, like)
        second = rounded(b * cos, like) - rounded(a * sin, like)
    else:
        first = rounded(a * cos, like) - rounded(b * sin, like)
        second = rounded(b * cos, like) + rounded(a * sin, like)
    return rounded(first, like), rounded(second, like)


@triton.jit
def left_dims(column: tl.tensor, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr) -> tl.tensor:
    """Return where in a head the first dim of each pair lies: the pairs that are rotated, then those of the other dims."""
    place = column
    if HALF != PAIRS or INTERLEAVED:
        rotated_column = column * 2 if INTERLEAVED else column
        place = tl.where(column < PAIRS, rotated_column, column + PAIRS)
    return place


@triton.jit
def right_dims(column: tl.tensor, HALF: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr) -> tl.tensor:
    """Return where in a head the second dim of each pair lies."""
    place = column + HALF
    if HALF != PAIRS or INTERLEAVED:
        rotated_column = column * 2 + 1 if INTERLEAVED else column + PAIRS
        place = tl.where(column < PAIRS, rotated_column, place)
    return place


@triton.jit
def _weights(q_weight: tl.tensor, k_weight: tl.tensor, column: tl.tensor, mask: tl.tensor, is_q: tl.tensor) -> tl.tensor:
    """Return the weights of each head's norm, [heads, columns]."""
    q_weights = tl.load(q_weight + column, mask=mask, other=0.0).to(tl.float32)
    k_weights = tl.load(k_weight + column, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_q[:, None], q_weights[None, :], k_weights[None, :])


@triton.jit(do_not_specialize=["written"])
def _heads(
    qkv: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor, cos: tl.tensor, sin: tl.tensor, q: tl.tensor, k: tl.tensor,
    v: tl.tensor, slots: tl.tensor, written: tl.tensor, head_elements: tl.tensor, eps: tl.tensor, HEADS: tl.constexpr,
    Q: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr, NORMED: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, PAGED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Norm and rotate the first HEADS heads of a token. PAGED: keys and values go to ``k``, the pages of a layer."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    HALF: tl.constexpr = DIM // 2
    real = column < HALF
    mask = (head < HEADS)[:, None] & real[None, :]
    is_q = head < Q
    is_v = head >= Q + KV
    left = left_dims(column, HALF, PAIRS, INTERLEAVED)
    right = right_dims(column, HALF, PAIRS, INTERLEAVED)
    source = qkv + token * ((Q + 2 * KV) * DIM) + _place(head, Q, KV, BLOCKS)[:, None] * DIM
    a = tl.load(source + left[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + right[None, :], mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + token * PAIRS + column, mask=column < PAIRS, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * PAIRS + column, mask=column < PAIRS, other=0.0).to(tl.float32)[None, :]
    x, y = a, b
    if NORMED:
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / DIM + eps)[:, None]
        x = scaled(a * scale, _weights(q_weight, k_weight, left, real, is_q), q, UNIT_OFFSET)
        y = scaled(b * scale, _weights(q_weight, k_weight, right, real, is_q), q, UNIT_OFFSET)
    x, y = rotated(x, y, c, s, q, False)
    x = tl.where(is_v[:, None], a, x).to(q.dtype.element_ty)
    y = tl.where(is_v[:, None], b, y).to(q.dtype.element_ty)
    target = q + (token * Q + head)[:, None] * DIM
    q_mask = mask & is_q[:, None]
    tl.store(target + left[None, :], x, mask=q_mask)
    tl.store(target + right[None, :], y, mask=q_mask)
    if PAGED:
        slot = tl.load(slots + token, mask=token < written, other=0).to(tl.int64)
        target = k + slot * DIM + (head - Q).to(tl.int64)[:, None] * head_elements
        page_mask = mask & (head >= Q)[:, None] & (token < written)
        tl.store(target + left[None, :], x, mask=page_mask)
        tl.store(target + right[None, :], y, mask=page_mask)
    else:
        target = k + (token * KV + head - Q)[:, None] * DIM
        k_mask = mask & ((head >= Q) & (head < Q + KV))[:, None]
        tl.store(target + left[None, :], x, mask=k_mask)
        tl.store(target + right[None, :], y, mask=k_mask)
        if HEADS > Q + KV:
            target = v + (token * KV + head - Q - KV)[:, None] * DIM
            tl.store(target + left[None, :], x, mask=mask & is_v[:, None])
            tl.store(target + right[None, :], y, mask=mask & is_v[:, None])


@triton.jit(do_not_specialize=["tokens", "per_program"])
def _heads_backward(
    grad_q: tl.tensor, grad_k: tl.tensor, grad_v: tl.tensor, qkv: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor,
    cos: tl.tensor, sin: tl.tensor, out: tl.tensor, parts: tl.tensor, tokens: tl.tensor, per_program: tl.tensor,
    q_stride: tl.tensor, q_head: tl.tensor, k_stride: tl.tensor, k_head: tl.tensor, v_stride: tl.tensor, v_head: tl.tensor,
    eps: tl.tensor, Q: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr, NORMED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of the qkv product [T, (Q + 2 KV) DIM] from those of q, k and v; and parts of the norms' weights' gradients.

    One program computes ``per_program`` tokens of ``BLOCK_H`` heads.
    """
    program = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    HALF: tl.constexpr = DIM // 2
    real = column < HALF
    mask = (head < Q + 2 * KV)[:, None] & real[None, :]
    is_q, is_k, is_v = head < Q, (head >= Q) & (head < Q + KV), head >= Q + KV
    q_mask, k_mask, v_mask = mask & is_q[:, None], mask & is_k[:, None], mask & is_v[:, None]
    wide = head.to(tl.int64)
    left = left_dims(column, HALF, PAIRS, INTERLEAVED)
    right = right_dims(column, HALF, PAIRS, INTERLEAVED)
    place = _place(head, Q, KV, BLOCKS)[:, None] * DIM
    q_place = (wide * q_head)[:, None]
    k_place = ((wide - Q) * k_head)[:, None]
    v_place = ((wide - Q - KV) * v_head)[:, None]
    sum_a = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    sum_b = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    weight_a, weight_b = sum_a, sum_b
    if NORMED:
        weight_a = _weights(q_weight, k_weight, left, real, is_q)
        weight_b = _weights(q_weight, k_weight, right, real, is_q)
        if UNIT_OFFSET:
            weight_a, weight_b = 1.0 + weight_a, 1.0 + weight_b
    first = program.to(tl.int64) * per_program
    for token in range(first, tl.minimum(first + per_program, tokens)):
        from_q, from_k, from_v = grad_q + token * q_stride, grad_k + token * k_stride, grad_v + token * v_stride
        # each head is of one kind: the other two add zeros
        value_a = tl.load(from_v + v_place + left[None, :], mask=v_mask, other=0.0).to(tl.float32)
        value_b = tl.load(from_v + v_place + right[None, :], mask=v_mask, other=0.0).to(tl.float32)
        a = tl.load(from_q + q_place + left[None, :], mask=q_mask, other=0.0).to(tl.float32)
        b = tl.load(from_q + q_place + right[None, :], mask=q_mask, other=0.0).to(tl.float32)
        a += tl.load(from_k + k_place + left[None, :], mask=k_mask, other=0.0).to(tl.float32)
        b += tl.load(from_k + k_place + right[None, :], mask=k_mask, other=0.0).to(tl.float32)
        c = tl.load(cos + token * PAIRS + column, mask=column < PAIRS, other=1.0).to(tl.float32)[None, :]
        s = tl.load(sin + token * PAIRS + column, mask=column < PAIRS, other=0.0).to(tl.float32)[None, :]
        a, b = rotated(a, b, c, s, out, True)
        if NORMED:
            source = qkv + token * ((Q + 2 * KV) * DIM) + place
            x = tl.load(source + left[None, :], mask=q_mask | k_mask, other=0.0).to(tl.float32)
            y = tl.load(source + right[None, :], mask=q_mask | k_mask, other=0.0).to(tl.float32)
            scale = tl.rsqrt(tl.sum(x * x + y * y, 1) / DIM + eps)[:, None]
            x, y = x * scale, y * scale
            sum_a += a * x
            sum_b += b * y
            a, b = a * weight_a, b * weight_b
            projection = tl.sum(a * x + b * y, 1)[:, None] / DIM
            a, b = (a - x * projection) * scale, (b - y * projection) * scale
        target = out + token * ((Q + 2 * KV) * DIM) + place
        tl.store(target + left[None, :], tl.where(is_v[:, None], value_a, a).to(out.dtype.element_ty), mask=mask)
        tl.store(target + right[None, :], tl.where(is_v[:, None], value_b, b).to(out.dtype.element_ty), mask=mask)
    if NORMED:
        target = parts + (program.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * (2 * DIM)
        tl.store(target + left, tl.sum(tl.where(is_q[:, None], sum_a, 0.0), 0), mask=real)
        tl.store(target + right, tl.sum(tl.where(is_q[:, None], sum_b, 0.0), 0), mask=real)
        tl.store(target + DIM + left, tl.sum(tl.where(is_k[:, None], sum_a, 0.0), 0), mask=real)
        tl.store(target + DIM + right, tl.sum(tl.where(is_k[:, None], sum_b, 0.0), 0), mask=real)


def head_blocks(shape: HeadShape, heads: int) -> tuple[int, int]:
    """Return the heads of a program, and elements of half a head's block."""
    block_d = triton.next_power_of_2(shape.dim // 2)
    return min(max(TILE // (2 * block_d), 1), triton.next_power_of_2(heads)), block_d


def _head_sizes(shape: HeadShape, normed: bool, cos: Tensor) -> tuple[int, ...]:
    """Return the constants that both kernels have, from ``Q`` to ``INTERLEAVED``."""
    heads = shape.queries, shape.keys, shape.dim, shape.fused_slices
    return *heads, normed, shape.unit_offset, cos.shape[-1], shape.interleaved


def split_heads(
    qkv: Tensor, norms: Norms, cos: Tensor, sin: Tensor, shape: HeadShape, pages: PageTarget | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``Ops.split_heads``, without gradients.

    With one fused slice, v is a view of qkv. With ``pages``, keys and values are written only there.
    """
    qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
    tokens, count = len(qkv), shape.queries + shape.keys
    q_weight, k_weight = norms
    q = qkv.new_empty(tokens, shape.queries, shape.dim)
    v = qkv.view(tokens, -1, shape.dim)[:, count:]
    if pages is not None:
        assert pages.pages[0].is_contiguous() and pages.pages[0].stride(0) > 0, "a layer's pages lie together"
        k = pages.pages
        page_args = pages.cache_slots, len(pages.cache_slots), k.stride(1)
    else:
        k = qkv.new_empty(tokens, shape.keys, shape.dim)
        page_args = qkv, 0, 0  # not read
        v = v if shape.fused_slices == 1 else torch.empty_like(k)
    num_heads = count if pages is None and shape.fused_slices == 1 else count + shape.keys
    block_h, block_d = head_blocks(shape, count + shape.keys)  # with and without pages: so the norms' sums have one order
    sizes = (*_head_sizes(shape, q_weight is not None, cos), pages is not None)
    _heads[(tokens, triton.cdiv(num_heads, block_h))](
        qkv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, cos, sin, q, k, v, *page_args, shape.eps,
        num_heads, *sizes, block_h, block_d, **OPTIONS,
    )  # fmt: skip
    return q, k, v


def split_heads_backward(
    grads: tuple[Tensor, Tensor, Tensor], qkv: Tensor, norms: Norms, cos: Tensor, sin: Tensor, shape: HeadShape
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return gradients of qkv and of the norms' weights from the gradients of q, k and v."""
    head_grads = [grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads]
    strides = [stride for grad in head_grads for stride in grad.stride()[:2]]
    qkv = qkv.contiguous()
    q_weight, k_weight = norms
    normed = q_weight is not None
    tokens = len(qkv)
    out = torch.empty_like(qkv)
    block_h, block_d = head_blocks(shape, shape.queries + 2 * shape.keys)
    per_program = max(triton.cdiv(tokens, PROGRAMS), 1)
    grid = triton.cdiv(tokens, per_program), triton.cdiv(shape.queries + 2 * shape.keys, block_h)
    parts = qkv.new_empty(grid[0] * grid[1] if normed else 0, 2 * shape.dim, dtype=torch.float32)
    sizes = _head_sizes(shape, normed, cos)
    _heads_backward[grid](
        *head_grads, qkv, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight, cos.contiguous(),
        sin.contiguous(), out, parts, tokens, per_program, *strides, shape.eps, *sizes, block_h, block_d, **OPTIONS,
    )  # fmt: skip
    if q_weight is None:
        return out, None, None
    q_weight, k_weight = sum_parts(parts, q_weight).chunk(2)
    return out, q_weight, k_weight
