"""One token of linear attention in Triton: convolution, gates, delta rule and gated norm, one launch for all rows and heads.

A program has a key head of a row, with its value heads: their states are read and written once, and nobody else reads them. Bits are as
:mod:`triton_layers` says. What differs from :mod:`linear_attention` and the operations behind it in the last bits: the order of the
sums, exp and rsqrt.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rlhf_spmd.kernels.linear_attention import EPS, DeltaShape, MixerWeights, StateRows
from rlhf_spmd.kernels.triton_layers import OPTIONS, rounded, scaled

ELEMENTS = 2048  # elements of a state for each warp
PADDING = tl.constexpr(64)  # rows among which padding is searched at a time


@triton.jit
def _log_of_one_plus(x: tl.tensor) -> tl.tensor:
    """Return log(1 + x), exact to some roundings also for small x, where 1 + x has lost digits: their loss is divided out."""
    total = 1.0 + x
    return tl.where(total == 1.0, x, tl.log(total) * (x / tl.where(total == 1.0, 1.0, total - 1.0)))


@triton.jit
def _convolved(
    new: tl.tensor, before: tl.tensor, weight: tl.tensor, width: tl.tensor, has_state: tl.tensor,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return silu of the convolution of ``width`` channels, and move their inputs ``before`` on by one token. ``has_state``: there
    are such inputs."""
    tap = tl.arange(0, BLOCK_J)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    mask = channel < width
    place = before + tap * CHANNELS + channel
    old = tl.load(place, mask=mask & (tap < KERNEL - 1) & has_state, other=0.0)
    seen = tl.where(tap == KERNEL - 1, tl.load(new + channel, mask=mask, other=0.0), old)
    factor = tl.load(weight + channel * KERNEL + tap, mask=mask & (tap < KERNEL), other=0.0).to(tl.float32)
    total = tl.sum(seen.to(tl.float32) * factor, 0)
    tl.debug_barrier()  # several threads may have read the same inputs
    tl.store(place - CHANNELS, seen, mask=mask & (tap > 0) & (tap < KERNEL))
    return total / (1.0 + tl.exp(-total))


