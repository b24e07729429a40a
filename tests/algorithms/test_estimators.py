"""Advantages without a critic against the formulas of their papers, in float64; normalisation by what a run has seen."""

from __future__ import annotations

import importlib
import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from flat_config import flat_config
from ranks import run_ranks
from rlhf_spmd.algorithms import grpo, reinforce_plus_plus
from rlhf_spmd.algorithms.base import add_scores
from rlhf_spmd.algorithms.estimators import ESTIMATORS, WHITENED, in_group
from rlhf_spmd.algorithms.ppo import Config as PPOConfig
from rlhf_spmd.algorithms.values import gae_advantages
from rlhf_spmd.config.load import check_tree, to_dict
from rlhf_spmd.objectives.advantages import group_statistics, leave_one_out, moments
from rlhf_spmd.objectives.running import RunningMoments
from rlhf_spmd.parallel.world import World
from rlhf_spmd.rewards.results import RewardError
from rlhf_spmd.workers.compute import GlobalReduce
from rlhf_spmd.workers.objective import Rows

LENGTHS = [3, 1, 5, 2, 4, 6, 2, 3]
GROUPS = [7, 2, 7, 2, 7, 2, 5, 5]
SCORES = [1.0, 0.25, -0.5, 0.75, 0.0, 2.0, 1.0, 1.0]
GAMMA, COEF = 0.9, 0.2
TOKENS = sum(LENGTHS)
ALL = list(range(len(LENGTHS)))


def drawn(seed: int) -> Tensor:
    return torch.randn(TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.5


def fields_of(rows: list[int]) -> dict[str, Tensor]:
    old = drawn(0) - 2
    per_token = {"old_log_probs": old, "ref_log_prob": old + drawn(1), "values": drawn(2)}
    made = {name: torch.cat([x[:0], *(x.split(LENGTHS)[row] for row in rows)]) for name, x in per_token.items()}
    return {**made, "scores": torch.tensor([SCORES[row] for row in rows], dtype=torch.float64)}


def rows_at(rows: list[int]) -> Rows:
    pick = lambda values: torch.tensor([values[row] for row in rows], dtype=torch.int64)  # noqa: E731
    return Rows(torch.tensor(rows, dtype=torch.int64), pick(GROUPS), pick(LENGTHS))


def alone(state: dict[str, Any] | None = None) -> GlobalReduce:
    return GlobalReduce(lambda x: x, lambda x: x, {} if state is None else state)


def config(estimator: str, kl: bool, **more: Any) -> grpo.Config:
    gamma = GAMMA if estimator == "reinforce_plus_plus" else 1.0
    ctrl = {"kl_ctrl": {"kl_coef": COEF}} if kl else {}
    knobs = {"adv_estimator": estimator, "use_kl_in_reward": kl, "use_kl_loss": False, "gamma": gamma, **ctrl, **more}
    made = flat_config(grpo.Config, **knobs)
    check_tree(made, "algorithm")
    return made


def ppo_config(**knobs: Any) -> PPOConfig:
    return flat_config(PPOConfig, **knobs)


def wanted(estimator: str, kl: bool, by_std: bool = True) -> list[float]:
    """Token by token, from the papers."""
    fields = fields_of(ALL)
    gaps = [part.tolist() for part in (fields["old_log_probs"] - fields["ref_log_prob"]).split(LENGTHS)]
    if estimator == "reinforce_plus_plus":  # 2501.03262: A_t = sum over later tokens of gamma^(i - t) (r - beta KL_i)
        raw = []
        for score, row in zip(SCORES, gaps, strict=True):
            rewards = [-COEF * gap if kl else 0.0 for gap in row]
            rewards[-1] += score
            raw += [sum(GAMMA ** (i - t) * rewards[i] for i in range(t, len(row))) for t in range(len(row))]
    else:
        rewards = [score - (COEF * sum(row) if kl else 0.0) for score, row in zip(SCORES, gaps, strict=True)]
        raw = []
        for row, (reward, group) in enumerate(zip(rewards, GROUPS, strict=True)):
            its = [i for i in ALL if GROUPS[i] == group]
            mean = statistics.fmean(rewards[i] for i in its)
            deviation = statistics.stdev(rewards[i] for i in its)
            advantage = {
                "grpo": (reward - mean) / (deviation + 1e-6 if by_std else 1.0),  # 2402.03300, 4.1.2; 2503.20783
                "rloo": reward - statistics.fmean(rewards[i] for i in its if i != row),  # 2402.14740, 3.3
                # 2505.23585, 3.2: the baseline is the mean weighted by length
                "opo": reward - sum(LENGTHS[i] * rewards[i] for i in its) / sum(LENGTHS[i] for i in its),
                "reinforce_plus_plus_baseline": reward - mean,
            }[estimator]
            raw += [advantage] * LENGTHS[row]
    if estimator not in WHITENED:
        return raw
    mean, variance = statistics.fmean(raw), statistics.variance(raw)
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in raw]


