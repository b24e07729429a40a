"""Policy losses against the formulas of their papers: value and gradient, in float64, whole and in micro-batches."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from flat_config import flat_config, with_knobs
from rlhf_spmd.algorithms.policy import LOSS_MODES, PolicyConfig, clipped_policy
from rlhf_spmd.config.load import check_tree
from rlhf_spmd.config.rules import check_section
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.objectives.losses import LOSS_AGG_MODES
from rlhf_spmd.objectives.rollout_correction import RejectionKind, RolloutCorrectionConfig, correction_weights, mismatch_sums
from rlhf_spmd.workers.objective import Rows, Totals

LENGTHS = [4, 1, 7, 3, 6]
LIMIT = 9  # tokens of a response, at most
LOW, HIGH, DUAL = 0.15, 0.25, 1.2
OF_RESPONSES = ("gspo", "geo_mean")  # losses that have one mode of aggregation


def drawn(seed: int, spread: float = 1.0) -> Tensor:
    return torch.randn(sum(LENGTHS), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


def sample() -> dict[str, Tensor]:
    """Advantages are a row's, of both signs; ratios are on both sides of the clip range."""
    per_row = torch.tensor([0.7, -1.3, 0.4, -0.6, 1.1], dtype=torch.float64)
    old = drawn(1) - 2
    return {
        "log_probs": (old + drawn(2, 0.4)).requires_grad_(),
        "old_log_probs": old,
        "rollout_log_probs": old + drawn(3, 0.3),
        "advantages": torch.repeat_interleave(per_row, torch.tensor(LENGTHS)),
        "entropy": drawn(4).abs(),
    }


def by_row(x: Tensor) -> list[list[float]]:
    return [part.tolist() for part in x.detach().split(LENGTHS)]


# Of one row: log-ratios and advantage -> each token's loss, and the derivative of their *mean* by each token's log-prob.
Row = tuple[list[float], list[float]]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def gspo(logs: list[float], a: float, new: list[float]) -> Row:
    """arXiv 2507.18071, eq. 5 to 7, and the gradient of eq. 10: of an unclipped row, A s / |y| grad log p."""
    s = math.prod(math.exp(x) for x in logs) ** (1 / len(logs))
    loss = -min(s * a, clip(s, 1 - LOW, 1 + HIGH) * a)
    is_free = s * a <= clip(s, 1 - LOW, 1 + HIGH) * a
    return [loss] * len(logs), [-a * s / len(logs) if is_free else 0.0] * len(logs)


def geo_mean(logs: list[float], a: float, new: list[float]) -> Row:
    """arXiv 2507.20673, eq. 4: the product of min(r^sgn, clip(r, e^-low, e^high)^sgn)^sgn to the power 1 / |o|."""
    sign = math.copysign(1, a)
    ratios = [math.exp(x) for x in logs]
    kept = [min(r**sign, clip(r, math.exp(-LOW), math.exp(HIGH)) ** sign) ** sign for r in ratios]
    mean = math.prod(kept) ** (1 / len(kept))
    slope = [-a * mean / len(kept) if abs(k - r) < 1e-15 * r else 0.0 for k, r in zip(kept, ratios, strict=True)]
    return [-a * mean] * len(kept), slope


def cispo(logs: list[float], a: float, new: list[float]) -> Row:
    """arXiv 2506.13585, eq. 4 and 5: sg(clip(r)) A log p."""
    weights = [clip(math.exp(x), 1 - LOW, 1 + HIGH) for x in logs]
    return [-w * a * p for w, p in zip(weights, new, strict=True)], [-w * a / len(logs) for w in weights]


def sapo(logs: list[float], a: float, new: list[float]) -> Row:
    """arXiv 2511.20347, eq. 5 and 6; the gradient is that of eq. 8: sech^2(tau / 2 (r - 1)) r A."""
    tau, ratios = (0.9 if a > 0 else 1.2), [math.exp(x) for x in logs]
    gates = [4 / tau / (1 + math.exp(-tau * (r - 1))) for r in ratios]
    slopes = [-a * r / math.cosh(tau / 2 * (r - 1)) ** 2 / len(logs) for r in ratios]
    return [-a * gate for gate in gates], slopes


def vanilla(logs: list[float], a: float, new: list[float]) -> Row:
    """arXiv 1707.06347, eq. 7, and arXiv 1912.09729: for A < 0 at most -A c. The bounds are open on either side: 2503.14476, eq. 8."""
    losses, slopes = [], []
    for r in map(math.exp, logs):
        surrogate = min(r * a, clip(r, 1 - LOW, 1 + HIGH) * a)
        bounded = max(surrogate, DUAL * a) if a < 0 else surrogate
        losses.append(-bounded)
        slopes.append(-a * r / len(logs) if bounded == r * a else 0.0)
    return losses, slopes


