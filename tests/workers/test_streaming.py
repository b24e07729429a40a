"""Rows that go to their consumers while others are generated (``rollout.chunks``), and rule rewards on the ranks that
generate, which begin on whole groups beside generation: the same run."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

import tasks
from overrides import FP64
from places import ROOT
from ranks import run_ranks
from rlhf_spmd.parallel.world import World

CONFIG = str(tasks.task() / "ppo.json")
ROLES = ("actor", "critic", "reference", "reward")
# rows end in waves, and groups one after the other
WAVES = "models.actor.generation.max_num_seqs=3"


def assert_same(run: tasks.Run, reference: tasks.Run) -> None:
    """In fp64, up to the order of sums."""
    assert run.responses == reference.responses
    difference, where = tasks.worst_metric(reference, run, floor=1e-2)
    assert difference < 1e-10, where
    difference, where = tasks.worst_tensor(reference, run)
    assert difference < 1e-9, where


# -- chunks

REWARD, VALUES, REFERENCE = "reward.compute_reward", "critic.compute_values", "reference.compute_ref_log_prob"
# name -> steps, chunks, overrides of 4 ranks, and the calls that stream on each of them
CASES: dict[str, tuple[int, int, tuple[str, ...], dict[int, set[str]]]] = {
    "groups kept together, rewards of all kinds, consumers on some of the ranks": (
        2,
        2,
        (
            *("placement.pools={a: [0, 1], b: [2, 3], c: [3], d: [2]}", "models.actor.pool=a", "models.actor.generation.pp=2"),
            *("models.actor.layout.pp=2", "models.critic.pool=b", "models.reference.pool=c", "models.reward.pool=d"),
            *("reward.function=reward_functions:best_of_group", "reward.by_group=true", "sampling.n=3"),
            *(f"reward.model={tasks.task() / 'critic'}", "reward.model_weight=0.5", "data.max_response_length=24"),
            *(f"environment.cls={ROOT}/tests/environments/test_environments.py:Parrot", "environment.weight=0.5"),
            'sampling.stop=["7","ab"]',
        ),
        {2: {REWARD, VALUES}, 3: {VALUES, REFERENCE}},
    ),
    "generator and consumers split over tp and pp, the actor trains beside the critic": (
        1,
        4,
        (
            *("placement.pools={a: [0, 1], b: [2, 3]}", *(f"models.{role}.pool=b" for role in ROLES)),
            *("models.actor.layout.tp=2", "models.critic.layout.tp=2", "models.reference.layout.pp=2"),
            *(f"models.actor.calls.generate_sequences.{key}" for key in ("pool=a", "layout.tp=2")),
            *(f"models.actor.calls.compute_log_prob.{key}" for key in ("pool=b", "layout.pp=2")),
            *("models.actor.attention=torch", "algorithm.ppo_max_token_len_per_gpu=100"),
        ),
        {rank: {"actor.compute_log_prob", REWARD, VALUES, REFERENCE} for rank in (2, 3)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_run_in_chunks(tmp_path: Path, name: str) -> None:
    """Spans of the trace show which calls had chunks."""
    steps, chunks, overrides, calls = CASES[name]
    common = (*overrides, *FP64, WAVES, "data.train_batch_size=4")
    reference = tasks.train(4, tmp_path / "whole", steps, *common)
    settings = (*common, f"rollout.chunks={chunks}")
    run_ranks(4, tasks.train_here, CONFIG, tasks.settings(tmp_path / "chunks", steps, *settings))
    streamed = tasks.read_run(tmp_path / "chunks")
    assert_same(streamed, reference)
    assert max(reference.log_prob_difference(), streamed.log_prob_difference()) < 1e-12  # of rows that came with log-probs too
    events = json.loads((tmp_path / "chunks" / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event.get("cat") == "compute" and "chunk" in event["args"]]
    expected = {(rank, call): steps * chunks for rank, names in calls.items() for call in names}
    assert Counter((event["pid"], event["name"]) for event in spans) == expected


# -- rewards beside generation

PATIENCE_S = 120.0
MIXED = (  # groups end in another order than they begin
    "models.actor.generation.max_num_seqs=6",
    'sampling.stop=["7","a","k","x"]',
)
SCORER_APART = ("placement.pools={a: [0], b: [1]}", *(f"models.{role}.pool=a" for role in ROLES[:3]), "models.reward.pool=b")
# name -> settings of the reward
REWARDS = {
    "two, by group and awaited, of several processes": (
        *("reward.function=reward_functions:best_of_group", "reward.by_group=true", "reward.num_workers=2"),
        "rewards.long.function=reward_functions:awaited",
    ),
    "failures": ("reward.function=reward_functions:moody", "reward.timeout_s=3", "reward.default=-0.5"),
}


@pytest.mark.parametrize("name", REWARDS)
def test_the_same_run_as_after_generation(tmp_path: Path, name: str) -> None:
    """Two ranks that generate score meanwhile; then one rank generates, and scores are another's."""
    settings = (*FP64, *MIXED, *REWARDS[name])
    early = tasks.train(2, tmp_path / "early", 1, *settings)
    late = tasks.train(2, tmp_path / "late", 1, *settings, *SCORER_APART)
    assert_same(late, early)
    texts = ["".join(tasks.VOCABULARY[i] for i in ids if i) for ids in early.responses.values()]
    moods = [sum(map(ord, text)) % 8 for text in texts]  # of reward_functions.moody
    failures = (moods.count(1), moods.count(3), moods.count(2)) if name == "failures" else (0, 0, 0)
    (metrics,) = early.metrics
    assert tuple(metrics[f"reward/{kind}"] for kind in ("failures", "timeouts", "unscored")) == failures
    assert name != "failures" or all(failures)