@pytest.mark.parametrize("kl", [False, True], ids=["score", "score minus KL"])
@pytest.mark.parametrize("estimator", [*ESTIMATORS, "reinforce_plus_plus"])
def test_advantages_are_the_papers(estimator: str, kl: bool) -> None:
    settings, fields = config(estimator, kl), fields_of(ALL)
    made, metrics = in_group(settings)({name: fields[name] for name in ("scores", *settings.kl.inputs)}, rows_at(ALL), alone())
    expected = wanted(estimator, kl)
    assert made["advantages"].values.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert metrics["critic/advantages/max"] == pytest.approx(max(expected), rel=1e-9)
    assert metrics["critic/advantages/min"] == pytest.approx(min(expected), rel=1e-9)
    assert ("actor/kl" in metrics) == kl
    gaps = fields["old_log_probs"] - fields["ref_log_prob"]
    reward = (sum(SCORES) - (COEF * float(gaps.sum()) if kl else 0.0)) / len(SCORES)
    assert metrics["reward/token_level_sum"] == pytest.approx(reward, rel=1e-9)


def test_dr_grpo_does_not_divide() -> None:
    made, _ = in_group(config("grpo", False, norm_adv_by_std_in_grpo=False))(fields_of(ALL), rows_at(ALL), alone())
    assert made["advantages"].values.tolist() == pytest.approx(wanted("grpo", False, by_std=False), abs=1e-12)


def on_part(world: World, estimator: str, parts: list[list[int]]) -> tuple[list[float], dict[str, float]]:
    whole = GlobalReduce(
        lambda x: world.all.all_reduce(x, "control"), lambda x: world.all.all_reduce(x.clone(), "control", "max"), {}
    )
    mine = parts[world.rank]
    fields = fields_of(mine) if mine else dict.fromkeys(fields_of(ALL), torch.empty(0))
    made, metrics = in_group(config(estimator, True))(fields, rows_at(mine), whole)
    return made["advantages"].values.tolist(), metrics


@pytest.mark.parametrize("estimator", [*ESTIMATORS, "reinforce_plus_plus"])
@pytest.mark.parametrize("parts", [[[0, 2, 4], [1, 3, 5, 6, 7]], [ALL, []]], ids=["by groups", "none on one"])
def test_two_ranks_compute_what_one_does(estimator: str, parts: list[list[int]]) -> None:
    """Whitening is over all ranks, and so are all metrics."""
    made, metrics = in_group(config(estimator, True))(fields_of(ALL), rows_at(ALL), alone())
    rows = made["advantages"].values.split(LENGTHS)
    for part, (found, told) in zip(parts, run_ranks(2, on_part, estimator, parts), strict=True):
        assert found == pytest.approx([x for row in part for x in rows[row].tolist()], rel=1e-9, abs=1e-9)
        assert told == pytest.approx(metrics, rel=1e-9)


def test_what_is_told_of_groups() -> None:
    """Of 0 to 1 rewards: all right, all wrong, all equal between, and one that teaches."""
    scores = torch.tensor([1.0, 1, 0, 0, 0.5, 0.5, 0, 1], dtype=torch.float64)
    groups = torch.tensor([1, 1, 2, 2, 3, 3, 4, 4])
    assert group_statistics(scores, groups).tolist() == pytest.approx([4, 3, 1, 1, math.sqrt(0.5)])
    _, metrics = in_group(config("grpo", False))(fields_of(ALL), rows_at(ALL), alone())
    shares = {name: metrics[f"group/{name}_fraction"] for name in ("equal", "right", "wrong")}
    assert shares == {"equal": pytest.approx(1 / 3), "right": pytest.approx(1 / 3), "wrong": 0.0}
    spread = [statistics.stdev(s for s, g in zip(SCORES, GROUPS, strict=True) if g == group) for group in (7, 2, 5)]
    assert metrics["group/score_std_mean"] == pytest.approx(statistics.fmean(spread))
    assert metrics["actor/zero_advantage_fraction"] == 2 / 8


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_that_is_not_whole_is_an_error(estimator: str) -> None:
    some = [0, 1, 2, 3, 4, 5, 6]  # group 5 has one row left
    with pytest.raises(ValueError, match="group 5 has 1 where at least 2 are needed"):
        in_group(config(estimator, False))(fields_of(some), rows_at(some), alone())
    with pytest.raises(ValueError, match="group 5 has 2 where 3 are sampled"):
        in_group(config(estimator, False), 3)(fields_of(ALL), rows_at(ALL), alone())
    with pytest.raises(ValueError, match="group 7 has 1 where at least 2 are needed"):
        in_group(config(estimator, False), 1)(fields_of([2]), rows_at([2]), alone())
    with pytest.raises(ValueError, match="a group of one row has no others"):
        leave_one_out(torch.ones(3), torch.tensor([1, 1, 2]))


