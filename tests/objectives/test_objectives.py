"""Advantages, KL and losses against a float64 re-derivation: the papers' formulas as plain loops over rows and tokens."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragged_samples import LENGTHS, flat, naive_gae, rows_of, sample
from rlhf_spmd.algorithms.kl import KLConfig, MeasuredKL
from rlhf_spmd.config.schema import check_section
from rlhf_spmd.objectives import advantages as adv
from rlhf_spmd.objectives import kl as kl_module
from rlhf_spmd.objectives import losses
from rlhf_spmd.workers.objective import Rows


def lengths_of(rows):
    return torch.tensor(rows, dtype=torch.int64)


def naive_policy_loss(lp, old, a, low, high, c):
    ratio = math.exp(max(-20.0, min(20.0, lp - old)))
    clipped = max(1 - low, min(1 + high, ratio))
    surrogate = min(ratio * a, clipped * a)
    if a < 0:
        surrogate = max(surrogate, c * a)
    return -surrogate


def naive_policy_gradient(lp, old, a, low, high, c):
    """d loss / d log_prob: -ratio * A where the unclipped term is in force, else 0."""
    ratio = math.exp(lp - old)
    if abs(lp - old) > 20 or (a > 0 and ratio > 1 + high):
        return 0.0
    if a < 0 and (ratio < 1 - low or ratio > c):
        return 0.0
    return -ratio * a


def naive_value_loss(v, old, ret, c):
    clipped = max(old - c, min(old + c, v))
    return 0.5 * max((v - ret) ** 2, (clipped - ret) ** 2)


def naive_value_gradient(v, old, ret, c):
    clipped = max(old - c, min(old + c, v))
    if clipped == v or (v - ret) ** 2 > (clipped - ret) ** 2:
        return v - ret
    return 0.0


def naive_aggregate(rows, mode, max_length):
    sums, live = [sum(row) for row in rows], range(len(rows))
    totals = [len(row) for row in rows]
    if mode == "token-mean":
        return sum(sums) / sum(totals)
    if mode == "seq-mean-token-sum":
        return sum(sums[i] for i in live) / len(live)
    if mode == "seq-mean-token-mean":
        return sum(sums[i] / totals[i] for i in live) / len(live)
    return sum(sums[i] for i in live) / len(live) / max_length


def test_token_level_rewards_are_minus_kl_with_the_score_on_the_last_token():
    n = sum(LENGTHS)
    kl, scores = sample(0, n), sample(1, len(LENGTHS))
    expected = [[-0.3 * x for x in row] for row in rows_of(kl, LENGTHS)]
    for row, score in zip(expected, scores.tolist(), strict=True):
        row[-1] += score
    torch.testing.assert_close(
        adv.token_level_rewards(scores, kl, 0.3, lengths_of(LENGTHS)), flat(expected), rtol=0, atol=1e-15
    )
    bare = adv.token_level_rewards(scores.float(), None, 0.3, lengths_of([1] * len(LENGTHS)))
    assert torch.equal(bare, scores.float())


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


def test_gae_with_lambda_one_gives_discounted_returns_and_with_zero_the_td_error():
    rewards, values = sample(4, 6), sample(5, 6)
    _, returns = adv.gae(rewards, values, lengths_of([6]), 0.9, 1.0)
    assert float(returns[0]) == pytest.approx(sum(0.9**t * float(rewards[t]) for t in range(6)), abs=1e-13)
    advantages, _ = adv.gae(rewards, values, lengths_of([6]), 0.9, 0.0)
    assert float(advantages[5]) == pytest.approx(float(rewards[5] - values[5]), abs=1e-13)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 8), min_size=0, max_size=12), st.randoms(use_true_random=False))
def test_gae_does_not_depend_on_how_rows_are_split(rows, rng: random.Random):
    n = sum(rows)
    rewards, values = sample(6, n).float(), sample(7, n).float()
    whole, _ = adv.gae(rewards, values, lengths_of(rows), 0.99, 0.95)
    cut = rng.randint(0, len(rows))
    at = sum(rows[:cut])
    head, _ = adv.gae(rewards[:at], values[:at], lengths_of(rows[:cut]), 0.99, 0.95)
    tail, _ = adv.gae(rewards[at:], values[at:], lengths_of(rows[cut:]), 0.99, 0.95)
    assert torch.equal(whole, torch.cat([head, tail])), "advantages must be bit-equal however rows are split"


def test_gae_works_in_float32_for_half_precision_values():
    advantages, returns = adv.gae(torch.ones(3), torch.ones(3, dtype=torch.bfloat16), lengths_of([3]), 1.0, 1.0)
    assert advantages.dtype == returns.dtype == torch.float32


def test_whiten_is_the_statistics_textbook():
    x = sample(8, 50) * 3 + 2
    mean = sum(x.tolist()) / 50
    variance = sum((v - mean) ** 2 for v in x.tolist()) / 49
    expected = torch.tensor([(v - mean) / math.sqrt(variance + 1e-8) for v in x.tolist()])
    parts = adv.moments(x[:13]) + adv.moments(x[13:])
    torch.testing.assert_close(adv.whiten(x, parts), expected.double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(adv.whiten(x, parts), adv.whiten(x, adv.moments(x)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("x", [torch.full((7,), 0.1), torch.tensor([3.0]), torch.full((1000,), 1e3)])
def test_whiten_of_equal_values_is_zero_not_noise(x):
    whitened = adv.whiten(x, adv.moments(x))
    assert bool(whitened.isfinite().all()) and float(whitened.abs().max()) < 1e-6


def naive_group_advantages(scores, groups, by_std):
    """Section 4.1.2 of the GRPO paper row by row, with the sample's standard deviation."""
    out = []
    for score, group in zip(scores, groups, strict=True):
        its = [other for other, its_group in zip(scores, groups, strict=True) if its_group == group]
        mean = sum(its) / len(its)
        deviation = math.sqrt(sum((other - mean) ** 2 for other in its) / max(len(its) - 1, 1))
        out.append((score - mean) / (deviation + 1e-6) if by_std else score - mean)
    return out


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_group_advantages_are_the_papers(by_std, dtype):
    """Groups of unequal size, in any order, beside an offset that float32 sums would lose."""
    groups = torch.tensor([9, 4, 4, 7, 9, 9, 4, 2, 7, 9, 4, 7])
    scores = (sample(3, len(groups)) + 1000.0).to(dtype)
    found = adv.group_advantages(scores, groups, by_std)
    expected = torch.tensor(naive_group_advantages(scores.double().tolist(), groups.tolist(), by_std), dtype=torch.float64)
    assert found.dtype == dtype and found[7] == 0  # alone in its group
    torch.testing.assert_close(found.double(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e6, 1e6), st.integers(1, 9), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_groups_of_equal_scores_teach_exactly_nothing(score, size, by_std, dtype):
    scores = torch.tensor([score] * size + [1.0, 2.0], dtype=dtype)
    found = adv.group_advantages(scores, torch.tensor([5] * size + [3, 3]), by_std)
    assert found[:size].tolist() == [0.0] * size and found[size] < 0 < found[size + 1]
    assert adv.group_advantages(scores[:0], torch.empty(0, dtype=torch.int64), by_std).tolist() == []


@pytest.mark.parametrize("kind", kl_module.KL_KINDS)
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


def test_k3_is_bounded_nonnegative_and_keeps_small_digits():
    far = torch.tensor([-50.0, 50.0])
    assert kl_module.kl_penalty(far, torch.zeros(2), "k3").tolist() == [10.0, 10.0]
    near = kl_module.kl_penalty(torch.tensor([1e-3]), torch.zeros(1), "k3")
    assert float(near) == pytest.approx(5e-7, rel=0.01)
    assert bool((kl_module.kl_penalty(sample(11, 1000), sample(12, 1000), "k3") >= 0).all())


@pytest.mark.parametrize("kind", ["k1+", "k3+", "abs+", "k2+"])
def test_the_plus_takes_the_gradient_of_k2(kind):
    p, q = sample(13, 20).requires_grad_(), sample(14, 20)
    value = kl_module.kl_penalty(p, q, kind)
    torch.testing.assert_close(value, kl_module.kl_penalty(p, q, kind[:-1]), rtol=0, atol=0)
    (gradient,) = torch.autograd.grad(value.sum(), p)
    torch.testing.assert_close(gradient, (p - q).detach(), rtol=0, atol=1e-15)


def test_the_expectation_of_k1_and_k3_is_the_kl_divergence():
    p, q = torch.softmax(sample(15, 12), 0), torch.softmax(sample(16, 12), 0)
    truth = float((p * (p / q).log()).sum())
    for kind in ("k1", "k3"):
        assert float((p * kl_module.kl_penalty(p.log(), q.log(), kind)).sum()) == pytest.approx(truth, abs=1e-12)


def test_unknown_kl_kind():
    with pytest.raises(ValueError, match=r"unknown kl_loss_type 'k4'; available: kl, k1"):
        kl_module.kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def test_kl_controllers():
    assert kl_module.KLControlConfig(kl_coef=0.05).moved(0.05, 3.0, 1000) == 0.05
    adaptive = kl_module.KLControlConfig(type="adaptive", kl_coef=0.1, target_kl=0.5, horizon=1000)
    assert adaptive.moved(0.1, 0.55, 100) == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))  # error 0.1
    assert adaptive.moved(0.101, 50.0, 100) == pytest.approx(0.101 * 1.02)  # clipped to 0.2
    assert adaptive.moved(0.101 * 1.02, 0.0, 100) == pytest.approx(0.101 * 1.02 * 0.98)
    assert adaptive.moved(0.1, 0.0, 10**9) > 0