def train_and_look(world: World, config: str, overrides: Sequence[str], directory: str) -> list[str]:
    """Trains with ``reward_functions:noted`` and a generation that takes no more steps after its first whole group until a row is
    scored. Returns the rows that were when generation ended."""
    from rlhf_spmd.controller.streaming import RolloutStreamer
    from rlhf_spmd.workers.reward import RewardWorker
    from rlhf_spmd.workers.rollout_engine import RolloutEngine

    tick, begin, finish = RolloutEngine.tick_together, RewardWorker.start_early, RolloutStreamer.finish
    begun: list[int] = []
    scored: list[str] = []

    def scored_now() -> list[str]:
        return [path.name for path in Path(directory).iterdir()]

    def slow_tick(self):
        tick(self)
        deadline = time.monotonic() + PATIENCE_S
        while begun and not scored_now() and time.monotonic() < deadline:
            time.sleep(0.01)
            tick(self)

    def noted_begin(self, rows, ranks):
        begun.extend(rows.row_ids.tolist())
        begin(self, rows, ranks)

    def looked_finish(self, rows):
        scored.extend(scored_now())
        finish(self, rows)

    with (
        mock.patch.object(RolloutEngine, "tick_together", slow_tick),
        mock.patch.object(RewardWorker, "start_early", noted_begin),
        mock.patch.object(RolloutStreamer, "finish", looked_finish),
    ):
        tasks.train_here(world, config, overrides)
    assert len(begun) == tasks.PROMPTS * tasks.SAMPLES // world.size, "all rows of the replica have begun"
    return scored


def test_rows_are_scored_before_generation_has_ended(tmp_path: Path) -> None:
    (tmp_path / "scored").mkdir()
    noted = ("reward.function=reward_functions:noted", f"reward.kwargs={{directory: {tmp_path}/scored}}", "reward.timeout_s=60")
    overrides = tasks.settings(tmp_path / "run", 1, *FP64, WAVES, *noted)
    scored = run_ranks(2, train_and_look, CONFIG, overrides, f"{tmp_path}/scored")
    assert all(scored), "on each rank some rows were scored when it had generated all"
    (metrics,) = tasks.read_run(tmp_path / "run").metrics
    assert metrics["reward/failures"] == metrics["reward/timeouts"] == 0


def test_a_function_of_all_rows_is_called_once_on_each_rank(tmp_path: Path) -> None:
    counted = ("reward.function=reward_functions:counted", f"reward.kwargs={{file: {tmp_path}/calls}}", "reward.timeout_s=60")
    tasks.train(2, tmp_path / "run", 1, WAVES, *counted)
    calls = [int(line) for line in (tmp_path / "calls").read_text().split()]
    assert len(calls) == 2 and sum(calls) == tasks.PROMPTS * tasks.SAMPLES


def test_a_replica_of_several_ranks_has_their_processes(tmp_path: Path) -> None:
    (tmp_path / "processes").mkdir()
    by_process = ("reward.function=reward_functions:by_process", f"reward.kwargs={{directory: {tmp_path}/processes}}")
    tasks.train(2, tmp_path / "run", 1, *by_process, "models.actor.layout.tp=2", "models.actor.generation.tp=2")
    assert len(list((tmp_path / "processes").iterdir())) == 2
