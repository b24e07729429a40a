"""Paged attention in Triton: wide tiles for chunks of prompts, narrow tiles for single tokens.

A program computes a tile: the queries of one row, with the G query heads of one KV head, are the rows of a matrix. A chunk
fills CHUNK_ROWS of them, so keys are read once for many queries. A single token fills 16 or G of them, and several programs
share its keys.

The bits of a query depend only on that query, its keys and its values:

- Keys come in blocks counted from position 0. Blocks are added in order within splits of SPLIT_KEYS keys, and splits in order.
- This holds whether one program walks over all splits, or several share them and the last to arrive adds them up.
- Blocks that a query does not see add exactly 0, and the compiler does not fuse multiplications with additions.
- The number of splits follows from the row's own length.

So batch, chunks, page size and PROGRAMS change nothing where both tiles compile to the same arithmetic, as they do in Triton's
interpreter, in which the tests run. On a device with wgmma the wide tile may round differently from the narrow one;
``TileShape.of_invariant_chunks`` is a wide tile that rounds like the narrow one.

Grids are static for the width of a page table: programs without keys return at once, and there are at most about PROGRAMS of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
from torch import Tensor

from rlhf_spmd.generation.kv_cache import KVCache, slot_mapping
from rlhf_spmd.generation.sequence import SequenceWork
from rlhf_spmd.kernels import AttentionRule, PageTarget, on_device, triton_paged_attention
from rlhf_spmd.kernels.triton_latent import latent_tile
from rlhf_spmd.kernels.triton_paged_attention import TileShape, score_factors

PROGRAMS = 1 << 12  # for single tokens: an H100 holds some 400 at a time
PART_BYTES = 256 << 20  # more are written by so many rows that these keep the GPU busy without sharing
LATENT_PROGRAMS = 1 << 9  # the same for latent attention: an H100 holds 132, whose parts take up to 33 KB for each split


class TritonAttention:
    """The attention context of a step. ``positions``, ``cache_slots``, ``page_table``: as in ``SlotMapping``.

    - singles, chunks: int32 [n, 4], (token, position, number of queries, line of the page table) of tiles with one query and with
      several. Chunks come with their tile's shape. Singles are None where each token of the step is one, with a line of its own
    - longest: at least the length of every row with a single query
    - arrived: int32 [number of singles, H * tiles of a KV head's queries], zeros
    """

    def __init__(
        self,
        cache: KVCache,
        num_heads: int,
        positions: Tensor,
        cache_slots: Tensor,
        page_table: Tensor,
        singles: Tensor | None,
        chunks: tuple[Tensor, TileShape] | None,
        longest: int,
        arrived: Tensor,
    ) -> None:
        self.cache, self.page_table = cache, page_table
        self.positions, self.cache_slots = positions, cache_slots
        self.singles, self.chunks = singles, chunks
        self.arrived = arrived
        self.group_size = num_heads // cache.kv_heads
        self.num_splits = -(-longest // triton_paged_attention.SPLIT_KEYS)
        programs = PROGRAMS if cache.kv_tensors_per_page == 2 else LATENT_PROGRAMS
        self.sharing = max(min(self.num_splits, programs // max(arrived.numel(), 1)), 1)
        size = len(arrived), num_heads, self.num_splits, cache.value_dim + 2
        if 4 * math.prod(size) > PART_BYTES:
            self.sharing = 1
        self.parts = torch.empty(size if self.sharing > 1 else (0,), dtype=torch.float32, device=positions.device)

    @classmethod
    def for_step(
        cls,
        work: Sequence[SequenceWork],
        cache: KVCache,
        num_heads: int,
        shape_of: Callable[[int, int, int, int], TileShape] = TileShape.of_chunks,
    ) -> TritonAttention:
        """Return the context of ``work``, in the order in which its tokens are packed. ``shape_of``: chooses the tile of chunks."""
        step = slot_mapping(work, cache)
        group_size = num_heads // cache.kv_heads
        device = cache.pages.device
        if cache.kv_tensors_per_page == 2:
            shape = shape_of(cache.head_dim, cache.pages.itemsize, cache.page_size, group_size)
        else:
            shape = latent_tile(cache.value_dim, cache.pages.itemsize, cache.page_size, chunks=True)
        width = max(shape.rows // group_size, 1)
        tiles: list[list[tuple[int, int, int, int]]] = [[], []]
        rows = zip(step.firsts.tolist(), step.starts.tolist(), step.counts.tolist(), strict=True)
        for line, (first, start, count) in enumerate(rows):
            for done in range(0, count, width):
                tiles[count > 1].append((first + done, start + done, min(width, count - done), line))
        tiles[1].sort(key=lambda tile: -tile[1])  # the tiles with most keys start first
        singles, chunks = (on_device(np.array(kind, dtype=np.int32), device) if kind else None for kind in tiles)
        wide = None if chunks is None else (chunks, shape)
        longest = max((start + 1 for _, start, _, _ in tiles[0]), default=1)
        arrived = torch.zeros(len(tiles[0]), _num_tiles(cache, num_heads), dtype=torch.int32, device=device)
        return cls(cache, num_heads, step.positions, step.cache_slots, step.page_table, singles, wide, longest, arrived)

    @classmethod
    def decoding(cls, positions: Tensor, page_table: Tensor, cache: KVCache, num_heads: int) -> TritonAttention:
        """Return the context of one token per row: ``positions`` [B], ``page_table`` [B, P]. The host does not read these tensors."""
        cache_slots = torch.empty_like(positions)
        counters = _num_tiles(cache, num_heads)
        arrived = torch.empty(len(positions), counters, dtype=torch.int32, device=positions.device)
        sizes = page_table.stride(0), counters, cache.page_size, triton.next_power_of_2(counters)
        triton_paged_attention.locate_rows[(len(positions),)](positions, page_table, cache_slots, arrived, *sizes, num_warps=1)
        longest = page_table.shape[1] * cache.page_size
        return cls(cache, num_heads, positions, cache_slots, page_table, None, None, longest, arrived)

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [T, H * G, D], k and v [T, H, D] -> [T, H * G, D]. Writes k and v, then attends over the rows' pages."""
        assert q.stride(2) == 1, "the elements of a head must lie together"
        assert self.cache.kv_tensors_per_page == 2, "latent attention writes its keys itself"
        write_pages(self.cache, layer_index, self.cache_slots, k, v)
        return self.attend_written(layer_index, q, rule)

    def page_target(self, layer_index: int) -> PageTarget:
        return PageTarget(self.cache.pages[layer_index], self.cache_slots)

    def attend_written(self, layer_index: int, q: Tensor, rule: AttentionRule) -> Tensor:
        """Attend as :meth:`attend` does, where the step's keys and values are in the pages already.

        Return as many elements of a head as values have.
        """
        cache = self.cache
        pages = cache.pages[layer_index]
        heads = cache.kv_heads
        dim = cache.value_dim
        out = torch.empty(*q.shape[:2], dim, dtype=q.dtype, device=q.device)
        scale, cap = score_factors(rule)
        has_sinks = rule.sinks is not None
        sinks = q if rule.sinks is None else rule.sinks.float()
        strides = (*q.stride()[:2], pages.stride(1), self.page_table.stride(0))
        split_keys = triton_paged_attention.SPLIT_KEYS
        shape_sizes = self.group_size, cache.page_size, dim, cache.head_dim - dim
        sizes = *shape_sizes, rule.window or 0, rule.softcap is not None, split_keys
        if self.chunks is not None:
            tiles, shape = self.chunks
            programs = len(tiles) * heads * triton.cdiv(self.group_size, shape.rows)
            triton_paged_attention.attend_chunks[(programs,)](
                q, pages, out, out, sinks, tiles, self.page_table, *strides, heads, 0,
                scale, cap, False, has_sinks, *sizes, *shape[:3], **shape.options,
            )  # fmt: skip
        if len(self.arrived):
            shape = _tile_of_singles(cache, self.group_size)
            tiles = self.positions if self.singles is None else self.singles
            forms = self.singles is not None, self.sharing > 1, has_sinks
            triton_paged_attention.attend_singles[(*self.arrived.shape, self.sharing)](
                q, pages, out, self.parts, self.arrived, self.positions, sinks, tiles, self.page_table, *strides, heads,
                self.num_splits,
                scale, cap, *forms, *sizes, *shape[:3], **shape.options,
            )  # fmt: skip
        return out


def _tile_of_singles(cache: KVCache, group_size: int) -> TileShape:
    sizes = cache.value_dim, cache.pages.itemsize, cache.page_size
    return TileShape.of_singles(*sizes, group_size) if cache.kv_tensors_per_page == 2 else latent_tile(*sizes, chunks=False)


def _num_tiles(cache: KVCache, num_heads: int) -> int:
    """Return the number of tiles of a single token."""
    group_size = num_heads // cache.kv_heads
    return cache.kv_heads * triton.cdiv(group_size, _tile_of_singles(cache, group_size).rows)


def write_pages(cache: KVCache, layer_index: int, cache_slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v [T, H, D] to ``cache_slots`` [T] of a layer's pages, in one launch."""
    assert k.stride(2) == v.stride(2) == 1, "the elements of a head must lie together"
    pages = cache.pages[layer_index]
    heads = cache.kv_heads
    dim = cache.head_dim
    strides = (*k.stride()[:2], *v.stride()[:2], pages.stride(1))
    triton_paged_attention.write[(len(k), heads)](k, v, pages, cache_slots, *strides, heads, dim, triton.next_power_of_2(dim))
