"""Rollouts of older weights are measured and corrected: what only whole runs can show, whose rows cross steps."""

from __future__ import annotations

from pathlib import Path

import pytest

import tasks
from overrides import PARTIAL

GRPO = {"name": "grpo", "ppo_mini_batch_size": 4, "use_kl_loss": False}
CORRECTION = {
    "rollout_is": "token",
    "rollout_is_threshold": 1.05,
    "rollout_rs": "seq_mean_k1",
    "rollout_rs_threshold": 1.001,
}


def test_stale_rows_are_measured_weighted_and_rejected(tmp_path: Path) -> None:
    """Two runs of the same seed. In the first step no row is stale: the same gradient; later another one."""
    overrides = ("models.actor.dtype=float64", "models.actor.optim.eps=1e-3", *PARTIAL)
    correction = [f"algorithm.rollout_correction.{key}={value}" for key, value in CORRECTION.items()]
    config = tasks.other_task(GRPO, "actor")
    plain = tasks.train(1, tmp_path / "plain", 3, *overrides, config=config).raw
    corrected = tasks.train(1, tmp_path / "corrected", 3, *overrides, *correction, config=config).raw
    assert abs(plain[0]["rollout_corr/kl"]) < 1e-12 and plain[0]["rollout_corr/ppl_ratio"] == pytest.approx(1.0, abs=1e-12)
    assert plain[-1]["rollout/stale_fraction"] > 0.05
    assert plain[-1]["rollout_corr/k3_kl"] > 1e-6 and plain[-1]["training/rollout_probs_diff_max"] > 1e-4
    assert plain[-1]["training/rollout_probs_diff_max"] > plain[-1]["training/rollout_probs_diff_mean"] > 0
    assert not any("rollout_is_mean" in key for key in plain[-1])
    assert corrected[0]["actor/grad_norm"] == pytest.approx(plain[0]["actor/grad_norm"], rel=1e-12)
    assert abs(corrected[-1]["actor/grad_norm"] / plain[-1]["actor/grad_norm"] - 1) > 1e-6
    for share in ("rollout_is_ratio_fraction_high", "rollout_rs_masked_fraction"):
        assert corrected[0][f"rollout_corr/{share}"] == 0.0 and 0 < corrected[-1][f"rollout_corr/{share}"] < 1
    means = [row["rollout_corr/rollout_is_mean"] for row in corrected]
    assert means[0] == pytest.approx(1.0, abs=1e-12) and means[-1] != pytest.approx(1.0, abs=1e-6)