@pytest.mark.parametrize("estimator", [*ESTIMATORS, "reinforce_plus_plus", "gae"])
def test_rows_without_a_score_are_left_out(estimator: str) -> None:
    """The others are computed as if these were not there, and a critic's returns of these are its own values: it learns nothing."""
    scored = [1, 2, 4, 5]  # of group 7, of group 2, none of group 5
    critic = ppo_config(norm_reward="mean_std", norm_value=True, kl_ctrl={"kl_coef": COEF})
    function = gae_advantages(critic) if estimator == "gae" else in_group(config(estimator, True))
    fields = fields_of(ALL)
    fields["scores"][[row for row in ALL if row not in scored]] = torch.nan
    found, metrics = function(dict(fields), rows_at(ALL), alone())
    alike, told = function(fields_of(scored), rows_at(scored), alone())
    for name, field in found.items():
        made, expected = field.values.split(LENGTHS), iter(alike[name].values.split([LENGTHS[row] for row in scored]))
        for row in ALL:
            absent = fields["values"].split(LENGTHS)[row] if name == "returns" else torch.zeros(LENGTHS[row]).double()
            torch.testing.assert_close(made[row], next(expected) if row in scored else absent, rtol=1e-9, atol=1e-12)
    for name in ("reward/token_level_sum", "critic/advantage_mean", "critic/returns/mean", "critic/explained_variance"):
        assert metrics.get(name, 0.0) == pytest.approx(told.get(name, 0.0), rel=1e-9)
    assert {name: x for name, x in metrics.items() if name.startswith("group/")} == pytest.approx(
        {name: x for name, x in told.items() if name.startswith("group/")}
    )
    assert metrics.get("actor/zero_advantage_fraction", 0.5) == 0.5
    fields["scores"][:] = torch.nan
    nothing, told = function(fields, rows_at(ALL), alone())
    assert not nothing["advantages"].values.any() and all(map(math.isfinite, told.values()))


def test_a_row_is_scored_where_one_of_several_rewards_scores_it() -> None:
    nan, state = torch.nan, {"kl_coef": 0.5}
    sound = torch.zeros(3, dtype=torch.bool)
    fields = {"reward_scores": torch.tensor([1.0, nan, nan]), "cost_scores": torch.tensor([0.5, -2.0, nan])}
    fields |= {"reward_failed": sound, "cost_failed": sound}
    made, told = add_scores(fields, rows_at([0, 1, 2]), alone(state))
    assert made["scores"][:2].tolist() == [1.5, -2.0] and made["scores"][2].isnan() and told == {"reward/total_mean": -0.25}
    lost, told = add_scores({**fields, "reward_failed": torch.tensor([False, True, False])}, rows_at([0, 1, 2]), alone(state))
    assert lost["scores"].isnan().tolist() == [False, True, True] and told == {"reward/total_mean": 1.5}, "half a sum is none"
    nothing = {name: torch.full((3,), nan) if name.endswith("scores") else sound for name in fields}
    assert add_scores(nothing, rows_at([0, 1, 2]), alone(state))[1] == {}
    with pytest.raises(RewardError, match=r"^no reward scores any of the first 3 rows; look at"):
        add_scores(nothing, rows_at([0, 1, 2]), alone())


