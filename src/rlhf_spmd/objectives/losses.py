"""PPO's policy and value losses, and how per-token losses become one number.

Losses come per token, [T]; :func:`aggregate` sums a micro-batch's tokens and divides by the *global* counts of the mini-batch,
so the sum over micro-batches and ranks is the mini-batch's loss whatever the split. Its gradients must therefore be summed over
data-parallel ranks, not averaged.

Sources: PPO, Schulman et al. 2017 (arXiv 1707.06347, eq. 7); dual clip, Ye et al. 2019 (arXiv 1912.09729, eq. 5); separate
lower and upper clip ratios, DAPO (arXiv 2503.14476); clipped value loss: TRL and verl; names of ``loss_agg_mode``: verl.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rlhf_spmd.objectives.advantages import check_packed, moments

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
LOSS_AGG_MODES: tuple[LossAggMode, ...] = get_args(LossAggMode)

# exp() of a larger difference of log-probs carries no information and overflows float32 from 88 on.
LOG_RATIO_LIMIT = 20.0


def log_ratios(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> Tensor:
    """Return log(new / old) [T], clamped where exp() carries no information. All three have that shape."""
    assert log_prob.shape == old_log_prob.shape == advantages.shape, (
        f"shapes differ: {tuple(log_prob.shape)}, old {tuple(old_log_prob.shape)}, advantages {tuple(advantages.shape)}"
    )
    return (log_prob - old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate loss per token, with the dual clip.

    ratio = exp(log_prob - old_log_prob), its exponent clamped to [-20, 20]. The loss is
    max(-A ratio, -A clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)), and where A < 0 at most -A clip_ratio_c.

    ``log_prob`` (takes gradients), ``old_log_prob``, ``advantages``: [T]; log-probs in nats. Returns the loss [T] and, without
    gradients, [T] each: ``clipped`` (bool: the clipped term is the larger one), ``dual_clipped`` (bool: the dual bound holds),
    ``ppo_kl`` (old_log_prob - log_prob within the same clamp: its mean estimates KL(old || new)).
    """
    log_ratio = log_ratios(log_prob, old_log_prob, advantages)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    single = torch.maximum(unclipped, clipped)
    ceiling = -advantages * clip_ratio_c
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(single, ceiling), single)
    stats = {
        "clipped": (clipped > unclipped).detach(),
        "dual_clipped": ((single > ceiling) & negative).detach(),
        "ppo_kl": -log_ratio.detach(),
    }
    return loss, stats


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, cliprange_value: float) -> tuple[Tensor, Tensor]:
    """Return 0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) per token.

    ``values`` (takes gradients), ``old_values``, ``returns``: [T]. Returns the loss [T] and a bool mask [T] of the tokens whose
    clipped term is the larger one. ``cliprange_value``: at least 0.
    """
    assert values.shape == old_values.shape == returns.shape, (
        f"shapes differ: {tuple(values.shape)}, old {tuple(old_values.shape)}, returns {tuple(returns.shape)}"
    )
    # Clamped between bounds, not old + clamp(difference): inside the bounds the value must stay the same number to the bit, or
    # rounding alone would count tokens as clipped.
    clipped_values = torch.clamp(values, old_values - cliprange_value, old_values + cliprange_value)
    unclipped = (values - returns).square()
    clipped = (clipped_values - returns).square()
    return 0.5 * torch.maximum(unclipped, clipped), (clipped > unclipped).detach()


def aggregate(
    loss: Tensor,
    lengths: Tensor,
    mode: LossAggMode,
    num_tokens: int | float,
    num_rows: int | float,
    max_length: int | float | None = None,
) -> Tensor:
    """Return this micro-batch's part of the mini-batch's loss: a scalar in the dtype of ``loss`` [T], with gradients.

    =========================== ================================================================================
    ``token-mean``              sum over tokens / ``num_tokens``
    ``seq-mean-token-sum``      sum over tokens / ``num_rows``
    ``seq-mean-token-mean``     sum over rows of the row's mean / ``num_rows``
    ``seq-mean-token-sum-norm`` sum over tokens / (``num_rows`` * ``max_length``), Dr. GRPO's (arXiv 2503.20783)
    =========================== ================================================================================

    ``num_tokens`` and ``num_rows`` are those of the whole mini-batch over all ranks. Rows without tokens, such as those whose
    tokens are all masked, add nothing to the sums and count in ``num_rows``, as in TRL, and in verl, which divides by its
    ``global_batch_size``.
    ``max_length`` is a constant of the run (tokens), needed by the last mode only.

    Raises ValueError for the last mode without ``max_length``.
    """
    check_packed(loss, lengths)
    if mode == "token-mean":
        assert num_tokens > 0, "the mini-batch has no tokens (global count 0)"
        return loss.sum() / num_tokens
    assert num_rows > 0, "the mini-batch has no rows (global count 0)"
    if mode == "seq-mean-token-mean":
        weights = torch.repeat_interleave(1.0 / lengths.clamp(min=1).double(), lengths)  # of a token 1 / its row's tokens
        return (loss * weights.to(device=loss.device, dtype=loss.dtype, non_blocking=True)).sum() / num_rows
    if mode == "seq-mean-token-sum":
        return loss.sum() / num_rows
    assert mode == "seq-mean-token-sum-norm", f"loss_agg_mode {mode!r}"
    if max_length is None or max_length <= 0:
        raise ValueError(f"loss_agg_mode {mode!r} divides by the largest response length; got {max_length}, give one > 0")
    return loss.sum() / (num_rows * max_length)


@torch.no_grad()
def explained_variance_sums(values: Tensor, returns: Tensor) -> Tensor:
    """Return float64 [5] of ``values`` and ``returns`` [T]: :func:`moments` of the returns, and of the errors without the count.

    Sum it over ranks.
    """
    return torch.cat([moments(returns), moments(returns.double() - values.double())[1:]])


def explained_variance(sums: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns), from global sums: 1 is perfect, 0 no better than a constant, below 0 worse.

    0.0 if the returns do not vary, so that the ratio does not exist.
    """
    count, target_sum, target_squares, error_sum, error_squares = sums.double().tolist()
    if count == 0:
        return 0.0
    target_spread = target_squares - target_sum**2 / count
    if target_spread <= 1e-12 * target_squares:
        return 0.0
    return 1.0 - (error_squares - error_sum**2 / count) / target_spread
