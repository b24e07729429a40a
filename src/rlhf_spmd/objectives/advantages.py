"""From scores to advantages: token-level rewards, generalized advantage estimation, whitening over the global batch.

All token tensors are packed, [T] with ``lengths`` int64 [rows] on the CPU; a row's arithmetic does not see the other rows, so
advantages and returns are bit-equal however rows are split over ranks or micro-batches. Nothing here takes gradients.

Sources: GAE, Schulman et al. 2015 (arXiv 1506.02438, eq. 16); score on the last token minus KL on every token: Ziegler et al.
2019 (arXiv 1909.08593); whitening with the unbiased variance and 1e-8 under the root: TRL and verl.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHITEN_EPSILON = 1e-8
GROUP_EPSILON = 1e-6  # as in verl: far below the spread of scores that differ


def check_packed(values: Tensor, lengths: Tensor) -> None:
    """Assert that ``values`` [T] fits ``lengths`` [rows]."""
    assert values.dim() == 1, f"packed values must be one-dimensional, got shape {tuple(values.shape)}"
    total = int(lengths.sum())
    assert total == len(values), f"lengths sum to {total}, but there are {len(values)} packed values"


@torch.no_grad()
def token_level_rewards(scores: Tensor, kl: Tensor | None, coef: float, lengths: Tensor) -> Tensor:
    """Return the reward of each response token: minus ``coef`` times its KL, plus the row's score on the row's last token.

    ``scores`` [rows], any device; ``kl`` [T] nats per token (:func:`kl.kl_penalty`) or None for none; returns [T] on the device
    and in the dtype of ``kl`` (of ``scores`` without one), at least float32. Every row with a score must have a token to carry it;
    a row without one (nan) gets 0.
    """
    assert len(scores) == len(lengths), f"{len(scores)} scores for {len(lengths)} rows"
    has_tokens = lengths > 0
    assert bool(scores[~has_tokens].isnan().all()), "a row without response tokens has nowhere to carry its score"
    like = scores if kl is None else kl
    dtype = torch.promote_types(like.dtype, torch.float32)
    if kl is None:
        rewards = torch.zeros(int(lengths.sum()), dtype=dtype, device=like.device)
    else:
        check_packed(kl, lengths)
        rewards = kl.to(dtype) * -coef
    last = (lengths[has_tokens].cumsum(0) - 1).to(rewards.device)
    rewards[last] += scores[has_tokens].nan_to_num().to(device=rewards.device, dtype=dtype)
    return rewards


def _time_major(lengths: Tensor) -> tuple[Tensor, list[int]]:
    """Return an order of tokens by distance from their row's end, longest rows first within one distance.

    The rows with a token at distance j are then a prefix of those at distance j - 1, so one backward step over all rows is one
    operation on two slices, without padding. That is int64 [T], the place of each packed token, and the numbers of rows with a
    token at distance 0, 1, ...
    """
    longest = int(lengths.max()) if len(lengths) else 0
    rank = torch.empty_like(lengths)
    rank[torch.argsort(lengths, descending=True, stable=True)] = torch.arange(len(lengths))
    counts = len(lengths) - torch.cumsum(torch.bincount(lengths, minlength=longest + 1), 0)[:longest]
    starts = torch.cumsum(counts, 0) - counts
    row_ends = torch.repeat_interleave(lengths.cumsum(0), lengths)
    distance = row_ends - 1 - torch.arange(len(row_ends))
    return starts[distance] + torch.repeat_interleave(rank, lengths), counts.tolist()


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Return generalized advantage estimates: delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lam A_{t+1}.

    ``rewards``, ``values`` [T]: those of each response token and of the state before it; after a row's last token both are 0 (the
    episode ends there, also where the response was cut at its length limit, as in TRL and verl). Returns
    ``(advantages, returns)``, [T] each, not whitened; returns = advantages + values. At least float32.
    """
    check_packed(rewards, lengths)
    check_packed(values, lengths)
    dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
    rewards, values = rewards.to(dtype), values.to(dtype)
    place, counts = _time_major(lengths)
    place = place.to(values.device)
    last = (lengths[lengths > 0].cumsum(0) - 1).to(values.device)
    next_values = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    next_values[last] = 0.0
    running = torch.empty_like(values)
    running[place] = rewards + gamma * next_values - values
    start = 0
    for distance, count in enumerate(counts):
        if distance:
            before = start - counts[distance - 1]
            running[start : start + count].add_(running[before : before + count], alpha=gamma * lam)
        start += count
    advantages = running[place]
    return advantages, advantages + values


