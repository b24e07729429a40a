"""The linear layers' matrix products in Triton, batch-invariant: an element's bits do not depend on the number of rows.

An element is one chain: the inner dimension in steps of BLOCK_K from its beginning, each step added to the same fp32 accumulator,
never in parts by several programs. The number of rows changes only the rows and columns of a tile. Within a step the tensor cores
execute the same kind of instruction for all tiles: on Hopper wgmma m64 n? k16, so tiles of fewer than 64 rows are filled up; before
Hopper mma.sync m16n8k16. That an element of wgmma is the same for every n is assumed, not documented.

Shape legend: M rows, N columns (rows of the weight), K inner.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_spmd.kernels import devices

PROGRAMS = 128  # that a product should have at least, about one for each multiprocessor of a large GPU
GROUP_ROWS = 8  # tiles of rows that are computed side by side: they share the weight's tiles in the L2 cache


class ProductTile(NamedTuple):
    """How much a program computes in a step.

    - rows, columns, inner: sizes of the step's product
    - warps: warps of the program
    - stages: steps in flight
    """

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        return {"num_warps": self.warps, "num_stages": self.stages}

    def shared_bytes(self, itemsize: int) -> int:
        """Return an upper bound of a program's shared memory in bytes: the factors of the steps in flight."""
        return itemsize * (self.rows + self.columns) * self.inner * self.stages


# by falling size; the last ones are for few rows, whose time is that of the weight's way from memory
HALF_TILES = (
    ProductTile(128, 256, 64, 8, 3),
    ProductTile(128, 128, 64, 8, 4),
    ProductTile(64, 128, 64, 4, 4),
    ProductTile(64, 64, 64, 4, 5),
    ProductTile(64, 32, 64, 4, 6),
    ProductTile(64, 16, 64, 4, 6),
)
# no tensor cores' work: a thread holds its rows of both factors, a step long
WIDE_TILES = (ProductTile(64, 64, 16, 8, 3), ProductTile(32, 32, 16, 4, 3), ProductTile(16, 32, 16, 4, 3))


def choose_tile(rows: int, columns: int, itemsize: int) -> ProductTile:
    """Return the largest tile that fits into shared memory and leaves enough programs, of no more rows than are there."""
    room = devices.shared_memory()
    tiles = [tile for tile in (HALF_TILES if itemsize == 2 else WIDE_TILES) if tile.shared_bytes(itemsize) <= room]
    for tile in tiles[:-1]:
        if tile.rows < 2 * rows and triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns) >= PROGRAMS:
            return tile
    return tiles[-1]


@triton.jit(do_not_specialize=["rows"])
def _product(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, rows: tl.tensor, columns: tl.tensor, inner: tl.tensor,
    x_stride: tl.tensor, weight_stride: tl.tensor, BIAS: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Compute a tile of x [M, K] times the transpose of weight [N, K], plus bias [N]. WHOLE: K is a multiple of BLOCK_K."""
    program = tl.program_id(0)
    across = tl.cdiv(columns, BLOCK_N)
    first = program // (GROUP * across) * GROUP
    beside = tl.minimum(tl.cdiv(rows, BLOCK_M) - first, GROUP)
    within = program % (GROUP * across)
    row = (first + within % beside).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (within // beside).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + row[:, None] * x_stride + k[None, :]
    weight_at = weight + column[None, :] * weight_stride + k[:, None]
    row_mask = (row < rows)[:, None]
    column_mask = (column < columns)[None, :]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        if WHOLE:
            a = tl.load(x_at, mask=row_mask, other=0.0)
            b = tl.load(weight_at, mask=column_mask, other=0.0)
        else:
            inner_mask = start + k < inner
            a = tl.load(x_at, mask=row_mask & inner_mask[None, :], other=0.0)
            b = tl.load(weight_at, mask=column_mask & inner_mask[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        x_at += BLOCK_K
        weight_at += BLOCK_K
    if BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    tl.store(out + row[:, None] * columns + column[None, :], total.to(out.dtype.element_ty), mask=row_mask & column_mask)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """Return ``x`` [M, K] times the transpose of ``weight`` [N, K], plus ``bias``: [M, N], rounded once; in fp32 if ``wide``."""
    assert x.shape[1] == weight.shape[1], f"{list(x.shape)} times the transpose of {list(weight.shape)}"
    assert x.dtype == weight.dtype, f"a product of {x.dtype} and {weight.dtype}"
    x, weight = (each if each.stride(1) == 1 else each.contiguous() for each in (x, weight))
    rows, inner = x.shape
    columns = len(weight)
    out = x.new_empty(rows, columns, dtype=torch.float32 if wide else x.dtype)
    if not out.numel():
        return out
    tile = choose_tile(rows, columns, x.element_size())
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns),)
    sizes = rows, columns, inner, x.stride(0), weight.stride(0), bias is not None, inner % tile.inner == 0, GROUP_ROWS
    _product[grid](x, weight, weight if bias is None else bias, out, *sizes, *tile[:3], **tile.options)
    return out
