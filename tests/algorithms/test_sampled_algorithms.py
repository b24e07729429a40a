"""ReMax, DAPO and distillation: their arithmetic against float64 derivations from the papers, and what they do in a run."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tasks
from algorithm_cases import CASES, ROLLOUTS, Case
from flat_config import flat_config
from ranks import run_ranks
from rlhf_spmd.algorithms.dapo import Config as DAPOConfig
from rlhf_spmd.algorithms.dapo import FilterGroupsConfig, OverlongConfig, dapo_advantages, report_too_few_groups, shaped_rewards
from rlhf_spmd.algorithms.distill import Config as DistillConfig
from rlhf_spmd.algorithms.distill import distillation_advantages
from rlhf_spmd.algorithms.policy import PolicyLossConfig, clipped_policy
from rlhf_spmd.algorithms.remax import Config as ReMaxConfig
from rlhf_spmd.algorithms.remax import greedy_scores, remax_advantages
from rlhf_spmd.controller.reference import COPY_STRIDE
from rlhf_spmd.data.batch import Ragged
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.parallel.world import World
from rlhf_spmd.rewards.results import RewardError
from rlhf_spmd.train import prepare
from rlhf_spmd.workers.compute import Function, GlobalReduce
from rlhf_spmd.workers.objective import Rows, Totals

ALONE = GlobalReduce(lambda x: x, lambda x: x, {})


def rows_of(lengths: list[int], groups: list[int], ids: list[int] | None = None) -> Rows:
    return Rows(torch.tensor(ids or range(len(lengths))), torch.tensor(groups), torch.tensor(lengths))


def per_token(function: Function, fields: dict[str, Tensor], rows: Rows) -> tuple[Tensor, dict[str, float]]:
    made, report = function(fields, rows, ALONE)
    field = made["advantages"]
    assert isinstance(field, Ragged)
    return field.values, report


def remax(config: ReMaxConfig, scores: list[float], lengths: list[int], kl: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """Advantages and metrics of two groups of two samples and a greedy row each, whose ``kl`` is that of each sample's tokens."""
    groups, ids = [7, 7, 7, 9, 9, 9], [0, 1, COPY_STRIDE, 2, 3, COPY_STRIDE + 2]
    judged = {"scores": torch.tensor(scores, dtype=torch.float64)}
    made, report = greedy_scores(judged, rows_of(lengths, groups, ids), ALONE)
    baselines, sampled = made["baselines"], [0, 1, 3, 4]
    assert isinstance(baselines, Tensor)
    fields = {"scores": judged["scores"][sampled], "baselines": baselines[sampled]}
    if config.kl.uses_reference:
        fields |= {"old_log_probs": torch.cat(kl), "ref_log_prob": torch.zeros(len(torch.cat(kl)))}
    rows = rows_of([lengths[i] for i in sampled], [groups[i] for i in sampled])
    advantages, more = per_token(remax_advantages(config), fields, rows)
    return advantages, report | more


@pytest.mark.parametrize("coefficient", [0.0, 0.3])
def test_remax_has_the_advantages_of_the_paper(coefficient: float) -> None:
    """Algorithm 1: r(x, a) - r(x, greedy). With KL in the reward a token has the KL from it on, and the greedy row none: verl."""
    config = flat_config(
        ReMaxConfig, **({"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": coefficient}} if coefficient else {})
    )
    scores, lengths = [1.0, 0.25, 3.0, -2.0, 0.5, 4.0], [2, 1, 3, 2, 3, 1]
    kl = [torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (2, 1, 2, 3)]
    advantages, report = remax(config, scores, lengths, kl)
    plain = [-2.0, -2.75, -6.0, -3.5]
    wanted = [[a - coefficient * float(its[t:].sum()) for t in range(len(its))] for a, its in zip(plain, kl, strict=True)]
    assert advantages.tolist() == pytest.approx([a for row in wanted for a in row], abs=1e-12)
    assert report["actor/baseline_mean"] == 3.5
    assert report["actor/advantage_mean"] == pytest.approx(sum(row[0] for row in wanted) / 4)
    assert ("actor/kl" in report) == bool(coefficient)


