"""Packed sequences: their bounds, rectangles of sequences of similar length, and tiles for attention over pages.

Shape legend: B sequences, S queries of each, H KV heads, G query heads per KV head, L keys, D head_dim, T tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.kernels.devices import on_device
from rlhf_spmd.kernels.layer_args import LayerKernelArgs

KEY_BLOCK = 64  # key lengths are multiples of it, see ``batch_invariant``
QUERY_BLOCK = 64  # queries whose keys are cut at one length: skips most of the future in long sequences


def visible_keys(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return which keys (positions [L]) each query (positions [..., R]) sees: bool [..., R, L]."""
    distance = queries[..., None] - keys
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def pad_rows(x: Tensor, rows: int, dim: int = 0) -> Tensor:
    """Return ``x`` with ``dim`` extended to ``rows`` by zeros, or ``x`` itself if it is long enough."""
    missing = rows - x.shape[dim]
    if missing <= 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


class PaddedGroup:
    """Packed sequences of similar length as one rectangle of B * S positions, padded to the longest.

    - index: int64 [B * S], the packed row of each position; padding points at row 0 of the batch
    - valid: bool [B, S], the positions that are no padding; the outputs of the others are dropped
    - real_index: int64, the positions that are no padding, among B * S
    - packed_rows: int64, the packed row of each entry of ``real_index``
    - has_no_padding: the sequences have equal lengths

    Padding comes after every real query of its sequence, so no query sees it as a key. The host computes the indices,
    because it knows the lengths.
    """

    def __init__(self, starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        self.num_sequences = len(starts)
        self.num_queries = max(lengths)
        self.num_keys = round_up(self.num_queries, KEY_BLOCK)
        offsets = np.arange(self.num_queries)
        valid = offsets < np.array(lengths)[:, None]
        index = np.where(valid, np.array(starts)[:, None] + offsets, 0).reshape(-1)
        real_index = np.flatnonzero(valid)
        self.has_no_padding = len(real_index) == len(index)
        self.valid = on_device(valid, device)
        self.index = on_device(index, device)
        self.real_index = on_device(real_index, device)
        self.packed_rows = on_device(index[real_index], device)

    def gather(self, x: Tensor) -> Tensor:
        """Return the rectangle [B, S, ...] of packed rows ``x`` [T, ...]."""
        return x.index_select(0, self.index).view(self.num_sequences, self.num_queries, *x.shape[1:])

    def without_padding(self, x: Tensor) -> Tensor:
        """Return the rows of ``x`` [B, S, ...] that are no padding, in the order of ``packed_rows``."""
        flat = x.reshape(-1, *x.shape[2:])
        return flat if self.has_no_padding else flat.index_select(0, self.real_index)

    def queries(self, x: Tensor, kv_heads: int) -> Tensor:
        """Return the queries ``x`` [T, H * G, D] as rows [B, H, S * G, D], the G heads of one query together."""
        batch = self.gather(x).view(self.num_sequences, self.num_queries, kv_heads, -1, x.shape[-1])
        return batch.transpose(1, 2).reshape(self.num_sequences, kv_heads, -1, x.shape[-1])

    def keys(self, x: Tensor) -> Tensor:
        """Return the keys or values ``x`` [T, H, D] as [B, H, L, D], with zeros behind the last."""
        batch = x.new_zeros(self.num_sequences, x.shape[1], self.num_keys, x.shape[2])
        batch[:, :, : self.num_queries] = self.gather(x).transpose(1, 2)
        return batch

    def scatter_queries(self, rows: Tensor, out: Tensor) -> None:
        """Write ``rows`` [B, H, S * G, D] to the packed rows of ``out`` [T, H * G, D]: the inverse of :meth:`queries`."""
        b, h, _, d = rows.shape
        batch = rows.view(b, h, self.num_queries, -1, d).transpose(1, 2).reshape(b, self.num_queries, -1, d)
        out.index_copy_(0, self.packed_rows, self.without_padding(batch))

    def scatter_keys(self, keys: Tensor, out: Tensor) -> None:
        """Write ``keys`` [B, H, L, D] to the packed rows of ``out`` [T, H, D]: the inverse of :meth:`keys`."""
        out.index_copy_(0, self.packed_rows, self.without_padding(keys[:, :, : self.num_queries].transpose(1, 2)))


class PackedTiles(NamedTuple):
    """Packed sequences as :mod:`triton_paged_attention` reads them: with keys in pages.

    - tiles: int32 [n, 4]: first token, its position, number of queries, sequence
    - table: int32 [sequences, P]: the pages of each sequence
    - slots: int64 [T]: the slot of each token
    """

    tiles: Tensor
    table: Tensor
    slots: Tensor
    num_pages: int


class Packing:
    """Sequences of ``lengths`` tokens, one after the other.

    ``bounds`` int64 [sequences + 1], on the host: their beginnings and ends.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = lengths
        self.device = device
        self.bounds = torch.tensor([0, *itertools.accumulate(lengths)])
        self._padded_groups: dict[tuple[int, float], list[PaddedGroup]] = {}
        self._group_positions: dict[tuple[int, float], Tensor] = {}
        self._tiles: dict[tuple[int, int], PackedTiles] = {}

    @cached_property
    def nonempty_bounds(self) -> tuple[Tensor, int]:
        """Return the bounds of the n sequences that have tokens, int32 [n + 1] on the device, and the length of the longest."""
        bounds = [0, *itertools.accumulate(n for n in self.lengths if n)]
        return on_device(torch.tensor(bounds, dtype=torch.int32), self.device), max(self.lengths, default=0)

    @cached_property
    def long_bounds(self) -> Tensor:
        """Return the bounds of ``nonempty_bounds`` as int64. It is always the same tensor: flash-linear-attention caches by it."""
        return self.nonempty_bounds[0].long()

    def layer_kernel_args(self, layer_index: int) -> LayerKernelArgs:
        """Return the packing's bounds for the C++ kernel of a whole layer. They are the same in every layer."""
        return LayerKernelArgs(items=self.bounds.data_ptr(), num_items=len(self.lengths))

    def padded_groups(self, num_heads: int, max_scores: float) -> list[PaddedGroup]:
        """Return groups of the sequences that have tokens, by similar length. A block of a group has at most ``max_scores`` scores,
        but a group has at least one sequence."""
        key = num_heads, max_scores
        if key not in self._padded_groups:
            lengths = self.lengths
            starts = self.bounds.tolist()
            groups: list[list[int]] = []
            for i in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: lengths[i]):
                shortest = lengths[groups[-1][0]] if groups else 0
                similar = bool(groups) and lengths[i] <= shortest + max(KEY_BLOCK // 2, shortest // 8)
                scores = num_heads * min(QUERY_BLOCK, lengths[i]) * round_up(lengths[i], KEY_BLOCK)
                if similar and (len(groups[-1]) + 1) * scores <= max_scores:
                    groups[-1].append(i)
                else:
                    groups.append([i])
            self._padded_groups[key] = [
                PaddedGroup([starts[i] for i in group], [lengths[i] for i in group], self.device) for group in groups
            ]
        return self._padded_groups[key]

    def group_positions(self, num_heads: int, max_scores: float) -> Tensor:
        """Return int64 [T]: the position of each token in the concatenated groups of :meth:`padded_groups`, without padding."""
        key = num_heads, max_scores
        if key not in self._group_positions:
            packed_rows = torch.cat([group.packed_rows for group in self.padded_groups(*key)])
            self._group_positions[key] = torch.argsort(packed_rows)
        return self._group_positions[key]

    def tiles(self, max_queries: int, page_size: int) -> PackedTiles:
        """Return tiles of up to ``max_queries`` queries, those with most keys first."""
        key = max_queries, page_size
        if key not in self._tiles:
            lengths = np.array(self.lengths, dtype=np.int64)
            first_tokens = self.bounds[:-1].numpy()
            num_pages = -(-lengths // page_size)
            first_pages = num_pages.cumsum() - num_pages
            num_tiles = -(-lengths // max_queries)
            starts = (np.arange(num_tiles.sum()) - (num_tiles.cumsum() - num_tiles).repeat(num_tiles)) * max_queries
            sequence = np.arange(len(lengths)).repeat(num_tiles)
            num_queries = np.minimum(lengths[sequence] - starts, max_queries)
            tiles = np.stack([first_tokens[sequence] + starts, starts, num_queries, sequence], 1)
            tiles = tiles[np.argsort(-starts, kind="stable")].astype(np.int32)
            # short sequences' last numbers are never read
            table = (first_pages[:, None] + np.arange(num_pages.max(initial=1))).astype(np.int32)
            positions = np.arange(lengths.sum()) - first_tokens.repeat(lengths)
            slots = first_pages.repeat(lengths) * page_size + positions
            self._tiles[key] = PackedTiles(
                on_device(tiles, self.device),
                on_device(table, self.device),
                on_device(slots, self.device),
                int(num_pages.sum()),
            )
        return self._tiles[key]
