"""Runs that only the whole trainer can show: rollouts of older weights are corrected, what PPO normalises by outlives a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

import tasks
from overrides import PARTIAL
from ranks import run_ranks

GRPO = {"name": "grpo", "ppo_mini_batch_size": 4, "use_kl_loss": False}
LEVELS = {"none": (), "token": ("rollout_is=token", "rollout_is_threshold=1.05"), "rows": ("rollout_rs=seq_mean_k1",)}


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tasks.Run]:
    """Two runs of the same seed: rows cross steps, so their tokens are drawn by weights of earlier steps."""
    runs = {}
    bounds = "rollout_rs_threshold=1.001"
    for name, keys in LEVELS.items():
        run_dir = tmp_path_factory.mktemp(name) / "run"
        more = [f"algorithm.rollout_correction.{key}" for key in (*keys, *((bounds,) if name == "rows" else ()))]
        more += ["models.actor.dtype=float64", "models.actor.optim.eps=1e-3", *PARTIAL, *more]
        run_ranks(1, tasks.train_here, tasks.other_task(GRPO, "actor"), tasks.settings(run_dir, 3, *more))
        runs[name] = tasks.read_run(run_dir)
    return runs


def test_the_mismatch_of_stale_rows_is_measured(stale: dict[str, tasks.Run]) -> None:
    first, *_, last = stale["none"].raw
    assert abs(first["rollout_corr/kl"]) < 1e-12 and first["rollout_corr/ppl_ratio"] == pytest.approx(1.0, abs=1e-12)
    assert last["rollout/stale_fraction"] > 0.05
    assert last["rollout_corr/k3_kl"] > 1e-6 and last["training/rollout_probs_diff_max"] > 1e-4
    assert last["training/rollout_probs_diff_max"] > last["training/rollout_probs_diff_mean"] > 0
    assert not any("rollout_is_mean" in key for key in last)


def test_stale_rows_are_weighted_and_rejected(stale: dict[str, tasks.Run]) -> None:
    """In the first step no row is stale: the same gradient; later another one."""
    plain = stale["none"].raw
    for name, share in (("token", "rollout_is_ratio_fraction_high"), ("rows", "rollout_rs_masked_fraction")):
        first, *_, last = stale[name].raw
        assert first["actor/grad_norm"] == pytest.approx(plain[0]["actor/grad_norm"], rel=1e-12)
        assert first[f"rollout_corr/{share}"] == 0.0
        assert 0 < last[f"rollout_corr/{share}"] < 1
        assert abs(last["actor/grad_norm"] / plain[-1]["actor/grad_norm"] - 1) > 1e-6
    means = [row["rollout_corr/rollout_is_mean"] for row in stale["token"].raw]
    assert means[0] == pytest.approx(1.0, abs=1e-12) and means[-1] != pytest.approx(1.0, abs=1e-6)


def test_what_ppo_normalises_by_is_in_checkpoints(tmp_path: Path) -> None:
    """Interrupted after two of four steps and resumed: bit for bit the run that was not."""
    more = ("algorithm.norm_reward=std", "algorithm.norm_value=true", "run.save_freq=2", "algorithm.entropy_coeff=0.01")
    config = str(tasks.task() / "ppo.json")
    for name, steps in (("whole", (4,)), ("halves", (2, 4))):
        for until in steps:
            # the schedule of the learning rate is that of the whole run, so the first half is told so
            run_ranks(1, tasks.train_here, config, tasks.settings(tmp_path / name, until, *more, *CONSTANT))
    whole, halves = (tasks.read_run(tmp_path / name) for name in ("whole", "halves"))
    tasks.assert_bit_equal(whole, halves)
    state = whole.state["compute"] if "compute" in whole.state else str(whole.state)
    assert "reward_norm" in str(state) and "value_norm" in str(state)
    assert len({row["critic/value_norm_mean"] for row in whole.metrics}) == 4


CONSTANT = tuple(f"models.{role}.optim.lr_scheduler_type=constant" for role in ("actor", "critic"))
