"""The lines that a run begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tasks
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.parallel.world import World
from rlhf_spmd.preflight.banner import describe, dry_run_text
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.train import RunPlan, prepare

POOLS = ["placement.pools={policy: [0, 1], value: [2, 3]}", "models.actor.pool=policy", "models.critic.pool=value"]


def prepared(run_dir: Path, size: int, *more: str) -> tuple[RunPlan, World]:
    launch = Launch(size=size, local_size=size)
    ready = prepare(str(tasks.task() / "ppo.json"), tasks.settings(run_dir, 2, *more), size, launch=launch)
    return ready, World(launch, torch.device("cpu"), torch.distributed.HashStore(), 1.0)


@pytest.mark.parametrize(
    ("size", "settings", "layout"),
    [
        (1, [], "actor, critic, reference whole on one rank"),
        (4, ["models.actor.layout.tp=2", "models.actor.generation.tp=1", "models.critic.layout={zero: 1, zero_size: 4}"],
         "actor tp(2) * dp(2), generation dp(4); critic dp(4) zero(1); reference dp(4)"),
        (4, [*POOLS, "models.actor.layout.pp=2", "models.reference.layout={zero: 3, zero_size: 2}"],
         "actor pp(2), generation dp(2) on ranks 0 to 1; critic dp(2) on ranks 2 to 3; reference dp(4) zero(3) zero_size(2)"),
    ],
)  # fmt: skip
def test_a_run_begins_with_how_it_is_split(tmp_path: Path, size: int, settings: list[str], layout: str) -> None:
    ready, world = prepared(tmp_path, size, *settings)
    trained, ranks, split, fits = describe(ready, world).splitlines()
    assert trained.startswith("run: ppo trains actor (") and trained.endswith(" on " + ready.training["prompts"].summary())
    assert ranks.startswith(f"  {size} rank") and split == f"  layout: {layout}" and fits.startswith("  memory: at most ")


def test_a_dry_run_has_the_table_of_roles_as_well(tmp_path: Path) -> None:
    ready, world = prepared(tmp_path, 4, *POOLS)
    text = dry_run_text(ready, world.launch)
    assert text.startswith(describe(ready, world) + "\n")
    assert {line.split()[0] for line in text.splitlines()[5:]} == {"actor", "critic", "reference", "reward", "compute"}
    assert "  critic     pool value [2 to 3], pp(1) * tp(1) * dp(2)" in text.splitlines()


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
