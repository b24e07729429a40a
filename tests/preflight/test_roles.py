"""Roles in a real run: the reward model's scores, overlap of pools, and SFT."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from algorithm_cases import CASES
from outside.rewards import share_of_even_digits
from ranks import run_ranks
from rlhf_spmd.controller import GroupShape, ResourcePool
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.planner.placement import PlacementConfig
from rlhf_spmd.preflight.placing import roles_on_pools
from rlhf_spmd.process.board import Board
from rlhf_spmd.process.program import ProgramContext
from rlhf_spmd.rewards.runner import RewardError
from rlhf_spmd.telemetry.run_dir import create_run_dir
from rlhf_spmd.train import prepare, train
from rlhf_spmd.workers import ReferenceWorker
from rlhf_spmd.workers.config import RoleConfig
from rlhf_spmd.workers.role_plan import RolePlan
from tasks import VOCABULARY, even_share, read_run, settings, task, token_ids, train_here


def test_a_reward_model_scores_as_transformers_does(tmp_path: Path) -> None:
    """Half the rule's score plus twice the model's, on a model split over tp and pp."""
    model = str(task() / "critic")
    layout = ["models.reward.layout.tp=2", "models.reward.layout.pp=2", "models.actor.layout.dp=4"]
    weights = ["reward.weight=0.5", "reward.model_weight=2.0"]
    overrides = settings(tmp_path, 1, f"reward.model={model}", *layout, *weights)
    run_ranks(4, train_here, str(task() / "ppo.json"), overrides)

    from transformers import AutoModelForSequenceClassification

    reference = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    samples = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert len(samples) == 16
    for sample in samples:
        ids = [VOCABULARY.index(c) for c in sample["prompt"]] + token_ids(sample["response"])
        with torch.no_grad():
            hidden = reference.model(torch.tensor([ids])).last_hidden_state[0, -1]
            expected = 0.5 * even_share("", sample["response"], {}) + 2.0 * float(reference.score(hidden))
        assert sample["score"] == pytest.approx(expected, abs=1e-5)
    (metrics,) = read_run(tmp_path).metrics
    assert metrics["reward/mean"] == pytest.approx(sum(sample["score"] for sample in samples) / len(samples), abs=1e-6)


def logged(world: Any, config: str, overrides: list[str]) -> str:
    """What training writes to standard error on this rank."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        train_here(world, config, overrides)
    return stderr.getvalue()


def test_a_reward_that_fails_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    overrides = settings(tmp_path, 2, "reward.function=outside.rewards:often_fails", "reward.default=-1", "run.log_samples=3")
    log = "".join(run_ranks(2, logged, str(task() / "ppo.json"), overrides)).splitlines()
    lines = [line for line in log if "often_fails" in line]
    assert len(lines) == 1 and "no opinion" in lines[0] and "reward.default=-1.0" in lines[0]
    kept = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert [row["row_id"] for row in kept if row["step"] == 1] == [0, 2, 4], (
        "as many as asked for: the first response to each prompt"
    )
    steps = read_run(tmp_path).metrics
    assert [step["reward/min"] for step in steps] == [-1.0] * 2
    for step in steps:
        assert 0 < step["reward/failures"] < 16 and step["reward/mean"] == 1.0 - 2.0 * step["reward/failures"] / 16
        assert (step["reward/extra/mean"], step["reward/extra/failures"]) == (7.0, 99.0)


def ends_with(world: Any, config: str, overrides: list[str]) -> str:
    """What the reward's error says on this rank."""
    with pytest.raises(RewardError) as error:
        train_here(world, config, overrides)
    return str(error.value)


def test_a_reward_that_fails_in_every_call_of_the_first_step_ends_the_run(tmp_path: Path) -> None:
    """On every rank with the error, which only the first of a replica's tp ranks has seen."""
    overrides = settings(tmp_path, 2, "reward.function=outside.rewards:always_fails", "models.reward.layout.tp=2")
    errors = run_ranks(2, ends_with, str(task() / "ppo.json"), overrides)
    ranks.close_pool(2)  # its ranks ended inside a step
    line = "reward.function 'outside.rewards:always_fails' failed in 16 of 16 calls of the first step; first error: row 0: TypeError: "
    line += "'good', a str, is not a number: a score is a float, an int or a bool, or None where there is none"
    assert errors == [line] * 2


