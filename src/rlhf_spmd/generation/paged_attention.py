"""Attention of a step's new tokens over the pages of the cache, by torch and by the C++ kernels.

Shape legend: B tiles, H KV heads of this rank, G query heads per KV head, S queries per tile, P pages per tile,
L = P * page_size keys, D head_dim, T tokens of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.generation.kv_cache import KVCache, fill_lines, slot_mapping
from rlhf_spmd.generation.sequence import SequenceWork
from rlhf_spmd.kernels import AttentionRule, CppOps, LayerKernelArgs, on_device
from rlhf_spmd.kernels.packing import KEY_BLOCK, PaddedGroup, visible_keys

TILE_QUERIES = 64  # queries of one row computed together; long prompts thus skip most keys that they do not see
MAX_TILE_SCORES = 1 << 22  # elements of one score matrix
GATHER_COST = 2  # gathering a key costs about as much as scoring it for two queries
GROUP_COST = 6000  # one more group of tiles costs about as much as this many scores


class Tile(NamedTuple):
    """``num_queries`` tokens of the step from ``token`` on, of the row that owns ``pages``. ``num_pages`` of these are gathered."""

    token: int
    num_queries: int
    num_pages: int
    pages: list[int]


def cut_tiles(work: Sequence[SequenceWork], page_size: int) -> list[Tile]:
    """Return the tokens of a step in tiles of at most TILE_QUERIES."""
    tiles = []
    token = 0
    align = math.lcm(KEY_BLOCK, page_size) // page_size  # keys in multiples of KEY_BLOCK need no padding
    for row, start, count, _ in work:
        for first in range(start, start + count, TILE_QUERIES):
            last = min(first + TILE_QUERIES, start + count)
            num_pages = -(-last // (page_size * align)) * align
            tiles.append(Tile(token, last - first, num_pages, row.pages))
            token += last - first
    return tiles


def group_tiles(tiles: Sequence[Tile], page_size: int, num_heads: int) -> list[list[Tile]]:
    """Return tiles that are computed together, padded to the longest. A new group starts where padding would cost more than a group."""
    tiles_by_size: dict[tuple[int, int], list[Tile]] = {}
    for tile in tiles:
        tiles_by_size.setdefault((tile.num_pages, tile.num_queries), []).append(tile)

    def cost(num_pages: int, count: int) -> int:
        return num_pages * page_size * (GATHER_COST + count)

    groups: list[list[Tile]] = []
    queries = real_cost = 0  # of the last group
    for (num_pages, count), members in sorted(tiles_by_size.items()):
        limit = max(1, MAX_TILE_SCORES // (num_heads * count * num_pages * page_size))
        for first in range(0, len(members), limit):
            block = members[first : first + limit]
            merged = len(block) + (len(groups[-1]) if groups else 0)
            widest = max(queries, count)
            new_cost = real_cost + len(block) * cost(num_pages, count)
            fits = merged * num_heads * widest * num_pages * page_size <= MAX_TILE_SCORES
            if groups and fits and merged * cost(num_pages, widest) - new_cost <= GROUP_COST:
                groups[-1] += block
                queries, real_cost = widest, new_cost
            else:
                groups.append(list(block))
                queries, real_cost = count, len(block) * cost(num_pages, count)
    return groups


class _Bucket:
    """Tiles padded to equal numbers of queries and pages. Padding repeats the step's first token, and its output is not read."""

    def __init__(self, tiles: list[Tile], cache: KVCache, positions: Tensor, group_size: int) -> None:
        num_pages = tiles[-1].num_pages  # groups ascend
        device = cache.pages.device
        page_table = fill_lines([tile.pages for tile in tiles], num_pages, np.int64)
        self.pages = cache.index_of_all_heads(on_device(page_table, device), cache.num_pages)
        self.tiles = PaddedGroup([tile.token for tile in tiles], [tile.num_queries for tile in tiles], device)
        self.positions = positions.index_select(0, self.tiles.index).view(len(tiles), -1)
        self.keys = torch.arange(num_pages * cache.page_size, device=device)
        self.group_size = group_size
        self._allowed: dict[int | None, Tensor] = {}  # by window

    def allowed(self, window: int | None) -> Tensor:
        """Return which keys each query sees, [1, B, S * G, L]."""
        if window not in self._allowed:
            seen = visible_keys(self.positions, self.keys, window)  # [B, S, L]
            self._allowed[window] = seen.repeat_interleave(self.group_size, 1)[None]
        return self._allowed[window]


