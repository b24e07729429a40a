"""The paged KV cache, and attention of a step's new tokens over it.

Shape legend: B tiles, H KV heads of this rank, G query heads per KV head, S queries per tile, P pages per tile,
L = P * page_size keys, D head_dim, T tokens of the step, N pages in the cache.

The C++ kernels read pages as they lie. For torch the keys and values of a layer lie as [2, H, N, page_size, D], so that one
gather of whole pages yields [2, H, B, L, D]: what the matrix products want, without another copy. Each gather goes to one persistent
buffer (a fresh one costs a page fault per 4 KB).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_spmd import kernels
from rlhf_spmd.generation.scheduler import Work
from rlhf_spmd.models.attention import KEY_BLOCK, attend_dense, attend_exact, visible
from rlhf_spmd.models.spec import AttentionRule

TILE_QUERIES = 64  # queries of one row computed together: cuts the unseen future of long prompts
MAX_TILE_SCORES = 1 << 22  # elements of one score matrix
GATHER_COST = 2  # gathering a key costs about as much as two queries that look at it,
GROUP_COST = 6000  # and one more group of tiles about as much as so many such looks
Index = NDArray[np.int64]


class KVCache:
    """``pages`` [layers, 2, H, N, elements of a page]: for the torch attention page_size * D, zeros at first, since unused slots
    are read and masked, so they must be finite; for the C++ kernels as ``kernels/attention.cpp`` says.

    ``attention``: see ``backends``; all but the C++ kernels take torch's form.
    """

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        attention: str = "auto",
    ) -> None:
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.num_pages, self.page_size = num_pages, page_size
        ours = attention in ("auto", "cpp")
        self.attention, self.kernels = attention, kernels.ready(torch.empty(0, dtype=dtype, device=device)) if ours else None
        shape = num_layers, 2, kv_heads, num_pages
        if self.kernels is None:
            self.pages = torch.zeros(*shape, page_size * head_dim, dtype=dtype, device=device)
        else:
            self.pages = torch.empty(*shape, kernels.page_elements(page_size, head_dim), dtype=dtype, device=device)
        self._buffer = self.pages.new_empty(0)
        self._waiting: tuple[Tensor, Tensor] | None = None  # pages in host memory: their numbers, what lies in them

    @staticmethod
    def page_bytes(num_layers: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> int:
        return num_layers * 2 * kv_heads * kernels.page_elements(page_size, head_dim) * dtype.itemsize

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """(source, destination) pages, in all layers."""
        source, destination = torch.tensor(copies, device=self.pages.device).unbind(1)
        self.pages[:, :, :, destination] = self.pages[:, :, :, source]

    def offload(self, used: Sequence[int]) -> None:
        """Give the memory back; what lies in the pages ``used`` waits in host memory, pinned where the cache is on a GPU."""
        index = torch.tensor(used, dtype=torch.int64, device=self.pages.device)
        shape = *self.pages.shape[:3], len(used), self.pages.shape[4]
        host = torch.empty(shape, dtype=self.pages.dtype, pin_memory=self.pages.is_cuda)
        for layer, pages in zip(host, self.pages, strict=True):
            layer.copy_(pages.index_select(2, index))
        self._waiting = index, host
        self._buffer = self.pages.new_empty(0)
        self.pages.untyped_storage().resize_(0)

    def reload(self) -> None:
        """The opposite of :meth:`offload`, if it was called. On a GPU the pages may then lie elsewhere."""
        if self._waiting is None:
            return
        (index, host), self._waiting = self._waiting, None
        self.pages.untyped_storage().resize_(self.pages.numel() * self.pages.element_size())
        if self.kernels is None:
            self.pages.zero_()
        for layer, pages in zip(host, self.pages, strict=True):
            pages.index_copy_(2, index, layer.to(pages.device))

    def spread(self, index: Index, stride: int) -> Tensor:
        """An index into one (key or value, head) block of ``stride`` entries -> the same in all 2 * H blocks of a layer."""
        blocks = np.arange(2 * self.kv_heads, dtype=np.int64) * stride
        return torch.from_numpy((blocks[:, None] + index.reshape(1, -1)).reshape(-1)).to(self.pages.device)

    def slots_of(self, positions: Tensor, table: Tensor) -> Tensor:
        """page * page_size + offset [B] of one position [B] per line of ``table`` [B, P]."""
        page = table.gather(1, torch.div(positions, self.page_size, rounding_mode="floor")[:, None])[:, 0]
        return page.long() * self.page_size + positions % self.page_size

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [T, H, D] to ``slots`` = spread(page * page_size + offset, N * page_size)."""
        rows = torch.stack([k, v]).transpose(1, 2).reshape(-1, self.head_dim)
        self.pages[layer].view(-1, self.head_dim).index_copy_(0, slots, rows)

    def gather(self, layer: int, index: Tensor, num_tiles: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, B, L, D] of ``index`` = spread(pages [B, P], N); valid until the next gather."""
        pages = self.pages[layer].view(-1, self.page_size * self.head_dim)
        size = len(index) * pages.shape[1]
        if self._buffer.numel() < size:
            self._buffer = pages.new_empty(size + size // 4)
        out = self._buffer[:size].view(len(index), -1)
        torch.index_select(pages, 0, index, out=out)
        keys, values = out.view(2, self.kv_heads, num_tiles, -1, self.head_dim).unbind(0)
        return keys, values


class Tile(NamedTuple):
    """``num_queries`` tokens of the step from ``token`` on, at positions ``start`` .. of the row that owns ``pages``.

    ``num_pages``: how many of those to gather.
    """

    token: int
    start: int
    num_queries: int
    num_pages: int
    pages: list[int]


def cut_tiles(work: Sequence[Work], page_size: int) -> list[Tile]:
    tiles = []
    token = 0
    align = math.lcm(KEY_BLOCK, page_size) // page_size  # keys in multiples of KEY_BLOCK: nothing is left to pad
    for row, start, count, _ in work:
        for first in range(start, start + count, TILE_QUERIES):
            last = min(first + TILE_QUERIES, start + count)
            num_pages = -(-last // (page_size * align)) * align
            tiles.append(Tile(token, first, last - first, num_pages, row.pages))
            token += last - first
    return tiles


def group_tiles(tiles: Sequence[Tile], page_size: int, num_heads: int) -> list[list[Tile]]:
    """Tiles that are computed together, padded to the longest: a new group starts where padding would cost more than it."""
    alike: dict[tuple[int, int], list[Tile]] = {}
    for tile in tiles:
        alike.setdefault((tile.num_pages, tile.num_queries), []).append(tile)

    def cost(num_pages: int, count: int) -> int:
        return num_pages * page_size * (GATHER_COST + count)

    groups: list[list[Tile]] = []
    queries = real_cost = 0  # of the last group
    for (num_pages, count), members in sorted(alike.items()):
        limit = max(1, MAX_TILE_SCORES // (num_heads * count * num_pages * page_size))
        for first in range(0, len(members), limit):
            some = members[first : first + limit]
            merged = len(some) + (len(groups[-1]) if groups else 0)
            widest = max(queries, count)
            new_cost = real_cost + len(some) * cost(num_pages, count)
            fits = merged * num_heads * widest * num_pages * page_size <= MAX_TILE_SCORES
            if groups and fits and merged * cost(num_pages, widest) - new_cost <= GROUP_COST:
                groups[-1] += some
                queries, real_cost = widest, new_cost
            else:
                groups.append(list(some))
                queries, real_cost = count, len(some) * cost(num_pages, count)
    return groups


class _Bucket:
    """Tiles padded to one number of queries and pages. Padded queries repeat the step's first token; nobody reads them."""

    def __init__(self, tiles: list[Tile], cache: KVCache, group_size: int) -> None:
        num_pages = tiles[-1].num_pages  # groups ascend
        self.num_tiles, self.num_queries = len(tiles), max(tile.num_queries for tile in tiles)
        table = np.zeros((len(tiles), num_pages), dtype=np.int64)
        for line, tile in zip(table, tiles, strict=True):
            held = tile.pages[:num_pages]
            line[: len(held)] = held
        bounds = np.array([(tile.token, tile.start, tile.num_queries) for tile in tiles], dtype=np.int64)
        offsets = np.arange(self.num_queries)
        valid = offsets < bounds[:, 2:]
        queries = np.where(valid, bounds[:, :1] + offsets, 0)
        positions = np.where(valid, bounds[:, 1:2] + offsets, 0)
        device = cache.pages.device
        self.pages = cache.spread(table, cache.num_pages)
        self.index = torch.from_numpy(queries.reshape(-1)).to(device)
        self.padded = not valid.all()
        if self.padded:
            self.valid = torch.from_numpy(np.flatnonzero(valid)).to(device)
            self.target = self.index[self.valid]
        self.positions = torch.from_numpy(positions).to(device)
        self.keys = torch.arange(num_pages * cache.page_size, device=device)
        self.group_size = group_size
        self._allowed: dict[int | None, Tensor] = {}  # by window

    def allowed(self, window: int | None) -> Tensor:
        """Which keys the rows see, [1, B, S * G, L]."""
        if window not in self._allowed:
            seen = visible(self.positions, self.keys, window)  # [B, S, L]
            self._allowed[window] = seen.repeat_interleave(self.group_size, 1)[None]
        return self._allowed[window]

    def rows(self, q: Tensor, kv_heads: int) -> Tensor:
        """[T, H * G, D] -> [H, B, S * G, D], the G heads of one query together."""
        picked = q.index_select(0, self.index).view(self.num_tiles, self.num_queries, kv_heads, -1, q.shape[-1])
        return picked.permute(2, 0, 1, 3, 4).reshape(kv_heads, self.num_tiles, -1, q.shape[-1])

    def scatter(self, rows: Tensor, out: Tensor) -> None:
        """Inverse of :meth:`rows` into out [T, H * G, D]."""
        split = rows.view(*rows.shape[:2], self.num_queries, -1, rows.shape[-1])
        flat = split.permute(1, 2, 0, 3, 4).reshape(-1, *out.shape[1:])
        if self.padded:
            out.index_copy_(0, self.target, flat.index_select(0, self.valid))
        else:
            out.index_copy_(0, self.index, flat)