PAPERS = {"vanilla": vanilla, "gspo": gspo, "geo_mean": geo_mean, "cispo": cispo, "sapo": sapo}


def config(mode: str, agg: str = "seq-mean-token-mean", **more: Any) -> PolicyConfig:
    knobs = {"tau_pos": 0.9, "tau_neg": 1.2} if mode == "sapo" else {"clip_ratio_low": LOW, "clip_ratio_high": HIGH}
    knobs |= {"clip_ratio_c": DUAL} if mode == "vanilla" else {}
    settings = flat_config(PolicyConfig, loss_mode=mode, loss_agg_mode=agg, **knobs, **more)
    check_tree(settings, "algorithm")
    return settings


def computed(
    settings: PolicyConfig, parts: list[list[int]], number: int | None = None
) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient by the log-probs and statistics, summed over micro-batches of these rows."""
    objective = clipped_policy(settings, SamplingConfig(max_response_length=LIMIT), number)
    fields = sample()
    totals = Totals(sum(LENGTHS), len(LENGTHS))
    loss, stats = torch.zeros((), dtype=torch.float64), {}  # type: Tensor, dict[str, float]
    for part in parts:
        fields_of_part = {name: torch.cat([x[:0], *(x.split(LENGTHS)[row] for row in part)]) for name, x in fields.items()}
        ids = torch.tensor(part, dtype=torch.int64)
        value, metrics = objective.loss(
            fields_of_part, Rows(ids, ids, torch.tensor([LENGTHS[row] for row in part], dtype=torch.int64)), totals
        )
        loss = loss + value
        stats = {name: stats.get(name, 0.0) + float(x) for name, x in metrics.items()}
    (gradient,) = torch.autograd.grad(loss, fields["log_probs"])
    return float(loss.detach()), gradient, stats


WHOLE = [list(range(len(LENGTHS)))]


@pytest.mark.parametrize("mode", LOSS_MODES)
def test_value_and_gradient_are_the_papers(mode: str) -> None:
    fields = sample()
    log_ratios, new = by_row(fields["log_probs"] - fields["old_log_probs"]), by_row(fields["log_probs"])
    rows = [PAPERS[mode](logs, a[0], its) for logs, a, its in zip(log_ratios, by_row(fields["advantages"]), new, strict=True)]
    wanted = sum(sum(losses) / len(losses) for losses, _ in rows) / len(rows)
    slopes = torch.tensor([slope / len(rows) for _, its in rows for slope in its], dtype=torch.float64)
    loss, gradient, stats = computed(config(mode), WHOLE)
    assert loss == pytest.approx(wanted, rel=1e-12) and stats["actor/pg_loss"] == loss
    torch.testing.assert_close(gradient, slopes, rtol=1e-10, atol=1e-12)
    if mode == "sapo":
        assert "actor/clip_frac" not in stats
    else:
        assert 0 < stats["actor/clip_frac"] < 1, "the example clips some and not all"
    if mode == "vanilla":
        ratios = [math.exp(x) for row in log_ratios for x in row]
        tokens = list(zip(ratios, fields["advantages"].tolist(), strict=True))
        clipped = [(a > 0 and ratio > 1 + HIGH) or (a < 0 and ratio < 1 - LOW) for ratio, a in tokens]
        dual = [a < 0 and ratio > DUAL for ratio, a in tokens]
        assert stats["actor/clip_frac"] == pytest.approx(sum(clipped) / len(tokens))
        assert stats["actor/clip_frac_dual"] == pytest.approx(sum(dual) / len(tokens)) and any(dual)
        assert stats["actor/ppo_kl"] == pytest.approx(-sum(map(math.log, ratios)) / len(tokens))


@pytest.mark.parametrize(
    ("mode", "agg"),
    [(mode, agg) for mode in LOSS_MODES for agg in (["seq-mean-token-mean"] if mode in OF_RESPONSES else LOSS_AGG_MODES)],
)
def test_micro_batches_add_up_to_the_same_loss(mode: str, agg: str) -> None:
    """With everything that a loss can have: correction, entropy."""
    correction = RolloutCorrectionConfig("sequence", 1.1, "seq_mean_k1", 1.3)
    settings = config(mode, agg, rollout_correction=correction, entropy_coeff=0.01)
    loss, gradient, stats = computed(settings, WHOLE)
    for parts in ([[0], [1], [2], [3], [4]], [[3, 0], [], [4, 2, 1]]):
        other, its_gradient, its_stats = computed(settings, parts)
        assert other == pytest.approx(loss, rel=1e-12, abs=1e-14)
        torch.testing.assert_close(its_gradient, gradient, rtol=1e-12, atol=1e-14)
        assert its_stats == pytest.approx(stats, rel=1e-12, abs=1e-14)
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_sampling(level: str) -> None:
    """min(pi_train / pi_rollout, threshold), of a token or of the product over its response; it takes no gradient."""
    fields = sample()
    logs = by_row(fields["old_log_probs"] - fields["rollout_log_probs"])
    ratios = [math.exp(x) if level == "token" else math.exp(sum(row)) for row in logs for x in row]
    settings = config("vanilla", "token-mean", rollout_correction=RolloutCorrectionConfig(level, 1.2))
    loss, gradient, stats = computed(settings, WHOLE)
    plain, its_gradient, _ = computed(config("vanilla", "token-mean"), WHOLE)
    weights = torch.tensor([min(ratio, 1.2) for ratio in ratios], dtype=torch.float64)
    torch.testing.assert_close(gradient, its_gradient * weights, rtol=1e-12, atol=1e-15)
    assert loss != plain
    assert stats["rollout_corr/rollout_is_mean"] == pytest.approx(float(weights.mean()), rel=1e-12)
    assert stats["rollout_corr/rollout_is_ratio_fraction_high"] == sum(x > 1.2 for x in ratios) / len(ratios) > 0


@pytest.mark.parametrize("kind", get_args(RejectionKind))
def test_rejection(kind: str) -> None:
    level, _, estimate = kind.rpartition("_")
    fields = sample()
    rows = by_row(fields["old_log_probs"] - fields["rollout_log_probs"])
    terms = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}
    flat = [[terms[estimate](d) for d in row] for row in rows]
    if level != "token":
        joined = {"seq_sum": sum, "seq_mean": lambda row: sum(row) / len(row), "seq_max": max}[level]
        flat = [[joined(row)] * len(row) for row in flat]
    values = [x for row in flat for x in row]
    upper = math.exp(0.1) if estimate == "k1" else sorted(values)[len(values) // 2] * 1.001
    settings = RolloutCorrectionConfig(rollout_rs=kind, rollout_rs_threshold=upper)
    check_section(settings, "algorithm.rollout_correction")
    kept = [abs(x) <= 0.1 for x in values] if estimate == "k1" else [x <= upper for x in values]
    weights, stats = correction_weights(settings, fields["old_log_probs"], fields["rollout_log_probs"], torch.tensor(LENGTHS))
    assert weights.tolist() == [float(x) for x in kept] and 0 < sum(kept) < len(kept)
    assert stats["rollout_rs_masked_fraction"].tolist() == [not x for x in kept]


@pytest.mark.parametrize("beside", [{}, {"rollout_is": "token", "rollout_rs": "token_k2", "rollout_rs_threshold": 0.05}])
def test_a_token_below_the_veto_rejects_its_response(beside: dict[str, Any]) -> None:
    """verl's rollout_token_veto_threshold: of training's probability over the rollout's; beside the other corrections."""
    fields = sample()
    rows = by_row(fields["old_log_probs"] - fields["rollout_log_probs"])
    settings, others = RolloutCorrectionConfig(rollout_token_veto_threshold=0.8, **beside), RolloutCorrectionConfig(**beside)
    check_section(settings, "algorithm.rollout_correction")
    assert settings.active
    probs = fields["old_log_probs"], fields["rollout_log_probs"], torch.tensor(LENGTHS)
    (weights, stats), (plain, _) = correction_weights(settings, *probs), correction_weights(others, *probs)
    vetoed = [min(map(math.exp, row)) < 0.8 for row in rows for _ in row]
    assert weights.tolist() == [0.0 if no else w for no, w in zip(vetoed, plain.tolist(), strict=True)]
    assert stats["rollout_is_veto_fraction"].tolist() == vetoed and 0 < sum(vetoed) < len(vetoed)
    assert stats["rollout_is_catastrophic_token_fraction"].tolist() == [math.exp(d) < 0.8 for row in rows for d in row]


