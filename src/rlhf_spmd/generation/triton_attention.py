"""Paged attention in Triton: wide tiles for chunks of prompts, narrow ones for single tokens, whose keys several programs share.

A program computes a tile: queries of one row, with the G query heads of one KV head, as rows of a matrix. Chunks fill CHUNK_ROWS of
them, so keys are read once for many queries; a single token fills 16 or G.
Bits of a query depend on that query, its keys and its values alone, by construction: keys come in blocks counted from position 0;
blocks are added in order within splits of SPLIT_KEYS keys, and splits in order, whether one program walks over all of them or
several share them and the last to arrive adds them up. Blocks that a query does not see add exactly 0, multiplications and
additions are not fused by the compiler, and the number of splits follows from the row's own length. So batch, chunks, page size
and PROGRAMS change nothing where both forms compile to the same arithmetic; Triton's interpreter, in which the tests run, has it so.
On a device with wgmma the wide tile's products may round otherwise than the narrow tile's; ``TileShape.of_alike`` has those of
the narrow one.

Grids are static for a table's width: programs without keys return at once, and there are at most about PROGRAMS of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
from torch import Tensor

from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.scheduler import Work
from rlhf_spmd.generation.step_pages import locate_tokens
from rlhf_spmd.kernels import AttentionRule, PageTarget, on_device, paged_kernels, paged_tiles
from rlhf_spmd.kernels.paged_tiles import TileShape, score_factors

PROGRAMS = 1 << 12  # of single tokens: an H100 holds some 400 at a time


class TritonAttention:
    """The attention context of a step. ``positions`` int64 [T]; ``slots`` int64 [T]: page * page_size + offset; ``table`` int32 [B, P]:
    the rows' pages. ``singles`` and ``chunks`` int32 [n, 4]: (token, position, number of queries, line of the table) of tiles with one
    query and with several, the latter with their shape; singles are None where they are the step's tokens, a line of the table each.
    ``longest``: bounds the length of a row with a single query. ``arrived`` int32 [number of singles, H], zeros."""

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        positions: Tensor,
        slots: Tensor,
        table: Tensor,
        singles: Tensor | None,
        chunks: tuple[Tensor, TileShape] | None,
        longest: int,
        arrived: Tensor,
    ) -> None:
        self.cache, self.positions, self.slots, self.table = cache, positions, slots, table
        self.singles, self.chunks, self.arrived = singles, chunks, arrived
        self.group_size = num_heads // cache.kv_heads
        self.num_splits = -(-longest // paged_tiles.SPLIT_KEYS)
        self.sharing = max(min(self.num_splits, PROGRAMS // max(arrived.numel(), 1)), 1)
        size = (len(arrived), num_heads, self.num_splits, cache.head_dim + 2) if self.sharing > 1 else (0,)
        self.parts = torch.empty(size, dtype=torch.float32, device=positions.device)

    @classmethod
    def for_step(
        cls,
        work: Sequence[Work],
        cache: KVCache,
        num_heads: int,
        shape_of: Callable[[int, int, int, int], TileShape] = TileShape.of_chunks,
    ) -> TritonAttention:
        """``work`` in the order in which its tokens are packed. ``shape_of``: gives chunks their tile."""
        step, group_size, device = locate_tokens(work, cache), num_heads // cache.kv_heads, cache.pages.device
        shape = shape_of(cache.head_dim, cache.pages.itemsize, cache.page_size, group_size)
        width = shape.rows // group_size
        tiles: list[list[tuple[int, int, int, int]]] = [[], []]
        rows = zip(step.firsts.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True)
        for line, (first, start, count) in enumerate(rows):
            for done in range(0, count, width):
                tiles[count > 1].append((first + done, start + done, min(width, count - done), line))
        tiles[1].sort(key=lambda tile: -tile[1])  # those with most keys begin first
        singles, chunks = (on_device(np.array(some, dtype=np.int32), device) if some else None for some in tiles)
        wide = None if chunks is None else (chunks, shape)
        longest = max((start + 1 for _, start, _, _ in tiles[0]), default=1)
        arrived = torch.zeros(len(tiles[0]), cache.kv_heads, dtype=torch.int32, device=device)
        return cls(cache, num_heads, step.positions, step.slots, step.table, singles, wide, longest, arrived)

    @classmethod
    def decoding(cls, positions: Tensor, table: Tensor, cache: KVCache, num_heads: int) -> TritonAttention:
        """One token of each row, of ``table`` [B, P], at ``positions`` [B]: nothing here looks at the tensors' values."""
        slots = torch.empty_like(positions)
        arrived = torch.empty(len(positions), cache.kv_heads, dtype=torch.int32, device=positions.device)
        sizes = table.stride(0), cache.kv_heads, cache.page_size, triton.next_power_of_2(cache.kv_heads)
        paged_kernels.locate_rows[(len(positions),)](positions, table, slots, arrived, *sizes, num_warps=1)
        return cls(cache, num_heads, positions, slots, table, None, None, table.shape[1] * cache.page_size, arrived)

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [T, H * G, D], k and v [T, H, D] -> [T, H * G, D]: writes k and v, then attends over the rows' pages."""
        assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "the elements of a head must lie together"
        pages, heads, dim = self.cache.pages[layer_index], self.cache.kv_heads, self.cache.head_dim
        strides = (*k.stride()[:2], *v.stride()[:2], pages.stride(1))
        paged_kernels.write[(len(k), heads)](k, v, pages, self.slots, *strides, heads, dim, triton.next_power_of_2(dim))
        return self.attend_written(layer_index, q, rule)

    def page_target(self, layer_index: int) -> PageTarget:
        return PageTarget(self.cache.pages[layer_index], self.slots)

    def attend_written(self, layer_index: int, q: Tensor, rule: AttentionRule) -> Tensor:
        """:meth:`attend` where the step's keys and values lie in ``cache.pages[layer_index]`` at ``slots`` already."""
        cache, out = self.cache, torch.empty_like(q, memory_format=torch.contiguous_format)
        pages, heads, dim = cache.pages[layer_index], cache.kv_heads, cache.head_dim
        scale, cap = score_factors(rule)
        strides = (*q.stride()[:2], pages.stride(1), self.table.stride(0))
        sizes = (self.group_size, cache.page_size, dim, rule.window or 0, rule.softcap is not None, paged_tiles.SPLIT_KEYS)
        if self.chunks is not None:
            tiles, shape = self.chunks
            paged_kernels.attend_chunks[(heads, len(tiles))](
                q,
                pages,
                out,
                out,
                tiles,
                self.table,
                *strides,
                heads,
                0,
                scale,
                cap,
                False,
                *sizes,
                *shape[:3],
                **shape.options,
            )
        if len(self.arrived):
            shape = TileShape.of_singles(dim, q.itemsize, cache.page_size, self.group_size)
            tiles = self.positions if self.singles is None else self.singles
            forms = self.singles is not None, self.sharing > 1
            paged_kernels.attend_singles[(len(self.arrived), heads, self.sharing)](
                q, pages, out, self.parts, self.arrived, self.positions, tiles, self.table, *strides, heads, self.num_splits,
                scale, cap, *forms, *sizes, *shape[:3], **shape.options,
            )  # fmt: skip
        return out
