"""The lines that a run begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tasks
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.preflight.banner import dry_run_text, run_banner
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.train import RunPlan, prepare

POOLS = ["placement.pools={policy: [0, 1], value: [2, 3]}", "models.actor.pool=policy", "models.critic.pool=value"]


def prepared(run_dir: Path, size: int, *more: str) -> tuple[RunPlan, World]:
    launch = Launch(size=size, local_size=size)
    ready = prepare(str(tasks.task() / "ppo.json"), tasks.settings(run_dir, 2, *more), size, launch=launch)
    return ready, World(launch, torch.device("cpu"), torch.distributed.HashStore(), 1.0)


def test_a_run_begins_with_how_it_is_split(tmp_path: Path) -> None:
    ready, world = prepared(tmp_path, 4, *POOLS, "models.actor.layout.tp=2", "models.actor.calls.compute_log_prob.pool=value")
    text = run_banner(ready, world)
    trained, ranks, *roles, fits = text.splitlines()
    assert trained.startswith("run: ppo trains actor (") and trained.endswith(" on " + ready.training["prompts"].summary())
    assert ranks.startswith("  4 ranks") and fits.startswith("  memory: at most ")
    assert [line.split()[0] for line in roles] == ["actor", "compute_log_prob", "critic", "reference", "reward", "compute"]
    assert (
        roles[0] == "  actor      pool policy [0 to 1], pp(1) * tp(2) * dp(1), generation pp(1) * tp(1) * micro_dp(2) * dp(1)"
    )
    assert roles[2] == "  critic     pool value [2 to 3], pp(1) * tp(1) * dp(2)"
    assert dry_run_text(ready, world.launch).startswith(text + "\n")


@pytest.mark.parametrize(
    ("arguments", "warns"),
    [
        ("response, row", False),
        ("response, answer=None", True),
        ("solution_str, ground_truth=None", True),
    ],
)
def test_rows_without_answers_are_told_where_a_reward_reads_them(tmp_path: Path, arguments: str, warns: bool) -> None:
    (tmp_path / "own.py").write_text(f"def score({arguments}): return 1.0\n")
    reward = RewardConfig(function=f"{tmp_path / 'own.py'}:score", data_sources=["a"])
    rows: list[dict[str, Any]] = [{"data_source": "a", "answer": None}, {"data_source": "b", "answer": "7"}]
    assert reward.misses_answers("reward", rows) is warns
    assert not reward.misses_answers("reward", [*rows, {"data_source": "a", "answer": 0}])
    assert not RewardConfig(function="auto").misses_answers("reward", rows)