def test_one_token_that_is_far_off_rejects_its_row() -> None:
    """exp(10) - 1 - 10 nats: the bound of a token's KL in losses is none of what is compared with a threshold, or metrics."""
    old, rollout, lengths = torch.full((100,), -1.0), torch.full((100,), -1.0), torch.tensor([100])
    rollout[50] = -11.0
    settings = RolloutCorrectionConfig(rollout_rs="seq_mean_k3", rollout_rs_threshold=1.0)
    assert not correction_weights(settings, old, rollout, lengths)[0].any()
    assert mismatch_sums(old, rollout, lengths)["rollout_corr/k3_kl"][0] == pytest.approx(math.exp(10) - 11)


def test_where_the_rollout_is_exact_a_correction_changes_no_bit() -> None:
    old = sample()["old_log_probs"]
    settings = RolloutCorrectionConfig("sequence", 2.0, "seq_sum_k1", 1.01)
    weights, _ = correction_weights(settings, old, old.clone(), torch.tensor(LENGTHS))
    assert torch.equal(weights, torch.ones_like(old))
    metrics = mismatch_sums(old, old.clone(), torch.tensor(LENGTHS))
    assert metrics.pop("rollout_corr/ppl_ratio") == [len(LENGTHS), len(LENGTHS)]
    assert metrics.pop("training/rollout_probs_diff_max") == 0.0
    assert all(total == 0.0 and count == len(old) for total, count in metrics.values())


