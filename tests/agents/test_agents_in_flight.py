"""Episodes of agents that take several steps: rollout.in_flight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_agent_runs import train

from tiers import tiers

IN_FLIGHT = ("rollout.in_flight=8", "data.train_batch_size=4", "run.log_samples=100")
ROWS_PER_GROUP = 2 * 8  # sampling.n * agent.max_rows
FROZEN = ("models.actor.optim.lr=0", "models.actor.optim.weight_decay=0", "models.actor.optim.min_lr_ratio=1")


def samples(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]


def check(run_dir: Path, steps: range) -> list[dict[str, Any]]:
    """Every step trained on whole groups, none of them twice. The rows that more than one version drew."""
    trained: set[int] = set()
    for step in steps:
        episodes = {sample["episode"] for sample in samples(run_dir) if sample["step"] == step}
        groups = {episode // ROWS_PER_GROUP for episode in episodes}
        assert len(groups) == 4 and episodes == {ROWS_PER_GROUP * group + number for group in groups for number in (0, 8)}
        assert not episodes & trained
        trained |= episodes
    return [sample for sample in samples(run_dir) if len(sample["versions"]) > 1]


LAYOUTS = {
    "one rank": (1, ()),
    "two replicas": (2, ()),
    "tp 2": (2, ("models.actor.layout.tp=2", "models.actor.generation.tp=2")),
    "pp 2": (2, ("models.actor.layout.pp=2", "models.actor.generation.pp=2", "models.actor.generation.kv_cache=offload")),
    "apart and ahead": (2, ("placement.strategy=separate", "rollout.max_staleness=3")),
}


@pytest.mark.parametrize("layout", tiers([*LAYOUTS], ["two replicas", "pp 2"]))
def test_slow_episodes_cross_steps(root: Path, tmp_path: Path, layout: str) -> None:
    """While the weights stay, what earlier steps drew has the log-probs of a forward pass now."""
    ranks, more = LAYOUTS[layout]
    metrics = train(ranks, root, tmp_path, "uneven", *IN_FLIGHT, *FROZEN, *more, steps=4)
    assert check(tmp_path, range(1, 5)) or "ahead" in layout, "there the weights are old anyway"
    assert max(row["rollout/stale_fraction"] for row in metrics) > 0
    assert all(row["rollout/log_prob_diff_max"] < 1e-10 for row in metrics)


def test_a_resumed_run_loses_no_prompt(root: Path, tmp_path: Path) -> None:
    """The episodes in flight begin again, whatever had become of them. Old tokens of others are not learned."""
    saved = "run.save_freq=1", "run.keep_checkpoints=5", "rollout.max_staleness=1"
    metrics = train(1, root, tmp_path / "run", "uneven", *IN_FLIGHT, *saved, steps=5)
    assert check(tmp_path / "run", range(1, 6))
    old = {sample["step"] for sample in samples(tmp_path / "run") if sample["versions"][0][0] < sample["step"] - 1}
    assert {row["step"] for row in metrics if row["rollout/masked_fraction"]} == old
    trained = {sample["episode"] for sample in samples(tmp_path / "run") if sample["step"] <= 2}
    train(
        1, root, tmp_path / "again", "uneven", *IN_FLIGHT, f"run.resume={tmp_path / 'run' / 'checkpoints' / 'step_2'}", steps=5
    )
    check(tmp_path / "again", range(3, 6))
    resumed = {sample["episode"] for sample in samples(tmp_path / "again")}
    assert not resumed & trained and len(resumed | trained) == 40
    assert min(resumed) == min(ROWS_PER_GROUP * group for group in range(20) if ROWS_PER_GROUP * group not in trained)


def test_a_validation_between_has_its_own_episodes(root: Path, tmp_path: Path) -> None:
    """While the weights stay, it gives what it gives where none is in flight."""
    validation = (
        f"data.val_path={root / 'train.jsonl'}",
        "data.val_batch_size=8",
        "run.test_freq=1",
        "val_sampling.temperature=1",
    )
    concurrency = "agent.concurrency=4"
    flying = train(1, root, tmp_path / "flying", "uneven", *IN_FLIGHT, *FROZEN, *validation, concurrency, steps=3)
    plain = train(1, root, tmp_path / "plain", "uneven", *IN_FLIGHT[1:], *FROZEN, *validation, steps=3)
    assert check(tmp_path / "flying", range(1, 4))
    assert [row.get("val/reward_mean") for row in flying] == [row.get("val/reward_mean") for row in plain] != [None] * 3


def test_failures_are_counted_in_the_step_that_takes_their_groups(root: Path, tmp_path: Path) -> None:
    metrics = train(1, root, tmp_path, "failing", *IN_FLIGHT, "agent.max_failure_rate=1", steps=3)
    failed = dict.fromkeys((1, 2, 3), 0)
    for sample in samples(tmp_path):
        failed[sample["step"]] += sample["score"] is None
    assert [row["agents/failed"] for row in metrics] == [*failed.values()] and sum(failed.values()) > 8
    assert [row["agents/episodes"] for row in metrics] == [8, 8, 8]
