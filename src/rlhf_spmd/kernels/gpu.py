"""The arithmetic of models on GPUs: torch's products, and Triton where torch would need many launches.

A class of its own rather than branches in :class:`~rlhf_spmd.kernels.ops.Ops`, which stays what any device can compute and what these
kernels are compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_spmd.kernels import triton_draw, triton_filter
from rlhf_spmd.kernels.drawings import Drawings, Drawn
from rlhf_spmd.kernels.ops import Ops


class GpuOps(Ops):
    """float32, bfloat16 and float16 on CUDA devices that Triton compiles for; in Triton's interpreter also on CPUs."""

    # -- draws, as drawings.DrawsRows describes them

    def draw_rows(self, scores: Tensor, logits: Tensor, drawings: Drawings, keys: Tensor, positions: Tensor) -> Drawn:
        rows, at_one = len(scores), torch.empty(len(scores), dtype=torch.float32, device=scores.device)
        tempered = torch.empty_like(at_one) if drawings.tempered else at_one
        out = torch.empty(rows, dtype=torch.int64, device=scores.device), tempered, at_one
        tiles = triton_draw.sum_tiles(scores, logits, drawings, scores.shape[1])
        triton_draw.pick(tiles[None], 0, 0, scores, logits, drawings, keys, positions, out)
        if drawings.filters and not drawings.greedy:
            triton_filter.pick_filtered(tiles, scores, logits, drawings, keys, positions, out)
        return out

    def tile_sums(self, scores: Tensor, logits: Tensor, drawings: Drawings, width: int) -> Tensor:
        return triton_draw.sum_tiles(scores, logits, drawings, width)

    def draw_from_tiles(
        self,
        tiles: Tensor,
        rank: int,
        first: int,
        scores: Tensor,
        logits: Tensor,
        drawings: Drawings,
        keys: Tensor,
        positions: Tensor,
    ) -> Tensor:
        out = torch.empty(3, len(scores), dtype=torch.float64, device=scores.device)
        tokens, tempered, at_one = out.unbind()
        triton_draw.pick(tiles, rank, first, scores, logits, drawings, keys, positions, (tokens, tempered, at_one))
        return out
