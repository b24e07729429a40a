"""Draws tokens. A draw depends only on (seed, step, row id, position) and on the row's own logits.

A model's vocabulary may be padded: its head has more rows than the tokenizer has ids. No such id is drawn or listed
among the likeliest (:func:`num_drawable_ids`). Log-probs count them all the same, as those of training do, in vLLM and verl
too: they are one distribution over all rows of the head, which generation and training compute alike, bit for bit, and
padding has next to no part in it.

Each draw takes one uniform number from a counter-based generator (splitmix64's finaliser over the four counters) and inverts
the cumulative distribution in vocabulary order, in fp64. Batch, order, rank and layout do not matter.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_spmd.data.tokenizer import Decoding
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.kernels import Ops, capabilities, choose_ops, on_device
from rlhf_spmd.kernels.sampling_tensors import Drawn, RowSampler, SamplingTensors
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import gather_logits, log_probs_of

# settings, and the index of the rows that follow them; None: all rows
SamplingGroups = list[tuple[SamplingConfig, Tensor | None]]
CHUNK_ELEMENTS = 1 << 25  # logits inverted at once: limits the fp64 work space to 256 MB


def num_drawable_ids(vocab_size: int, eos_ids: Collection[int], decoding: Decoding | None) -> int:
    """Return the number below which ids may be drawn: those of the tokenizer (without one, all), and the end tokens."""
    if decoding is None or decoding.tokenizer is None:
        return vocab_size
    return min(vocab_size, max(_largest_id(decoding.tokenizer), *eos_ids, 0) + 1)


@lru_cache(maxsize=8)
def _largest_id(tokenizer: Any) -> int:
    return max(tokenizer.get_vocab().values())


def _signed(x: int) -> int:
    """Return the same 64 bits as a signed number, as torch's int64 has them."""
    return (x & ((1 << 64) - 1)) - ((x >> 63 & 1) << 64)


_GOLDEN, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Return splitmix64's finaliser of ``x`` (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def _stir(state: Tensor, counter: Tensor) -> Tensor:
    return _mix(_mix(state + _GOLDEN) ^ (counter + _GOLDEN))


def row_keys(seeds: int | Sequence[int], steps: Tensor, row_ids: Tensor) -> Tensor:
    """Return the keys of the rows' draws for :func:`uniform`, int64 [rows]. ``seeds``: one per row, or one for all."""
    signed = _signed(seeds) if isinstance(seeds, int) else list(map(_signed, seeds))
    return _stir(_stir(torch.tensor(signed, device=row_ids.device).expand_as(row_ids), steps), row_ids)


def uniform(keys: Tensor, positions: Tensor) -> Tensor:
    """Return random numbers in [0, 1), fp64 [rows], of 53 bits each; the same on every device.

    ``keys``: from :func:`row_keys`. ``positions``: the positions of the drawn tokens in their responses.
    """
    return _shift_right(_stir(keys, positions), 11).double() * 2.0**-53


def sample(logits: Tensor, sampling: SamplingConfig, draws: Tensor) -> Tensor:
    """Return token ids int64 [rows] from ``logits`` [rows, vocabulary] and ``draws`` fp64 [rows], which greedy sampling does not use.

    Ids are always inside the vocabulary. From logits that are not finite they mean nothing.
    """
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
    # right=True: the first token whose cumulative weight exceeds the draw, so never a token of weight 0.
    # A draw is at most 1 - 2**-53, so draw * total < total in fp64 too.
    tokens = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    return tokens.clamp_(max=weights.shape[1] - 1)  # beyond it only where weights are not finite


