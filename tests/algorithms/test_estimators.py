"""Advantages without a critic against the formulas of their papers, in float64; normalisation by what a run has seen."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from flat_config import flat_config
from ranks import run_ranks
from rlhf_spmd.algorithms import grpo
from rlhf_spmd.algorithms.base import add_scores
from rlhf_spmd.algorithms.estimators import ESTIMATORS, WHITENED, estimated_advantages
from rlhf_spmd.algorithms.ppo import Config as PPOConfig
from rlhf_spmd.algorithms.values import gae_advantages
from rlhf_spmd.config.load import check_tree
from rlhf_spmd.data.batch import ragged
from rlhf_spmd.objectives.advantages import group_statistics, leave_one_out, moments
from rlhf_spmd.objectives.running import RunningMoments
from rlhf_spmd.parallel.world import World
from rlhf_spmd.rewards.results import RewardError
from rlhf_spmd.workers.compute import Function, GlobalReduce
from rlhf_spmd.workers.objective import Rows

LENGTHS = [3, 1, 5, 2, 4, 6, 2, 3]
GROUPS = [7, 2, 7, 2, 7, 2, 5, 5]
SCORES = [1.0, 0.25, -0.5, 0.75, 0.0, 2.0, 1.0, 1.0]
GAMMA, COEF = 0.9, 0.2
TOKENS = sum(LENGTHS)
ALL = list(range(len(LENGTHS)))
ALL_ESTIMATORS = [*ESTIMATORS, "reinforce_plus_plus"]


def drawn(seed: int) -> Tensor:
    return torch.randn(TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.5


def fields_of(rows: list[int]) -> dict[str, Tensor]:
    old = drawn(0) - 2
    per_token = {"old_log_probs": old, "ref_log_prob": old + drawn(1), "values": drawn(2)}
    computed = {name: torch.cat([x[:0], *(x.split(LENGTHS)[row] for row in rows)]) for name, x in per_token.items()}
    return {**computed, "scores": torch.tensor([SCORES[row] for row in rows], dtype=torch.float64)}


def rows_at(rows: list[int]) -> Rows:
    pick = lambda values: torch.tensor([values[row] for row in rows], dtype=torch.int64)  # noqa: E731
    return Rows(torch.tensor(rows, dtype=torch.int64), pick(GROUPS), pick(LENGTHS))


def alone(state: dict[str, Any] | None = None) -> GlobalReduce:
    return GlobalReduce(lambda x: x, lambda x: x, {} if state is None else state)


def config(estimator: str, kl: bool, **more: Any) -> grpo.Config:
    gamma = GAMMA if estimator == "reinforce_plus_plus" else 1.0
    ctrl = {"kl_ctrl": {"kl_coef": COEF}} if kl else {}
    knobs = {"adv_estimator": estimator, "use_kl_in_reward": kl, "use_kl_loss": False, "gamma": gamma, **ctrl, **more}
    computed = flat_config(grpo.Config, **knobs)
    check_tree(computed, "algorithm")
    return computed


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
            members = [i for i in ALL if GROUPS[i] == group]
            mean = statistics.fmean(rewards[i] for i in members)
            deviation = statistics.stdev(rewards[i] for i in members)
            advantage = {
                "grpo": (reward - mean) / (deviation + 1e-6 if by_std else 1.0),  # 2402.03300, 4.1.2; 2503.20783
                "rloo": reward - statistics.fmean(rewards[i] for i in members if i != row),  # 2402.14740, 3.3
                # 2505.23585, 3.2: the baseline is the mean weighted by length
                "opo": reward - sum(LENGTHS[i] * rewards[i] for i in members) / sum(LENGTHS[i] for i in members),
                "reinforce_plus_plus_baseline": reward - mean,
            }[estimator]
            raw += [advantage] * LENGTHS[row]
    if estimator not in WHITENED:
        return raw
    mean, variance = statistics.fmean(raw), statistics.variance(raw)
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in raw]


@pytest.mark.parametrize("kl", [False, True], ids=["score", "score minus KL"])
@pytest.mark.parametrize("estimator", ALL_ESTIMATORS)
def test_advantages_are_the_papers(estimator: str, kl: bool) -> None:
    settings, fields = config(estimator, kl), fields_of(ALL)
    computed, metrics = estimated_advantages(settings)(
        {name: fields[name] for name in ("scores", *settings.kl.inputs)}, rows_at(ALL), alone()
    )
    expected = wanted(estimator, kl)
    assert computed["advantages"].values.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert metrics["critic/advantages/max"] == pytest.approx(max(expected), rel=1e-9)
    assert metrics["critic/advantages/min"] == pytest.approx(min(expected), rel=1e-9)
    assert ("actor/kl" in metrics) == kl
    gaps = fields["old_log_probs"] - fields["ref_log_prob"]
    reward = (sum(SCORES) - (COEF * float(gaps.sum()) if kl else 0.0)) / len(SCORES)
    assert metrics["reward/token_level_sum"] == pytest.approx(reward, rel=1e-9)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_episode_in_several_rows_is_judged_as_in_one(estimator: str) -> None:
    """Each response as two conversations of an episode, out of order: its tokens keep their advantages."""
    whole = rows_at(ALL)
    first = [length // 2 for length in LENGTHS]
    parts = [(4 * i + slot, i, n) for i, k in enumerate(first) for slot, n in ((0, k), (2, LENGTHS[i] - k))]
    parts = [*parts[6:], *parts[:6]]
    ids, episodes, lengths = (torch.tensor(column) for column in zip(*parts, strict=True))
    scores = torch.tensor(SCORES, dtype=torch.float64)
    settings = config(estimator, False)
    expected, expected_metrics = estimated_advantages(settings)({"scores": scores}, whole, alone())
    per_row = [values[0].item() for values in expected["advantages"].rows()]
    rows = Rows(ids, whole.group_ids[episodes], lengths)
    judged, metrics = estimated_advantages(settings, rows_per_episode=4)({"scores": scores[episodes]}, rows, alone())
    values = [per_row[i] for _, i, n in parts for _ in range(n)]
    assert judged["advantages"].values.tolist() == pytest.approx(values, rel=1e-9, abs=1e-12)
    for name in ("score_std_mean", "equal_fraction"):
        assert metrics[f"group/{name}"] == pytest.approx(expected_metrics[f"group/{name}"])


def test_a_turn_has_credit_by_the_turns_behind_it() -> None:
    """Rows without turns of others, with several turns, with none of the model's own, and with one at each end."""
    turns = [[2, 1], [0, 1], [], [1, 1, 3]]  # tokens of the model's turns, with one token of others between two
    masks = [
        [bit for n, turn in enumerate(row) for bit in [False] * (n > 0 or i == 1) + [True] * turn]
        for i, row in enumerate(turns)
    ]
    lengths = torch.tensor([sum(row) for row in turns])
    ids = torch.arange(4)
    rows = Rows(ids, torch.zeros_like(ids), lengths, ragged(masks, torch.bool))
    scores = torch.tensor([1.0, 0.0, torch.nan, 3.0], dtype=torch.float64)
    plain, discounted = (
        estimated_advantages(config("rloo", False, turn_discount=discount))({"scores": scores}, rows, alone())[0]["advantages"]
        for discount in (1.0, 0.5)
    )
    factors = [[0.5, 0.5, 1.0], [1.0], [], [0.25, 0.5, 1.0, 1.0, 1.0]]
    for one, two, factor, mask in zip(plain.rows(), discounted.rows(), factors, masks, strict=True):
        own = torch.tensor(mask, dtype=torch.bool)
        assert two[own].tolist() == pytest.approx([x * f for x, f in zip(one[own].tolist(), factor, strict=True)], rel=1e-12)
        assert not two[~own].any()
    assert plain.values.abs().sum() > 0


