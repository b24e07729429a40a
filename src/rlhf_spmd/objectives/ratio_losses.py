"""Policy losses beside PPO's (:func:`losses.policy_loss`): other bounds of the ratio of the new to the old policy.

All take ``log_prob`` (takes gradients), ``old_log_prob`` and ``advantages``, [T] packed, log-probs in nats. They return the loss [T]
and, without gradients, [T] each: ``ppo_kl``, and ``clipped`` (bool) for losses that clip, as :func:`losses.policy_loss`. Losses that
look at whole rows also take ``lengths`` int64 [rows].
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_spmd.objectives.advantages import of_tokens, row_means
from rlhf_spmd.objectives.losses import log_ratios

Loss = tuple[Tensor, dict[str, Tensor]]


def _stats(clipped: Tensor, log_ratio: Tensor) -> dict[str, Tensor]:
    return {"clipped": clipped.detach(), "ppo_kl": -log_ratio.detach()}


def gspo_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, lengths: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> Loss:
    """GSPO (arXiv 2507.18071): max(-A s, -A clip(s, 1 - low, 1 + high)), s the geometric mean of a row's ratios (eq. 5 to 7).

    Written as the paper's token variant (eq. 13, 14): of each token the value is the row's s, and the gradient that of its own
    log-prob. With one advantage for a row and the mean over its tokens this is the sequence's loss, value and gradient; tokens may
    have advantages of their own.
    """
    log_ratio = log_ratios(log_prob, old_log_prob, advantages)
    sequence = of_tokens(row_means(log_ratio.detach(), lengths), lengths)
    ratio = (sequence + log_prob - log_prob.detach()).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return torch.maximum(unclipped, clipped), _stats(clipped > unclipped, log_ratio)


def geo_mean_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, lengths: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> Loss:
    """GMPO (arXiv 2507.20673, eq. 4): -A times the geometric mean of a row's ratios, each clipped by itself before the mean.

    The clip is of log-ratios, to [-low, high], so the ratio's bounds are e^-low and e^high; as PPO's it bounds only what makes the
    objective larger. All tokens of a row have the row's loss; A is the mean of the row's ``advantages``, which should be alike.
    """
    log_ratio = log_ratios(log_prob, old_log_prob, advantages)
    bounded = log_ratio.clamp(-clip_ratio_low, clip_ratio_high)
    clipped_log_ratio = torch.where(advantages >= 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    loss = -row_means(advantages, lengths) * row_means(clipped_log_ratio, lengths).exp()
    return of_tokens(loss, lengths), _stats(clipped_log_ratio != log_ratio, log_ratio)


def cispo_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_ratio_low: float, clip_ratio_high: float
) -> Loss:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5): -A log_prob weighted by the clipped ratio, which takes no gradient.

    So a token whose ratio is out of bounds still teaches. The paper has no lower bound: ``clip_ratio_low`` = 1.
    """
    log_ratio = log_ratios(log_prob, old_log_prob, advantages)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    return -advantages * weight * log_prob, _stats(weight != ratio, log_ratio)


def sapo_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, tau_pos: float, tau_neg: float) -> Loss:
    """SAPO (arXiv 2511.20347, eq. 5 and 6): -A (4 / tau) sigmoid(tau (ratio - 1)), a gate in place of the clip.

    tau is ``tau_pos`` where A > 0, else ``tau_neg``. The gradient at ratio 1 is that of the unclipped loss. Nothing is clipped.
    """
    log_ratio = log_ratios(log_prob, old_log_prob, advantages)
    tau = torch.full_like(log_ratio.detach(), tau_neg).masked_fill(advantages > 0, tau_pos)
    loss = -advantages * (4.0 / tau) * torch.sigmoid(tau * (log_ratio.exp() - 1.0))
    return loss, {"ppo_kl": -log_ratio.detach()}
