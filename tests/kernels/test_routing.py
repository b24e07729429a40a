"""How a token chooses its experts: torch against a loop over tokens, Triton against torch; the parts of a correction."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rlhf_spmd.kernels import Ops, RoutingRule
from rlhf_spmd.kernels.gpu_ops import GpuOps
from rlhf_spmd.kernels.routing import as_parts, from_parts
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


def draw(corrected: bool) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, COUNT, generator=generator, dtype=torch.float64)
    correction = torch.randn(COUNT, generator=generator) * 0.3 if corrected else None
    return logits, correction


def by_loops(row: Tensor, correction: Tensor | None, rule: RoutingRule) -> dict[int, Tensor]:
    """Weight by expert."""
    scores = {"softmax": row.softmax(0), "sigmoid": row.sigmoid(), "chosen": row}[rule.scoring]
    ranked = (scores if correction is None else scores + correction).tolist()
    size = len(row) // rule.groups
    groups = [range(first, first + size) for first in range(0, len(row), size)]
    groups.sort(key=lambda group: -sum(sorted((ranked[e] for e in group), reverse=True)[: rule.group_best]))
    best = sorted((e for group in groups[: rule.top_groups] for e in group), key=lambda e: -ranked[e])[: rule.per_token]
    total = sum(scores[e].exp() for e in best) if rule.scoring == "chosen" else sum(scores[e] for e in best)
    chosen = {e: scores[e].exp() / total if rule.scoring == "chosen" else scores[e] for e in best}
    return {e: (weight / total if rule.normalise else weight) * rule.scale for e, weight in chosen.items()}


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_torch_against_a_loop_over_tokens(rule: RoutingRule, corrected: bool) -> None:
    logits, correction = draw(corrected and rule.scoring != "chosen")
    logits.requires_grad_()
    weights, chosen = Ops().route(logits, None if correction is None else as_parts(correction), rule, torch.float64)
    factors = torch.linspace(-1, 1, weights.numel(), dtype=torch.float64).view_as(weights)
    total = torch.zeros((), dtype=torch.float64)
    for row, given, of_row, factor in zip(logits, weights, chosen.tolist(), factors, strict=True):
        expected = by_loops(row, correction, rule)
        assert expected.keys() == set(of_row)
        assert all(abs(float((given[i] - expected[e]).detach())) < 1e-12 for i, e in enumerate(of_row))
        total = total + sum(factor[i] * expected[e] for i, e in enumerate(of_row))
    (got,), (want,) = (torch.autograd.grad(x, logits) for x in ((weights * factors).sum(), total))
    assert (got - want).abs().max() < 1e-12


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_triton_against_torch(rule: RoutingRule, corrected: bool) -> None:
    logits, correction = draw(corrected and rule.scoring != "chosen")
    parts = None if correction is None else as_parts(correction).to(DEVICE)
    results = []
    for ops in (Ops(), GpuOps()):
        given = logits.to(DEVICE, torch.float32).requires_grad_()
        weights, chosen = ops.route(given, parts, rule, torch.float32)
        assert not chosen.requires_grad
        factors = torch.linspace(-1, 1, weights.numel(), device=DEVICE).view_as(weights)
        results.append((weights.detach(), chosen, torch.autograd.grad((weights * factors).sum(), given)[0]))
    (weights, chosen, grad), (its_weights, its_chosen, its_grad) = results
    assert torch.equal(chosen, its_chosen)
    assert (weights - its_weights).abs().max() < 1e-6 and (grad - its_grad).abs().max() < 1e-6


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_weights_of_given_experts(rule: RoutingRule) -> None:
    """In float64 those of a loop over tokens; with the experts that the logits choose, bit for bit those without; in Triton alike."""
    logits, _ = draw(False)
    given = torch.stack(
        [torch.randperm(COUNT, generator=torch.Generator().manual_seed(i))[: rule.per_token] for i in range(40)]
    )
    logits.requires_grad_()
    weights, chosen = Ops().route(logits, None, rule, torch.float64, given)
    assert torch.equal(chosen, given)
    factors = torch.linspace(-1, 1, weights.numel(), dtype=torch.float64).view_as(weights)
    scores = {"softmax": logits.softmax(1), "sigmoid": logits.sigmoid(), "chosen": logits.exp()}[rule.scoring].gather(1, given)
    whole = scores.sum(1, keepdim=True) if rule.normalise or rule.scoring == "chosen" else 1.0
    want = scores / whole * rule.scale
    grads = [torch.autograd.grad((x * factors).sum(), logits, retain_graph=True)[0] for x in (weights, want)]
    assert (weights - want).abs().max() < 1e-12 and (grads[0] - grads[1]).abs().max() < 1e-12
    results = []
    for ops in (Ops(), GpuOps()):
        narrow = logits.detach().to(DEVICE, torch.float32).requires_grad_()
        own, numbers = ops.route(narrow, None, rule, torch.float32)
        assert torch.equal(own, ops.route(narrow, None, rule, torch.float32, numbers)[0])
        found, same = ops.route(narrow, None, rule, torch.float32, given.to(DEVICE))
        assert torch.equal(same.cpu(), given)
        results.append((found.detach(), torch.autograd.grad((found * factors.to(found)).sum(), narrow)[0]))
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(*results, strict=True))


def test_logits_that_are_no_numbers_choose_experts_that_are_there() -> None:
    logits = torch.full((3, COUNT), math.nan, device=DEVICE)
    for rule in RULES:
        _, chosen = GpuOps().route(logits, None, rule, torch.float32)
        assert int(chosen.min()) >= 0 and int(chosen.max()) < COUNT


def test_the_parts_of_a_correction_are_exact_in_bf16() -> None:
    values = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 4000)
    parts = as_parts(values)
    assert parts.shape == (4000, 3)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert torch.equal(from_parts(parts.to(dtype)), values)
