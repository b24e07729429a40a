"""Paged attention by the flash-attn 2 package, without splitting the keys: the number of splits would depend on the batch.

Rows with one new token are computed together; a row with several is computed alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from flash_attn import flash_attn_with_kvcache
from torch import Tensor

from rlhf_spmd.generation.kv_cache import KVCache, slot_mapping
from rlhf_spmd.generation.sequence import SequenceWork
from rlhf_spmd.generation.triton_attention import write_pages
from rlhf_spmd.kernels import AttentionRule, on_device


class FlashAttention:
    """The attention context of a step. ``positions`` and ``slots``: int64 [T], as in ``SlotMapping``.

    ``parts``: tokens [rows, queries], lengths int32 [rows] and page table int32 [rows, P] of rows with equally many queries.
    """

    def __init__(self, cache: KVCache, positions: Tensor, slots: Tensor, parts: list[tuple[Tensor, Tensor, Tensor]]) -> None:
        self.cache, self.positions, self.slots, self.parts = cache, positions, slots, parts

    @classmethod
    def for_step(cls, work: Sequence[SequenceWork], cache: KVCache, num_heads: int) -> FlashAttention:
        """``work`` is in the order in which its tokens are packed."""
        step, parts = slot_mapping(work, cache), []
        device = step.page_table.device
        lengths = on_device((step.starts + step.counts).astype(np.int32), device)
        groups = [np.flatnonzero(step.counts == 1), *np.flatnonzero(step.counts > 1)[:, None]]
        for lines in (group for group in groups if len(group)):
            tokens = step.firsts[lines, None] + np.arange(step.counts[lines[0]])
            at = on_device(lines, device)
            parts.append((on_device(tokens, device), lengths.index_select(0, at), step.page_table.index_select(0, at)))
        return cls(cache, step.positions, step.slots, parts)

    @classmethod
    def decoding(cls, positions: Tensor, page_table: Tensor, cache: KVCache, num_heads: int) -> FlashAttention:
        """The context of one token per row: ``positions`` [B], ``page_table`` [B, P]. The host does not read these tensors."""
        lines = torch.arange(len(positions), device=positions.device)[:, None]
        return cls(
            cache, positions, cache.slots_of(positions, page_table), [(lines, (positions + 1).to(torch.int32), page_table)]
        )

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [T, H * G, D], k and v [T, H, D] -> [T, H * G, D]. Writes k and v, then attends over the rows' pages."""
        cache, out = self.cache, torch.empty_like(q, memory_format=torch.contiguous_format)
        write_pages(cache, layer_index, self.slots, k, v)
        shape = (2, cache.kv_heads, cache.num_pages, cache.page_size, cache.head_dim)
        keys, values = cache.pages[layer_index].view(shape).permute(0, 2, 3, 1, 4)  # [pages, tokens, H, D]
        window = (-1, -1) if rule.window is None else (rule.window - 1, 0)
        for tokens, lengths, page_table in self.parts:
            options = {"cache_seqlens": lengths, "block_table": page_table, "softmax_scale": rule.scale, "causal": True}
            options |= {"window_size": window, "softcap": rule.softcap or 0.0, "num_splits": 1}
            out[tokens] = flash_attn_with_kvcache(q[tokens], keys, values, **options)
        return out