def test_mismatch_statistics() -> None:
    fields = sample()
    old, rollout = fields["old_log_probs"], fields["rollout_log_probs"]
    pairs = [list(zip(a, b, strict=True)) for a, b in zip(by_row(old), by_row(rollout), strict=True)]
    flat = [pair for row in pairs for pair in row]
    metrics = mismatch_sums(old, rollout, torch.tensor(LENGTHS))
    assert metrics["rollout_corr/kl"] == [pytest.approx(sum(b - a for a, b in flat), rel=1e-12), len(flat)]
    assert metrics["rollout_corr/k3_kl"][0] == pytest.approx(sum(math.exp(a - b) - 1 - (a - b) for a, b in flat), rel=1e-12)
    ratios = [math.exp(-sum(a for a, _ in row) / len(row)) / math.exp(-sum(b for _, b in row) / len(row)) for row in pairs]
    assert metrics["rollout_corr/ppl_ratio"] == [pytest.approx(sum(ratios), rel=1e-12), len(ratios)]
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(max(abs(math.exp(a) - math.exp(b)) for a, b in flat))


def test_the_entropy_coefficient_moves_on_a_line() -> None:
    settings = config("vanilla", "token-mean", entropy_coeff=0.5, entropy_coeff_end=0.1, entropy_coeff_steps=5)
    coefficients = [settings.policy.entropy_coefficient(number) for number in range(1, 8)]
    assert coefficients == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.1, 0.1])
    still, end = config("vanilla", "token-mean"), with_knobs(settings, entropy_coeff=0.1, entropy_coeff_end=None)
    entropy = float(sample()["entropy"].mean())
    assert computed(settings, WHOLE, 5)[0] == pytest.approx(computed(still, WHOLE)[0] - 0.1 * entropy, rel=1e-12)
    assert computed(settings, WHOLE, 9)[0] == pytest.approx(
        computed(with_knobs(end, entropy_coeff_steps=None), WHOLE)[0], rel=1e-12
    )
    with pytest.raises(ValueError, match="does not tell clipped_policy its global_step"):
        clipped_policy(settings, SamplingConfig(max_response_length=LIMIT))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"loss_mode": "gpso"}, "unknown algorithm.loss_mode 'gpso'; available: vanilla, gspo"),
        ({"loss_mode": "sapo", "clip_ratio_high": 0.3}, "clip_ratio_high=0.3 does nothing with algorithm.loss_mode=sapo"),
        ({"tau_neg": 2.0}, "tau_neg=2.0 does nothing with algorithm.loss_mode=vanilla"),
        ({"loss_mode": "cispo", "clip_ratio_c": 5.0}, "clip_ratio_c=5.0 does nothing"),
        ({"clip_ratio_low": 1.2}, "clip_ratio_low=1.2: must be at least 0 and at most 1"),
        ({"clip_ratio_c": 1.0}, "clip_ratio_c=1.0: must be above 1"),
        ({"rollout_is": "tokens"}, "rollout_is='tokens' is not known; did you mean 'token'. allowed: token, sequence, or null"),
        ({"rollout_rs": "geometric"}, ".*rollout_rs='geometric' is not known; allowed"),
        ({"rollout_rs_threshold": 2.0}, "rollout_rs_threshold=2.0 does nothing without .*rollout_rs; leave it out"),
        ({"rollout_is_threshold": 5.0}, "rollout_is_threshold=5.0 does nothing without .*rollout_is; leave it out"),
        ({"rollout_is_threshold": 0.0}, "must be above 0"),
        ({"rollout_token_veto_threshold": 1.5}, "rollout_token_veto_threshold=1.5: must be above 0 and at most 1"),
    ],
)
def test_settings_that_cannot_be_are_refused(knobs: dict[str, Any], message: str) -> None:
    is_correction = all(name.startswith(("rollout_", "bypass_")) and name != "rollout_correction" for name in knobs)
    config = RolloutCorrectionConfig(**knobs) if is_correction else flat_config(PolicyConfig, **knobs)
    with pytest.raises(ValueError, match=message):
        check_tree(config, "algorithm")
