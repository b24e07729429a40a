"""Losses of preferences, from a model's scores or log-probs of pairs, or of responses with a label.

Every function takes float tensors with one number per pair [pairs] or per row [rows], with gradients, and returns losses of the
same shape, not aggregated. Log-probs are of whole responses, in nats.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

LossType = Literal["sigmoid", "ipo", "hinge", "robust"]


def pair_indices(group_ids: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the chosen and of the rejected row of each group, int64 [pairs] each.

    ``group_ids`` int64 [rows]. ``chosen`` [rows]: 1 for one row of each group, 0 for the other.
    """
    chosen = chosen.to(group_ids.device)
    by_rank = torch.argsort(chosen, descending=True, stable=True)
    order = by_rank[torch.argsort(group_ids[by_rank], stable=True)]
    assert len(order) % 2 == 0, "a group without its second row"
    first, second = order[0::2], order[1::2]
    are_pairs = torch.equal(group_ids[first], group_ids[second]) and bool((chosen[first] > chosen[second]).all())
    assert are_pairs, "groups that are no pair of a chosen and a rejected row"
    return first, second


def best_and_worst(scores: Tensor, group_ids: Tensor) -> Tensor:
    """Return float64 [rows]: 1 for a group's first row of the highest score, 0 for its first of the lowest, else -1.

    A group whose ``scores`` [rows] are equal has only -1; a row without a score (nan) is neither. ``group_ids`` int64 [rows]; whole
    groups.
    """
    choices = torch.full((len(scores),), -1.0, dtype=torch.float64)
    rows = torch.nonzero(~scores.isnan())[:, 0]
    scores, group_ids = scores[rows], group_ids[rows]
    ends = []
    for order in (scores.argsort(descending=True, stable=True), scores.argsort(stable=True)):
        order = order[group_ids[order].argsort(stable=True)]
        ordered_groups = group_ids[order]
        ends.append(order[ordered_groups.diff(prepend=ordered_groups[:1] - 1) != 0])  # the first of each group
    best, worst = ends
    differ = scores[best] > scores[worst]
    choices[rows[best[differ]]] = 1.0
    choices[rows[worst[differ]]] = 0.0
    return choices


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Return -log sigmoid(chosen - rejected - margin) of scores [pairs]: Bradley-Terry (arXiv 2203.02155, eq. 1), with the margin of
    Llama 2 (arXiv 2307.09288, eq. 2).
    """
    return -logsigmoid(chosen - rejected - margin)


def cost_preference(safer: Tensor, riskier: Tensor, safer_sign: Tensor, riskier_sign: Tensor) -> Tensor:
    """Return the loss of costs [pairs] (Safe-RLHF, arXiv 2310.12773, eq. 6): the riskier response costs more, and only unsafe responses
    cost more than 0. Signs: 1 for a safe response, -1 for an unsafe one.
    """
    signs = logsigmoid(-safer_sign * safer) + logsigmoid(-riskier_sign * riskier)
    return -logsigmoid(riskier - safer) - signs


def preference_loss(difference: Tensor, beta: float, loss_type: LossType = "sigmoid", smoothing: float = 0.0) -> Tensor:
    """Return DPO's losses of ``difference`` [pairs]: log-ratio to the reference of the chosen minus that of the rejected response.

    =========== ========================================================================================================
    ``sigmoid`` -log sigmoid(beta d) (arXiv 2305.18290, eq. 7); ``smoothing`` is the share of pairs the wrong way round:
                (1 - s) * that - s log sigmoid(-beta d), conservative DPO (https://ericmitchell.ai/cdpo.pdf)
    ``robust``  its unbiased form, ((1 - s) * -log sigmoid(beta d) + s log sigmoid(-beta d)) / (1 - 2 s) (arXiv 2403.00409, eq. 8)
    ``ipo``     (d - 1 / (2 beta))^2 (arXiv 2310.12036, eq. 17)
    ``hinge``   max(0, 1 - beta d) (SLiC, arXiv 2305.10425)
    =========== ========================================================================================================
    """
    if loss_type == "ipo":
        return (difference - 1 / (2 * beta)).square()
    if loss_type == "hinge":
        return torch.relu(1 - beta * difference)
    right, wrong = -logsigmoid(beta * difference), -logsigmoid(-beta * difference)
    if loss_type == "robust":
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    assert loss_type == "sigmoid", f"loss_type {loss_type!r}"
    return (1 - smoothing) * right + smoothing * wrong


def odds_ratio(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return -log sigmoid of the log odds ratio (ORPO, arXiv 2403.07691, eq. 4 and 7) of mean log-probs per token [pairs]."""

    def log_odds(mean: Tensor) -> Tensor:
        return mean - torch.log(-torch.expm1(mean.clamp(max=-1e-12)))

    return -logsigmoid(log_odds(chosen) - log_odds(rejected))


def simpo(chosen: Tensor, rejected: Tensor, beta: float, gamma: float) -> Tensor:
    """Return -log sigmoid(beta (chosen - rejected) - gamma) of mean log-probs per token [pairs] (SimPO, arXiv 2405.14734, eq. 6)."""
    return -logsigmoid(beta * (chosen - rejected) - gamma)


def kto(ratio: Tensor, desirable: Tensor, baseline: float, beta: float, weights: tuple[float, float]) -> Tensor:
    """Return KTO's loss (arXiv 2402.01306, eq. 8) of log-ratios to the reference [rows], without its constant weight.

    ``desirable`` bool [rows]. ``baseline``: the estimate of the KL divergence, at least 0, without gradient. ``weights``: those of
    desirable and of undesirable rows.
    """
    value = torch.sigmoid(beta * torch.where(desirable, ratio - baseline, baseline - ratio))
    good, bad = weights
    return torch.where(desirable, good * (1 - value), bad * (1 - value))
