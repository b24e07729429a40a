"""The rule which keys a query sees, and packed sequences gathered into rectangles.

Shape legend: B sequences, S queries of each, H KV heads, G query heads per KV head, L keys, D head_dim, T tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.kernels.devices import on_device

KEY_BLOCK = 64  # key lengths are multiples of it, see ``batch_invariant``
QUERY_BLOCK = 64  # queries whose keys are cut at one length: skips most of the future in long sequences


class LayerKernelArgs(NamedTuple):
    """Where the attention's inputs are, for the C++ kernel of a whole layer: addresses and sizes. All but the first two are 0 without
    a cache.

    - items: address of the rows' items, see :meth:`CppOps.attend_paged`, or without a cache of the bounds of the sequences
    - num_items: number of rows, or of sequences
    - page_table: address of the page table
    - cache: address of the layer's pages
    - num_pages, page_size, page_elements: pages of the cache, tokens of a page, and elements of a page of one head
    """

    items: int
    num_items: int
    page_table: int = 0
    cache: int = 0
    num_pages: int = 0
    page_size: int = 0
    page_elements: int = 0


@dataclass(frozen=True)
class AttentionRule:
    """How a layer turns scores into probabilities.

    - scale, softcap: softmax(softcap * tanh(q k^T * scale / softcap)); without softcap, softmax(q k^T * scale)
    - window: a query at position i sees keys j with i - window < j <= i; without window, all j <= i
    - sinks [query heads]: one more score of each head, as of a key whose value is 0. A parameter; rules are compared without
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = field(default=None, compare=False, repr=False)

    def sinks_of_rows(self, kv_heads: int, rows: int, heads_dim: int = 1) -> Tensor | None:
        """Return the sinks [1, kv_heads, rows, 1], or [kv_heads, 1, rows, 1] with ``heads_dim`` 0; None without sinks. In the rows the
        G query heads of a KV head lie beside each other."""
        if self.sinks is None:
            return None
        heads = self.sinks.view(kv_heads, -1)
        return heads.repeat(1, -(-rows // heads.shape[1]))[:, :rows, None].unsqueeze(1 - heads_dim)


Norms = tuple[Tensor | None, Tensor | None]  # weights [D] of the norms of queries and keys


@dataclass(frozen=True)
class HeadShape:
    """How a token's row of the qkv product is divided into heads.

    - queries, keys: number of query heads and of key heads; there are as many value heads as key heads
    - dim: elements of a head
    - fused_slices: number of equal parts of the row, each with queries, keys and values
    - eps, unit_offset: options of the norms of queries and keys
    - interleaved: neighbours are rotated together, not a dim of the first half and one of the second
    """

    queries: int
    keys: int
    dim: int
    fused_slices: int = 1
    eps: float = 1e-6
    unit_offset: bool = False
    interleaved: bool = False


class LayerParts(NamedTuple):
    """The parameters of a layer, each with a weight and a bias; None for a norm that the layer does not have."""

    input_norm: Any | None
    qkv: Any
    q_norm: Any | None
    k_norm: Any | None
    out: Any
    attention_norm: Any | None
    post_norm: Any | None
    gate_up: Any
    down: Any
    mlp_norm: Any | None


@dataclass(frozen=True)
class LayerOptions:
    """What layers differ in.

    - heads: of its attention, on one rank; their eps, unit_offset and interleaved are those of all norms and rotations of the layer
    - inner: columns of the MLP
    - gelu: in place of silu
    - norms_over_all_heads: q and k have one norm over all heads, not one per head
    - residual: multiplies what is added to the rows
    """

    heads: HeadShape
    inner: int
    gelu: bool
    norms_over_all_heads: bool = False
    residual: float = 1.0


class PageTarget(NamedTuple):
    """Where a step's keys and values of a layer go.

    ``pages`` [2, H, N, page_size * D]; ``cache_slots`` int64 [T]: page * page_size + offset of each token.
    """

    pages: Tensor
    cache_slots: Tensor


def visible(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return which keys (positions [L]) each query (positions [..., R]) sees: bool [..., R, L]."""
    ahead = queries[..., None] - keys
    return ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)


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
    - full: nothing is padding

    Padding comes after every real query of its sequence, so no query sees it as a key. The host computes the indices,
    because it knows the lengths.
    """

    def __init__(self, starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        self.num_sequences, self.num_queries = len(starts), max(lengths)
        offsets = np.arange(self.num_queries)
        valid = offsets < np.array(lengths)[:, None]
        index = np.where(valid, np.array(starts)[:, None] + offsets, 0).reshape(-1)
        real_index = np.flatnonzero(valid)
        self.full = len(real_index) == len(index)
        self.valid, self.index = on_device(valid, device), on_device(index, device)
        self.real_index, self.packed_rows = on_device(real_index, device), on_device(index[real_index], device)
        self.num_keys = round_up(self.num_queries, KEY_BLOCK)

    def gather(self, x: Tensor) -> Tensor:
        """Return the rectangle [B, S, ...] of packed rows ``x`` [T, ...]."""
        return x.index_select(0, self.index).view(self.num_sequences, self.num_queries, *x.shape[1:])

    def without_padding(self, x: Tensor) -> Tensor:
        """Return the rows of ``x`` [B, S, ...] that are no padding, in the order of ``packed_rows``."""
        flat = x.reshape(-1, *x.shape[2:])
        return flat if self.full else flat.index_select(0, self.real_index)

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
        self.lengths, self.device = lengths, device
        self.bounds = torch.tensor([0, *itertools.accumulate(lengths)])
        self._padded_groups: dict[tuple[int, float], list[PaddedGroup]] = {}
        self._group_positions: dict[tuple[int, float], Tensor] = {}
        self._tiles: dict[tuple[int, int], PackedTiles] = {}

    @cached_property
    def filled(self) -> tuple[Tensor, int]:
        """Return the bounds of the n sequences that have tokens, int32 [n + 1] on the device, and the length of the longest."""
        bounds = [0, *itertools.accumulate(n for n in self.lengths if n)]
        return on_device(torch.tensor(bounds, dtype=torch.int32), self.device), max(self.lengths, default=0)

    @cached_property
    def long_bounds(self) -> Tensor:
        """Return the bounds of ``filled`` as int64. Always the same tensor: flash-linear-attention keeps by it what it prepares."""
        return self.filled[0].long()

    def layer_kernel_args(self, layer_index: int) -> LayerKernelArgs:
        """Return the packing's bounds for the C++ kernel of a whole layer. They are the same in every layer."""
        return LayerKernelArgs(items=self.bounds.data_ptr(), num_items=len(self.lengths))

    def padded_groups(self, num_heads: int, max_scores: float) -> list[PaddedGroup]:
        """Return groups of the sequences that have tokens, by similar length. A block of a group has at most ``max_scores`` scores,
        but a group has at least one sequence."""
        key = num_heads, max_scores
        if key not in self._padded_groups:
            starts, lengths = self.bounds.tolist(), self.lengths
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

    def tiles(self, width: int, page_size: int) -> PackedTiles:
        """Return tiles of up to ``width`` queries, those with most keys first."""
        key = width, page_size
        if key not in self._tiles:
            lengths, firsts = np.array(self.lengths, dtype=np.int64), self.bounds[:-1].numpy()
            counts = -(-lengths // page_size)
            first_pages = counts.cumsum() - counts  # of each sequence
            within = np.arange(lengths.sum()) - firsts.repeat(lengths)
            per_row = -(-lengths // width)
            starts = (np.arange(per_row.sum()) - (per_row.cumsum() - per_row).repeat(per_row)) * width
            sequence = np.arange(len(lengths)).repeat(per_row)
            tiles = np.stack([firsts[sequence] + starts, starts, np.minimum(lengths[sequence] - starts, width), sequence], 1)
            tiles = tiles[np.argsort(-starts, kind="stable")].astype(np.int32)
            table = (first_pages[:, None] + np.arange(counts.max(initial=1))).astype(
                np.int32
            )  # a row's last numbers are never read
            slots = first_pages.repeat(lengths) * page_size + within
            self._tiles[key] = PackedTiles(
                tiles=on_device(tiles, self.device),
                table=on_device(table, self.device),
                slots=on_device(slots, self.device),
                num_pages=int(counts.sum()),
            )
        return self._tiles[key]
