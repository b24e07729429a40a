"""Advantages, KL and losses against a float64 re-derivation: the papers' formulas as plain loops over rows and tokens."""

from __future__ import annotations

import math
import random
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flat_config import flat_config, with_knobs
from rlhf_spmd.algorithms.ppo import Config as PPOConfig
from rlhf_spmd.algorithms.values import gae_advantages
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.data.batch import Ragged
from rlhf_spmd.objectives import advantages as adv
from rlhf_spmd.objectives import kl as kl_module
from rlhf_spmd.objectives import losses
from rlhf_spmd.objectives.kl import KLControlConfig
from rlhf_spmd.workers.compute import GlobalReduce
from rlhf_spmd.workers.objective import Rows

LENGTHS = [5, 1, 9, 3, 3, 12, 1, 7]


def sample(seed: int, count: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64) * spread


def rows_of(x: Tensor, lengths: list[int]) -> list[list[float]]:
    """Nested lists of floats: what the naive re-derivations work on."""
    out, start = [], 0
    for n in lengths:
        out.append([float(v) for v in x[start : start + n]])
        start += n
    return out


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([v for row in rows for v in row], dtype=torch.float64)


def naive_gae(rewards: list[list[float]], values: list[list[float]], gamma: float, lam: float) -> list[list[float]]:
    """Equation 16 as it is written: a sum over all later TD errors, quadratic in the length."""
    out = []
    for r, v in zip(rewards, values, strict=True):
        deltas = [r[t] + gamma * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(v))]
        out.append([sum((gamma * lam) ** k * deltas[t + k] for k in range(len(v) - t)) for t in range(len(v))])
    return out


def lengths_of(rows):
    return torch.tensor(rows, dtype=torch.int64)


def naive_value_loss(v, old, ret, c):
    clipped = max(old - c, min(old + c, v))
    return 0.5 * max((v - ret) ** 2, (clipped - ret) ** 2)


def naive_value_gradient(v, old, ret, c):
    clipped = max(old - c, min(old + c, v))
    if clipped == v or (v - ret) ** 2 > (clipped - ret) ** 2:
        return v - ret
    return 0.0


def naive_aggregate(rows, mode, max_length):
    sums = [sum(row) for row in rows]
    return {
        "token-mean": sum(sums) / sum(len(row) for row in rows),
        "seq-mean-token-sum": sum(sums) / len(rows),
        "seq-mean-token-mean": sum(total / len(row) for total, row in zip(sums, rows, strict=True) if row) / len(rows),
        "seq-mean-token-sum-norm": sum(sums) / len(rows) / max_length,
    }[mode]


def test_a_score_needs_a_token_to_lie_on():
    with pytest.raises(AssertionError, match="without response tokens"):
        adv.token_level_rewards(torch.zeros(2), torch.zeros(3), 0.1, lengths_of([3, 0]))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.97, 0.9), (0.9, 0.0), (0.0, 0.5)])
def test_gae_is_the_papers_sum(gamma, lam):
    n = sum(LENGTHS)
    rewards, values = sample(2, n), sample(3, n)
    expected = flat(naive_gae(rows_of(rewards, LENGTHS), rows_of(values, LENGTHS), gamma, lam))
    advantages, returns = adv.gae(rewards, values, lengths_of(LENGTHS), gamma, lam)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(returns, expected + values, rtol=0, atol=1e-13)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=0, max_size=12), st.randoms(use_true_random=False))
def test_gae_does_not_depend_on_how_rows_are_split(rows, rng: random.Random):
    n = sum(rows)
    rewards, values = sample(6, n).float(), sample(7, n).float()
    at_once, _ = adv.gae(rewards, values, lengths_of(rows), 0.99, 0.95)
    cut = rng.randint(0, len(rows))
    at = sum(rows[:cut])
    head, _ = adv.gae(rewards[:at], values[:at], lengths_of(rows[:cut]), 0.99, 0.95)
    tail, _ = adv.gae(rewards[at:], values[at:], lengths_of(rows[cut:]), 0.99, 0.95)
    assert torch.equal(at_once, torch.cat([head, tail])), "advantages must be bit-equal however rows are split"


