"""Sampling of tokens from logits in Triton, with their log-probs: one pass over the logits, then a look at one tile of each row.

The first kernel reduces tiles of TILE tokens: their maximum, and sums of exp((x - maximum) / temperature). Exponentials are fp32, as
the weights of a draw are; sums are fp64. The second kernel has one program per row. It brings the tiles' sums to the row's
maximum, chooses the tile in which the cumulative weight exceeds the draw, then a block of it, then the token. Log-probs follow
from the same sums.

Order and rounding of a row's sums depend on the vocabulary and TILE alone. Sums are not monotonic to the last bit, so a choice asks for
a weight above 0 too. Where rounding leaves a goal unreached, the last such choice counts.

Legend: B rows, N tiles of the row (of all ranks). Statistics of a row's tiles, fp64 [5, B, N]: maximum of the scores and their sum at
the row's temperature; maximum of the logits, their sum at the row's temperature and at 1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_spmd.kernels.sampling_tensors import Drawn, SamplingTensors

TILE = 4096  # tokens
BLOCK = 64  # tokens, by which a tile is searched
OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}  # kernels that compute the same weight must round alike


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    """Return splitmix64's finaliser on int64: shifts are logical by their masks."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def uniform_of(key: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Return fp64 numbers in [0, 1) with the bits of :func:`rlhf_spmd.generation.sampler.uniform`."""
    mixed = _mix(_mix(key + -7046029254386353131) ^ (position + -7046029254386353131))
    return ((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def weights_of(x: tl.tensor, largest: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return fp32 exp((x - largest) / temperature); the division is rounded once, so that of 1 changes no bit."""
    return tl.exp(tl.div_rn(x - tl.where(largest == float("-inf"), 0.0, largest), temperature))


@triton.jit
def first_above(weights: tl.tensor, goal: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """Return where the cumulative sum of fp64 ``weights`` [SIZE] first exceeds ``goal``; else the last weight above 0; else 0."""
    index = tl.arange(0, SIZE)
    counts = weights > 0.0
    first = tl.min(tl.where((tl.cumsum(weights, 0) > goal) & counts, index, SIZE), 0)
    return tl.where(first < SIZE, first, tl.max(tl.where(counts, index, 0), 0))


@triton.jit
def _sums(x: tl.tensor, temperature: tl.tensor, TEMPERED: tl.constexpr) -> tl.tensor:
    """Return the maximum, and fp64 sums of exponentials at ``temperature`` and at 1."""
    largest = tl.max(x, 0)
    total = tl.sum(weights_of(x, largest, temperature).to(tl.float64), 0)
    plain = total
    if TEMPERED:
        plain = tl.sum(weights_of(x, largest, 1.0).to(tl.float64), 0)
    return largest, total, plain


@triton.jit
def _sum_tiles(
    scores: tl.tensor, logits: tl.tensor, temperatures: tl.tensor, tiles: tl.tensor, scores_stride: tl.tensor,
    logits_stride: tl.tensor, drawable: tl.tensor, vocabulary: tl.tensor, SAME: tl.constexpr, GREEDY: tl.constexpr,
    TEMPERED: tl.constexpr, SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """Write the largest score and the sums of exponentials of a tile of a row's vocabulary, fp64 [5, B, tiles].

    Those of ``scores`` come first, then those of ``logits`` at the row's temperature and at 1.
    """
    row = tl.program_id(0).to(tl.int64)
    tile, num_tiles = tl.program_id(1), tl.num_programs(1)
    token = tile * SIZE + tl.arange(0, SIZE)
    mask = token < vocabulary
    temperature = tl.load(temperatures + row)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    target = tiles + row * num_tiles + tile
    step = tl.num_programs(0).to(tl.int64) * num_tiles
    x = tl.load(logits + row * logits_stride + token, mask=mask, other=float("-inf"))
    largest, total, plain = _sums(x, temperature, TEMPERED)
    tl.store(target + 2 * step, largest.to(tl.float64))
    tl.store(target + 3 * step, total)
    tl.store(target + 4 * step, plain)
    if not SAME:
        x = tl.load(scores + row * scores_stride + token, mask=token < drawable, other=float("-inf"))
        if GREEDY:  # no weight is asked for, but whether all scores are numbers
            largest = tl.max(x, 0)
            total = tl.sum(tl.where(x == x, 1.0, x).to(tl.float64), 0)
        else:
            largest, total, _ = _sums(x, temperature, False)
    elif (tile + 1) * SIZE > drawable:  # other tiles have the same sums
        largest, total, _ = _sums(tl.where(token < drawable, x, float("-inf")), temperature, False)
    tl.store(target, largest.to(tl.float64))
    tl.store(target + step, total)


@triton.jit
def totals_of(tiles: tl.tensor, offset: tl.tensor, mask: tl.tensor, step: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Return the tiles' maxima at ``offset`` fp64 [N], the row's maximum, the tiles' weights relative to it, and the sum at
    ``temperature`` 1 from the next field. Tiles without a finite score weigh 0."""
    maxima = tl.load(tiles + offset, mask=mask, other=float("-inf"))
    sums = tl.load(tiles + offset + step, mask=mask, other=0.0)
    largest = tl.max(maxima, 0)
    return maxima, largest, sums * tl.exp((maxima - largest) / temperature)


@triton.jit
def note_log_probs(
    tiles: tl.tensor, offset: tl.tensor, mask: tl.tensor, step: tl.tensor, temperature: tl.tensor, label: tl.tensor,
    good: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return fp64 log-probs of the logit ``label`` at ``temperature`` and at 1; NaN unless the scores were ``good``."""
    maxima, largest, weights = totals_of(tiles, offset + 2 * step, mask, step, temperature)
    plain = tl.load(tiles + offset + 4 * step, mask=mask, other=0.0) * tl.exp(maxima - largest)
    above = tl.where(good, label.to(tl.float64), float("nan")) - largest
    return above / temperature - tl.log(tl.sum(weights, 0)), above - tl.log(tl.sum(plain, 0))


@triton.jit
def filters_row(
    top_p: tl.tensor, min_p: tl.tensor, top_k: tl.tensor, temperature: tl.tensor, vocabulary: tl.tensor
) -> tl.tensor:
    """Return True if a filter removes tokens of a row's distribution."""
    return (temperature > 0.0) & ((top_p < 1.0) | (min_p > 0.0) | ((top_k > 0) & (top_k < vocabulary)))


@triton.jit
def _pick(
    scores: tl.tensor, logits: tl.tensor, temperatures: tl.tensor, keys: tl.tensor, positions: tl.tensor, tiles: tl.tensor,
    tokens: tl.tensor, tempered: tl.tensor, plain: tl.tensor, scores_stride: tl.tensor, logits_stride: tl.tensor,
    drawable: tl.tensor, num_tiles: tl.tensor, num_ranks: tl.tensor, rank: tl.tensor, first: tl.tensor,
    SIZE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Draw a row's token.

    - drawable: number of this rank's tokens that may be drawn, from ``first`` on
    - num_tiles: tiles of a rank; TILES: at least those of all ranks, a power of two
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    mask = tile < num_tiles * num_ranks
    step = tl.num_programs(0).to(tl.int64) * num_tiles
    offset = (tile // num_tiles) * (5 * step) + row * num_tiles + tile % num_tiles
    temperature = tl.load(temperatures + row)
    greedy = temperature == 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    maxima, largest, weights = totals_of(tiles, offset, mask, step, temperature.to(tl.float64))
    total = tl.sum(weights, 0)
    good = (total > 0.0) & (total < float("inf"))
    weights = tl.where(greedy, tl.where(mask & (maxima == largest), 1.0, 0.0), weights)
    uniform = uniform_of(tl.load(keys + row), tl.load(positions + row))
    goal = tl.where(greedy, 0.0, uniform * total)
    chosen = first_above(weights, goal, TILES)
    before = tl.sum(tl.where(tile < chosen, weights, 0.0), 0)
    at_maximum = tl.max(tl.where(tile == chosen, maxima, float("-inf")), 0)
    scale = tl.where(greedy, 1.0, tl.exp((at_maximum - largest) / temperature.to(tl.float64)))
    goal = tl.maximum((goal - before) / scale, 0.0)
    is_local = chosen // num_tiles == rank
    start = (chosen % num_tiles) * SIZE
    token = start + tl.arange(0, SIZE)
    x = tl.load(scores + row * scores_stride + token, mask=(token < drawable) & is_local, other=float("-inf"))
    x = tl.where(greedy, tl.where(x == largest.to(tl.float32), 1.0, 0.0), weights_of(x, at_maximum.to(tl.float32), temperature))
    blocks = tl.sum(tl.reshape(x, (SIZE // WIDTH, WIDTH)).to(tl.float64), 1)
    block = first_above(blocks, goal, SIZE // WIDTH)
    goal = tl.maximum(goal - tl.sum(tl.where(tl.arange(0, SIZE // WIDTH) < block, blocks, 0.0), 0), 0.0)
    token = start + block * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(scores + row * scores_stride + token, mask=(token < drawable) & is_local, other=float("-inf"))
    x = tl.where(greedy, tl.where(x == largest.to(tl.float32), 1.0, 0.0), weights_of(x, at_maximum.to(tl.float32), temperature))
    drawn = tl.minimum(start + block * WIDTH + first_above(x.to(tl.float64), goal, WIDTH), tl.maximum(drawable - 1, 0))
    label = tl.load(logits + row * logits_stride + drawn)
    at_own, at_one = note_log_probs(tiles, offset, mask, step, temperature.to(tl.float64), label, good)
    tl.store(tokens + row, tl.where(is_local, first + drawn, 0).to(tokens.dtype.element_ty))
    tl.store(tempered + row, tl.where(is_local, at_own, 0.0).to(tempered.dtype.element_ty))
    tl.store(plain + row, tl.where(is_local, at_one, 0.0).to(plain.dtype.element_ty))


def num_tiles(width: int) -> int:
    return max(triton.cdiv(width, TILE), 1)


def sum_tiles(scores: Tensor, logits: Tensor, settings: SamplingTensors, width: int) -> Tensor:
    """Return statistics fp64 [5, B, tiles] of logits [B, V], with the tiles of ``width`` tokens. ``scores`` may have fewer columns,
    those that may be drawn."""
    rows, vocabulary = logits.shape
    drawable = scores.shape[1]
    _check(scores, logits)
    out = torch.empty(5, rows, num_tiles(width), dtype=torch.float64, device=scores.device)
    if rows:
        same = scores.data_ptr() == logits.data_ptr()
        _sum_tiles[(rows, num_tiles(width))](
            scores, logits, settings.temperature, out, scores.stride(0), logits.stride(0), drawable, vocabulary,
            same, settings.greedy, settings.tempered, TILE, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return out


def pick(
    tiles: Tensor, rank: int, first: int, scores: Tensor, logits: Tensor, settings: SamplingTensors, keys: Tensor, positions: Tensor,
    out: Drawn,
) -> None:  # fmt: skip
    """Fill ``out`` from the statistics of all ranks, ``tiles`` [tp, 5, B, N]; zeros for tokens in another rank's slice."""
    ranks, _, rows, tiles_each = tiles.shape
    if rows:
        _pick[(rows,)](
            scores, logits, settings.temperature, keys, positions, tiles, *out, scores.stride(0), logits.stride(0), scores.shape[1],
            tiles_each, ranks, rank, first, TILE, triton.next_power_of_2(ranks * tiles_each), BLOCK, num_warps=4, **OPTIONS,
        )  # fmt: skip


def _check(*logits: Tensor) -> None:
    for each in logits:
        assert each.dtype == torch.float32 and each.stride(1) == 1, "draws are of fp32 logits whose rows lie together"