def test_a_critics_advantages_of_an_episode_that_failed() -> None:
    """It may have drawn nothing; the other rows' advantages are those without it."""
    gae_of = gae_advantages(ppo_config())
    lengths = torch.tensor([2, 0, 3])
    values = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)
    log_probs = {"old_log_probs": torch.zeros(5, dtype=torch.float64), "ref_log_prob": torch.ones(5, dtype=torch.float64)}
    scores = torch.tensor([1.0, torch.nan, -1.0], dtype=torch.float64)
    ids = torch.arange(3)
    computed, _ = gae_of({"scores": scores, "values": values, **log_probs}, Rows(ids, ids, lengths), alone())
    kept = torch.tensor([0, 2])
    expected, _ = gae_of({"scores": scores[kept], "values": values, **log_probs}, Rows(kept, kept, lengths[kept]), alone())
    for name in ("advantages", "returns"):
        assert computed[name].values.tolist() == expected[name].values.tolist()


def test_dr_grpo_does_not_divide() -> None:
    computed, _ = estimated_advantages(config("grpo", False, norm_adv_by_std_in_grpo=False))(
        fields_of(ALL), rows_at(ALL), alone()
    )
    assert computed["advantages"].values.tolist() == pytest.approx(wanted("grpo", False, by_std=False), abs=1e-12)