def test_an_adaptive_coefficient_goes_on_from_the_state_and_a_fixed_one_is_the_configuration_s():
    lengths = torch.tensor([2])
    rows = Rows(torch.tensor([0]), torch.tensor([0]), lengths)
    fields = {"scores": torch.zeros(1), "old_log_probs": torch.zeros(2), "ref_log_prob": torch.zeros(2)}
    for kind, start, after in (("fixed", 0.05, {}), ("adaptive", 0.2, {"kl_coef": 0.2 * (1 - 0.2 / 100)})):
        config = KLConfig(kl_ctrl=kl_module.KLControlConfig(type=kind, kl_coef=0.05, horizon=100))
        assert MeasuredKL(config, fields, rows, {}).coefficient == 0.05  # of a role that has not been called yet
        state = {"kl_coef": 0.2} if kind == "adaptive" else {}
        measured = MeasuredKL(config, fields, rows, state)
        assert measured.coefficient == start
        metrics = measured.settle(measured.sums())
        assert state == pytest.approx(after) and metrics["actor/kl_coef"] == state.get("kl_coef", 0.05)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "adaptiv"}, r"kl_ctrl.type='adaptiv' is not known; did you mean 'adaptive'\? allowed: fixed, adaptive"),
        ({"kl_coef": -1.0}, r"kl_ctrl.kl_coef=-1.0: must be at least 0"),
        ({"kl_coef": float("nan")}, r"kl_ctrl.kl_coef=nan: must be a finite number, at least 0"),
        ({"type": "adaptive", "target_kl": 0.0}, r"kl_ctrl.target_kl=0.0: must be above 0"),
        ({"type": "adaptive", "horizon": 0}, r"kl_ctrl.horizon=0: must be at least 1"),
        ({"type": "adaptive", "kl_coef": 0.0}, r"stays 0"),
    ],
)
def test_impossible_kl_control(change, message):
    with pytest.raises(ValueError, match=message):
        check_section(kl_module.KLControlConfig(**change), "kl_ctrl")


