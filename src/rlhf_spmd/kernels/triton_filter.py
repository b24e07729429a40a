"""Sampling of tokens with min_p, top_k and top_p in Triton: by a threshold, without a sort and without waiting for the host.

Weights exp((score - maximum) / temperature) lie in [0, 1], so their bits, read as integers, are in their order. A row keeps the weights
from a threshold on; of those equal to it only the first ones, where top_p cuts between them. Four steps:

1. Count the weights of each row by their eight highest bits (BINS): tiles of the vocabulary side by side.
2. Gather the candidates of a row, in the order of the vocabulary. The counts give a bin from which on all that stays must lie: that of
   the k-th weight for top_k, else the one below which there is surely less than 1 - top_p of the total. Tiles whose maximum lies
   below are not read. A row with more than CANDIDATES has none gathered; the next step reads its scores instead.
3. Search the candidates for the thresholds of top_k (by counts) and of top_p (by fp64 mass), PIVOTS at a time.
4. Walk over the candidates and draw.

A row mostly reads its logits three times: for maxima and sums, for the counts, and some tiles for the candidates. A row with too many
candidates (a flat distribution) reads them up to eleven times more with top_p, nine more with so large a top_k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_spmd.kernels.sampling_tensors import Drawn, SamplingTensors
from rlhf_spmd.kernels.triton_draw import (
    OPTIONS,
    TILE,
    filters_row,
    first_above,
    note_log_probs,
    totals_of,
    uniform_of,
    weights_of,
)

CANDIDATES = 8192  # that a row has room for
BINS: tl.constexpr = tl.constexpr(256)  # a weight's bits shifted right by 22; 1 is in bin 254
CHUNK = 512  # candidates that are read at a time
PIVOTS = 8  # thresholds that are tried at once


@triton.jit
def _row(
    row: tl.tensor, temperatures: tl.tensor, top_p: tl.tensor, min_p: tl.tensor, top_k: tl.tensor, tiles: tl.tensor,
    vocabulary: tl.tensor, num_tiles: tl.tensor, step: tl.tensor, TILES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return temperature, maximum and sum of a row, its settings, and whether its distribution is filtered and has a finite sum."""
    tile = tl.arange(0, TILES)
    temperature = tl.load(temperatures + row)
    p, m, k = tl.load(top_p + row), tl.load(min_p + row), tl.load(top_k + row)
    filtered = filters_row(p, m, k, temperature, vocabulary)
    temperature = tl.where(filtered, temperature, 1.0)
    _, largest, weights = totals_of(tiles, row * num_tiles + tile, tile < num_tiles, step, temperature.to(tl.float64))
    total = tl.sum(weights, 0)
    active = filtered & (total > 0.0) & (total < float("inf"))
    return temperature, largest.to(tl.float32), total, p.to(tl.float64), m.to(tl.float32), k, active


@triton.jit
def _bits(weights: tl.tensor) -> tl.tensor:
    """Return the bits of fp32 weights as int32: of numbers above 0, larger ones have larger bits."""
    return weights.to(tl.int32, bitcast=True)