def _centered(scores: Tensor, group_ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return float64 [rows], scores minus their group's mean by ``weights`` [rows]; 0 to the bit where all of a group are equal.

    Also the index of each row's group, and each group's number of rows with a score. Rows without one (nan) do not count and get 0.
    """
    groups, index = torch.unique(group_ids, return_inverse=True)
    scored = ~scores.isnan()
    counts = torch.bincount(index[scored], minlength=len(groups))
    rows = torch.arange(len(scores))[scored]
    first = torch.zeros_like(counts).scatter_reduce_(0, index[scored], rows, "amin", include_self=False)
    wide = scores.double()
    shifted = wide - wide[first][index]  # the mean of equal numbers need not be that number
    total, weight = (
        torch.zeros(len(counts), dtype=torch.float64).index_add_(0, index[scored], x[scored])
        for x in (shifted * weights, weights)
    )
    return (shifted - (total / weight.clamp(min=1))[index]).masked_fill(~scored, 0.0), index, counts


def _deviations(centered: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    """Return the unbiased standard deviation of each group; 0 for a group with one row or none."""
    squares = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, index, centered.square())
    return (squares / (counts - 1).clamp(min=1)).sqrt()


@torch.no_grad()
def group_advantages(scores: Tensor, group_ids: Tensor, by_std: bool) -> Tensor:
    """Return a row's score minus its group's mean; with ``by_std`` divided by the group's standard deviation (unbiased) + 1e-6.

    GRPO (arXiv 2402.03300, section 4.1.2); without ``by_std`` Dr. GRPO (arXiv 2503.20783). ``scores`` [rows], ``group_ids`` int64
    [rows]; whole groups. Returns [rows] in the dtype of ``scores``, at least float32: 0 to the bit where all scores of a group
    are equal, and for a row without a score (nan), which does not count in its group.
    """
    centered, index, counts = _centered(scores, group_ids, torch.ones(len(scores), dtype=torch.float64))
    if by_std:
        centered = centered / (_deviations(centered, index, counts)[index] + GROUP_EPSILON)
    return centered.to(torch.promote_types(scores.dtype, torch.float32))


@torch.no_grad()
def leave_one_out(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Return a row's score minus the mean of the *other* rows of its group: RLOO (arXiv 2402.14740, section 3.3).

    Shapes, and rows without a score, as in :func:`group_advantages`; the only row of a group with a score gets 0. Raises
    ValueError for a group of one row, which has no others.
    """
    centered, index, counts = _centered(scores, group_ids, torch.ones(len(scores), dtype=torch.float64))
    if bool((torch.bincount(index) < 2).any()):
        raise ValueError("a group of one row has no others to be compared with: leave-one-out needs at least 2 rows per group")
    return (centered * (counts / (counts - 1).clamp(min=1))[index]).to(torch.promote_types(scores.dtype, torch.float32))


@torch.no_grad()
def length_weighted_advantages(scores: Tensor, group_ids: Tensor, lengths: Tensor) -> Tensor:
    """Return a row's score minus its group's mean weighted by length: OPO (arXiv 2505.23585, section 3.2).

    This baseline has the least variance where a row's gradient grows with its tokens. Shapes as in :func:`group_advantages`;
    ``lengths`` int64 [rows].
    """
    centered, _, _ = _centered(scores, group_ids, lengths.double())
    return centered.to(torch.promote_types(scores.dtype, torch.float32))


@torch.no_grad()
def group_statistics(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Return float64 [5]: the groups with a score; those whose scores are all equal, all equal and at least 1, all equal and at most 0;
    and the sum of the groups' standard deviations. Sum it over ranks.

    ``scores`` (nan: none), ``group_ids`` [rows]; whole groups.
    """
    centered, index, counts = _centered(scores, group_ids, torch.ones(len(scores), dtype=torch.float64))
    spread = _deviations(centered, index, counts)
    equal = (counts > 0).scatter_reduce_(0, index, centered == 0, "amin")
    scored = ~scores.isnan()
    score = torch.zeros(len(counts), dtype=torch.float64).scatter_(0, index[scored], scores[scored].double())
    shares = torch.stack([counts > 0, equal, equal & (score >= 1), equal & (score <= 0)]).sum(1)
    return torch.cat([shares.double(), spread.sum()[None]])


def row_sums(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of each row's tokens, [rows] of ``x`` [T]. Passes gradients.

    The host, which has ``lengths``, does not wait for a GPU: a copy that it waits for would delay the start of the backward pass until
    the forward pass has ended.
    """
    if not len(x):
        return x.new_zeros(len(lengths))
    # in the order of the tokens, on GPUs too, where index_add adds in any
    return torch.segment_reduce(x, "sum", lengths=lengths.to(x.device, non_blocking=True), unsafe=True)


def row_maxima(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the largest of each row's tokens, [rows] of ``x`` [T]; 0 for a row without tokens."""
    if not len(x):
        return x.new_zeros(len(lengths))
    largest = torch.segment_reduce(x, "max", lengths=lengths.to(x.device, non_blocking=True), unsafe=True)
    return largest.masked_fill((lengths == 0).to(x.device, non_blocking=True), 0.0)


def row_means(x: Tensor, lengths: Tensor) -> Tensor:
    """Return the mean of each row's tokens, [rows] of ``x`` [T]; 0 for a row without tokens. Passes gradients."""
    return row_sums(x, lengths) / lengths.clamp(min=1).to(x.device, non_blocking=True)


def of_tokens(per_row: Tensor, lengths: Tensor) -> Tensor:
    """Return each row's number [rows] for each of its tokens [T]. Passes gradients."""
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    # the gradients of an index GPUs add in order, unlike those of repeat_interleave
    return per_row[rows.to(per_row.device, non_blocking=True)]


@torch.no_grad()
def moments(x: Tensor) -> Tensor:
    """Return float64 [3]: count, sum and sum of squares of ``x`` [T]. Sum it over ranks."""
    wide = x.double()
    return torch.stack([wide.new_tensor(float(len(x))), wide.sum(), wide.square().sum()])


@torch.no_grad()
def whiten(x: Tensor, moments: Tensor) -> Tensor:
    """Return (x - mean) / sqrt(variance + 1e-8), in the shape and dtype of ``x`` [T].

    ``moments``: those of the global batch, as :func:`moments` returns them, summed over ranks. The variance is the unbiased one;
    that of a single value is taken as 0.
    """
    count, total, squares = moments.to(device=x.device, dtype=torch.float64).unbind()
    mean = total / count.clamp(min=1.0)
    # The difference of two near-equal sums can come out a little below zero when all values are equal.
    variance = ((squares - count * mean.square()) / (count - 1.0).clamp(min=1.0)).clamp(min=0.0)
    return ((x.double() - mean) * torch.rsqrt(variance + WHITEN_EPSILON)).to(x.dtype)