@triton.jit(do_not_specialize=["rows"])
def _delta_rule_step(
    product: tl.tensor, conv: tl.tensor, decay: tl.tensor, decay_bias: tl.tensor, norm: tl.tensor, inputs: tl.tensor,
    memory: tl.tensor, slots: tl.tensor, positions: tl.tensor, out: tl.tensor, rows: tl.tensor, query_scale: tl.tensor, eps: tl.tensor,
    LENGTH_EPS: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, D: tl.constexpr, KERNEL: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Write the output [rows, heads, D] of one token of each row, from its ``product`` and the state of its slot, which moves on.

    One program computes one head of one row. Rows with a slot below 0 are left out.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    BLOCK_KEYS: tl.constexpr = KEYS // BLOCKS  # key heads of a block
    VALUES: tl.constexpr = KEYS * GROUP
    WIDTH: tl.constexpr = BLOCK_KEYS * (2 * K + GROUP * D)  # channels of a block
    CHANNELS: tl.constexpr = BLOCKS * WIDTH
    block, number = head // BLOCK_KEYS, head % BLOCK_KEYS
    slot = tl.load(slots + row)
    has_state = tl.load(positions + row) > 0
    if slot < 0:
        return
    source = product + row * (CHANNELS + VALUES * (D + 2)) + block * (WIDTH + BLOCK_KEYS * GROUP * (D + 2))
    channel = block * WIDTH
    before = inputs + slot * ((KERNEL - 1) * CHANNELS) + channel
    weight = conv + channel * KERNEL
    first = number * K
    q = _convolved(source + first, before + first, weight + first * KERNEL, K, has_state, CHANNELS, KERNEL, BLOCK_J, BLOCK_K)
    first = (BLOCK_KEYS + number) * K
    k = _convolved(source + first, before + first, weight + first * KERNEL, K, has_state, CHANNELS, KERNEL, BLOCK_J, BLOCK_K)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + LENGTH_EPS) * query_scale
    k = k * tl.rsqrt(tl.sum(k * k, 0) + LENGTH_EPS)
    i, j = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    mask = (i < K)[:, None] & (j < D)[None, :]
    factor = tl.load(norm + j, mask=j < D, other=0.0).to(tl.float32)
    for value in range(GROUP):
        in_block = number * GROUP + value  # among the value heads of the block
        value_head = head * GROUP + value
        first = 2 * BLOCK_KEYS * K + in_block * D
        v = _convolved(
            source + first, before + first, weight + first * KERNEL, D, has_state, CHANNELS, KERNEL, BLOCK_J, BLOCK_D
        )
        numbers = source + WIDTH + BLOCK_KEYS * GROUP * D + in_block
        rate = rounded(1.0 / (1.0 + tl.exp(-tl.load(numbers).to(tl.float32))), out)
        step = tl.load(numbers + BLOCK_KEYS * GROUP).to(tl.float32) + tl.load(decay_bias + value_head).to(tl.float32)
        step = tl.where(step > 20.0, step, _log_of_one_plus(tl.exp(tl.minimum(step, 20.0))))
        state_decay = tl.exp(-tl.exp(tl.load(decay + value_head).to(tl.float32)) * step)
        place = memory + (slot * VALUES + value_head) * (K * D) + i[:, None] * D + j[None, :]
        state = tl.load(place, mask=mask & has_state, other=0.0) * state_decay
        change = (v - tl.sum(k[:, None] * state, 0)) * rate
        state += k[:, None] * change[None, :]
        mixed = rounded(tl.sum(q[:, None] * state, 0), out)
        tl.debug_barrier()
        tl.store(place, state, mask=mask)
        normal = mixed * tl.rsqrt(tl.sum(mixed * mixed, 0) / D + eps)
        gate = tl.load(source + WIDTH + in_block * D + j, mask=j < D, other=0.0).to(tl.float32)
        result = (scaled(normal, factor, out, False) * (gate / (1.0 + tl.exp(-gate)))).to(out.dtype.element_ty)
        target = out + value_head * D + j
        tl.store(target + row * VALUES * D, result, mask=j < D)
        if row == 0:
            for first in range(1, rows, PADDING):
                other = first + tl.arange(0, PADDING)
                empty = tl.load(slots + other, mask=other < rows, other=0) < 0
                targets = target[None, :] + other.to(tl.int64)[:, None] * (VALUES * D)
                results = tl.broadcast_to(result[None, :], [PADDING, BLOCK_D])
                tl.store(targets, results, mask=empty[:, None] & (j < D)[None, :])


def sizes_of(shape: DeltaShape) -> tuple[dict[str, Any], int]:
    """Return what the kernel is compiled for, and its warps."""
    block_k, block_d = triton.next_power_of_2(shape.key_dim), triton.next_power_of_2(shape.value_dim)
    sizes = {"LENGTH_EPS": EPS, "KEYS": shape.keys, "GROUP": shape.values // shape.keys, "KERNEL": shape.kernel}
    sizes |= {"BLOCKS": shape.fused_slices, "BLOCK_J": triton.next_power_of_2(shape.kernel)}
    sizes |= {"K": shape.key_dim, "D": shape.value_dim, "BLOCK_K": block_k, "BLOCK_D": block_d}
    return sizes, min(max(block_k * block_d // ELEMENTS, 1), 16)


def delta_rule_step(product: Tensor, weights: MixerWeights, shape: DeltaShape, states: StateRows) -> Tensor:
    """Return :meth:`~rlhf_spmd.kernels.linear_attention.HasDeltaRuleStep.delta_rule_step`."""
    assert states.inputs.is_contiguous() and states.memory.is_contiguous(), "a layer's states lie together"
    product = product.contiguous()
    rows = len(product)
    out = product.new_empty(rows, shape.values, shape.value_dim)
    sizes, warps = sizes_of(shape)
    tensors = weights.conv, weights.decay, weights.decay_bias, weights.norm, *states
    scale = shape.key_dim**-0.5
    _delta_rule_step[(rows, shape.keys)](product, *tensors, out, rows, scale, weights.eps, **sizes, num_warps=warps, **OPTIONS)
    return out
