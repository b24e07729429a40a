"""Rule rewards on the ranks that generate: they begin on whole groups beside generation, and nothing else of the run changes."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import tasks
from ranks import run_ranks
from rlhf_spmd.parallel.world import World

STEPS = 2
ROLES = ("actor", "critic", "reference")
FP64 = tuple(f"models.{role}.dtype=float64" for role in ROLES)
WAVES = "models.actor.generation.max_num_seqs=3"  # rows end in waves, and groups one after the other
MIXED = (
    "models.actor.generation.max_num_seqs=6",
    'sampling.stop=["7","a","k","x"]',
)  # groups end in another order than they begin
APART = ("placement.pools={a: [0, 1], b: [2]}", *(f"models.{role}.pool=a" for role in ROLES), "models.reward.pool=b")
PATIENCE_S = 120.0

# name -> settings of the reward
REWARDS = {
    "each row": ("reward.function=tasks:even_share",),
    "of several processes": ("reward.function=tasks:even_share", "reward.num_workers=2"),
    "failures": ("reward.function=reward_functions:moody", "reward.timeout_s=3", "reward.default=-0.5"),
    "by group": ("reward.function=reward_functions:best_of_group", "reward.by_group=true"),
    "awaited": ("reward.function=reward_functions:awaited",),
    "two": ("reward.function=tasks:even_share", "rewards.long.function=reward_functions:length"),
}


def train_and_look(world: World, config: str, overrides: Sequence[str], directory: str) -> list[str]:
    """Trains with ``reward_functions:noted`` and a generation that takes no more steps after its first whole group until a row is
    scored. Returns the rows that were when generation ended."""
    from rlhf_spmd.controller.streaming import RolloutStreamer
    from rlhf_spmd.workers.reward import RewardWorker
    from rlhf_spmd.workers.rollout_engine import RolloutEngine

    tick, begin, finish = RolloutEngine.tick, RewardWorker.start_early, RolloutStreamer.finish
    begun, seen = [], []

    def slow_tick(self):
        tick(self)
        deadline = time.monotonic() + PATIENCE_S
        while begun and not seen_now() and time.monotonic() < deadline:
            time.sleep(0.01)
            tick(self)

    def seen_now():
        return [path.name for path in Path(directory).iterdir()]

    def noted_begin(self, rows, ranks):
        begun.extend(rows.row_ids.tolist())
        begin(self, rows, ranks)

    def looked_finish(self, rows):
        seen.extend(seen_now())
        finish(self, rows)

    RolloutEngine.tick, RewardWorker.start_early, RolloutStreamer.finish = slow_tick, noted_begin, looked_finish
    try:
        tasks.train_here(world, config, overrides)
    finally:
        RolloutEngine.tick, RewardWorker.start_early, RolloutStreamer.finish = tick, begin, finish
    assert len(begun) == tasks.PROMPTS * tasks.SAMPLES // world.size, "all rows of the replica have begun"
    return seen


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("early")


@functools.cache
def run(directory: Path, name: str, ranks: int) -> tasks.Run:
    """3 ranks: two that generate, and one that scores."""
    run_dir = directory / f"{sorted(REWARDS).index(name)}_{ranks}"
    more = (*FP64, *MIXED, *REWARDS[name], *(APART if ranks == 3 else ()))
    run_ranks(ranks, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(run_dir, STEPS, *more))
    return tasks.read_run(run_dir)


def test_rows_are_scored_before_generation_has_ended(tmp_path: Path) -> None:
    (tmp_path / "scored").mkdir()
    noted = ("reward.function=reward_functions:noted", f"reward.kwargs={{directory: {tmp_path}/scored}}", "reward.timeout_s=60")
    overrides = tasks.settings(tmp_path / "run", 1, *FP64, WAVES, *noted)
    seen = run_ranks(2, train_and_look, str(tasks.task() / "ppo.json"), overrides, f"{tmp_path}/scored")
    assert all(seen), "on each rank some rows were scored when it had generated all"
    (metrics,) = tasks.read_run(tmp_path / "run").metrics
    assert metrics["reward/failures"] == metrics["reward/timeouts"] == 0


@pytest.mark.parametrize(("name", "ranks"), [*((name, 3) for name in REWARDS), ("each row", 1)])
def test_the_same_run_as_after_generation(directory: Path, name: str, ranks: int) -> None:
    one, other = run(directory, name, 2), run(directory, name, ranks)
    assert one.responses == other.responses
    difference, where = tasks.worst_metric(one, other, floor=1e-2)
    weights, tensor = tasks.worst_tensor(one, other)
    print(f"{name}: metrics {difference:.1e} ({where}), weights {weights:.1e} ({tensor})")
    assert difference < 1e-10, where
    assert weights < 1e-9, tensor
    texts = ["".join(tasks.VOCABULARY[i] for i in ids if i) for ids in one.responses.values()]
    moods = [sum(map(ord, text)) % 8 for text in texts]
    bad = (moods.count(1), moods.count(3), moods.count(2)) if name == "failures" else (0, 0, 0)
    assert tuple(sum(step[f"reward/{kind}"] for step in one.metrics) for kind in ("failures", "timeouts", "unscored")) == bad
    assert name != "failures" or all(bad)


def test_a_function_of_all_rows_is_called_once_on_each_rank(tmp_path: Path) -> None:
    counted = ("reward.function=reward_functions:counted", f"reward.kwargs={{file: {tmp_path}/calls}}", "reward.timeout_s=60")
    overrides = tasks.settings(tmp_path / "run", 1, WAVES, *counted)
    run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), overrides)
    calls = [int(line) for line in (tmp_path / "calls").read_text().split()]
    assert len(calls) == 2 and sum(calls) == tasks.PROMPTS * tasks.SAMPLES


def test_a_replica_of_several_ranks_has_their_processes(tmp_path: Path) -> None:
    (tmp_path / "processes").mkdir()
    settings = ("reward.function=reward_functions:by_process", f"reward.kwargs={{directory: {tmp_path}/processes}}")
    overrides = tasks.settings(
        tmp_path / "run", 1, *FP64, *settings, "models.actor.layout.tp=2", "models.actor.generation.tp=2"
    )
    run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), overrides)
    assert len(list((tmp_path / "processes").iterdir())) == 2