def filter_weights(weights: Tensor, sampling: SamplingConfig) -> Tensor:
    """Set to 0 what min_p, top_k and top_p exclude. ``weights`` [rows, vocabulary]: exp(score - largest score), at most 1."""
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
    """Keep the likeliest tokens until their weight reaches ``top_p`` of the sum. Of equal weights, the lower ids are kept.

    Sorting a vocabulary is expensive and the nucleus mostly small, so the largest 256 weights are tried first, then all.
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
    in_nucleus = before < goal
    last = (in_nucleus.sum(dim=-1, keepdim=True) - 1).clamp_(min=0)  # the nucleus is empty only where weights are not finite
    threshold = largest.gather(1, last)
    above = weights > threshold
    # keep as many tokens with the smallest weight of the nucleus as it has room for
    room = last + 1 - above.sum(dim=-1, keepdim=True)
    ties = weights == threshold
    if bool((ties.sum(dim=-1, keepdim=True) > room).any()):
        ties &= ties.cumsum(dim=-1) <= room
    return weights.where(above | ties, 0.0)


def build_sampling_tensors(
    samplings: Sequence[SamplingConfig], kinds: NDArray[np.int64], device: torch.device
) -> SamplingTensors:
    """Return the settings of rows as tensors; row i follows ``samplings[kinds[i]]``."""
    present = [samplings[kind] for kind in np.unique(kinds)]
    floats = [(each.temperature, each.top_p, each.min_p) for each in samplings]
    columns = on_device(np.ascontiguousarray(np.array(floats, dtype=np.float32).reshape(-1, 3)[kinds].T), device)
    temperature, top_p, min_p = columns.unbind()
    top_k = on_device(np.array([each.top_k for each in samplings], dtype=np.int32)[kinds], device)
    return SamplingTensors(
        temperature,
        top_p,
        min_p,
        top_k,
        filters=any(each.top_p < 1.0 or each.top_k > 0 or each.min_p > 0.0 for each in present),
        greedy=all(each.greedy for each in present),
        tempered=any(each.log_prob_temperature != 1.0 for each in present),
    )


def group_by_sampling(samplings: Sequence[SamplingConfig], kinds: NDArray[np.int64], device: torch.device) -> SamplingGroups:
    """Group the rows by their settings; row i follows ``samplings[kinds[i]]``."""
    if (kinds == kinds[0]).all():
        return [(samplings[kinds[0]], None)]
    return [(samplings[kind], on_device(np.flatnonzero(kinds == kind), device)) for kind in np.unique(kinds)]


def draw_rows(
    ops: Ops,
    scores: Tensor,
    logits: Tensor,
    settings: SamplingTensors,
    keys: Tensor,
    positions: Tensor,
    decoder: Decoder,
    groups: SamplingGroups,
    num_drawable: int | None = None,
) -> Drawn:
    """Draw a token for each row. Returns token ids int64 [B] and their log-probs [B], at the row's temperature and at 1.

    The temperature of greedy rows counts as 1.

    - logits: this rank's slice [B, V_local] (``local_logits``), from which log-probs are computed
    - scores: what tokens are drawn from: ``logits`` itself if no rules changed them, else the whole vocabulary [B, V]
    - keys, positions: int64 [B], the arguments of :func:`uniform`
    - groups: the rows by their settings; read only by ops without :class:`RowSampler`, which draw group by group
    - num_drawable: only token ids below this number are drawn (:func:`num_drawable_ids`); None: all of the vocabulary

    A row whose logits or scores are not finite gets some token of the vocabulary, and a log-prob at 1 that is not finite. The two
    log-probs are one tensor if ``settings`` are not tempered. With :class:`RowSampler` the host does not wait.
    Collective over tp: every rank of it must call, in program order; tokens and log-probs are the same on all.
    """
    num_drawable = decoder.spec.vocab_size if num_drawable is None else num_drawable
    if not isinstance(ops, RowSampler):
        return _draw_groups(scores, logits, settings, keys, positions, decoder, groups, num_drawable)
    tp = decoder.tp
    first, last = decoder.vocab_range
    if tp.size == 1:
        return ops.draw_rows(scores[:, :num_drawable], logits, settings, keys, positions)
    if settings.filters and not settings.greedy:
        all_logits = gather_logits(decoder, logits)
        all_scores = (all_logits if scores is logits else scores)[:, :num_drawable]
        drawn = ops.draw_rows(all_scores, all_logits, settings, keys, positions)
        for column in drawn[: 2 + settings.tempered]:  # devices of different kinds may round differently
            tp.broadcast(column, 0, "generation:tokens")
        return drawn
    local = (logits if scores is logits else scores[:, first:last])[:, : max(num_drawable - first, 0)]
    sums = ops.tile_sums(local, logits, settings, -(-decoder.spec.vocab_size // tp.size))
    tiles = torch.stack(tp.all_gather(sums, "generation:tile_sums"))
    local_results = ops.draw_from_tiles(tiles, tp.rank, first, local, logits, settings, keys, positions)
    results = tp.all_reduce(local_results, "generation:tokens")  # only the rank that owns a token has it; the others have zeros
    log_probs = results[1:].to(logits.dtype)
    return results[0].to(torch.int64), log_probs[0], log_probs[1]


def _draw_groups(
    scores: Tensor,
    logits: Tensor,
    settings: SamplingTensors,
    keys: Tensor,
    positions: Tensor,
    decoder: Decoder,
    groups: SamplingGroups,
    num_drawable: int,
) -> Drawn:
    """Draw as :func:`draw_rows`, group by group. Rows do not influence each other, so a group is drawn as if it were alone."""
    has_rules = scores is not logits
    if not has_rules:
        scores = gather_logits(decoder, logits)
    draws = positions if settings.greedy else uniform(keys, positions)
    parts: list[Drawn] = []
    for sampling, row_index in groups:
        index = slice(None) if row_index is None else row_index
        group_logits = logits[index]
        group_scores = group_logits if scores is logits else scores[index]
        drawn = sample(group_scores[:, :num_drawable], sampling, draws[index])
        # cumulative sums may differ between ranks in the last bit, and then their schedules would
        if not capabilities(drawn.device).batch_invariant:
            decoder.tp.broadcast(drawn, 0, "generation:tokens")
        log_probs = log_probs_t1 = log_probs_of(decoder, group_logits, drawn)
        if sampling.log_prob_temperature != 1.0:
            log_probs = log_probs_of(decoder, group_logits, drawn, sampling.log_prob_temperature)
        parts.append((drawn, log_probs, log_probs_t1))
    if len(groups) == 1 and groups[0][1] is None:
        tokens, log_probs, log_probs_t1 = parts[0]
    else:
        tokens, log_probs, log_probs_t1 = (_in_row_order(column, groups) for column in zip(*parts, strict=True))
    if has_rules:  # rules may leave no token to draw
        log_probs_t1 = log_probs_t1.masked_fill(~scores[:, :num_drawable].amax(1).isfinite(), torch.nan)
    return tokens, log_probs, log_probs_t1


def _in_row_order(parts: Sequence[Tensor], groups: SamplingGroups) -> Tensor:
    """Return one tensor of the parts, in the order of the rows."""
    column = parts[0].new_empty(sum(map(len, parts)))
    for part, (_, row_index) in zip(parts, groups, strict=True):
        assert row_index is not None, "a group of all rows has no others beside it"
        column.index_copy_(0, row_index, part)
    return column
