"""The attention of one token per row, told by device tensors alone: no look of the host at their values, no shape that
follows from them. For ``decode_loop``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf_spmd.generation.paged_attention import KernelAttention, KVCache, attend
from rlhf_spmd.models.attention import visible
from rlhf_spmd.models.decoder import Attention
from rlhf_spmd.models.spec import AttentionRule

DecodingOver = Callable[[Tensor, Tensor, KVCache, int], Attention]


def decoding_over(cache: KVCache) -> DecodingOver:
    """What makes the attention context of a step over ``cache``: (``positions`` int64 [B] of the tokens, ``table`` int32 [B, P] of the
    rows' pages, the cache, this rank's query heads)."""
    if cache.attention == "triton":
        from rlhf_spmd.generation.triton_attention import TritonAttention

        return TritonAttention.decoding
    if cache.attention == "flash_attn":
        from rlhf_spmd.generation.flash_attention import FlashAttention

        return FlashAttention.decoding
    return PagedDecoding if cache.kernels is None else KernelDecoding


class KernelDecoding(KernelAttention):
    def __init__(self, positions: Tensor, table: Tensor, cache: KVCache, num_heads: int) -> None:
        assert cache.kernels is not None
        self.cache, self.found, self.positions, self.table = cache, cache.kernels, positions, table.reshape(-1)
        lines = torch.arange(len(table))
        self.items = torch.stack([lines, positions, torch.ones_like(lines), lines * table.shape[1]], 1)


class PagedDecoding:
    """As ``PagedAttention``, with its bits; keys of all pages in the table are gathered."""

    def __init__(self, positions: Tensor, table: Tensor, cache: KVCache, num_heads: int) -> None:
        self.cache, self.positions = cache, positions
        blocks = torch.arange(2 * cache.kv_heads, device=table.device)[:, None]
        self.pages = (table.long().reshape(1, -1) + blocks * cache.num_pages).reshape(-1)
        self.slots = (cache.slots_of(positions, table) + blocks * (cache.num_pages * cache.page_size)).reshape(-1)
        self.keys = torch.arange(table.shape[1] * cache.page_size, device=table.device)

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        cache, rows = self.cache, len(q)
        cache.write(layer_index, self.slots, k, v)
        keys, values = cache.gather(layer_index, self.pages, rows)
        queries = q.reshape(rows, cache.kv_heads, -1, q.shape[-1]).transpose(0, 1)
        seen = visible(self.positions[:, None], self.keys, rule.window)[None].expand(-1, -1, queries.shape[2], -1)
        return attend(queries, keys, values, rule, seen).transpose(0, 1).reshape(q.shape)
