"""Drawing tokens: a draw depends on (seed, step, row id, position) and on the row's own logits, on nothing else.

Each draw takes one uniform number from a counter-based generator (splitmix64's finaliser over the four counters) and inverts
the cumulative distribution in vocabulary order, in fp64. Batch, order, rank and layout do not enter.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_spmd import kernels
from rlhf_spmd.generation.config import SamplingConfig

CHUNK_ELEMENTS = 1 << 25  # logits inverted at once: bounds the fp64 work space to 256 MB
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_keys(seed: int, step: int | NDArray[np.int64], row_ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """What :func:`uniform` makes of all but the positions."""
    state = np.full(len(row_ids), seed & ((1 << 64) - 1), dtype=np.uint64)
    for counter in (np.asarray(step, dtype=np.int64), row_ids):
        state = _stir(state, counter)
    return state


def _stir(state: NDArray[np.uint64], counter: NDArray[np.int64]) -> NDArray[np.uint64]:
    return _mix(_mix(state + _GOLDEN) ^ (counter.astype(np.uint64) + _GOLDEN))


def uniform(
    seed: int, step: int | NDArray[np.int64], row_ids: NDArray[np.int64], positions: NDArray[np.int64]
) -> NDArray[np.float64]:
    """fp64 [rows] in [0, 1), of 53 random bits each. ``step``: one, or one per row. ``positions``: of the drawn token in its
    response."""
    state = _stir(row_keys(seed, step, row_ids), positions)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _signed(x: np.uint64 | int) -> int:
    """The same 64 bits as torch's int64 has them."""
    return int(x) - ((int(x) >> 63) << 64)


def _mix_on_device(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform_on_device(keys: Tensor, positions: Tensor) -> Tensor:
    """:func:`uniform`'s numbers, bit for bit, from :func:`row_keys` as int64 and positions, both [rows]."""
    state = _mix_on_device(_mix_on_device(keys + _signed(_GOLDEN)) ^ (positions + _signed(_GOLDEN)))
    return _shift_right(state, 11).double() * 2.0**-53


def sample(logits: Tensor, sampling: SamplingConfig, draws: Tensor) -> Tensor:
    """Token ids int64 [rows] from ``logits`` [rows, vocabulary] and ``draws`` fp64 [rows] (unused when greedy). They lie in the
    vocabulary, whatever the logits are; from logits that are not finite they mean nothing."""
    if sampling.greedy:
        found = kernels.ready(logits) if logits.dtype == torch.float32 else None
        return logits.argmax(dim=-1) if found is None else found.argmax(logits)
    unfiltered = sampling.min_p == 0.0 and sampling.top_p == 1.0 and not 0 < sampling.top_k < logits.shape[1]
    if unfiltered and logits.dtype == torch.float32 and (found := kernels.ready(logits)) is not None:
        return found.draw(logits, sampling.temperature, draws)
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