def test_rows_without_a_score_teach_nothing() -> None:
    """ReMax: also those whose greedy response has none. DAPO: they are not compared, and a group of them is replaced."""
    nan = torch.nan
    advantages, report = remax(ReMaxConfig(), [1.0, nan, 3.0, -2.0, 0.5, nan], [1] * 6, [])
    assert advantages.tolist() == [-2.0, 0.0, 0.0, 0.0]
    assert report == {"actor/baseline_mean": 3.0, "actor/advantage_mean": -2.0}

    scores = torch.tensor([-1.0, nan, 1.0, nan, nan, nan, 1.0, 1.0, nan], dtype=torch.float64)
    rows = rows_of([2] * 9, [0] * 3 + [1] * 3 + [2] * 3)
    made, _ = shaped_rewards(DAPOConfig(overlong_buffer=OverlongConfig(len=4)), 8)({"scores": scores}, rows, ALONE)
    assert isinstance(made["spread"], Tensor) and isinstance(made["seq_rewards"], Tensor)
    assert made["spread"].tolist() == [1.0] * 3 + [-1.0] * 3 + [0.0] * 3
    for is_scored, error in ((False, RewardError), (True, ValueError)):
        with pytest.raises(error, match="step 4: of 16 prompts in 2 batches 0 have responses whose scores differ"):
            report_too_few_groups(None, 4, 0, 8, 2, is_scored)
    advantages, _ = per_token(dapo_advantages({}), {"seq_rewards": made["seq_rewards"]}, rows)
    assert advantages[::2].tolist() == pytest.approx([-(0.5**0.5), 0, 0.5**0.5, 0, 0, 0, 0, 0, 0], abs=1e-6)


def test_dapo_s_penalty_and_advantages_are_those_of_the_paper() -> None:
    """Equations 9 (advantages) and 13 (penalty) in plain numbers."""
    limit, room, factor = 8, 3, 0.5
    scores, lengths = [1.0, 0.0, 1.0, 0.5], [4, 6, 8, 7]
    penalties = [0.0 if n <= limit - room else factor * ((limit - room) - n) / room for n in lengths]
    rewards = np.array([s + p for s, p in zip(scores, penalties, strict=True)])
    wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    config = DAPOConfig(overlong_buffer=OverlongConfig(len=room, penalty_factor=factor))
    rows = rows_of(lengths, [3] * 4)
    made, report = shaped_rewards(config, limit)({"scores": torch.tensor(scores, dtype=torch.float64)}, rows, ALONE)
    rewarded = made["seq_rewards"]
    assert isinstance(rewarded, Tensor) and rewarded.tolist() == pytest.approx(rewards.tolist(), abs=1e-12)
    assert report == {
        "dapo/overlong_penalty_mean": [pytest.approx(sum(penalties)), 4.0],
        "dapo/equal_group_fraction": [0.0, 4.0],
    }
    advantages, _ = per_token(dapo_advantages({}), {"seq_rewards": rewarded}, rows)
    assert advantages.tolist() == pytest.approx(np.repeat(wanted, lengths).tolist(), abs=1e-12)


@pytest.mark.parametrize(("metric", "spreads"), [("score", [0.0, 0.0, 1.0]), ("seq_reward", [1.0, 0.0, 1.0])])
def test_dapo_keeps_groups_by_the_metric(metric: str, spreads: list[float]) -> None:
    """Group 0 has equal scores and unequal lengths, group 1 equal both, group 2 unequal scores that differ by rounding only."""
    config = DAPOConfig(overlong_buffer=OverlongConfig(len=4), filter_groups=FilterGroupsConfig(metric=metric))
    scores = torch.tensor([0.3, 0.3, 0.3, 0.7, 0.7, 0.7, 0.1, 0.1, 0.1 + 1e-12], dtype=torch.float64)
    made, _ = shaped_rewards(config, 8)(
        {"scores": scores}, rows_of([2, 8, 8, 3, 3, 3, 2, 2, 2], [0] * 3 + [1] * 3 + [2] * 3), ALONE
    )
    spread = made["spread"]
    assert isinstance(spread, Tensor) and (spread > 0).double().view(3, 3).tolist() == [[s] * 3 for s in spreads]


