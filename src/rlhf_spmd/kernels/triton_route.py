"""The router of a mixture of experts in Triton: :mod:`routing` in one launch, and its gradient in another.

Shape legend: T tokens, E experts, K of which a token takes. A program computes a token, whose scores are a tile [groups, experts of
a group].
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_spmd.kernels.routing import TINY, RoutingRule

SCORINGS = {"softmax": 0, "sigmoid": 1, "chosen": 2}
OPTIONS: dict[str, Any] = {"num_warps": 2, "num_stages": 1}


@triton.jit
def _scores(x: tl.tensor, SCORING: tl.constexpr) -> tl.tensor:
    """Return scores from logits [groups, experts], which are -inf where there is no expert."""
    if SCORING == 0:
        e = tl.exp(x - tl.max(tl.max(x, 1), 0))
        x = e / tl.sum(tl.sum(e, 1), 0)
    elif SCORING == 1:
        x = 1.0 / (1.0 + tl.exp(-x))
    return x


@triton.jit
def _factors(scores: tl.tensor, real: tl.tensor, tiny: tl.tensor, SCORING: tl.constexpr, NORMALISE: tl.constexpr) -> tl.tensor:
    """Return weights from the scores [K] of the chosen experts, not yet times the rule's scale."""
    if SCORING == 2:
        x = tl.where(real, scores, float("-inf"))
        scores = tl.exp(x - tl.max(x, 0))
        scores = scores / tl.sum(scores, 0)
    elif NORMALISE:
        scores = scores / (tl.sum(tl.where(real, scores, 0.0), 0) + tiny)
    return scores


