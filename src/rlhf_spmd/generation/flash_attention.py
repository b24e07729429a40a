"""Paged attention by flash-attn 2, without splits over the keys: their number would depend on the batch, and with it the bits.

Rows with one new token are computed together, a row with several alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from flash_attn import flash_attn_with_kvcache
from torch import Tensor

from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.scheduler import Work
from rlhf_spmd.generation.step_pages import locate_tokens
from rlhf_spmd.kernels import AttentionRule, on_device


class FlashAttention:
    """The attention context of a step. ``positions`` int64 [T], ``slots`` int64 [T] (page * page_size + offset). ``parts``: tokens
    [rows, queries], lengths int32 [rows] and pages int32 [rows, P] of rows with equally many queries."""

    def __init__(self, cache: KVCache, positions: Tensor, slots: Tensor, parts: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        self.cache, self.positions, self.parts = cache, positions, parts
        self.slots = cache.spread(slots, cache.num_pages * cache.page_size)

    @classmethod
    def for_step(cls, work: Sequence[Work], cache: KVCache, num_heads: int) -> FlashAttention:
        """``work`` in the order in which its tokens are packed."""
        step, parts = locate_tokens(work, cache), []
        lengths, device = on_device((step.starts + step.counts).astype(np.int32), step.table.device), step.table.device
        groups = [np.flatnonzero(step.counts == 1), *np.flatnonzero(step.counts > 1)[:, None]]
        for lines in (group for group in groups if len(group)):
            tokens = step.firsts[lines, None] + np.arange(step.counts[lines[0]])
            at = on_device(lines, device)
            parts.append((on_device(tokens, device), lengths.index_select(0, at), step.table.index_select(0, at)))
        return cls(cache, step.positions, step.slots, parts)

    @classmethod
    def decoding(cls, positions: Tensor, table: Tensor, cache: KVCache, num_heads: int) -> FlashAttention:
        """One token of each row, of ``table`` [B, P], at ``positions`` [B]: nothing here looks at the tensors' values."""
        lines = torch.arange(len(positions), device=positions.device)[:, None]
        return cls(cache, positions, cache.slots_of(positions, table), [(lines, (positions + 1).to(torch.int32), table)])

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [T, H * G, D], k and v [T, H, D] -> [T, H * G, D]: writes k and v, then attends over the rows' pages."""
        cache, out = self.cache, torch.empty_like(q, memory_format=torch.contiguous_format)
        cache.write(layer_index, self.slots, k, v)
        shape = (2, cache.kv_heads, cache.num_pages, cache.page_size, cache.head_dim)
        keys, values = cache.pages[layer_index].view(shape).permute(0, 2, 3, 1, 4)  # [pages, tokens, H, D]
        window = (-1, -1) if rule.window is None else (rule.window - 1, 0)
        for tokens, lengths, table in self.parts:
            options = {"cache_seqlens": lengths, "block_table": table, "softmax_scale": rule.scale, "causal": True}
            options |= {"window_size": window, "softcap": rule.softcap or 0.0, "num_splits": 1}
            out[tokens] = flash_attn_with_kvcache(q[tokens], keys, values, **options)
        return out
