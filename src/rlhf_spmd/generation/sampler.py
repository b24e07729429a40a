"""Drawing tokens: a draw depends on (seed, step, row id, position) and on the row's own logits, on nothing else.

Each draw takes one uniform number from a counter-based generator (splitmix64's finaliser over the four counters) and inverts
the cumulative distribution in vocabulary order, in fp64. Batch, order, rank and layout do not enter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.kernels import choose_ops

CHUNK_ELEMENTS = 1 << 25  # logits inverted at once: bounds the fp64 work space to 256 MB


def _signed(x: int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return (x & ((1 << 64) - 1)) - ((x >> 63 & 1) << 64)


_GOLDEN, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def _stir(state: Tensor, counter: Tensor) -> Tensor:
    return _mix(_mix(state + _GOLDEN) ^ (counter + _GOLDEN))


def row_keys(seeds: int | Sequence[int], steps: Tensor, row_ids: Tensor) -> Tensor:
    """What :func:`uniform` makes of all but the positions, int64 as ``steps`` and ``row_ids`` [rows]. ``seeds``: of each, or of all."""
    signed = _signed(seeds) if isinstance(seeds, int) else list(map(_signed, seeds))
    return _stir(_stir(torch.tensor(signed, device=row_ids.device).expand_as(row_ids), steps), row_ids)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """fp64 [rows] in [0, 1), of 53 random bits each, the same on every device. ``keys``: :func:`row_keys`. ``positions``: of the drawn
    token in its response."""
    return _shift_right(_stir(keys, positions), 11).double() * 2.0**-53


def sample(logits: Tensor, sampling: SamplingConfig, draws: Tensor) -> Tensor:
    """Token ids int64 [rows] from ``logits`` [rows, vocabulary] and ``draws`` fp64 [rows] (unused when greedy). They lie in the
    vocabulary, whatever the logits are; from logits that are not finite they mean nothing."""
    ops = choose_ops(logits.dtype, logits.device)
    if sampling.greedy:
        return ops.argmax(logits)
    unfiltered = sampling.min_p == 0.0 and sampling.top_p == 1.0 and not 0 < sampling.top_k < logits.shape[1]
    if unfiltered and (drawn := ops.draw(logits, sampling.temperature, draws)) is not None:
        return drawn
    rows = max(1, CHUNK_ELEMENTS // logits.shape[1])
    parts = [_sample_rows(part, sampling, u) for part, u in zip(logits.split(rows), draws.split(rows), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _sample_rows(logits: Tensor, sampling: SamplingConfig, draws: Tensor) -> Tensor:
    scores = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    scores = scores - scores.amax(dim=-1, keepdim=True)
    if sampling.temperature != 1.0:
        scores /= sampling.temperature
    weights = filter_weights(scores.exp_(), sampling)
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    # right=True: the first token whose cumulative weight exceeds the draw, hence never one of weight 0.
    # A draw is at most 1 - 2**-53, so draw * total < total in fp64 too.
    found = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    return found.clamp_(max=weights.shape[1] - 1)  # beyond it only where weights are not finite


def filter_weights(weights: Tensor, sampling: SamplingConfig) -> Tensor:
    """Zero what min_p, top_k and top_p exclude. ``weights`` [rows, vocabulary]: exp(score - largest score), so at most 1."""
    vocabulary = weights.shape[1]
    if sampling.min_p > 0.0:
        weights = weights.where(weights >= sampling.min_p, 0.0)
    if 0 < sampling.top_k < vocabulary:
        kth = weights.topk(sampling.top_k, dim=-1).values[:, -1:]
        weights = weights.where(weights >= kth, 0.0)
    if sampling.top_p < 1.0:
        weights = _keep_nucleus(weights, sampling.top_p)
    return weights


def _keep_nucleus(weights: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens until their weight reaches ``top_p`` of the whole; of equal ones the lower ids.

    Sorting a vocabulary is dear and the nucleus is mostly small, so the largest 256 are tried first, then all.
    """
    vocabulary = weights.shape[1]
    goal = top_p * weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    for num_candidates in sorted({min(256, vocabulary), vocabulary}):
        if num_candidates < vocabulary:
            largest = weights.topk(num_candidates, dim=-1).values
        else:
            largest = weights.sort(dim=-1, descending=True).values
        before = largest.cumsum(dim=-1, dtype=torch.float64) - largest
        if num_candidates == vocabulary or bool((before[:, -1:] + largest[:, -1:] >= goal).all()):
            break
    kept = before < goal
    last = (kept.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)  # none is kept only where weights are not finite
    threshold = largest.gather(1, last)
    above = weights > threshold
    # of the tokens that equal the last kept weight, so many as the nucleus still has room for
    room = last + 1 - above.sum(dim=-1, keepdim=True)
    ties = weights == threshold
    if bool((ties.sum(dim=-1, keepdim=True) > room).any()):
        ties &= ties.cumsum(dim=-1) <= room
    return weights.where(above | ties, 0.0)
