"""Episodes of agents that take several steps: rollout.in_flight."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_agent_runs import train

from rlhf_spmd.agents.config import AgentConfig
from rlhf_spmd.agents.endpoint import AskedTurn
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.generation.scheduler import GenerationStats
from rlhf_spmd.generation.sequence import Completion, Request
from rlhf_spmd.workers.agent_rollouts import AgentRollouts, AgentRow
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
    assert [row["agents/failed"] for row in metrics] == [*failed.values()] and sum(failed.values()) >= 8, (
        "8 groups of 16 fail, 12 are taken"
    )
    assert [row["agents/episodes"] for row in metrics] == [8, 8, 8]


class News:
    """A server whose news a test has written."""

    def __init__(self, news: list[dict[str, list[Any]]]) -> None:
        self.news = news

    def receive(self, wait_s: float) -> dict[str, list[Any]]:
        return self.news.pop(0)

    def begin(self, *_: object) -> None: ...
    def pause(self) -> None: ...
    def send(self, draws: object) -> None: ...


class Drawing:
    """A generator that ends each row at once."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.stats = GenerationStats()
        self.decoder = SimpleNamespace(dtype=torch.float32)
        self.drawn: list[int] = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    @contextmanager
    def reserving(self, longest: int) -> Iterator[int]:
        yield longest

    def drop(self, row_ids: object) -> None: ...

    def generate_until(self, requests: list[Request], *_: object) -> list[Completion]:
        self.drawn += [request.row_id for request in requests]
        values = torch.zeros(1), torch.zeros(1)
        return [Completion(request.row_id, [2], *values, "stop", torch.tensor([1])) for request in requests]


def rollouts_with(news: list[dict[str, list[Any]]]) -> AgentRollouts:
    """Rollouts whose server has these news."""
    rollouts = object.__new__(AgentRollouts)
    rollouts.__dict__ |= {"longest": 100, "limit_s": 10.0, "nodes": {}, "in_flight": {}, "_asked": [], "_episode_of": {}}
    rollouts.__dict__ |= {"_num_episodes": 0, "_num_calls": 0, "generator": Drawing(), "config": AgentConfig()}
    rollouts.__dict__["dialect"] = SimpleNamespace(first_ids=[1], end_ids={2})
    rollouts.__dict__["replica"] = SimpleNamespace(rank=0, broadcast_json=lambda message, _: message)
    rollouts.__dict__["server"] = News(news)
    return rollouts


def asked(number: int, episode: int) -> AskedTurn:
    return AskedTurn(number, episode, [1, 2], 4, number, 0)


def ended(episode: int) -> list[Any]:
    return [episode, "failed", 0.0, "why", [], 0, 0, 0, 0]


def rows(*groups: int) -> dict[int, AgentRow]:
    return {ROWS_PER_GROUP * group: AgentRow(group, {}) for group in groups}


CALL = SamplingConfig(), 1, 1, lambda: None


def test_a_request_behind_the_end_of_its_episode_is_nobodys() -> None:
    """In the step of the end and in the next one."""
    rollouts = rollouts_with(
        [
            {"asked": [asked(1, 1), asked(2, 2)], "ended": [ended(1)]},
            {"asked": [asked(3, 1)], "ended": []},
            {"asked": [], "ended": [ended(2)]},
        ]
    )
    first, second = rollouts.run(rows(0, 1), *CALL, 1), rollouts.run(rows(1, 2), *CALL, 1)
    assert (first.groups, second.groups) == ([0], [1]) and rollouts.generator.drawn == [2]  # type: ignore[attr-defined]


def test_a_request_in_a_validation_waits_for_the_step_that_answers() -> None:
    """Also behind a step that has enough groups as it begins."""
    rollouts = rollouts_with(
        [
            {"asked": [], "ended": [ended(1), ended(2)]},
            {"asked": [asked(1, 3)], "ended": []},  # validation
            {"asked": [], "ended": [ended(4)]},
            {"asked": [], "ended": []},
            {"asked": [], "ended": [ended(3)]},
        ]
    )
    groups = [rollouts.run(rows(0, 1, 2), *CALL, 1).groups, rollouts.run(rows(9), *CALL).groups]
    groups += [rollouts.run(rows(1, 2), *CALL, 1).groups, rollouts.run(rows(2, 3), *CALL, 1).groups]
    assert groups == [[0], [9], [1], [2]] and rollouts.generator.drawn == [1]  # type: ignore[attr-defined]