def test_gae_works_in_float32_for_half_precision_values():
    advantages, returns = adv.gae(torch.ones(3), torch.ones(3, dtype=torch.bfloat16), lengths_of([3]), 1.0, 1.0)
    assert advantages.dtype == returns.dtype == torch.float32


@pytest.mark.parametrize("x", [torch.full((7,), 0.1), torch.tensor([3.0]), torch.full((1000,), 1e3)])
def test_whiten_of_equal_values_is_zero_not_noise(x):
    whitened = adv.whiten(x, adv.moments(x))
    assert bool(whitened.isfinite().all()) and float(whitened.abs().max()) < 1e-6


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_group_advantages_are_the_papers(by_std, dtype):
    """Section 4.1.2 of the GRPO paper, with the sample's standard deviation. Groups are of unequal size, in any order, and beside an
    offset that float32 sums would lose.
    """
    groups = torch.tensor([9, 4, 4, 7, 9, 9, 4, 2, 7, 9, 4, 7])
    scores = (sample(3, len(groups)) + 1000.0).to(dtype)
    expected = torch.zeros(len(groups), dtype=torch.float64)
    for position, group in enumerate(groups.tolist()):
        members = scores[groups == group].double()
        scale = (float(members.std()) if len(members) > 1 else 0.0) + 1e-6 if by_std else 1.0
        expected[position] = (scores[position].double() - members.mean()) / scale
    advantages = adv.group_advantages(scores, groups, by_std)
    assert advantages.dtype == dtype and advantages[7] == 0  # alone in its group
    torch.testing.assert_close(advantages.double(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(1, 9), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_groups_of_equal_scores_teach_exactly_nothing(score, size, by_std, dtype):
    scores = torch.tensor([score] * size + [1.0, 2.0], dtype=dtype)
    advantages = adv.group_advantages(scores, torch.tensor([5] * size + [3, 3]), by_std)
    assert advantages[:size].tolist() == [0.0] * size and advantages[size] < 0 < advantages[size + 1]
    assert adv.group_advantages(scores[:0], torch.empty(0, dtype=torch.int64), by_std).tolist() == []


@pytest.mark.parametrize("kind", [kind for kind in get_args(kl_module.KLKind) if not kind.endswith("+")])
def test_kl_estimators_are_schulmans(kind):
    p, q = sample(9, 40, 2.0), sample(10, 40, 2.0)
    formula = {
        "kl": lambda d: d,
        "k1": lambda d: d,
        "abs": abs,
        "mse": lambda d: d * d / 2,
        "k2": lambda d: d * d / 2,
        "low_var_kl": lambda d: min(10.0, math.exp(min(20.0, -d)) - 1 + max(d, -20.0)),
        "k3": lambda d: min(10.0, math.exp(min(20.0, -d)) - 1 + max(d, -20.0)),
    }[kind]
    expected = torch.tensor([formula(d) for d in (p - q).tolist()], dtype=torch.float64)
    torch.testing.assert_close(kl_module.kl_penalty(p, q, kind), expected, rtol=1e-12, atol=1e-12)


def test_k3_is_bounded_and_keeps_small_digits():
    far = torch.tensor([-50.0, 50.0])
    assert kl_module.kl_penalty(far, torch.zeros(2), "k3").tolist() == [10.0, 10.0]
    near = kl_module.kl_penalty(torch.tensor([1e-3]), torch.zeros(1), "k3")
    assert float(near) == pytest.approx(5e-7, rel=0.01)


@pytest.mark.parametrize("kind", ["k1+", "k3+", "abs+", "k2+"])
def test_the_plus_takes_the_gradient_of_k2(kind):
    p, q = sample(13, 20).requires_grad_(), sample(14, 20)
    value = kl_module.kl_penalty(p, q, kind)
    torch.testing.assert_close(value, kl_module.kl_penalty(p, q, kind[:-1]), rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(value.sum(), p)
    torch.testing.assert_close(gradient, (p - q).detach(), rtol=0, atol=1e-15)


def test_kl_controllers():
    assert kl_module.KLControlConfig(kl_coef=0.05).moved(0.05, 3.0, 1000) == 0.05
    adaptive = kl_module.KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=0.5, horizon=1000)
    assert adaptive.moved(0.1, 0.55, 100) == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))  # error 0.1
    assert adaptive.moved(0.101, 50.0, 100) == pytest.approx(0.101 * 1.02)  # clipped to 0.2
    assert adaptive.moved(0.101 * 1.02, 0.0, 100) == pytest.approx(0.101 * 1.02 * 0.98)
    assert adaptive.moved(0.1, 0.0, 10**9) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "adaptiv"}, r"kl_ctrl.type='adaptiv' is not known; did you mean 'adaptive'\? allowed: fixed, adaptive"),
        ({"kl_coef": -1.0}, r"kl_ctrl.kl_coef=-1.0: must be at least 0"),
        ({"kl_coef": float("nan")}, r"kl_ctrl.kl_coef=nan: must be a finite number, at least 0"),
        ({"type": "adaptive", "target_kl": 0.0}, r"kl_ctrl.target_kl=0.0: must be above 0"),
        ({"type": "adaptive", "horizon": 0}, r"kl_ctrl.horizon=0: must be at least 1"),
    ],
)
def test_impossible_kl_control(change, message):
    with pytest.raises(ValueError, match=message):
        check_section(kl_module.KLControlConfig(**change), "kl_ctrl")