def test_two_named_rewards_side_by_side(tmp_path: Path) -> None:
    """Each with its own rows, weight and metrics; means are over rows, of which the replicas have unequal numbers."""
    config = json.loads((task() / "ppo.json").read_text())
    del config["models"]["critic"], config["models"]["reference"]
    config["algorithm"] = {"name": "outside.two_rewards", "ppo_mini_batch_size": 4}
    prompts = [{"prompt": str(i) * 3, "data_source": "odd" if i in (2, 5, 6) else "even"} for i in range(8)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    config["data"]["path"] = str(tmp_path / "data.jsonl")
    (tmp_path / "config.json").write_text(json.dumps(config))
    file, run_dir = str(tmp_path / "config.json"), tmp_path / "run"
    overrides = settings(run_dir, 1, "rewards.cost.weight=-2", "rewards.cost.data_sources=[odd]")
    with pytest.raises(ValueError, match=r"^rewards.cots: this algorithm has no such reward; did you mean 'cost'\?"):
        prepare(file, [*overrides, "rewards.cots.function=gsm8k"], 2)
    run_ranks(2, train_here, file, [*overrides, "rewards.cost.function=outside.rewards:priced"])

    samples = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert len(samples) == 16, "the texts are reported once"
    scores = [even_share("", sample["response"], {}) for sample in samples]
    assert [sample["score"] for sample in samples] == pytest.approx(scores, abs=1e-6)
    odd = [sample["response"] for sample in samples if sample["prompt"][0] in "256"]
    shares = [-2 * share_of_even_digits("", response, {}) for response in odd]
    (metrics,) = read_run(run_dir).metrics
    expected = {"reward/mean": sum(scores) / 16, "cost/mean": sum(shares) / 6, "cost/max": max(shares), "cost/min": min(shares)}
    expected |= {
        "reward/failures": 0,
        "cost/failures": 0,
        "cost/extra/length": sum(map(len, odd)) / 6,
    }
    expected["response_length/mean"] = sum(len(token_ids(sample["response"])) for sample in samples) / 16
    assert {key: metrics.get(key) for key in expected} == pytest.approx(expected, abs=1e-6)


RATES = [  # role, algorithm, override, its learning rate and that of its head (None: the same)
    ("actor", "grpo", "lr=null", 1e-6, None),
    ("actor", "dpo", "lr=null", 1e-6, None),
    ("actor", "ppo, one model", "lr=null", 1e-6, 1e-5),
    ("critic", "ppo", "lr=null", 1e-5, None),
    ("cost_critic", "safe_rlhf", "lr=null", 1e-5, None),
    ("reward", "reward_model", "lr=null", 1e-5, 1e-4),
    ("cost", "cost_model", "lr=null", 1e-5, 1e-4),
    ("reward", "reward_model", "lr=2e-5", 2e-5, None),
    ("reward", "reward_model", "head_lr=3e-4", 1e-3, 3e-4),
]


@pytest.mark.parametrize(("role", "name", "override", "lr", "head_lr"), RATES)
def test_learning_rates_by_role(tmp_path: Path, role: str, name: str, override: str, lr: float, head_lr: float | None) -> None:
    """verl's of actors and critics; TRL's of new heads; what a user gives counts for the head too."""
    overrides = settings(tmp_path, 4, *CASES[name].overrides(), f"models.{role}.optim.{override}")
    optim = prepare(CASES[name].file, overrides, 1).roles[role].config.optim
    assert (optim.lr, optim.head_lr) == (lr, head_lr)


def sft_here(world: Any, overrides: list[str]) -> str:
    """Returns what it writes to standard error."""
    prepared = prepare(None, overrides, world.size, "sft")
    create_run_dir(prepared.config.run.dir)
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        train(ProgramContext(world, Board(world.launch, world.store), prepared))
    return stderr.getvalue()


def sft_rows(tmp_path: Path, run_dir: Path) -> list[str]:
    """64 rows, in batches of 16."""
    data = tmp_path / "sft.jsonl"
    rows = [{"prompt": f"{i % 10}{i % 7}", "response": f"{i % 7}{i % 10}"} for i in range(64)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"data.path={data}", "data.train_batch_size=16", f"models.actor.path={task() / 'actor'}", f"run.dir={run_dir}"]


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_sft_learns_the_same_on_every_layout(tmp_path: Path) -> None:
    common = ["run.steps=6", "run.test_freq=3", "models.actor.dtype=float64", "models.actor.optim.lr=3e-3"]
    common.append(f"data.val_path={tmp_path}/sft.jsonl")
    run_ranks(1, sft_here, [*sft_rows(tmp_path, tmp_path / "alone"), *common])
    layout = ["models.actor.layout.pp=2", "models.actor.layout.zero=1"]
    run_ranks(4, sft_here, [*sft_rows(tmp_path, tmp_path / "on_ranks"), *common, *layout])
    alone, on_ranks = (metrics_of(tmp_path / name) for name in ("alone", "on_ranks"))
    assert (tmp_path / "on_ranks" / "export" / "model.safetensors").exists()
    assert alone[-1]["val/loss"] < 0.6 * alone[0]["val/loss"]
    for row, other in zip(alone, on_ranks, strict=True):
        for key in {"val/loss", "actor/loss", "actor/grad_norm"} & row.keys():
            assert other[key] == pytest.approx(row[key], rel=1e-10), (row["step"], key)


def test_the_learning_rate_of_sft(tmp_path: Path) -> None:
    optim = prepare(None, [*sft_rows(tmp_path, tmp_path / "run"), "run.test_freq=0"], 1, "sft").roles["actor"].config.optim
    assert (optim.lr, optim.head_lr) == (1e-5, None)


def test_sft_that_reached_its_goal_says_so_and_stays_ended(tmp_path: Path) -> None:
    overrides = [*sft_rows(tmp_path, tmp_path / "run"), "run.steps=9", "run.test_freq=2"]
    overrides += ["algorithm.stop_at_reward=-1", "reward.function=tasks:even_share"]
    overrides += [
        f"val_prompts.path={task() / 'train.jsonl'}",
        "val_prompts.max_response_length=4",
        "val_prompts.max_prompt_length=12",
    ]
    log = ""
    for _ in range(2):
        log += run_ranks(1, sft_here, overrides)[0]
        rows = metrics_of(tmp_path / "run")
        assert [row["step"] for row in rows] == [0, 1, 2]
    assert log.count(f"target reached: val/reward_mean {rows[2]['val/reward_mean']:.4g} >= -1 at step 2\n") == 1
    assert "nothing to do: its goal was reached in step 2" in log


def test_an_algorithm_of_the_users_needs_a_trained_role() -> None:
    """Placing names the roles; it does not fail at the last of no trained roles."""
    shape = GroupShape(Layout())
    judge = RolePlan(ReferenceWorker, RoleConfig(), ResourcePool("unplaced", (0,)), shape, None)

    with pytest.raises(ValueError, match=r"none of the algorithm's roles is trained \(judge\); at least one must be"):
        roles_on_pools({"judge": judge}, PlacementConfig(), 1, 1, lambda: pytest.fail("no strategy needs a step"))