@triton.jit
def _count_weights(
    scores: tl.tensor, temperatures: tl.tensor, top_p: tl.tensor, min_p: tl.tensor, top_k: tl.tensor, tiles: tl.tensor,
    counts: tl.tensor, masses: tl.tensor, stride: tl.tensor, vocabulary: tl.tensor, num_tiles: tl.tensor, SIZE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:  # fmt: skip
    """Add to ``counts`` int32 [B, BINS], zeros at first. Write ``masses`` fp64 [B, N]: the mass that min_p leaves of each tile."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * num_tiles
    temperature, largest, _, _, m, _, active = _row(
        row, temperatures, top_p, min_p, top_k, tiles, vocabulary, num_tiles, step, TILES
    )  # fmt: skip
    if active:
        token = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
        x = tl.load(scores + row * stride + token, mask=token < vocabulary, other=float("-inf"))
        weights = weights_of(x, largest, temperature)
        histogram = tl.histogram(_bits(weights) >> 22, BINS)  # what lies outside counts in bin 0, which nobody reads
        mass = tl.sum(tl.where(weights >= m, weights, 0.0).to(tl.float64), 0)
        tl.store(masses + row * num_tiles + tl.program_id(1), mass)
        tl.atomic_add(counts + row * BINS + tl.arange(0, BINS), histogram, mask=histogram > 0)


@triton.jit
def _edge(bin_number: tl.tensor) -> tl.tensor:
    """Return the least weight of a bin, fp64."""
    return (bin_number << 22).to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _gather_candidates(
    scores: tl.tensor, temperatures: tl.tensor, top_p: tl.tensor, min_p: tl.tensor, top_k: tl.tensor, tiles: tl.tensor,
    counts: tl.tensor, gathered: tl.tensor, ids: tl.tensor, plans: tl.tensor, stride: tl.tensor, vocabulary: tl.tensor,
    num_tiles: tl.tensor, SIZE: tl.constexpr, TILES: tl.constexpr, ROOM: tl.constexpr,
) -> None:  # fmt: skip
    """Write ``plans`` int32 [B, 3]: the number of candidates, or -1 if the row's own scores are the candidates; least bits of weights
    that can stay; least bits of the k-th weight's bin."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * num_tiles
    temperature, largest, total, p, m, k, active = _row(
        row, temperatures, top_p, min_p, top_k, tiles, vocabulary, num_tiles, step, TILES
    )  # fmt: skip
    if active:
        lane = tl.arange(0, BINS)
        histogram = tl.load(counts + row * BINS + lane)
        from_here = tl.sum(histogram, 0) - tl.cumsum(histogram, 0) + histogram
        least_of_kth = tl.max(tl.where(from_here >= k, lane, 0), 0) << 22
        # bin 0 has nothing that a total of at least 1 would notice
        mass = tl.where(lane > 0, histogram.to(tl.float64) * _edge(lane + 1), 0.0)
        allowed = (1.0 - p) * total * 0.999 - total * 1e-6  # the total is one of weights that were rounded otherwise
        least_of_nucleus = tl.max(tl.where(tl.cumsum(mass, 0) - mass <= allowed, lane, 0), 0) << 22
        by_rank = (k > 0) & (k < vocabulary)
        cut = tl.where(by_rank, least_of_kth, tl.where(p < 1.0, least_of_nucleus, 0))
        cut = tl.maximum(tl.maximum(cut, _bits(m)), 1)
        least_of_kth = tl.where(by_rank, least_of_kth, 0)
        num_weights = tl.sum(tl.where(lane >= (cut >> 22), histogram, 0), 0)
        count = num_weights * 0
        if num_weights <= ROOM:
            for tile in range(0, num_tiles):
                top = tl.load(tiles + row * num_tiles + tile).to(tl.float32)
                # exponentials are not monotonic in their last bits
                if _bits(weights_of(top, largest, temperature)) + 16 >= cut:
                    token = tile * SIZE + tl.arange(0, SIZE)
                    x = tl.load(scores + row * stride + token, mask=token < vocabulary, other=float("-inf"))
                    chosen = (_bits(weights_of(x, largest, temperature)) >= cut).to(tl.int32)
                    target = row * ROOM + count + tl.cumsum(chosen, 0) - 1
                    tl.store(gathered + target, x, mask=chosen > 0)
                    tl.store(ids + target, token, mask=chosen > 0)
                    count += tl.sum(chosen, 0)
        else:
            count -= 1
        tl.store(plans + row * 3, count)
        tl.store(plans + row * 3 + 1, cut)
        tl.store(plans + row * 3 + 2, least_of_kth)


@triton.jit
def _sums_from(
    candidates: tl.tensor, count: tl.tensor, largest: tl.tensor, temperature: tl.tensor, bounds: tl.tensor, BY_MASS: tl.constexpr,
    SIZE: tl.constexpr, TRIES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return, for each of ``bounds`` [TRIES], the mass or the number of the weights whose bits are not below it: fp64."""
    sums = tl.zeros([SIZE, TRIES], tl.float64)
    for start in range(0, count, SIZE):
        place = start + tl.arange(0, SIZE)
        weights = weights_of(tl.load(candidates + place, mask=place < count, other=float("-inf")), largest, temperature)
        value = weights.to(tl.float64)
        if not BY_MASS:
            value = tl.where(weights > 0.0, 1.0, 0.0).to(tl.float64)
        sums += tl.where(_bits(weights)[:, None] >= bounds[None, :], value[:, None], 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _lane(values: tl.tensor, lane: tl.tensor, TRIES: tl.constexpr) -> tl.tensor:
    """Return one of ``values`` [TRIES], by its position."""
    return tl.sum(tl.where(tl.arange(0, TRIES) == lane, values, 0.0), 0)


@triton.jit
def _search(
    candidates: tl.tensor, count: tl.tensor, largest: tl.tensor, temperature: tl.tensor, low: tl.tensor, high: tl.tensor,
    goal: tl.tensor, BY_MASS: tl.constexpr, SIZE: tl.constexpr, TRIES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the largest bound in ``low`` .. ``high`` - 1 whose sum reaches ``goal``, that sum, and the sum of the next bound.
    ``low`` is known to reach it; ``high`` is at least 2 more."""
    lane = tl.arange(0, TRIES)
    reached = goal * 0.0
    missed = goal * 0.0  # right where ``high`` never falls: no weight has so many bits
    while high - low > 1:
        step = (high - low + TRIES - 1) // TRIES
        bounds = low + lane * step
        sums = _sums_from(candidates, count, largest, temperature, bounds, BY_MASS, SIZE, TRIES)
        passing = tl.sum(tl.where((lane > 0) & (bounds < high) & (sums >= goal), 1, 0), 0)
        reached = _lane(sums, passing, TRIES)
        below_high = low + (passing + 1) * step < high
        missed = tl.where(below_high, _lane(sums, passing + 1, TRIES), missed)
        low = low + passing * step
        high = tl.minimum(low + step, high)
    return low, reached, missed


@triton.jit
def _pick_filtered(
    scores: tl.tensor, logits: tl.tensor, temperatures: tl.tensor, top_p: tl.tensor, min_p: tl.tensor, top_k: tl.tensor,
    keys: tl.tensor, positions: tl.tensor, tiles: tl.tensor, masses: tl.tensor, gathered: tl.tensor, ids: tl.tensor,
    plans: tl.tensor, tokens: tl.tensor, tempered: tl.tensor, plain: tl.tensor, scores_stride: tl.tensor, logits_stride: tl.tensor,
    vocabulary: tl.tensor, num_tiles: tl.tensor, TILES: tl.constexpr, ROOM: tl.constexpr, SIZE: tl.constexpr,
    TRIES: tl.constexpr,
) -> None:  # fmt: skip
    """Write a token of each row with top_k, top_p or min_p, and its log-probs at the row's temperature and at 1.

    ``plans``: see :func:`_gather_candidates`.
    """
    row = tl.program_id(0).to(tl.int64)
    step = tl.num_programs(0).to(tl.int64) * num_tiles
    temperature, largest, _, p, m, k, active = _row(
        row, temperatures, top_p, min_p, top_k, tiles, vocabulary, num_tiles, step, TILES
    )  # fmt: skip
    if active:
        count = tl.load(plans + row * 3)
        cut = tl.load(plans + row * 3 + 1)
        least_of_kth = tl.load(plans + row * 3 + 2)
        wide = count < 0
        candidates = gathered + row * ROOM
        if wide:
            candidates = scores + row * scores_stride
            count = count * 0 + vocabulary
        floor = tl.maximum(_bits(m), 1)
        tile = tl.arange(0, TILES)
        left = tl.sum(tl.load(masses + row * num_tiles + tile, mask=tile < num_tiles, other=0.0), 0)
        if least_of_kth > 0:
            kth, _, _ = _search(
                candidates, count, largest, temperature, least_of_kth, least_of_kth + (1 << 22), k.to(tl.float64), False, SIZE, TRIES
            )  # fmt: skip
            floor = tl.maximum(floor, kth)
            bounds = floor + tl.zeros([TRIES], tl.int32)
            left = _lane(_sums_from(candidates, count, largest, temperature, bounds, True, SIZE, TRIES), 0, TRIES)
        last = floor
        kept_mass = left
        num_ties = left * 0.0 + float("inf")  # kept candidates that weigh as much as the last one
        if p < 1.0:
            goal = p * left
            last, reached, missed = _search(
                candidates, count, largest, temperature, tl.maximum(floor, cut), cut * 0 + 0x3F800002, goal, True, SIZE, TRIES
            )  # fmt: skip
            weight = last.to(tl.float32, bitcast=True).to(tl.float64)
            num_ties = tl.maximum(tl.ceil((goal - missed) / weight), 1.0)
            kept_mass = tl.minimum(missed + num_ties * weight, reached)
        goal = uniform_of(tl.load(keys + row), tl.load(positions + row)) * kept_mass
        place = _walk(candidates, count, largest, temperature, last, num_ties, goal, SIZE)
        drawn = tl.where(wide, place, tl.load(ids + row * ROOM + place, mask=tl.load(plans + row * 3) >= 0, other=0))
        label = tl.load(logits + row * logits_stride + drawn)
        at_own, at_one = note_log_probs(
            tiles, row * num_tiles + tile, tile < num_tiles, step, temperature.to(tl.float64), label, active
        )  # fmt: skip
        tl.store(tokens + row, drawn.to(tokens.dtype.element_ty))
        tl.store(tempered + row, at_own.to(tempered.dtype.element_ty))
        tl.store(plain + row, at_one.to(plain.dtype.element_ty))


@triton.jit
def _walk(
    candidates: tl.tensor, count: tl.tensor, largest: tl.tensor, temperature: tl.tensor, last: tl.tensor, num_ties: tl.tensor,
    goal: tl.tensor, SIZE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the place of the first candidate at which the cumulative kept weight exceeds ``goal``. Kept are candidates with more bits
    than ``last``, and the first ``num_ties`` with equal bits. If rounding leaves the goal unreached: the last kept one."""
    start, chosen_place = count * 0, count * 0
    before, ties = goal * 0.0, goal * 0.0
    going = count > 0
    while going:
        place = start + tl.arange(0, SIZE)
        weights = weights_of(tl.load(candidates + place, mask=place < count, other=float("-inf")), largest, temperature)
        tied = tl.where(_bits(weights) == last, 1.0, 0.0).to(tl.float64)
        earlier = ties + tl.cumsum(tied, 0) - tied
        stays = (_bits(weights) > last) | ((tied > 0.0) & (earlier < num_ties))
        weights = tl.where(stays, weights, 0.0).to(tl.float64)
        chosen = first_above(weights, goal - before, SIZE)
        added = tl.sum(weights, 0)
        chosen_place = tl.where(added > 0.0, start + chosen, chosen_place)
        before += added
        ties += tl.sum(tied, 0)
        start += SIZE
        going = (start < count) & (before <= goal)
    return chosen_place


def pick_filtered(
    tiles: Tensor, scores: Tensor, logits: Tensor, settings: SamplingTensors, keys: Tensor, positions: Tensor, out: Drawn
) -> None:
    """Overwrite the draws of rows with filters in ``out``.

    ``tiles`` [5, B, N]: :func:`triton_draw.sum_tiles` of the whole vocabulary.
    """
    _, rows, num_tiles = tiles.shape
    device = scores.device
    if not rows:
        return
    counts = torch.zeros(rows, BINS.value, dtype=torch.int32, device=device)
    gathered = torch.empty(rows, CANDIDATES, dtype=torch.float32, device=device)
    masses = torch.empty(rows, num_tiles, dtype=torch.float64, device=device)
    ids = torch.empty_like(gathered, dtype=torch.int32)
    plans = torch.empty(rows, 3, dtype=torch.int32, device=device)
    tensors = settings[:4]
    sizes = scores.shape[1], num_tiles
    padded = triton.next_power_of_2(num_tiles)
    _count_weights[(rows, num_tiles)](
        scores, *tensors, tiles, counts, masses, scores.stride(0), *sizes, TILE, padded, num_warps=4, **OPTIONS
    )  # fmt: skip
    _gather_candidates[(rows,)](
        scores, *tensors, tiles, counts, gathered, ids, plans, scores.stride(0), *sizes, TILE, padded, CANDIDATES,
        num_warps=8, **OPTIONS,
    )  # fmt: skip
    _pick_filtered[(rows,)](
        scores, logits, *tensors, keys, positions, tiles, masses, gathered, ids, plans, *out, scores.stride(0),
        logits.stride(0), *sizes, padded, CANDIDATES, CHUNK, PIVOTS, num_warps=8, **OPTIONS,
    )  # fmt: skip
