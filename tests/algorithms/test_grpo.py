"""GRPO: advantages within groups. That it is the same run in every layout is in test_algorithms."""

from __future__ import annotations

from pathlib import Path

import pytest
import tasks
from ranks import run_ranks

STEPS = 3
ALGORITHM = {"name": "grpo", "ppo_mini_batch_size": 4, "ppo_epochs": 2, "entropy_coeff": 0.01, "kl_loss_coef": 0.05}
FP64 = ("models.actor.dtype=float64", "models.reference.dtype=float64", "models.reward.dtype=float64")


def train(ranks: int, run_dir: Path, config: str, *more: str) -> tasks.Run:
    steady = "models.actor.optim.eps=1e-3"  # Adam does not magnify what rounds off at 0
    run_ranks(
        ranks, tasks.train_here, config, tasks.settings(run_dir, STEPS, "sampling.n=4", "run.log_samples=32", steady, *more)
    )
    return tasks.read_run(run_dir)


def test_the_task_asks_for_something(tmp_path: Path) -> None:
    one = train(1, tmp_path, tasks.other_task(ALGORITHM, "actor", "reference"), *FP64)
    for row in one.metrics:
        assert row["reward/std"] > 0.05 and row["actor/zero_advantage_fraction"] < 0.5 and row["actor/kl_loss"] > 0.01
    assert abs(one.metrics[0]["actor/ppo_kl_first"]) < 1e-15 and one.metrics[0]["actor/clip_frac"] > 0.01
    assert one.state["optimizer_steps"] == {"actor": STEPS * 2 * 2}


def test_rewards_that_do_not_differ_move_nothing(tmp_path: Path) -> None:
    """To the bit, without KL loss, entropy and weight decay: every advantage is 0."""
    config = tasks.other_task({"name": "grpo", "ppo_mini_batch_size": 4, "use_kl_loss": False}, "actor")
    still = train(2, tmp_path / "run", config, "reward.function=test_grpo:a_tenth", "models.actor.optim.weight_decay=0")
    assert all(row["reward/mean"] == pytest.approx(0.1) and row["actor/grad_norm"] == 0.0 for row in still.metrics)
    assert all(row["actor/zero_advantage_fraction"] == 1.0 for row in still.metrics)


def a_tenth(response: str) -> float:
    return 0.1