@pytest.mark.parametrize("gamma", [0.0, 0.7, 1.0])
def test_distillation_counts_the_kl_of_later_tokens(gamma: float) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = rows_of([3, 1, 4], [0, 1, 2])
    student, teacher = (-torch.rand(8, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages, report = per_token(
        distillation_advantages(DistillConfig(gamma=gamma)), {"old_log_probs": student, "teacher_log_probs": teacher}, rows
    )
    wanted: list[float] = []
    for mine, its in zip(student.split([3, 1, 4]), teacher.split([3, 1, 4]), strict=True):
        kl = (mine - its).tolist()
        wanted += [-sum(gamma ** (later - t) * kl[later] for later in range(t, len(kl))) for t in range(len(kl))]
    assert advantages.tolist() == pytest.approx(wanted, abs=1e-12)
    assert report["actor/reverse_kl"] == pytest.approx(float((student - teacher).mean()), abs=1e-12)
    assert report["actor/reverse_kl_per_row"] == pytest.approx(float((student - teacher).sum()) / 3, abs=1e-12)


def of_tokens(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """GKD's divergence of each distribution (arXiv 2306.13649, eq. 1; the limits as TRL has them), over the whole vocabulary."""
    if beta in (0.0, 1.0):
        one, other = (student, teacher) if beta else (teacher, student)
        return (one.exp() * (one - other)).sum(-1)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    sides = [(side.exp() * (side - mixture)).sum(-1) for side in (teacher, student)]
    return beta * sides[0] + (1 - beta) * sides[1]


@pytest.mark.parametrize("gamma", [0.0, 1.0])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_distillation_follows_the_divergence(beta: float, gamma: float) -> None:
    """Over all responses of two tokens, weighted by their probability, our gradient is that of the divergence itself: of each token at
    what the student wrote before (GKD), or with gamma 1 of whole responses, which for the reverse KL is MiniLLM's."""
    generator = torch.Generator().manual_seed(3)
    size, config = 3, DistillConfig(gamma=gamma, beta=beta, policy=PolicyLossConfig(loss_agg_mode="seq-mean-token-sum"))
    objective = clipped_policy(config, SamplingConfig(max_response_length=8))
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((size,), (size, size)) * 2]
    first, then, *teacher = weights
    its_first, its_then = (table.log_softmax(-1) for table in teacher)

    def log_probs(a: int, b: int) -> Tensor:
        return torch.stack([first.log_softmax(-1)[a], then.log_softmax(-1)[a, b]])

    first.requires_grad_(), then.requires_grad_()
    pairs = list(itertools.product(range(size), repeat=2))
    written = first.softmax(-1) if gamma else first.softmax(-1).detach()
    each = of_tokens(then.log_softmax(-1), its_then, beta)
    divergence = of_tokens(first.log_softmax(-1), its_first, beta) + (written * each).sum()
    exact = torch.autograd.grad(divergence, (first, then))
    ours, mean = [torch.zeros_like(first), torch.zeros_like(then)], 0.0
    for a, b in pairs:
        student, rows = log_probs(a, b), rows_of([2], [0])
        fields = {"old_log_probs": student.detach(), "teacher_log_probs": torch.stack([its_first[a], its_then[a, b]])}
        advantages, report = per_token(distillation_advantages(config), fields, rows)
        mean += report["actor/divergence" if beta < 1 else "actor/reverse_kl_per_row"] * float(student.sum().exp().detach())
        fields = {"log_probs": student, "old_log_probs": student.detach(), "advantages": advantages, "entropy": torch.zeros(2)}
        loss, _ = objective.loss(fields, rows, Totals(2, 1))
        gradients = torch.autograd.grad(loss * student.detach().sum().exp(), (first, then))
        for total, gradient in zip(ours, gradients, strict=True):
            total += gradient
    assert mean * (2 if beta < 1 else 1) == pytest.approx(float(divergence.detach()), abs=1e-12)
    for mine, wanted in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-12, rtol=0)


# -- in runs


def test_a_teacher_has_a_temperature_of_its_own(tmp_path: Path) -> None:
    """At sampling.temperature it is the same run; at another one the teacher's log-probs are those of a softer distribution."""
    case, runs = CASES["distill"], {}
    for name, temperature in (("usual", "null"), ("same", "1.0"), ("soft", "4.0")):
        runs[name] = case.train(
            tmp_path / name, f"algorithm.teacher_temperature={temperature}", "algorithm.beta=0.5", ranks=2, steps=1
        )
    tasks.assert_bit_equal(runs["usual"], runs["same"])
    kl = {name: run.metrics[0]["actor/reverse_kl"] for name, run in runs.items()}
    assert abs(kl["soft"] - kl["usual"]) > 1e-3


def test_remax_is_the_run_that_generates_twice(tmp_path: Path) -> None:
    """tests/outside/greedy_baseline.py has a call for the greedy rows; rows of one batch that draw unlike are the same rows."""
    case = Case("quickstart_remax", frozen=(), more=ROLLOUTS)
    once = case.train(tmp_path / "once")
    twice = case.train(tmp_path / "twice", "algorithm.name=outside.greedy_baseline", "algorithm.together=true")
    assert once.responses.items() <= twice.responses.items()
    advantages, others = ([row["actor/advantage_mean"] for row in run.metrics] for run in (once, twice))
    assert advantages == pytest.approx(others, abs=1e-12)
    assert tasks.worst_tensor(once, twice)[0] < 1e-9


def test_remax_takes_the_rollouts_log_probs_where_they_are_exact(tmp_path: Path) -> None:
    """The greedy rows beside them do not make a forward pass necessary, and the update finds no difference."""
    exact = ("models.actor.dtype=float32", "models.reference.dtype=float32")
    (row,) = CASES["remax"].train(tmp_path / "run", *exact, steps=1).raw
    assert row["rollout/log_prob_diff_max"] == 0.0 and "timing_s/compute_log_prob" not in row


def train_and_listen(world: World, config: str, overrides: list[str]) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        tasks.train_here(world, config, overrides)
    return errors.getvalue()


def test_dapo_replaces_groups_that_score_alike_or_tells_of_a_bound(tmp_path: Path) -> None:
    """Every step has as many groups as it wants, whole ones, of more prompts than one batch. It refuses to learn nothing."""
    case = CASES["dapo"]
    run = case.train(tmp_path / "replaced", "run.log_samples=1000", steps=1, ranks=2)
    (replaced,) = run.metrics
    assert replaced["dapo/kept_groups"] >= tasks.PROMPTS and replaced["dapo/num_gen_batches"] > 1
    assert replaced["dapo/equal_group_fraction"] > 0
    rows = [json.loads(line) for line in (tmp_path / "replaced" / "rollouts.jsonl").read_text().splitlines()]
    assert len(rows) == replaced["dapo/num_gen_batches"] * tasks.PROMPTS * 4, "all batches"
    scores, lengths = (np.array([row[key] for row in rows]) for key in ("score", "length"))
    assert replaced["reward/mean"] == pytest.approx(scores.mean(), rel=1e-12)
    assert replaced["reward/std"] == pytest.approx(scores.std(), rel=1e-9) and replaced["reward/unscored"] == 0
    assert replaced["response_length/mean"] == pytest.approx(lengths.mean(), rel=1e-12)

    more = (*case.overrides(), "algorithm.filter_groups.max_num_gen_batches=1")
    written = run_ranks(2, train_and_listen, case.file, tasks.settings(tmp_path / "few", 1, *more))
    kept = int(tasks.read_run(tmp_path / "few").metrics[0]["dapo/kept_groups"])
    assert 0 < kept < tasks.PROMPTS
    line = (
        f"step 1: of {tasks.PROMPTS} prompts in 1 batches {kept} have responses whose scores differ, where {tasks.PROMPTS} were"
    )
    assert [text.count(line) for text in written] == [1, 0]

    more = ("reward.function=tasks:always_one", "algorithm.filter_groups.max_num_gen_batches=2")
    with pytest.raises(ValueError, match=r"^step 1: of 16 prompts in 2 batches 0 have responses whose scores differ, so"):
        tasks.train_alone(tmp_path / "none", 3, *case.overrides(), *more, config=Path(case.file))


def test_distillation_comes_nearer_to_its_teacher_without_a_reward(tmp_path: Path) -> None:
    all_rows = (f"data.train_batch_size={tasks.NUM_TRAIN}", f"algorithm.ppo_mini_batch_size={tasks.NUM_TRAIN}", "sampling.n=8")
    optim = ("models.actor.optim.eps=1e-8", "models.actor.optim.lr=3e-4")
    metrics = CASES["distill"].train(tmp_path, "reward.function=null", "algorithm.gamma=0", *optim, *all_rows, steps=6).metrics
    kl = [row["actor/reverse_kl"] for row in metrics]
    assert max(kl[-3:]) < 0.75 * kl[0], kl
    assert "reward/mean" not in metrics[0]


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("distill", "models.teacher.path=null", "models.teacher.path must be given"),
        ("distill", "algorithm.gamma=1.5", "algorithm.gamma=1.5: must be at least 0 and at most 1"),
        ("dapo", "algorithm.overlong_buffer.len=13", "overlong_buffer.len=13 must be at most data.max_response_length=12"),
        ("dapo", "algorithm.filter_groups.metric=acc", "filter_groups.metric='acc' is not known; allowed: score, seq_reward"),
        ("dapo", "rollout.in_flight=16", "algorithm.name=dapo: this algorithm takes no prompts in flight"),
        (
            "remax",
            "reward={function: 'reward_functions:best_of_group', by_group: true}",
            "reward.by_group=true: remax scores the greedy response to a prompt by itself",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path: Path, name: str, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(CASES[name].file, tasks.settings(tmp_path, 3, *CASES[name].overrides(), override), 1)