@triton.jit
def _route(
    logits: tl.tensor, score_bias: tl.tensor, weights: tl.tensor, expert_ids: tl.tensor, count: tl.tensor, scale: tl.tensor,
    tiny: tl.tensor, K: tl.constexpr, SCORING: tl.constexpr, NORMALISE: tl.constexpr, BIASED: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, BEST: tl.constexpr, SIZE: tl.constexpr, GIVEN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:  # fmt: skip
    """Write a token's experts [T, K], the largest scores first, and their weights. With ``GIVEN`` the experts are read."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    within = tl.arange(0, BLOCK_S)
    expert = group[:, None] * SIZE + within[None, :]
    mask = (group < GROUPS)[:, None] & (within < SIZE)[None, :]
    minus_infinity = float("-inf")
    scores = _scores(tl.load(logits + token * count + expert, mask=mask, other=minus_infinity).to(tl.float32), SCORING)
    ranked = scores
    if BIASED:
        parts = score_bias + expert * 3
        bias = tl.load(parts, mask=mask, other=0.0).to(tl.float32)
        bias += tl.load(parts + 1, mask=mask, other=0.0).to(tl.float32)
        bias += tl.load(parts + 2, mask=mask, other=0.0).to(tl.float32)
        ranked = scores + bias
    ranked = tl.where(mask, ranked, minus_infinity)
    if TOP_GROUPS < GROUPS:
        sums = tl.max(ranked, 1)
        if SIZE > 1 and BEST > 1:
            first = tl.min(tl.where(ranked == sums[:, None], within[None, :], BLOCK_S), 1)
            sums += tl.max(tl.where(within[None, :] == first[:, None], minus_infinity, ranked), 1)
        sums = tl.where(group < GROUPS, sums, minus_infinity)
        kept_groups = group < 0
        for _ in range(TOP_GROUPS):
            best = tl.min(tl.where(sums == tl.max(sums, 0), group, GROUPS - 1), 0)
            kept_groups = kept_groups | (group == best)
            sums = tl.where(group == best, minus_infinity, sums)
        ranked = tl.where(kept_groups[:, None], ranked, minus_infinity)
    choice = tl.arange(0, BLOCK_K)
    factors = tl.full([BLOCK_K], 0.0, tl.float32)
    experts = tl.full([BLOCK_K], 0, tl.int64)
    for number in range(K):
        if GIVEN:
            expert_number = tl.load(expert_ids + token * K + number).to(tl.int32)
        else:
            best = tl.max(tl.max(ranked, 1), 0)
            # the last one where logits are not numbers: what is stored must be an expert
            expert_number = tl.min(tl.min(tl.where(ranked == best, expert, count - 1), 1), 0).to(tl.int32)
        is_choice = choice == number
        factors = tl.where(is_choice, tl.sum(tl.sum(tl.where(expert == expert_number, scores, 0.0), 1), 0), factors)
        experts = tl.where(is_choice, expert_number.to(tl.int64), experts)
        ranked = tl.where(expert == expert_number, minus_infinity, ranked)
    real = choice < K
    factors = _factors(factors, real, tiny, SCORING, NORMALISE) * scale
    tl.store(weights + token * K + choice, factors.to(weights.dtype.element_ty), mask=real)
    if not GIVEN:
        tl.store(expert_ids + token * K + choice, experts, mask=real)


@triton.jit
def _route_backward(
    grad: tl.tensor, logits: tl.tensor, expert_ids: tl.tensor, grad_logits: tl.tensor, count: tl.tensor, scale: tl.tensor,
    tiny: tl.tensor, K: tl.constexpr, SCORING: tl.constexpr, NORMALISE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient of a token's logits [T, experts] from that of its experts' weights [T, K]."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_S)
    choice = tl.arange(0, BLOCK_K)
    mask = expert < count
    real = choice < K
    x = tl.load(logits + token * count + expert, mask=mask, other=float("-inf")).to(tl.float32)
    scores = tl.max(_scores(x[None, :], SCORING), 0)
    expert_number = tl.load(expert_ids + token * K + choice, mask=real, other=0)
    grad_factors = tl.load(grad + token * K + choice, mask=real, other=0.0).to(tl.float32) * scale
    is_chosen = (expert_number[:, None] == expert[None, :]) & real[:, None]  # [K, E]
    chosen_scores = tl.sum(tl.where(is_chosen, scores[None, :], 0.0), 1)
    if SCORING == 2:
        factors = tl.where(real, _factors(chosen_scores, real, tiny, SCORING, NORMALISE), 0.0)
        grad_factors = factors * (grad_factors - tl.sum(grad_factors * factors, 0))
    elif NORMALISE:
        total = tl.sum(tl.where(real, chosen_scores, 0.0), 0) + tiny
        grad_factors = (grad_factors - tl.sum(grad_factors * chosen_scores, 0) / total) / total
    grad_scores = tl.sum(tl.where(is_chosen, grad_factors[:, None], 0.0), 0)
    if SCORING == 0:
        grad_scores = scores * (grad_scores - tl.sum(grad_scores * scores, 0))
    elif SCORING == 1:
        grad_scores = grad_scores * scores * (1.0 - scores)
    tl.store(grad_logits + token * count + expert, grad_scores.to(grad_logits.dtype.element_ty), mask=mask)


def route(
    logits: Tensor, score_bias: Tensor | None, rule: RoutingRule, dtype: torch.dtype, expert_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return weights and experts as ``Ops.route`` does."""
    logits = logits.contiguous()
    tokens, count = logits.shape
    size = count // rule.groups
    weights = torch.empty(tokens, rule.experts_per_token, dtype=dtype, device=logits.device)
    if expert_ids is None:
        ids = torch.empty(tokens, rule.experts_per_token, dtype=torch.int64, device=logits.device)
    else:
        ids = expert_ids.contiguous()
    if tokens:
        bias_parts = logits if score_bias is None else score_bias.contiguous()
        sizes = {"BIASED": score_bias is not None, "GROUPS": rule.groups, "TOP_GROUPS": rule.top_groups, "SIZE": size}
        sizes |= {"BEST": rule.group_best, "GIVEN": expert_ids is not None}
        blocks = {"BLOCK_G": triton.next_power_of_2(rule.groups), "BLOCK_S": triton.next_power_of_2(size)}
        _route[(tokens,)](logits, bias_parts, weights, ids, count, *_numbers(rule), **_kind(rule), **sizes, **blocks, **OPTIONS)
    return weights, ids


def route_backward(rule: RoutingRule, grad: Tensor, logits: Tensor, expert_ids: Tensor) -> Tensor:
    """Return the gradient of the logits [T, E] from that of the weights [T, K]."""
    logits = logits.contiguous()
    out = torch.empty_like(logits)
    if len(logits):
        inputs = grad.contiguous(), logits, expert_ids, out, logits.shape[1]
        width = triton.next_power_of_2(logits.shape[1])
        _route_backward[(len(logits),)](*inputs, *_numbers(rule), **_kind(rule), BLOCK_S=width, **OPTIONS)
    return out


def _numbers(rule: RoutingRule) -> tuple[float, float]:
    return rule.scale, TINY if rule.scoring == "sigmoid" else 0.0


def _kind(rule: RoutingRule) -> dict[str, Any]:
    block = triton.next_power_of_2(rule.experts_per_token)
    return {"K": rule.experts_per_token, "SCORING": SCORINGS[rule.scoring], "NORMALISE": rule.normalise, "BLOCK_K": block}
