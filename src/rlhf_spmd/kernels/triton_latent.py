"""Latent attention of generation in Triton: keys and queries, and the tiles with which :mod:`triton_paged_attention` reads the keys.

One launch norms the short vectors, rotates what is rotated, and writes each token's key to the pages. The product of the queries is
torch's. Results are those of :func:`~rlhf_spmd.kernels.dense_attention.latent_heads` up to the order of the norm's sums and rsqrt.

Shape legend: as in ``dense_attention``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_spmd.kernels.dense_attention import LatentKeys
from rlhf_spmd.kernels.layer_args import PageTarget
from rlhf_spmd.kernels.triton_layers import OPTIONS, TILE, scaled
from rlhf_spmd.kernels.triton_paged_attention import TileShape
from rlhf_spmd.kernels.triton_qkv import left_dims, right_dims, rotated


def latent_tile(rank: int, itemsize: int, page_size: int, chunks: bool) -> TileShape:
    """Return the tile for keys whose first ``rank`` elements are the values. The queries of a head may take several tiles.

    With DeepSeek's 512 + 64 elements a program has the registers of a multiprocessor for itself, and no more rows would fit into them.
    """
    shape = TileShape.of(rank, itemsize, page_size, 32 if chunks and itemsize == 2 else 16)
    if itemsize > 2:
        return shape._replace(keys=16, warps=16, stages=2)
    return shape._replace(keys=32 if chunks else 64, warps=8, stages=2)


@triton.jit
def _turn(
    source: tl.tensor, target: tl.tensor, mask: tl.tensor, cos: tl.tensor, sin: tl.tensor, like: tl.tensor, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_E: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate what lies behind each of ``source`` [heads, 1] and write it behind ``target``. ``cos`` and ``sin``: of the token."""
    pair = tl.arange(0, BLOCK_E)
    real = pair < HALF
    left = left_dims(pair, HALF, HALF, INTERLEAVED)[None, :]
    right = right_dims(pair, HALF, HALF, INTERLEAVED)[None, :]
    c = tl.load(cos + pair, mask=real, other=1.0).to(tl.float32)[None, :]
    s = tl.load(sin + pair, mask=real, other=0.0).to(tl.float32)[None, :]
    mask = mask & real[None, :]
    a = tl.load(source + left, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + right, mask=mask, other=0.0).to(tl.float32)
    a, b = rotated(a, b, c, s, like, False)
    tl.store(target + left, a.to(like.dtype.element_ty), mask=mask)
    tl.store(target + right, b.to(like.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["written"])
def keys_to_pages(
    q: tl.tensor, short: tl.tensor, weight: tl.tensor, cos: tl.tensor, sin: tl.tensor, out: tl.tensor, pages: tl.tensor,
    slots: tl.tensor, written: tl.tensor, eps: tl.tensor, HEADS: tl.constexpr, NOPE: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr,
) -> None:  # fmt: skip
    """Write a token's key to the pages by its first program; rotate ``BLOCK_H`` heads' queries into ``out`` [T, H, C + E] by each
    other one."""
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = ROPE // 2
    WIDTH: tl.constexpr = RANK + ROPE
    cos += token * HALF
    sin += token * HALF
    if tl.program_id(1) > 0:
        head = ((tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        row = token * HEADS + head
        _turn(q + row * (NOPE + ROPE) + NOPE, out + row * WIDTH + RANK, head < HEADS, cos, sin, out, HALF, INTERLEAVED, BLOCK_E)
    elif token < written:
        source = short + token * WIDTH
        target = pages + tl.load(slots + token) * WIDTH
        column = tl.arange(0, BLOCK_C)
        wide = tl.load(source + column, mask=column < RANK, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / RANK + eps)
        factor = tl.load(weight + column, mask=column < RANK, other=0.0).to(tl.float32)
        tl.store(target + column, scaled(wide * scale, factor, out, False).to(out.dtype.element_ty), mask=column < RANK)
        zero = tl.zeros([1, 1], tl.int32)
        _turn(source + RANK + zero, target + RANK + zero, zero == 0, cos, sin, out, HALF, INTERLEAVED, BLOCK_E)


def latent_to_pages(q: Tensor, short: Tensor, keys: LatentKeys, pages: PageTarget) -> Tensor:
    """Return ``Ops.latent_to_pages``."""
    q, short, cos, sin = (x.contiguous() for x in (q, short, keys.cos, keys.sin))
    tokens, heads, width = q.shape
    _, nope, rank = keys.to_keys.shape
    out = q.new_empty(tokens, heads, short.shape[1])
    torch.bmm(q[..., :nope].transpose(0, 1), keys.to_keys, out=out[..., :rank].transpose(0, 1))
    rope = width - nope
    block_e = triton.next_power_of_2(rope // 2)
    block_h = min(max(TILE // (2 * block_e), 1), triton.next_power_of_2(heads))
    sizes = heads, nope, rank, rope, keys.interleaved, block_h, triton.next_power_of_2(rank), block_e
    tensors = q, short, keys.weight, cos, sin, out, pages.pages, pages.cache_slots
    grid = tokens, 1 + triton.cdiv(heads, block_h)
    keys_to_pages[grid](*tensors, len(pages.cache_slots), keys.eps, *sizes, **OPTIONS)
    return out
