"""Paged attention in Triton: one kernel for chunks of prompts and single tokens, split over the keys for the latter.

A program computes a tile: as many queries of one row as fit into at least 16 matrix rows with the G query heads of one KV head.
Bits of a query depend on that query, its keys and its values alone, by construction: every tile has the same shape; keys
come in blocks counted from position 0; blocks are added in order within splits of SPLIT_KEYS keys, and splits in order, whether one
program walks over all of them (chunks) or each has its own and a second kernel adds them up (single tokens). Blocks and splits that a
query does not see add exactly 0, multiplications and additions are not fused by the compiler, and the number of splits
follows from the row's own length. So batch, chunks and page size change nothing where both forms compile to the same arithmetic;
Triton's interpreter, in which the tests run, has it so.

Grids are static for a table's width: programs without keys return at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.scheduler import Work
from rlhf_spmd.generation.step_pages import locate_tokens
from rlhf_spmd.kernels import AttentionRule, PageTarget, on_device

SPLIT_KEYS = 512  # keys that one program of a single token walks over: a multiple of every block of keys
BLOCK_BYTES = 1 << 14  # keys of a block, which is loaded as a whole: 64 of 128 bf16, 32 of 128 fp32
LOG2_E = 1.4426950408889634
OPTIONS: dict[str, Any] = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}


@triton.jit
def _write(
    k: tl.tensor, v: tl.tensor, pages: tl.tensor, slots: tl.tensor, k_stride: tl.tensor, k_head: tl.tensor,
    v_stride: tl.tensor, v_head: tl.tensor, head_elements: tl.tensor, heads: tl.tensor, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < DIM
    to = pages + tl.load(slots + token) * DIM + d
    tl.store(to + head * head_elements, tl.load(k + token * k_stride + head * k_head + d, mask=inside), mask=inside)
    tl.store(to + (head + heads) * head_elements, tl.load(v + token * v_stride + head * v_head + d, mask=inside), mask=inside)


@triton.jit
def _add(
    top: tl.tensor, total: tl.tensor, mixed: tl.tensor, other_top: tl.tensor, other_total: tl.tensor, other_mixed: tl.tensor
) -> tl.tensor:
    """Two parts of a softmax: largest scores, sums of exponentials, weighted values. One without keys adds exactly 0."""
    new_top = tl.maximum(top, other_top)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    scale, other_scale = tl.exp2(top - base), tl.exp2(other_top - base)
    total = total * scale + other_total * other_scale
    mixed = mixed * scale[:, None] + other_mixed * other_scale[:, None]
    return new_top, total, mixed


@triton.jit
def _splits(start: tl.tensor, count: tl.tensor, SPLIT: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """Oldest key of a tile, and its first split and the one after its last."""
    oldest = start * 0
    if WINDOW > 0:
        oldest = tl.maximum(start - WINDOW + 1, 0)
    return oldest, oldest // SPLIT, tl.cdiv(start + count, SPLIT)


@triton.jit
def _walk(
    x: tl.tensor, keys_at: tl.tensor, values_at: tl.tensor, line: tl.tensor, first: tl.tensor, last: tl.tensor,
    length: tl.tensor, position: tl.tensor, scale: tl.tensor, cap: tl.tensor, PAGE: tl.constexpr, DIM: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The part of the softmax over keys ``first`` .. ``last``; ``scale`` and ``cap`` are those of scores in powers of two."""
    d = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(first, last, BLOCK_N):
        key = block + tl.arange(0, BLOCK_N)
        written = key < length
        page = tl.load(line + key // PAGE, mask=written, other=0).to(tl.int64)
        slot = (page * PAGE + key % PAGE) * DIM
        k = tl.load(keys_at + slot[None, :] + d[:, None], mask=written[None, :] & (d < DIM)[:, None], other=0.0)
        scores = tl.dot(x, k, input_precision="ieee") * scale
        if CAPPED:
            scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634)) + 1.0))  # tanh
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        v = tl.load(values_at + slot[:, None] + d[None, :], mask=written[:, None] & (d < DIM)[None, :], other=0.0)
        mixed = tl.dot(p.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
        top = new_top
    return top, total, mixed


@triton.jit
def _attend(
    q: tl.tensor, pages: tl.tensor, out: tl.tensor, parts: tl.tensor, tiles: tl.tensor, table: tl.tensor,
    q_stride: tl.tensor, q_head: tl.tensor, head_elements: tl.tensor, table_stride: tl.tensor, kv_heads: tl.tensor,
    num_splits: tl.tensor, scale: tl.tensor, cap: tl.tensor, GROUP: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    token, start = tl.load(tiles + tile * 4).to(tl.int64), tl.load(tiles + tile * 4 + 1)
    count, line = tl.load(tiles + tile * 4 + 2), tl.load(tiles + tile * 4 + 3).to(tl.int64)
    oldest, first, last = _splits(start, count, SPLIT, WINDOW)
    if PARTS:
        first = tl.maximum(first, tl.program_id(2))
        last = tl.minimum(last, tl.program_id(2) + 1)
    if first >= last:
        return
    row = tl.arange(0, BLOCK_M)
    query = row // GROUP
    position = start + tl.minimum(query, count - 1)
    heads = head * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    inside = (query < count)[:, None] & (d < DIM)[None, :]
    x = tl.load(q + (token + query)[:, None] * q_stride + heads[:, None] * q_head + d[None, :], mask=inside, other=0.0)
    keys_at = pages + head.to(tl.int64) * head_elements
    values_at = pages + (head.to(tl.int64) + kv_heads) * head_elements
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in range(first, last):
        begin = tl.maximum(split * SPLIT, oldest // BLOCK_N * BLOCK_N)
        end = tl.minimum((split + 1) * SPLIT, start + count)
        other_top, other_total, other_mixed = _walk(
            x, keys_at, values_at, table + line * table_stride, begin, end, start + count, position, scale, cap,
            PAGE, DIM, WINDOW, CAPPED, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        top, total, mixed = _add(top, total, mixed, other_top, other_total, other_mixed)
    if PARTS:
        to = parts + ((tile * kv_heads * GROUP + heads) * num_splits + tl.program_id(2)).to(tl.int64) * (DIM + 2)
        real = row < GROUP
        tl.store(to[:, None] + d[None, :], mixed, mask=inside)
        tl.store(to + DIM, top, mask=real)
        tl.store(to + DIM + 1, total, mask=real)
    else:
        to = (token + query)[:, None] * (kv_heads * GROUP * DIM) + heads[:, None] * DIM + d[None, :]
        tl.store(out + to, mixed / total[:, None], mask=inside)


@triton.jit
def _add_parts(
    parts: tl.tensor, out: tl.tensor, tiles: tl.tensor, kv_heads: tl.tensor, num_splits: tl.tensor, GROUP: tl.constexpr,
    DIM: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    tile = tl.program_id(0)
    token, start = tl.load(tiles + tile * 4).to(tl.int64), tl.load(tiles + tile * 4 + 1)
    _, first, last = _splits(start, 1, SPLIT, WINDOW)
    row = tl.arange(0, BLOCK_M)
    real = row < GROUP
    heads = tl.program_id(1) * GROUP + row
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d < DIM)[None, :]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in range(first, last):
        at = parts + ((tile * kv_heads * GROUP + heads) * num_splits + split).to(tl.int64) * (DIM + 2)
        other_top = tl.load(at + DIM, mask=real, other=0.0)
        other_total = tl.load(at + DIM + 1, mask=real, other=1.0)
        other_mixed = tl.load(at[:, None] + d[None, :], mask=inside, other=0.0)
        top, total, mixed = _add(top, total, mixed, other_top, other_total, other_mixed)
    to = token * (kv_heads * GROUP * DIM) + heads[:, None] * DIM + d[None, :]
    tl.store(out + to, mixed / total[:, None], mask=inside)


class TritonAttention:
    """The attention context of a step. ``positions`` int64 [T]; ``slots`` int64 [T]: page * page_size + offset; ``table`` int32 [B, P]:
    the rows' pages; ``singles`` and ``chunks`` int32 [n, 4]: (token, position, number of queries, line of the table) of tiles with one
    query and with several. ``longest``: bounds the length of a row with a single query."""

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        positions: Tensor,
        slots: Tensor,
        table: Tensor,
        singles: Tensor,
        chunks: Tensor | None,
        longest: int,
    ) -> None:
        self.cache, self.positions, self.slots, self.table = cache, positions, slots, table
        self.group_size = num_heads // cache.kv_heads
        self.num_splits = -(-longest // SPLIT_KEYS)
        self.launches = [(chunks, 1)] if chunks is not None and len(chunks) else []
        if len(singles):
            self.launches.append((singles, self.num_splits))
        size = len(singles), num_heads, self.num_splits, cache.head_dim + 2
        self.parts = torch.empty(size if self.num_splits > 1 else 0, dtype=torch.float32, device=positions.device)

    @classmethod
    def for_step(cls, work: Sequence[Work], cache: KVCache, num_heads: int) -> TritonAttention:
        """``work`` in the order in which its tokens are packed."""
        step = locate_tokens(work, cache)
        width = tile_rows(num_heads // cache.kv_heads) // (num_heads // cache.kv_heads)
        tiles: list[list[tuple[int, int, int, int]]] = [[], []]
        rows = zip(step.firsts.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True)
        for line, (first, start, count) in enumerate(rows):
            for done in range(0, count, width):
                tiles[count > 1].append((first + done, start + done, min(width, count - done), line))
        singles, chunks = (on_device(np.array(some, dtype=np.int32), cache.pages.device) for some in tiles)
        longest = max((start + 1 for _, start, _, _ in tiles[0]), default=1)
        return cls(cache, num_heads, step.positions, step.slots, step.table, singles, chunks, longest)

    @classmethod
    def decoding(cls, positions: Tensor, table: Tensor, cache: KVCache, num_heads: int) -> TritonAttention:
        """One token of each row, of ``table`` [B, P], at ``positions`` [B]: nothing here looks at the tensors' values."""
        lines = torch.arange(len(positions), device=positions.device)
        slots = cache.slots_of(positions, table)
        singles = torch.stack([lines, positions, torch.ones_like(lines), lines], 1).to(torch.int32)
        return cls(cache, num_heads, positions, slots, table, singles, None, table.shape[1] * cache.page_size)

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [T, H * G, D], k and v [T, H, D] -> [T, H * G, D]: writes k and v, then attends over the rows' pages."""
        assert k.stride(2) == v.stride(2) == 1, "the elements of a head must lie together"
        pages, heads, dim = self.cache.pages[layer_index], self.cache.kv_heads, self.cache.head_dim
        sizes = *k.stride()[:2], *v.stride()[:2], pages.stride(1), heads, dim, max(triton.next_power_of_2(dim), 16)
        _write[(len(k), heads)](k, v, pages, self.slots, *sizes)
        return self.attend_written(layer_index, q, rule)

    def page_target(self, layer_index: int) -> PageTarget:
        return PageTarget(self.cache.pages[layer_index], self.slots)

    def attend_written(self, layer_index: int, q: Tensor, rule: AttentionRule) -> Tensor:
        """:meth:`attend` where k and v are in the pages already."""
        cache, dim = self.cache, self.cache.head_dim
        assert q.stride(2) == 1, "the elements of a head must lie together"
        pages, heads = cache.pages[layer_index], cache.kv_heads
        head_elements, block_d = pages.stride(1), max(triton.next_power_of_2(dim), 16)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        scale, cap = (rule.scale * LOG2_E, 0.0) if rule.softcap is None else (rule.scale / rule.softcap, rule.softcap * LOG2_E)
        block_m, window = tile_rows(self.group_size), rule.window or 0
        block_n = min(max(BLOCK_BYTES // (block_d * q.dtype.itemsize), 16), 64)
        for tiles, splits in self.launches:
            _attend[(len(tiles), heads, splits)](
                q, pages, out, self.parts, tiles, self.table, *q.stride()[:2], head_elements, self.table.stride(0), heads, splits,
                scale, cap, self.group_size, cache.page_size, dim, window, rule.softcap is not None, splits > 1,
                SPLIT_KEYS, block_m, block_n, block_d, **OPTIONS,
            )  # fmt: skip
            if splits > 1:
                sizes = (self.group_size, dim, window, SPLIT_KEYS, block_m, block_d)
                _add_parts[(len(tiles), heads)](self.parts, out, tiles, heads, splits, *sizes, **OPTIONS)
        return out


def tile_rows(group_size: int) -> int:
    return max(triton.next_power_of_2(group_size), 16)