class KernelAttention:
    """The C++ kernel over the pages as they lie. ``positions`` [T]. Exact: its bits are those of PackedAttention's kernel."""

    def __init__(self, work: Sequence[Work], cache: KVCache, found: kernels.Kernels) -> None:
        self.cache, self.found = cache, found
        table: list[int] = []
        items = np.empty((len(work), 4), dtype=np.int64)
        items[:, 1] = [item.start for item in work]
        items[:, 2] = counts = [item.num_tokens for item in work]
        for line, (row, *_) in zip(items, work, strict=True):
            line[3] = len(table)
            table += row.pages
        ends = np.cumsum(items[:, 2])
        items[:, 0] = first = ends - items[:, 2]
        self.items, self.table = torch.from_numpy(items), torch.tensor(table, dtype=torch.int32)
        self.positions = torch.from_numpy(np.arange(ends[-1]) + np.repeat(items[:, 1] - first, counts))

    def kernel_context(self, layer_index: int) -> kernels.Context:
        """For the kernel that computes a whole layer."""
        pages = self.cache.pages
        at = pages.data_ptr() + layer_index * pages.stride(0) * pages.itemsize
        sizes = pages.shape[3], self.cache.page_size, pages.shape[4]
        return self.items.data_ptr(), len(self.items), self.table.data_ptr(), at, *sizes

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [T, H * G, D], k and v [T, H, D] -> [T, H * G, D]: writes k and v, then attends over the rows' pages."""
        pages, page_size = self.cache.pages[layer_index], self.cache.page_size
        return self.found.attend_paged(q, k, v, self.items, self.table, pages, page_size, rule.scale, rule.softcap, rule.window)