class KernelAttention:
    """The C++ kernel, which reads pages as they lie. Its bits are those of PackedAttention's kernel.

    ``positions`` [T]. ``items`` int64 [rows, 4]: the row's first token in the step, that token's position, the number of its
    tokens, and where the row's pages begin in the flat ``page_table``.
    """

    def __init__(self, cache: KVCache, positions: Tensor, items: Tensor, page_table: Tensor) -> None:
        assert isinstance(cache.ops, CppOps), "pages of another form"
        self.cache, self.kernels = cache, cache.ops
        self.positions, self.items = positions, items
        self.space: Tensor | None = None  # work space of :class:`CppOps`
        self.page_table = page_table.contiguous().view(-1)  # with one column, reshape alone would return a view with gaps

    @classmethod
    def for_step(cls, work: Sequence[SequenceWork], cache: KVCache, num_heads: int) -> KernelAttention:
        step = slot_mapping(work, cache)
        lines = np.arange(len(work)) * step.page_table.shape[1]
        items = np.stack([step.firsts, step.starts, step.counts, lines], 1)
        return cls(cache, step.positions, torch.from_numpy(items), step.page_table)

    @classmethod
    def decoding(cls, positions: Tensor, page_table: Tensor, cache: KVCache, num_heads: int) -> KernelAttention:
        lines = torch.arange(len(page_table))
        items = torch.stack([lines, positions, torch.ones_like(lines), lines * page_table.shape[1]], 1)
        return cls(cache, positions, items, page_table)

    def layer_kernel_args(self, layer_index: int) -> LayerKernelArgs:
        """Return the arguments of the kernel that computes a whole layer."""
        pages = self.cache.pages
        address = pages.data_ptr() + layer_index * pages.stride(0) * pages.itemsize
        return LayerKernelArgs(
            items=self.items.data_ptr(),
            num_items=len(self.items),
            page_table=self.page_table.data_ptr(),
            cache=address,
            num_pages=pages.shape[3],
            page_size=self.cache.page_size,
            page_elements=pages.shape[4],
        )

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [T, H * G, D], k and v [T, H, D] -> [T, H * G, D]. Writes k and v, then attends over the rows' pages."""
        pages, page_size = self.cache.pages[layer_index], self.cache.page_size
        return self.kernels.attend_paged(q, k, v, self.items, self.page_table, pages, page_size, rule)


class PagedAttention:
    """The torch attention over gathered pages. ``positions`` [T].

    On CPUs its bits are PackedAttention's, whatever the batch, page size or chunking.
    """

    def __init__(self, work: Sequence[SequenceWork], cache: KVCache, num_heads: int) -> None:
        step = slot_mapping(work, cache)
        self.cache, self.positions = cache, step.positions
        self._all_slots = cache.index_of_all_heads(step.cache_slots, cache.num_pages * cache.page_size)
        groups = group_tiles(cut_tiles(work, cache.page_size), cache.page_size, num_heads)
        self.buckets = [_Bucket(group, cache, step.positions, num_heads // cache.kv_heads) for group in groups]

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [T, H * G, D], k and v [T, H, D] -> [T, H * G, D]. Writes k and v, then attends over the rows' pages."""
        cache = self.cache
        cache.write(layer_index, self._all_slots, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for bucket in self.buckets:
            keys, values = cache.gather(layer_index, bucket.pages, len(bucket.positions))
            rows = bucket.tiles.queries(q, cache.kv_heads).transpose(0, 1)
            mixed = cache.ops.attend(rows, keys, values, rule, bucket.allowed(rule.window))
            bucket.tiles.scatter_queries(mixed.transpose(0, 1), out)
        return out


class PagedDecoding:
    """As ``PagedAttention``, with the same bits, for one token per row; gathers all pages of the page table."""

    def __init__(self, positions: Tensor, page_table: Tensor, cache: KVCache, num_heads: int) -> None:
        self.cache, self.positions = cache, positions
        self.pages = cache.index_of_all_heads(page_table.long(), cache.num_pages)
        self._all_slots = cache.index_of_all_heads(
            cache.cache_slots_of(positions, page_table), cache.num_pages * cache.page_size
        )
        self.keys = torch.arange(page_table.shape[1] * cache.page_size, device=page_table.device)

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        cache = self.cache
        cache.write(layer_index, self._all_slots, k, v)
        keys, values = cache.gather(layer_index, self.pages, len(q))
        queries = q.reshape(len(q), cache.kv_heads, -1, q.shape[-1]).transpose(0, 1)
        seen = visible_keys(self.positions[:, None], self.keys, rule.window)[None].expand(-1, -1, queries.shape[2], -1)
        return cache.ops.attend(queries, keys, values, rule, seen).transpose(0, 1).reshape(q.shape)
