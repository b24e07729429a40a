"""Losses of preferences and of Safe-RLHF against float64 derivations from their papers, value and gradient, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flat_config import flat_config
from rlhf_spmd.algorithms import cost_model, dpo, kto, orpo, reward_model, safe_rlhf, simpo
from rlhf_spmd.config.load import check_tree
from rlhf_spmd.objectives.advantages import gae
from rlhf_spmd.objectives.kl import KLControlConfig
from rlhf_spmd.objectives.preferences import best_and_worst, pair_indices
from rlhf_spmd.objectives.preferences import kto as kto_loss
from rlhf_spmd.workers.compute import GlobalReduce
from rlhf_spmd.workers.objective import Objective, Rows, Totals

LENGTHS = [3, 5, 2, 4, 6, 1, 7, 2]
CHOSEN = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]  # not always the first of a pair
ROWS = Rows(torch.arange(8), torch.arange(8) // 2 * 10, torch.tensor(LENGTHS))
PAIRS = [(0, 1), (3, 2), (4, 5), (7, 6)]  # chosen, rejected


def numbers(seed: int, scale: float = 1.0, size: int = sum(LENGTHS)) -> Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOG_PROBS = -numbers(0).abs() - 0.05
REF_LOGPS = torch.stack([x.sum() for x in (LOG_PROBS + numbers(1, 0.2)).split(LENGTHS)])


def sigma(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def assert_same(
    objective: Objective, fields: dict[str, Tensor], name: str, derived: Callable[[list[Tensor]], Tensor]
) -> dict[str, Any]:
    """``derived``: the loss of the whole batch from each row's entries of the field ``name``. Returns the statistics.

    The batch is also given in two micro-batches, whose losses and gradients must add up to the same.
    """
    per_row = len(fields[name]) == len(LENGTHS)
    derived_inputs = fields[name].clone().requires_grad_()
    expected = derived(list(derived_inputs) if per_row else list(derived_inputs.split(LENGTHS)))
    (slope,) = torch.autograd.grad(expected, derived_inputs)
    inputs, total, stats = fields[name].clone().requires_grad_(), torch.tensor(0.0, dtype=torch.float64), {}
    for part in (range(8),), (range(4), range(4, 8)):
        total, stats = torch.tensor(0.0, dtype=torch.float64), {}
        for chosen in part:
            rows = Rows(ROWS.row_ids[chosen], ROWS.group_ids[chosen], ROWS.lengths[chosen])
            at = {
                key: torch.cat([x.split(LENGTHS)[i] for i in chosen]) if len(x) > 8 else x[chosen] for key, x in fields.items()
            }
            at[name] = torch.cat([inputs.split(LENGTHS)[i] for i in chosen]) if not per_row else inputs[chosen]
            loss, report = objective.loss(at, rows, Totals(sum(LENGTHS), 8))
            total = total + loss
            stats = {key: stats.get(key, 0.0) + float(value) for key, value in report.items()}
        (gradient,) = torch.autograd.grad(total, inputs)
        assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
        torch.testing.assert_close(gradient, slope, rtol=1e-9, atol=1e-12)
    assert float(slope.abs().max()) > 1e-3
    return stats


# -- the DPO family


def ratios(rows: list[Tensor], by_token: bool = False) -> list[Tensor]:
    return [(row.sum() - ref) / (len(row) if by_token else 1) for row, ref in zip(rows, REF_LOGPS, strict=True)]


DPO: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "eq. 7 of 2305.18290": ({}, lambda h: -torch.log(sigma(0.3 * h))),
    "conservative": (
        {"label_smoothing": 0.1},
        lambda h: -0.9 * torch.log(sigma(0.3 * h)) - 0.1 * torch.log(1 - sigma(0.3 * h)),
    ),
    "robust, eq. 8 of 2403.00409": (
        {"loss_type": "robust", "label_smoothing": 0.2},
        lambda h: (-0.8 * torch.log(sigma(0.3 * h)) + 0.2 * torch.log(sigma(-0.3 * h))) / 0.6,
    ),
    "ipo, eq. 17 of 2310.12036": ({"loss_type": "ipo"}, lambda h: (h - 1 / 0.6) ** 2),
    "hinge": ({"loss_type": "hinge"}, lambda h: torch.where(0.3 * h < 1, 1 - 0.3 * h, torch.zeros_like(h))),
    "by token": ({"length_normalized": True}, lambda h: -torch.log(sigma(0.3 * h))),
}


@pytest.mark.parametrize("name", DPO)
def test_dpo(name: str) -> None:
    settings, loss = DPO[name]
    config = flat_config(dpo.Config, beta=0.3, **settings)
    check_tree(config, "algorithm")

    def derived(rows: list[Tensor]) -> Tensor:
        r = ratios(rows, config.loss.length_normalized)
        return sum(loss(r[w] - r[b]) for w, b in PAIRS) / 4  # type: ignore[return-value]

    fields = {"log_probs": LOG_PROBS, "chosen": torch.tensor(CHOSEN), "ref_logps": REF_LOGPS}
    stats = assert_same(config.loss.objective(), fields, "log_probs", derived)
    implied = [0.3 * float(x) for x in ratios(list(LOG_PROBS.split(LENGTHS)), config.loss.length_normalized)]
    margins = [implied[w] - implied[b] for w, b in PAIRS]
    assert stats["rewards/margins"] == pytest.approx(sum(margins) / 4)
    assert stats["rewards/accuracies"] == sum(margin > 0 for margin in margins) / 4
    assert stats["rewards/chosen"] == pytest.approx(sum(implied[w] for w, _ in PAIRS) / 4)
    assert stats["logps/rejected"] == pytest.approx(sum(float(LOG_PROBS.split(LENGTHS)[b].sum()) for _, b in PAIRS) / 4)


def test_orpo() -> None:
    """2403.07691: eq. 3 (odds), 6 and 7, where the likelihood of a response is the mean over its tokens."""

    def derived(rows: list[Tensor]) -> Tensor:
        p = [torch.exp(row.mean()) for row in rows]
        odds = [x / (1 - x) for x in p]
        terms = [-torch.log(p[w]) - 0.4 * torch.log(sigma(torch.log(odds[w] / odds[b]))) for w, b in PAIRS]
        return sum(terms) / 4  # type: ignore[return-value]

    fields = {"log_probs": LOG_PROBS, "chosen": torch.tensor(CHOSEN)}
    stats = assert_same(orpo.Config(beta=0.4).objective(), fields, "log_probs", derived)
    means = [float(row.mean()) for row in LOG_PROBS.split(LENGTHS)]
    assert stats["nll_loss"] == pytest.approx(-sum(means[w] for w, _ in PAIRS) / 4)


def test_simpo() -> None:
    """2405.14734, eq. 6."""

    def derived(rows: list[Tensor]) -> Tensor:
        terms = [
            -torch.log(sigma(2.5 / len(rows[w]) * rows[w].sum() - 2.5 / len(rows[b]) * rows[b].sum() - 1.4)) for w, b in PAIRS
        ]
        return sum(terms) / 4  # type: ignore[return-value]

    fields = {"log_probs": LOG_PROBS, "chosen": torch.tensor(CHOSEN)}
    assert_same(simpo.Config(beta=2.5, simpo_gamma=1.4).objective(), fields, "log_probs", derived)


def test_kto() -> None:
    """2402.01306, eq. 8: lambda_y - v(x, y), less the constant lambda_y of the mean, which has no gradient."""
    config = kto.Config(beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)
    desirable = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0])

    def derived(rows: list[Tensor]) -> Tensor:
        total = torch.tensor(0.0, dtype=torch.float64)
        for ratio, label in zip(ratios(rows), desirable.tolist(), strict=True):
            weight, sign = (1.5, 1) if label else (0.7, -1)
            total = total + weight - weight * sigma(0.3 * sign * (ratio - 0.2))
        return total / 8

    fields = {"log_probs": LOG_PROBS, "desirable": desirable, "ref_logps": REF_LOGPS}
    stats = assert_same(kto.objective(config, 0.2, 3 / 8), fields, "log_probs", derived)
    implied = [0.3 * float(x) for x in ratios(list(LOG_PROBS.split(LENGTHS)))]
    assert stats["rewards/chosen"] == pytest.approx(sum(implied[i] for i in (0, 4, 6)) / 3)
    assert stats["rewards/rejected"] == pytest.approx(sum(implied[i] for i in (1, 2, 3, 5, 7)) / 5)


def test_kto_s_baseline_is_the_mean_log_ratio() -> None:
    fields = {"old_log_probs": LOG_PROBS, "ref_logps": REF_LOGPS, "desirable": torch.tensor(CHOSEN)}
    _, stats = kto.mean_log_ratio(fields, ROWS, ALONE())
    expected = sum(float(x) for x in ratios(list(LOG_PROBS.split(LENGTHS)))) / 8
    assert stats == {"kto/kl": pytest.approx(expected), "kto/desirable_fraction": 0.5}
    far = kto_loss(torch.tensor([0.0]), torch.tensor([True]), 1.0, 1.0, (1.0, 1.0))
    assert float(far) == pytest.approx(1 - 1 / (1 + math.e))


# -- scores


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_reward_model(coefficient: float) -> None:
    """2203.02155, eq. 1, with the margin of 2307.09288, eq. 2, and 2312.09244's penalty of a pair's sum, as TRL has it."""
    margin = torch.tensor([0.5, 0.5, 0.0, 0.0, 2.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    scores = numbers(3, size=8)

    def derived(r: list[Tensor]) -> Tensor:
        return sum(-torch.log(sigma(r[w] - r[b] - margin[w])) + coefficient * (r[w] + r[b]) ** 2 for w, b in PAIRS) / 4  # type: ignore[return-value]

    fields = {"row_values": scores, "chosen": torch.tensor(CHOSEN), "margin": margin}
    config = reward_model.Config(center_rewards_coefficient=coefficient)
    stats = assert_same(config.objective(), fields, "row_values", derived)
    assert stats["accuracy"] == sum(bool(scores[w] > scores[b]) for w, b in PAIRS) / 4


def test_cost_model() -> None:
    """2310.12773, eq. 6: the less safe response y_w costs more, and s(y) C(y) > 0 with s = 1 for unsafe responses."""
    safe = [1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0, 1.0]
    costs = numbers(4, size=8)

    def derived(c: list[Tensor]) -> Tensor:
        total = torch.tensor(0.0, dtype=torch.float64)
        for safer, riskier in PAIRS:
            total = total - torch.log(sigma(c[riskier] - c[safer]))
            total = total - torch.log(sigma(-safe[riskier] * c[riskier])) - torch.log(sigma(-safe[safer] * c[safer]))
        return total / 4

    fields = {"row_values": costs, "chosen": torch.tensor(CHOSEN), "safe": torch.tensor(safe)}
    stats = assert_same(cost_model.Config().objective(), fields, "row_values", derived)
    assert stats["accuracy"] == sum(bool(costs[b] > costs[w]) for w, b in PAIRS) / 4
    assert stats["accuracy_sign"] == sum(float(c) * s < 0 for c, s in zip(costs, safe, strict=True)) / 8


# -- pairs


def test_rows_that_are_no_pairs_are_told_apart() -> None:
    groups = torch.tensor([7, 7, 5, 5])
    assert [x.tolist() for x in pair_indices(groups, torch.tensor([0.0, 1.0, 1.0, 0.0]))] == [[2, 1], [3, 0]]
    assert [x.tolist() for x in pair_indices(groups[:0], torch.empty(0))] == [[], []]
    for wrong in (torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])):
        with pytest.raises(AssertionError):
            pair_indices(groups, wrong)
    with pytest.raises(AssertionError):
        pair_indices(groups[:3], torch.tensor([1.0, 0.0, 1.0]))


def test_the_best_against_the_worst() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 3.0, 5.0, 5.0, -1.0, -2.0])
    groups = torch.tensor([4, 4, 4, 4, 9, 9, 2, 2])
    assert best_and_worst(scores, groups).tolist() == [0.0, 1.0, -1.0, -1.0, -1.0, -1.0, 1.0, 0.0]
    scores[[0, 4, 5, 6]] = torch.nan  # a response without a score is not one of 0
    assert best_and_worst(scores, groups).tolist() == [-1.0, 1.0, 0.0, -1.0, -1.0, -1.0, -1.0, -1.0]
    assert best_and_worst(scores[:0], groups[:0]).tolist() == [] and best_and_worst(scores[4:6], groups[4:6]).tolist() == [
        -1,
        -1,
    ]


# -- Safe-RLHF


def ALONE() -> GlobalReduce:
    return GlobalReduce(sum=lambda x: x, max=lambda x: x, state={})


def safe_fields(costs: Tensor, ref: Tensor = LOG_PROBS) -> dict[str, Tensor]:
    fields = {"scores": numbers(6, size=8), "costs": costs, "old_values": numbers(8), "old_cost_values": numbers(9)}
    return fields | {"old_log_probs": LOG_PROBS, "ref_log_prob": ref}


def test_lagrangian_advantages() -> None:
    """2310.12773, section 3.3 and appendix B: r - beta/2 KL and c + beta/2 KL per token, (A_r - lambda A_c) / (1 + lambda)."""
    knobs = {"gamma": 0.9, "lam": 0.8, "lambda_init": 0.5, "lambda_lr": 0.4, "threshold": 0.2}
    config = flat_config(safe_rlhf.Config, **knobs, kl_ctrl=KLControlConfig(kl_coef=0.1))
    ref, costs = LOG_PROBS + numbers(5, 0.3), numbers(7, size=8)
    fields = safe_fields(costs, ref)
    reduce = ALONE()
    returned, metrics = safe_rlhf.lagrangian(config, 1)(fields, ROWS, reduce)

    excess = sum(costs.tolist()) / 8 - 0.2
    multiplier = 0.5 * math.exp(0.4 * 0.5 * excess)
    assert metrics["safe_rlhf/lambda"] == pytest.approx(multiplier) and reduce.state == {"lambda": metrics["safe_rlhf/lambda"]}
    assert metrics["safe_rlhf/cost_excess"] == pytest.approx(excess)

    def side(end: Tensor, sign: float, baseline: Tensor) -> tuple[Tensor, Tensor]:
        rewards = -sign * 0.05 * (LOG_PROBS - ref)
        rewards[ROWS.lengths.cumsum(0) - 1] += end
        advantages, returns = gae(rewards, baseline, ROWS.lengths, 0.9, 0.8)
        return (advantages - advantages.mean()) / (advantages.var() + 1e-8).sqrt(), returns

    of_reward, returns = side(fields["scores"], 1.0, fields["old_values"])
    of_cost, cost_returns = side(costs, -1.0, fields["old_cost_values"])
    expected = (of_reward - multiplier * of_cost) / (1 + multiplier)
    for name, value in (("advantages", expected), ("returns", returns), ("cost_returns", cost_returns)):
        torch.testing.assert_close(returned[name].values, value, rtol=1e-10, atol=1e-12)  # type: ignore[union-attr]

    safe_rlhf.lagrangian(config, 2)(fields, ROWS, reduce)
    assert reduce.state["lambda"] == pytest.approx(multiplier * math.exp(0.4 * multiplier * excess))


def test_rows_without_a_cost_count_on_the_side_of_the_reward_only() -> None:
    """The multiplier's step is of the rows that have one; without any it stays. The others' cost returns are the critic's values."""
    config = flat_config(safe_rlhf.Config, lambda_init=0.5, lambda_lr=0.4, threshold=0.5)
    fields = safe_fields(torch.full((8,), torch.nan).double())
    reduce = ALONE()
    reward_only, metrics = safe_rlhf.lagrangian(config, 1)(fields, ROWS, reduce)
    assert reduce.state == {"lambda": 0.5} and "safe_rlhf/cost_excess" not in metrics
    torch.testing.assert_close(reward_only["cost_returns"].values, fields["old_cost_values"])  # type: ignore[union-attr]
    fields["costs"][:2] = 1.0
    returned, metrics = safe_rlhf.lagrangian(config, 1)(fields, ROWS, reduce)
    multiplier = 0.5 * math.exp(0.4 * 0.5 * 0.5)
    assert metrics["safe_rlhf/cost_excess"] == 0.5 and metrics["safe_rlhf/lambda"] == pytest.approx(multiplier)
    with_cost = sum(LENGTHS[:2])
    advantages, others = (x["advantages"].values for x in (returned, reward_only))  # type: ignore[union-attr]
    ratio = (1 + 0.5) / (1 + multiplier)
    torch.testing.assert_close(advantages[with_cost:], others[with_cost:] * ratio)
    assert not torch.allclose(advantages[:with_cost], others[:with_cost] * ratio)
    cost_returns = returned["cost_returns"].values  # type: ignore[union-attr]
    torch.testing.assert_close(cost_returns[with_cost:], fields["old_cost_values"][with_cost:])
    assert not torch.allclose(cost_returns[:with_cost], fields["old_cost_values"][:with_cost])