def test_without_groups_a_single_row_is_enough() -> None:
    made, metrics = in_group(config("reinforce_plus_plus", False), 1)(fields_of([2]), rows_at([2]), alone())
    assert len(made["advantages"].values) == LENGTHS[2] and not any(key.startswith("group/") for key in metrics)
    with pytest.raises(ValueError, match="reinforce_plus_plus is reinforce_plus_plus; use algorithm"):
        check_tree(flat_config(reinforce_plus_plus.Config, adv_estimator="rloo"), "algorithm")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"adv_estimator": "gae"}, "unknown algorithm.adv_estimator 'gae'; available: grpo, rloo, .*gae is algorithm.name=ppo"),
        ({"adv_estimator": "rloo", "gamma": 0.9}, "gamma=0.9 does nothing"),
        ({"adv_estimator": "opo", "norm_adv_by_std_in_grpo": False}, "norm_adv_by_std_in_grpo=false does nothing"),
        (
            {"adv_estimator": "reinforce_plus_plus", "loss_mode": "geo_mean", "loss_agg_mode": "seq-mean-token-mean"},
            "geo_mean needs one advantage per response",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tree(flat_config(grpo.Config, use_kl_loss=False, **knobs), "algorithm")


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gspo", "cispo"])
def test_an_algorithm_s_own_settings_are_sound_and_its_own(name: str) -> None:
    made = importlib.import_module(f"rlhf_spmd.algorithms.{name}").Config()
    check_tree(made, "algorithm")
    assert made.name == name
    usual = to_dict(grpo.Config())
    different = [key for key, value in to_dict(made).items() if value != usual[key]]
    assert len(different) >= 2, different


# -- what PPO normalises


def test_running_moments_are_those_of_all_numbers_so_far() -> None:
    """Far from 0, where a sum of squares would lose the variance of the whole."""
    numbers = torch.randn(60, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1e4
    state: dict[str, Any] = {}
    for part in numbers.split([7, 1, 30, 22]):
        RunningMoments("x", state).add(moments(part))
    known = RunningMoments("x", state)
    assert known.count == 60 and known.mean == pytest.approx(float(numbers.mean()), rel=1e-14)
    assert known.std == pytest.approx(float(numbers.std()), rel=1e-6)
    assert known.restore(known.normalise(numbers)).tolist() == pytest.approx(numbers.tolist(), rel=1e-14)
    assert RunningMoments("y", state).normalise(numbers).tolist() == numbers.tolist(), "nothing is known before the first"


def test_equal_numbers_are_not_divided_by_nothing() -> None:
    state: dict[str, Any] = {}
    RunningMoments("x", state).add(moments(torch.full((9,), 0.1, dtype=torch.float64)))
    assert RunningMoments("x", state).std == 1.0


@pytest.mark.parametrize("norm", ["mean_std", "std"])
def test_rewards_are_normalised_by_all_that_were_seen(norm: str) -> None:
    state: dict[str, Any] = {}
    made = ppo_config(use_kl_in_reward=False, norm_reward=norm)
    seen: list[float] = []
    for rows in ([0, 1, 2], [3, 4, 5, 6, 7]):
        seen += [SCORES[row] for row in rows]
        center, scale = statistics.fmean(seen) if norm == "mean_std" else 0.0, statistics.stdev(seen)
        fields = fields_of(rows)
        found, metrics = gae_advantages(made)(dict(fields), rows_at(rows), alone(state))
        fields["scores"] = (fields["scores"] - center) / scale
        same, told = gae_advantages(ppo_config(use_kl_in_reward=False))(fields, rows_at(rows), alone())
        torch.testing.assert_close(found["returns"].values, same["returns"].values, rtol=1e-9, atol=1e-12)
        assert metrics == pytest.approx(told, rel=1e-9)
    assert list(state) == ["reward_norm"] and state["reward_norm"][0] == len(SCORES)


def test_values_are_restored_and_returns_normalised() -> None:
    """The critic's numbers are in units of the returns so far: GAE sees them in rewards, targets are in units of all returns."""
    state: dict[str, Any] = {}
    made = ppo_config(use_kl_in_reward=False, norm_value=True, lam=0.9)
    plain, seen = ppo_config(use_kl_in_reward=False, lam=0.9), torch.empty(0, dtype=torch.float64)
    for _ in range(3):
        fields = fields_of(ALL)
        mean, std = (float(seen.mean()), float(seen.std())) if len(seen) else (0.0, 1.0)
        found, metrics = gae_advantages(made)(dict(fields), rows_at(ALL), alone(state))
        same, _ = gae_advantages(plain)(fields | {"values": fields["values"] * std + mean}, rows_at(ALL), alone())
        torch.testing.assert_close(found["advantages"].values, same["advantages"].values, rtol=1e-8, atol=1e-9)
        returns = same["returns"].values
        seen = torch.cat([seen, returns])
        wanted_returns = (returns - seen.mean()) / seen.std()
        torch.testing.assert_close(found["returns"].values, wanted_returns, rtol=1e-8, atol=1e-9)
        assert metrics["critic/value_norm_mean"] == pytest.approx(float(seen.mean()))
    assert state["value_norm"][0] == 3 * TOKENS


def test_an_unknown_normalisation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.norm_reward='yes' is not known; allowed: none, mean_std"):
        check_tree(ppo_config(norm_reward="yes"), "algorithm")
