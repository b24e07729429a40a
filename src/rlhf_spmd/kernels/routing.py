"""Which experts of a mixture a token takes, and with which weights.

Shape legend: T tokens, E experts, K of which a token takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RoutingRule:
    """A token takes the ``experts_per_token`` experts of the highest scores, which are their weights, times ``scale``.

    ``scoring``: how scores come from logits: "softmax" or "sigmoid" over all experts, or "chosen", a softmax over those that are taken.
    ``normalise``: weights are divided by their sum. ``groups``: experts lie in as many equal groups, of which a token takes only from
    those ``top_groups`` whose ``group_best`` highest scores have the highest sum: two (DeepSeek-V3, arXiv 2412.19437) or one
    (DeepSeek-V2, arXiv 2405.04434).
    """

    experts_per_token: int
    scoring: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: Literal[1, 2] = 2


def sigmoid(x: Tensor) -> Tensor:
    """Return the sigmoid of x [T, n]. CPUs round a tensor's last elements otherwise, so each row gets one more element behind it."""
    return torch.sigmoid(F.pad(x, (0, 1))[:, :-1])


TINY = 1e-20  # added to the sums of sigmoids, as transformers does


def choose(logits: Tensor, score_bias: Tensor | None, rule: RoutingRule) -> Tensor:
    """Return the numbers of the experts that tokens take, int64 [T, K], the highest scores first. ``logits``: [T, E], fp32 or fp64.
    ``score_bias``: [E, 3], see :func:`split_to_bf16_terms`; it is added to the scores that choose experts, not to their weights."""
    with torch.no_grad():
        ranked = logits
        if rule.groups > 1 or score_bias is not None:
            ranked = sigmoid(logits) if rule.scoring == "sigmoid" else torch.softmax(logits, -1)
        if score_bias is not None:
            ranked = ranked + sum_terms(score_bias)
        if rule.top_groups < rule.groups:
            grouped = ranked.view(len(ranked), rule.groups, -1)
            sums = grouped.topk(min(rule.group_best, grouped.shape[2]), -1).values.sum(-1)
            left_out = torch.ones_like(sums, dtype=torch.bool).scatter_(1, sums.topk(rule.top_groups, -1).indices, False)
            ranked = grouped.masked_fill(left_out[:, :, None], -math.inf).flatten(1)
        return ranked.topk(rule.experts_per_token, -1).indices


def weigh(logits: Tensor, expert_ids: Tensor, rule: RoutingRule) -> Tensor:
    """Return the weights of the experts ``expert_ids`` [T, K], in the dtype of ``logits`` [T, E]."""
    if rule.scoring == "chosen":
        return torch.softmax(logits.gather(1, expert_ids), -1) * rule.scale
    scores = torch.softmax(logits, -1) if rule.scoring == "softmax" else sigmoid(logits)
    weights = scores.gather(1, expert_ids)
    if rule.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + (TINY if rule.scoring == "sigmoid" else 0.0))
    return weights if rule.scale == 1.0 else weights * rule.scale


def split_to_bf16_terms(values: Tensor) -> Tensor:
    """Return for each of ``values`` [E] three terms whose sum it is, [E, 3] in fp32; each has the precision of bf16.

    A model of any dtype stores such terms exactly, and casts do not change them. Values below 1e-30 lose digits."""
    rest = values.float()
    terms = []
    for _ in range(3):
        terms.append(rest.bfloat16().float())
        rest = rest - terms[-1]
    return torch.stack(terms, -1)


def sum_terms(terms: Tensor) -> Tensor:
    """Return the fp32 values [E] that :func:`split_to_bf16_terms` split into ``terms`` [E, 3]."""
    return terms.float().sum(-1)