def test_the_multiplier_waits_and_is_bounded() -> None:
    config = flat_config(safe_rlhf.Config, lambda_init=1.0, lambda_lr=10.0, lambda_max=3.0, lambda_update_delay_steps=2)
    fields, reduce = safe_fields(torch.ones(8).double()), ALONE()
    rising = [safe_rlhf.lagrangian(config, number)(fields, ROWS, reduce)[1]["safe_rlhf/lambda"] for number in range(1, 5)]
    assert rising == [1.0, 1.0, pytest.approx(3.0), pytest.approx(3.0)]
    fields["costs"] = torch.full((8,), -1e6).double()
    falling = [safe_rlhf.lagrangian(config, number)(fields, ROWS, reduce)[1]["safe_rlhf/lambda"] for number in (5, 6)]
    assert falling[0] == falling[1] == pytest.approx(math.exp(-20.0))


# -- refusals


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            flat_config(dpo.Config, loss_type="sigmod"),
            r"loss_type='sigmod' is not known; did you mean 'sigmoid'\? allowed: sigmoid,",
        ),
        (flat_config(dpo.Config, label_smoothing=0.5), r"algorithm.label_smoothing=0.5: must be at least 0 and below 0.5"),
        (flat_config(dpo.Config, label_smoothing=0.1, loss_type="ipo"), r"label_smoothing=0.1 does nothing without .*=robust"),
        (flat_config(dpo.Config, beta=0.0), r"algorithm.beta=0.0: must be above 0"),
        (kto.Config(desirable_weight=-1.0), r"algorithm.desirable_weight=-1.0: must be at least 0"),
        (simpo.Config(simpo_gamma=-1.0), r"algorithm.simpo_gamma=-1.0"),
        (flat_config(safe_rlhf.Config, lambda_init=0.0), r"algorithm.lambda_init=0.0: must be above 0"),
        (replace(safe_rlhf.Config(), threshold=math.nan), r"algorithm.threshold=nan"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_settings_that_cannot_be(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tree(config, "algorithm")