def test_beyond_exp_20_a_ratio_is_bounded_and_takes_no_gradient():
    log_prob = torch.tensor([30.0, -30.0], dtype=torch.float64, requires_grad=True)
    loss, stats = losses.policy_loss(log_prob, torch.zeros(2), torch.tensor([-1.0, 1.0]).double(), 1.0, 0.2, 1e12)
    assert loss.tolist() == pytest.approx([math.exp(20), -math.exp(-20)], rel=1e-12)
    assert torch.autograd.grad(loss.sum(), log_prob)[0].tolist() == [0.0, 0.0]
    assert stats["ppo_kl"].tolist() == [-20.0, 20.0]


def test_value_loss_and_its_gradient():
    n = 400
    old, returns = sample(24, n), sample(25, n)
    values = (old + sample(26, n, 0.5)).requires_grad_()
    loss, clipped = losses.value_loss(values, old, returns, 0.3)
    numbers = list(zip(values.tolist(), old.tolist(), returns.tolist(), strict=True))
    expected = torch.tensor([naive_value_loss(*row, 0.3) for row in numbers], dtype=torch.float64)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    slope = torch.tensor([naive_value_gradient(*row, 0.3) for row in numbers], dtype=torch.float64)
    torch.testing.assert_close(gradient, slope, rtol=1e-12, atol=1e-12)
    bound = [(max(o - 0.3, min(o + 0.3, v)) - r) ** 2 > (v - r) ** 2 for v, o, r in numbers]
    assert clipped.tolist() == bound and 0 < sum(bound) < n


def test_unmoved_values_are_not_counted_as_clipped():
    old = sample(27, 1000).float() * 100
    _, clipped = losses.value_loss(old + 1e-3, old, old * 0, 0.5)
    assert not bool(clipped.any())