def function_of(estimator: str) -> Function:
    if estimator == "gae":
        kl = {"type": "adaptive", "kl_coef": COEF, "target_kl": 0.1, "horizon": 100}
        return gae_advantages(ppo_config(norm_reward="mean_std", norm_value=True, kl_ctrl=kl))
    return estimated_advantages(config(estimator, True))


def on_part(world: World, parts: list[list[int]]) -> list[tuple[dict[str, list[float]], dict[str, float]]]:
    """Of every estimator this rank's fields and the metrics."""
    part, results = parts[world.rank], []
    for estimator in (*ALL_ESTIMATORS, "gae"):
        reduce = GlobalReduce(
            lambda x: world.all.all_reduce(x, "control"), lambda x: world.all.all_reduce(x.clone(), "control", "max"), {}
        )
        fields = fields_of(part) if part else dict.fromkeys(fields_of(ALL), torch.empty(0))
        computed, metrics = function_of(estimator)(fields, rows_at(part), reduce)
        results.append(({name: field.values.tolist() for name, field in computed.items()}, metrics))
    return results


@pytest.mark.parametrize("parts", [[[0, 2, 4], [1, 3, 5, 6, 7]], [ALL, []]], ids=["by groups", "none on one"])
def test_two_ranks_compute_what_one_does(parts: list[list[int]]) -> None:
    """Whitening is over all ranks, and so are all metrics."""
    for estimator, *results in zip((*ALL_ESTIMATORS, "gae"), *run_ranks(2, on_part, parts), strict=True):
        computed, metrics = function_of(estimator)(fields_of(ALL), rows_at(ALL), alone())
        for part, (fields, metrics_of_rank) in zip(parts, results, strict=True):
            assert metrics_of_rank == pytest.approx(metrics, rel=1e-9), estimator
            for name, field in computed.items():
                rows = field.values.split(LENGTHS)
                expected = [x for row in part for x in rows[row].tolist()]
                assert fields[name] == pytest.approx(expected, rel=1e-9, abs=1e-9), estimator


def test_metrics_of_groups() -> None:
    """Of 0 to 1 rewards: all right, all wrong, all equal between, and one that teaches."""
    scores = torch.tensor([1.0, 1, 0, 0, 0.5, 0.5, 0, 1], dtype=torch.float64)
    groups = torch.tensor([1, 1, 2, 2, 3, 3, 4, 4])
    assert group_statistics(scores, groups).tolist() == pytest.approx([4, 3, 1, 1, math.sqrt(0.5)])
    _, metrics = estimated_advantages(config("grpo", False))(fields_of(ALL), rows_at(ALL), alone())
    shares = {name: metrics[f"group/{name}_fraction"] for name in ("equal", "right", "wrong")}
    assert shares == {"equal": pytest.approx(1 / 3), "right": pytest.approx(1 / 3), "wrong": 0.0}
    spread = [statistics.stdev(s for s, g in zip(SCORES, GROUPS, strict=True) if g == group) for group in (7, 2, 5)]
    assert metrics["group/score_std_mean"] == pytest.approx(statistics.fmean(spread))
    assert metrics["actor/zero_advantage_fraction"] == 2 / 8