class PagedAttention:
    """The torch attention over gathered pages. ``positions`` [T].

    On CPU it is exact (``models.attention``): its bits are PackedAttention's, whatever the batch, page size or chunking.
    """

    def __init__(self, work: Sequence[Work], cache: KVCache, num_heads: int) -> None:
        self.cache = cache
        page_size = cache.page_size
        tiles = cut_tiles(work, page_size)
        positions: list[int] = []
        slots: list[int] = []
        for _, start, count, _, pages in tiles:
            for position in range(start, start + count):
                positions.append(position)
                slots.append(pages[position // page_size] * page_size + position % page_size)
        self.positions = torch.tensor(positions, device=cache.pages.device)
        self.slots = cache.spread(np.array(slots), cache.num_pages * page_size)
        groups = group_tiles(tiles, page_size, num_heads)
        self.buckets = [_Bucket(group, cache, num_heads // cache.kv_heads) for group in groups]

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [T, H * G, D], k and v [T, H, D] -> [T, H * G, D]: writes k and v, then attends over the rows' pages."""
        cache = self.cache
        cache.write(layer_index, self.slots, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for bucket in self.buckets:
            keys, values = cache.gather(layer_index, bucket.pages, bucket.num_tiles)
            rows = bucket.rows(q, cache.kv_heads)
            bucket.scatter(attend(rows, keys, values, rule, bucket.allowed(rule.window)), out)
        return out


def attend(rows: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule, allowed: Tensor) -> Tensor:
    """rows [H, B, R, D], keys and values [H, B, L, D], allowed [1, B, R, L] -> [H, B, R, D]. Exact on CPU."""
    if rows.device.type == "cpu":
        return attend_exact(rows, keys, values, rule, allowed)
    return attend_dense(rows, keys, values, rule, allowed)
