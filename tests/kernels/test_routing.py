"""How a token chooses its experts: torch against a loop over tokens, Triton against torch; the parts of a bias of the scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlhf_spmd.kernels import Ops, RoutingRule
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.kernels.routing import split_to_bf16_terms, sum_terms
from triton_device import DEVICE

COUNT = 24
RULES = [
    RoutingRule(3),
    RoutingRule(3, normalise=True, scale=1.5),
    RoutingRule(4, "sigmoid", normalise=True, scale=2.5),
    RoutingRule(1, "sigmoid"),
    RoutingRule(4, "sigmoid", normalise=True, groups=6, top_groups=2),
    RoutingRule(2, "softmax", groups=24, top_groups=3),
    RoutingRule(3, "softmax", scale=16.0, groups=6, top_groups=2, group_best=1),
    RoutingRule(4, "chosen"),
]


def draw(score_biased: bool) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, COUNT, generator=generator, dtype=torch.float64)
    score_bias = torch.randn(COUNT, generator=generator) * 0.3 if score_biased else None
    return logits, score_bias


def by_loops(row: Tensor, score_bias: Tensor | None, rule: RoutingRule) -> dict[int, Tensor]:
    """Weight by expert."""
    scores = {"softmax": row.softmax(0), "sigmoid": row.sigmoid(), "chosen": row}[rule.scoring]
    ranked = (scores if score_bias is None else scores + score_bias).tolist()
    size = len(row) // rule.groups
    groups = [range(first, first + size) for first in range(0, len(row), size)]
    groups.sort(key=lambda group: -sum(sorted((ranked[e] for e in group), reverse=True)[: rule.group_best]))
    best = sorted((e for group in groups[: rule.top_groups] for e in group), key=lambda e: -ranked[e])[: rule.experts_per_token]
    total = sum(scores[e].exp() for e in best) if rule.scoring == "chosen" else sum(scores[e] for e in best)
    chosen = {e: scores[e].exp() / total if rule.scoring == "chosen" else scores[e] for e in best}
    return {e: (weight / total if rule.normalise else weight) * rule.scale for e, weight in chosen.items()}


CASES = [
    (rule, score_biased) for rule in RULES for score_biased in (False, True) if not score_biased or rule.scoring != "chosen"
]


def weighted_gradient(weights: Tensor, logits: Tensor) -> Tensor:
    factors = torch.linspace(-1, 1, weights.numel(), dtype=weights.dtype, device=weights.device).view_as(weights)
    return torch.autograd.grad((weights * factors).sum(), logits, retain_graph=True)[0]


@pytest.mark.parametrize(("rule", "score_biased"), CASES, ids=str)
def test_experts_that_logits_choose(rule: RoutingRule, score_biased: bool) -> None:
    """In float64 as by a loop over tokens; in Triton as in torch."""
    logits, score_bias = draw(score_biased)
    parts = None if score_bias is None else split_to_bf16_terms(score_bias)
    logits.requires_grad_()
    weights, chosen = Ops().route(logits, parts, rule, torch.float64)
    expected = []
    for row, of_row in zip(logits, chosen.tolist(), strict=True):
        by_expert = by_loops(row, score_bias, rule)
        assert by_expert.keys() == set(of_row)
        expected.append(torch.stack([by_expert[e] for e in of_row]))
    want = torch.stack(expected)
    assert (weights - want).abs().max() < 1e-12
    assert (weighted_gradient(weights, logits) - weighted_gradient(want, logits)).abs().max() < 1e-12
    results = []
    for ops in (Ops(), GpuOps()):
        narrow = logits.detach().to(DEVICE, torch.float32).requires_grad_()
        weights, chosen = ops.route(narrow, None if parts is None else parts.to(DEVICE), rule, torch.float32)
        assert not chosen.requires_grad
        results.append((chosen, weights.detach(), weighted_gradient(weights, narrow)))
    (chosen, *numbers), (its_chosen, *its_numbers) = results
    assert torch.equal(chosen, its_chosen)
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(numbers, its_numbers, strict=True))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_weights_of_given_experts(rule: RoutingRule) -> None:
    """In float64 by the formula; with the experts that the logits choose, bit for bit those without; in Triton alike."""
    logits, _ = draw(False)
    orders = [torch.randperm(COUNT, generator=torch.Generator().manual_seed(i)) for i in range(40)]
    assigned = torch.stack([order[: rule.experts_per_token] for order in orders])
    logits.requires_grad_()
    weights, chosen = Ops().route(logits, None, rule, torch.float64, assigned)
    assert torch.equal(chosen, assigned)
    scores = {"softmax": logits.softmax(1), "sigmoid": logits.sigmoid(), "chosen": logits.exp()}[rule.scoring].gather(
        1, assigned
    )
    total = scores.sum(1, keepdim=True) if rule.normalise or rule.scoring == "chosen" else 1.0
    want = scores / total * rule.scale
    assert (weights - want).abs().max() < 1e-12
    assert (weighted_gradient(weights, logits) - weighted_gradient(want, logits)).abs().max() < 1e-12
    results = []
    for ops in (Ops(), GpuOps()):
        narrow = logits.detach().to(DEVICE, torch.float32).requires_grad_()
        weights, numbers = ops.route(narrow, None, rule, torch.float32)
        assert torch.equal(weights, ops.route(narrow, None, rule, torch.float32, numbers)[0])
        weights, same = ops.route(narrow, None, rule, torch.float32, assigned.to(DEVICE))
        assert torch.equal(same.cpu(), assigned)
        results.append((weights.detach(), weighted_gradient(weights, narrow)))
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(*results, strict=True))


def test_logits_that_are_no_numbers_choose_experts_that_are_there() -> None:
    logits = torch.full((3, COUNT), math.nan, device=DEVICE)
    for rule in RULES:
        _, chosen = GpuOps().route(logits, None, rule, torch.float32)
        assert int(chosen.min()) >= 0 and int(chosen.max()) < COUNT


def test_the_parts_of_a_correction_are_exact_in_bf16() -> None:
    values = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 4000)
    parts = split_to_bf16_terms(values)
    assert parts.shape == (4000, 3)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert torch.equal(sum_terms(parts.to(dtype)), values)