@pytest.mark.parametrize(
    ("rows", "sampled", "message"),
    [
        (ALL[:7], None, "group 5 has 1 where at least 2 are needed"),
        (ALL, 3, "group 5 has 2 where 3 are sampled"),
        ([2], 1, "group 7 has 1 where at least 2 are needed"),
    ],
)
def test_a_group_that_is_not_complete_is_an_error(rows: list[int], sampled: int | None, message: str) -> None:
    for estimator in ESTIMATORS:
        with pytest.raises(ValueError, match=message):
            estimated_advantages(config(estimator, False), sampled)(fields_of(rows), rows_at(rows), alone())
    with pytest.raises(ValueError, match="a group of one row has no others"):
        leave_one_out(torch.ones(3), torch.tensor([1, 1, 2]))


@pytest.mark.parametrize("estimator", [*ALL_ESTIMATORS, "gae"])
def test_rows_without_a_score_are_left_out(estimator: str) -> None:
    """The others are computed as if these were not there, and a critic's returns of these are its own values: it learns nothing."""
    scored = [1, 2, 4, 5]  # of group 7, of group 2, none of group 5
    function = function_of(estimator)
    fields = fields_of(ALL)
    fields["scores"][[row for row in ALL if row not in scored]] = torch.nan
    computed, metrics = function(dict(fields), rows_at(ALL), alone())
    without, metrics_without = function(fields_of(scored), rows_at(scored), alone())
    for name, field in computed.items():
        expected = iter(without[name].values.split([LENGTHS[row] for row in scored]))
        by_row = field.values.split(LENGTHS)
        for row in ALL:
            absent = fields["values"].split(LENGTHS)[row] if name == "returns" else torch.zeros(LENGTHS[row]).double()
            torch.testing.assert_close(by_row[row], next(expected) if row in scored else absent, rtol=1e-9, atol=1e-12)
    means = ("reward/token_level_sum", "critic/advantage_mean", "critic/returns/mean", "critic/explained_variance")
    for name in (*means, *(name for name in metrics if name.startswith("group/"))):
        assert metrics.get(name, 0.0) == pytest.approx(metrics_without.get(name, 0.0), rel=1e-9)
    assert metrics.get("actor/zero_advantage_fraction", 0.5) == 0.5
    fields["scores"][:] = torch.nan
    nothing, metrics = function(fields, rows_at(ALL), alone())
    assert not nothing["advantages"].values.any() and all(map(math.isfinite, metrics.values()))


def test_a_row_is_scored_where_one_of_several_rewards_scores_it() -> None:
    nan, state = torch.nan, {"kl_coef": 0.5}
    sound = torch.zeros(3, dtype=torch.bool)
    fields = {"reward_scores": torch.tensor([1.0, nan, nan]), "cost_scores": torch.tensor([0.5, -2.0, nan])}
    fields |= {"reward_failed": sound, "cost_failed": sound}
    fields |= {"reward_answer_codes": torch.full((3,), nan), "cost_answer_codes": torch.tensor([7.0, -1.0, nan])}
    sums, metrics = add_scores(fields, rows_at([0, 1, 2]), alone(state))
    assert (
        sums["scores"][:2].tolist() == [1.5, -2.0]
        and sums["scores"][2].isnan()
        and metrics == {"reward/total_mean": [-0.5, 2.0]}
    )
    assert sums["answer_codes"][:2].tolist() == [7.0, -1.0] and sums["answer_codes"][2].isnan()
    failed, metrics = add_scores(
        {**fields, "reward_failed": torch.tensor([False, True, False])}, rows_at([0, 1, 2]), alone(state)
    )
    assert failed["scores"].isnan().tolist() == [False, True, True] and metrics == {"reward/total_mean": [1.5, 1.0]}, (
        "half a sum is none"
    )
    nothing = {name: torch.full((3,), nan) if name.endswith(("scores", "codes")) else sound for name in fields}
    assert add_scores(nothing, rows_at([0, 1, 2]), alone(state))[1] == {}
    with pytest.raises(RewardError, match=r"^no reward scores any of the first 3 rows; look at"):
        add_scores(nothing, rows_at([0, 1, 2]), alone())