@pytest.mark.parametrize("mode", losses.LOSS_AGG_MODES)
def test_aggregate_sums_over_any_split_to_the_mini_batch(mode):
    """A row without a token, as one that is masked, counts among the rows."""
    lengths = [*LENGTHS, 4, 0]
    counts = (sum(lengths), len(lengths))
    x = sample(29, sum(lengths)).requires_grad_()
    expected = naive_aggregate(rows_of(x.detach(), lengths), mode, 16)
    loss = losses.aggregate(x, lengths_of(lengths), mode, *counts, max_length=16)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-12, abs=1e-12)
    (gradient,) = torch.autograd.grad(loss, x)
    start, gradients, total = 0, [], 0.0
    for part in (lengths[:2], lengths[2:3], lengths[3:7], lengths[7:]):
        stop = start + sum(part)
        loss = losses.aggregate(x[start:stop], lengths_of(part), mode, *counts, max_length=16)
        gradients.append(torch.autograd.grad(loss, x)[0])
        total += float(loss.detach())
        start = stop
    assert total == pytest.approx(expected, rel=1e-12, abs=1e-12)
    torch.testing.assert_close(sum(gradients), gradient, rtol=1e-12, atol=1e-12)


def test_an_aggregation_by_the_longest_response_needs_its_length():
    with pytest.raises(ValueError, match=r"seq-mean-token-sum-norm.*got None"):
        losses.aggregate(torch.zeros(2), lengths_of([2]), "seq-mean-token-sum-norm", 2, 1)


def test_explained_variance_from_sums():
    returns = sample(31, 200)
    values = returns * 0.7 + sample(32, 200, 0.3)
    expected = 1 - float((returns - values).var() / returns.var())
    sums = losses.explained_variance_sums(values[:50], returns[:50]) + losses.explained_variance_sums(values[50:], returns[50:])
    assert losses.explained_variance(sums) == pytest.approx(expected, abs=1e-12)
    assert losses.explained_variance(losses.explained_variance_sums(returns, returns)) == 1.0
    assert losses.explained_variance(losses.explained_variance_sums(values, torch.full((200,), 0.1))) == 0.0


# -- PPO's advantages, as a script computes them


GAMMA, LAM, COEF = 0.9, 0.8, 0.3
PLAIN = flat_config(PPOConfig, gamma=GAMMA, lam=LAM, kl_ctrl=KLControlConfig(kl_coef=COEF))
ADAPTIVE = with_knobs(PLAIN, kl_ctrl=KLControlConfig("adaptive", COEF, target_kl=0.1, horizon=100))
WITHOUT = with_knobs(PLAIN, use_kl_in_reward=False)
TOKENS = ("values", "old_log_probs", "ref_log_prob")


def all_fields() -> dict[str, Tensor]:
    return {name: sample(seed, sum(LENGTHS)) for seed, name in enumerate(TOKENS)} | {"scores": sample(3, len(LENGTHS))}