CLIPS = [(0.2, 0.2, 3.0), (0.1, 0.28, 1.5), (0.2, 0.2, 1e9)]


@pytest.mark.parametrize("clips", CLIPS)
def test_policy_loss_and_its_gradient(clips):
    n = 400
    old, log_prob, a = sample(17, n), (sample(17, n) + sample(18, n, 0.7)), sample(19, n)
    log_prob[:2] += 30.0  # beyond the clamp of the exponent
    log_prob.requires_grad_()
    loss, stats = losses.policy_loss(log_prob, old, a, *clips)
    numbers = list(zip(log_prob.tolist(), old.tolist(), a.tolist(), strict=True))
    expected = [naive_policy_loss(*row, *clips) for row in numbers]
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob)
    slope = [naive_policy_gradient(*row, *clips) for row in numbers]
    torch.testing.assert_close(gradient, torch.tensor(slope, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    low, high, c = clips
    for i, (lp, o, advantage) in enumerate(numbers):
        ratio = math.exp(max(-20.0, min(20.0, lp - o)))
        assert bool(stats["clipped"][i]) == ((advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low))
        assert bool(stats["dual_clipped"][i]) == (advantage < 0 and ratio > c)
        assert float(stats["ppo_kl"][i]) == pytest.approx(max(-20.0, min(20.0, o - lp)), abs=1e-12)
    assert all(not value.requires_grad for value in stats.values())


def test_policy_loss_against_finite_differences():
    old, a = sample(20, 30), sample(21, 30)
    # Away from the kinks, where the two-sided difference means something.
    log_prob = (old + torch.tensor([-0.9, -0.05, 0.05, 0.6, 1.9]).repeat(6)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: losses.policy_loss(x, old, a, 0.2, 0.3, 3.0)[0], (log_prob,), atol=1e-6)


def test_on_policy_the_gradient_is_minus_the_advantage_and_nothing_is_clipped():
    log_prob, a = sample(22, 50).float().requires_grad_(), sample(23, 50).float()
    loss, stats = losses.policy_loss(log_prob, log_prob.detach(), a, 0.2, 0.2, 3.0)
    assert torch.equal(torch.autograd.grad(loss.sum(), log_prob)[0], -a)
    assert not bool(stats["clipped"].any()) and not bool(stats["dual_clipped"].any()) and not bool(stats["ppo_kl"].any())


@pytest.mark.parametrize(
    ("clips", "message"),
    [((1.2, 0.2, 3.0), "clip_ratio_low = 1.2"), ((0.2, -1, 3.0), "clip_ratio_high"), ((0.2, 0.2, 1.0), "_c = 1.0")],
)
def test_impossible_clip_ratios(clips, message):
    with pytest.raises(ValueError, match=message):
        losses.policy_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), *clips)


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
    with pytest.raises(ValueError, match="cliprange_value = -1"):
        losses.value_loss(old, old, old, -1)