def test_without_groups_a_single_row_is_enough() -> None:
    computed, metrics = estimated_advantages(config("reinforce_plus_plus", False), 1)(fields_of([2]), rows_at([2]), alone())
    assert len(computed["advantages"].values) == LENGTHS[2] and not any(key.startswith("group/") for key in metrics)


@pytest.mark.parametrize(
    ("schema", "knobs", "message"),
    [
        (
            grpo.Config,
            {"adv_estimator": "gae"},
            "unknown algorithm.adv_estimator 'gae'; available: grpo, .*gae is algorithm.name=ppo",
        ),
        (grpo.Config, {"adv_estimator": "rloo", "gamma": 0.9}, "gamma=0.9 does nothing"),
        (grpo.Config, {"adv_estimator": "opo", "norm_adv_by_std_in_grpo": False}, "norm_adv_by_std_in_grpo=false does nothing"),
        (PPOConfig, {"norm_reward": "yes"}, r"algorithm\.norm_reward='yes' is not known; allowed: none, mean_std"),
    ],
)
def test_settings_that_cannot_be_are_refused(schema: type, knobs: dict[str, Any], message: str) -> None:
    more = {"use_kl_loss": False} if schema is grpo.Config else {}
    with pytest.raises(ValueError, match=message):
        check_tree(flat_config(schema, **more, **knobs), "algorithm")


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
    RunningMoments("equal", state).add(moments(torch.full((9,), 0.1, dtype=torch.float64)))
    assert RunningMoments("equal", state).std == 1.0


@pytest.mark.parametrize("norm", ["mean_std", "std"])
def test_rewards_are_normalised_by_all_that_were_seen(norm: str) -> None:
    state: dict[str, Any] = {}
    settings = ppo_config(use_kl_in_reward=False, norm_reward=norm)
    seen: list[float] = []
    for rows in ([0, 1, 2], [3, 4, 5, 6, 7]):
        seen += [SCORES[row] for row in rows]
        center, scale = statistics.fmean(seen) if norm == "mean_std" else 0.0, statistics.stdev(seen)
        fields = fields_of(rows)
        normalised, metrics = gae_advantages(settings)(dict(fields), rows_at(rows), alone(state))
        fields["scores"] = (fields["scores"] - center) / scale
        same, metrics_of_same = gae_advantages(ppo_config(use_kl_in_reward=False))(fields, rows_at(rows), alone())
        torch.testing.assert_close(normalised["returns"].values, same["returns"].values, rtol=1e-9, atol=1e-12)
        assert metrics == pytest.approx(metrics_of_same, rel=1e-9)
    assert list(state) == ["reward_norm"] and state["reward_norm"][0] == len(SCORES)


def test_values_are_restored_and_returns_normalised() -> None:
    """The critic's numbers are in units of the returns so far: GAE sees them in rewards, targets are in units of all returns."""
    state: dict[str, Any] = {}
    settings = ppo_config(use_kl_in_reward=False, norm_value=True, lam=0.9)
    plain, seen = ppo_config(use_kl_in_reward=False, lam=0.9), torch.empty(0, dtype=torch.float64)
    for _ in range(3):
        fields = fields_of(ALL)
        mean, std = (float(seen.mean()), float(seen.std())) if len(seen) else (0.0, 1.0)
        normalised, metrics = gae_advantages(settings)(dict(fields), rows_at(ALL), alone(state))
        same, _ = gae_advantages(plain)(fields | {"values": fields["values"] * std + mean}, rows_at(ALL), alone())
        torch.testing.assert_close(normalised["advantages"].values, same["advantages"].values, rtol=1e-8, atol=1e-9)
        returns = same["returns"].values
        seen = torch.cat([seen, returns])
        wanted_returns = (returns - seen.mean()) / seen.std()
        torch.testing.assert_close(normalised["returns"].values, wanted_returns, rtol=1e-8, atol=1e-9)
        assert metrics["critic/value_norm_mean"] == pytest.approx(float(seen.mean()))
    assert state["value_norm"][0] == 3 * TOKENS