def rows(mask: Ragged | None = None) -> Rows:
    ids = torch.arange(len(LENGTHS))
    return Rows(ids, ids // 2, lengths_of(LENGTHS), mask)


def on_one_rank(state: dict[str, Any]) -> GlobalReduce:
    return GlobalReduce(lambda x: x, lambda x: x, state)


def expected(config: PPOConfig, coefficient: float) -> tuple[list[Tensor], dict[str, float]]:
    """Advantages and returns, and the metrics besides the coefficient."""
    fields = all_fields()
    values = rows_of(fields["values"], LENGTHS)
    kl = rows_of(
        fields["old_log_probs"] - fields["ref_log_prob"] if config.kl.uses_reference else 0.0 * fields["values"], LENGTHS
    )
    rewards = [[-coefficient * x if config.kl.use_kl_in_reward else 0.0 for x in row] for row in kl]
    for row, score in zip(rewards, fields["scores"].tolist(), strict=True):
        row[-1] += score
    raw = flat(naive_gae(rewards, values, GAMMA, LAM))
    returns = raw + fields["values"]
    whitened = (raw - raw.mean()) * torch.rsqrt(raw.var(correction=1) + 1e-8)
    return [whitened, returns], {
        "reward/token_level_sum": sum(map(sum, rewards)) / len(rewards),
        "actor/kl": float(flat(kl).mean()),
        "actor/kl_per_row": sum(sum(row) / len(row) for row in kl) / len(kl),
        "critic/advantage_mean": float(raw.mean()),
        "critic/returns/mean": float(returns.mean()),
        "critic/advantages/max": float(whitened.max()),
        "critic/advantages/min": float(whitened.min()),
        "critic/returns/max": float(returns.max()),
        "critic/returns/min": float(returns.min()),
        "critic/explained_variance": float(1 - (returns - fields["values"]).var() / returns.var()),
    }


def computed(config: PPOConfig, state: dict[str, Any]) -> tuple[list[Tensor], dict[str, float]]:
    fields = all_fields()
    if not config.kl.uses_reference:
        del fields["old_log_probs"], fields["ref_log_prob"]  # what the script does not read
    made, metrics = gae_advantages(config)(fields, rows(), on_one_rank(state))
    return [made[name].values for name in ("advantages", "returns")], metrics


@pytest.mark.parametrize(
    "config",
    [PLAIN, WITHOUT, with_knobs(WITHOUT, use_kl_loss=True)],
    ids=["KL in the reward", "no reference", "KL in the loss only"],
)
def test_advantages_are_gae_of_score_minus_kl(config: PPOConfig) -> None:
    state: dict[str, Any] = {}
    fields, metrics = computed(config, state)
    expected_fields, expected_metrics = expected(config, COEF)
    for field, expected_field in zip(fields, expected_fields, strict=True):
        assert torch.allclose(field, expected_field, rtol=1e-9, atol=1e-10)
    assert metrics == pytest.approx(expected_metrics | {"actor/kl_coef": COEF}, rel=1e-9, abs=1e-12)
    assert state == {}, "a coefficient that does not move is the configuration's"


def test_an_adaptive_coefficient_moves_on_the_mean_over_rows_and_goes_on_from_the_state() -> None:
    state: dict[str, Any] = {"best": 3.0}  # another function's, which stays
    coefficient = COEF
    for _ in range(3):
        wanted, wanted_metrics = expected(ADAPTIVE, coefficient)
        error = min(max(wanted_metrics["actor/kl_per_row"] / 0.1 - 1, -0.2), 0.2)
        coefficient *= 1 + error * len(LENGTHS) / 100
        (advantages, _), metrics = computed(ADAPTIVE, state)
        assert torch.allclose(advantages, wanted[0], rtol=1e-9, atol=1e-10), "a step's advantages use the coefficient before"
        assert metrics["actor/kl_coef"] == pytest.approx(coefficient, rel=1e-12)
        assert state == {"best": 3.0, "kl_coef": metrics["actor/kl_coef"]}
    assert coefficient != COEF
    unmoved: dict[str, Any] = {}
    computed(with_knobs(ADAPTIVE, use_kl_in_reward=False, use_kl_loss=True), unmoved)
    assert unmoved == {"kl_coef": COEF}, "a KL that is in the loss only does not move it"


def test_tokens_of_an_environment_get_zeros() -> None:
    """Every row with one more token in front, which the model did not draw."""
    longer = torch.tensor([n + 1 for n in LENGTHS])
    starts = longer.cumsum(0) - longer
    mask = torch.ones(int(longer.sum()), dtype=torch.bool)
    mask[starts] = False
    made, _ = gae_advantages(PLAIN)(all_fields(), rows(Ragged(mask, longer)), on_one_rank({}))
    for name, wanted in zip(("advantages", "returns"), expected(PLAIN, COEF)[0], strict=True):
        field = made[name]
        assert isinstance(field, Ragged) and torch.equal(field.lengths, longer)
        assert torch.allclose(field.values[mask], wanted, rtol=1e-9, atol=1e-10) and not field.values[~mask].any()