@pytest.mark.parametrize("mode", losses.LOSS_AGG_MODES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_aggregate_sums_over_any_split_to_the_mini_batch(mode, dtype):
    rows = [*LENGTHS, 4, 0]
    counts = (sum(rows), len(rows) - 1)
    x = sample(29, sum(rows)).to(dtype).requires_grad_()
    whole = losses.aggregate(x, lengths_of(rows), mode, *counts, max_length=16)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    full = [row for row in rows_of(x.detach(), rows) if row]
    expected = naive_aggregate(full, mode, 16)
    torch.testing.assert_close(whole, torch.tensor(expected, dtype=dtype), **tolerance)
    (gradient,) = torch.autograd.grad(whole, x)
    start, partial, total = 0, [], 0.0
    for part in (rows[:2], rows[2:3], rows[3:7], rows[7:]):
        stop = start + sum(part)
        piece = losses.aggregate(x[start:stop], lengths_of(part), mode, *counts, max_length=16)
        partial.append(torch.autograd.grad(piece, x)[0])
        total += float(piece.detach())
        start = stop
    assert total == pytest.approx(expected, rel=tolerance["rtol"], abs=tolerance["atol"])
    torch.testing.assert_close(sum(partial), gradient, **tolerance)


def test_aggregate_says_what_is_wrong():
    with pytest.raises(AssertionError, match="loss_agg_mode 'mean'"):
        losses.aggregate(torch.zeros(2), lengths_of([2]), "mean", 2, 1)
    with pytest.raises(ValueError, match=r"seq-mean-token-sum-norm.*got None"):
        losses.aggregate(torch.zeros(2), lengths_of([2]), "seq-mean-token-sum-norm", 2, 1)
    with pytest.raises(AssertionError, match="lengths sum to 3, but there are 2"):
        losses.aggregate(torch.zeros(2), lengths_of([3]), "token-mean", 2, 1)


def test_sft_loss_is_the_negative_log_likelihood():
    log_prob = -sample(30, 6).abs()
    loss = losses.aggregate(-log_prob, lengths_of([2, 4]), "seq-mean-token-mean", 6, 2)
    assert float(loss) == pytest.approx(-float(log_prob[:2].mean() + log_prob[2:].mean()) / 2)


def test_explained_variance_from_sums():
    returns = sample(31, 200)
    values = returns * 0.7 + sample(32, 200, 0.3)
    expected = 1 - float((returns - values).var() / returns.var())
    sums = losses.explained_variance_sums(values[:50], returns[:50]) + losses.explained_variance_sums(values[50:], returns[50:])
    assert losses.explained_variance(sums) == pytest.approx(expected, abs=1e-12)
    assert losses.explained_variance(losses.explained_variance_sums(returns, returns)) == 1.0
    assert losses.explained_variance(losses.explained_variance_sums(values, torch.full((200,), 0.1))) == 0.0
