"""Shapes of the tiles of :mod:`paged_kernels`: what a program computes at a time, and so in which order a query's sums are taken."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton

from rlhf_spmd.kernels.packing import AttentionRule

SPLIT_KEYS = 512  # keys of a part of the softmax: a multiple of every block of keys
BLOCK_BYTES = 1 << 14  # keys of a block, which is loaded as a whole: 64 of 128 bf16
CHUNK_ROWS = 128  # matrix rows of a chunk's tile, see TileShape
LOG2_E = 1.4426950408889634


class TileShape(NamedTuple):
    """How large a kernel's tile is: matrix rows, keys of a block, elements of a head rounded up; warps of a program, blocks in
    flight."""

    rows: int
    keys: int
    elements: int
    warps: int
    stages: int

    @classmethod
    def of(cls, head_dim: int, itemsize: int, page_size: int, rows: int) -> TileShape:
        """Blocks of fp32, whose products are no tensor cores' work, are small: a thread holds whole rows of both factors."""
        elements = max(triton.next_power_of_2(head_dim), 16)
        keys = min(max(BLOCK_BYTES // (elements * itemsize), 16), 64 if itemsize == 2 else 16)
        # two blocks arrive while one is computed; where each waits for the numbers of its pages, these are a step of their own
        return cls(rows, keys, elements, 8 if rows >= 32 else 4, 5 if page_size % keys else 3)

    @classmethod
    def of_singles(cls, head_dim: int, itemsize: int, page_size: int, group_size: int) -> TileShape:
        return cls.of(head_dim, itemsize, page_size, tile_rows(group_size))

    @classmethod
    def of_chunks(
        cls, head_dim: int, itemsize: int, page_size: int, group_size: int, chunk_rows: int | None = None
    ) -> TileShape:
        """CHUNK_ROWS at most, fewer where a tile's two sums, of a split and of all, would not fit into registers."""
        most = min(CHUNK_ROWS, 32 if itemsize > 2 else 64 if head_dim > 128 else 128)
        return cls.of(head_dim, itemsize, page_size, max(chunk_rows or most, tile_rows(group_size)))

    @classmethod
    def of_alike(cls, head_dim: int, itemsize: int, page_size: int, group_size: int) -> TileShape:
        """The shape for chunks whose queries must have the bits of single tokens: the same instructions, and the same warps for the
        keys of a block. Tensor cores allow for twice as many rows: four warps then still lie side by side along the keys."""
        narrow = cls.of_singles(head_dim, itemsize, page_size, group_size)
        return narrow._replace(rows=32) if itemsize == 2 and head_dim <= 128 and narrow.rows == 16 else narrow

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}


def tile_rows(group_size: int) -> int:
    return max(triton.next_power_of_2(group_size), 16)


def score_factors(rule: AttentionRule) -> tuple[float, float]:
    """``scale`` and ``cap`` of the kernels, whose scores are powers of two."""
    if rule.softcap is None:
        return rule.scale * LOG2_E, 0.0
    return rule.scale / rule.softcap, rule.softcap * LOG2_E
