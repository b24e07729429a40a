"""Rows that go to their consumers while others are generated (``placement.rollout_chunks``): the same run, with spans that show it."""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import tasks
from places import ROOT
from ranks import run_ranks

STEPS = 2
ROLES = ("actor", "critic", "reference", "reward")
FP64 = tuple(f"models.{role}.dtype=float64" for role in ROLES)
APART = ("placement.pools={a: [0, 1], b: [2, 3]}", *(f"models.{role}.pool=b" for role in ROLES[1:]))
PARROT = (
    f"environment.cls={ROOT}/tests/environments/test_environments.py:Parrot",
    *("environment.weight=0.5", 'sampling.stop=["7","ab"]'),
)
ALL = {"reward.compute_reward", "critic.compute_values", "reference.compute_ref_log_prob"}
# rows end in waves, and groups one after the other
WAVES = "models.actor.generation.max_num_seqs=3"

# name -> overrides of 4 ranks, and the calls that stream on each of them
CASES: dict[str, tuple[tuple[str, ...], dict[int, set[str]]]] = {
    "a reward model and a rule, reference and critic": (
        (*APART, "models.actor.pool=a", f"reward.model={tasks.task() / 'critic'}", "reward.model_weight=0.5"),
        {2: ALL, 3: ALL},
    ),
    "generator and consumers split over tp and pp, the actor trains beside the critic": (
        (
            *(*APART, "models.actor.pool=b", "models.actor.layout.tp=2", "models.actor.calls.generate_sequences.pool=a"),
            *("models.actor.calls.generate_sequences.layout.tp=2", "models.critic.layout.tp=2", "models.reference.layout.pp=2"),
            *("models.actor.calls.compute_log_prob.pool=b", "models.actor.calls.compute_log_prob.layout.pp=2"),
            *("models.actor.attention=torch", "algorithm.ppo_max_token_len_per_gpu=100"),
        ),
        {rank: {"actor.compute_log_prob", *ALL} for rank in (2, 3)},
    ),
    "groups kept together, and consumers on some of the ranks": (
        (
            *("placement.pools={a: [0, 1], b: [2, 3], c: [3], d: [2]}", "models.actor.pool=a", "models.actor.generation.pp=2"),
            *("models.actor.layout.pp=2", "models.critic.pool=b", "models.reference.pool=c", "models.reward.pool=d"),
            *("reward.function=reward_functions:best_of_group", "reward.by_group=true", "sampling.n=3"),
        ),
        {
            2: {"reward.compute_reward", "critic.compute_values"},
            3: {"critic.compute_values", "reference.compute_ref_log_prob"},
        },
    ),
    "with environments": (
        (*APART, "models.actor.pool=a", *PARROT, "data.max_response_length=24"),
        {2: ALL, 3: ALL},
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("streaming")


@functools.cache
def run(directory: Path, name: str, chunks: int) -> Path:
    run_dir = directory / f"{sorted(CASES).index(name)}_{chunks}"
    more = (*CASES[name][0], *FP64, WAVES, f"placement.rollout_chunks={chunks}")
    run_ranks(4, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(run_dir, STEPS, *more))
    return run_dir


def spans(run_dir: Path) -> list[dict[str, Any]]:
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    return sorted((event for event in events if event.get("cat") == "compute"), key=lambda event: event["ts"])


# more chunks than two once, where the generator is split
@pytest.mark.parametrize(("name", "chunks"), [*((name, 2) for name in CASES), (list(CASES)[1], 4)])
def test_the_same_run_in_chunks(directory: Path, name: str, chunks: int) -> None:
    whole, streamed = (run(directory, name, number) for number in (1, chunks))
    one, other = tasks.read_run(whole), tasks.read_run(streamed)
    assert other.responses == one.responses
    difference, where = tasks.worst_metric(one, other, floor=1e-2)
    weights, tensor = tasks.worst_tensor(one, other)
    print(f"{name}, {chunks} chunks: metrics {difference:.1e} ({where}), weights {weights:.1e} ({tensor})")
    assert difference < 1e-10, where
    assert weights < 1e-9, tensor
    assert max(one.log_prob_difference(), other.log_prob_difference()) < 1e-12  # of rows that came with their log-probs too
    assert not any("chunk" in event["args"] for event in spans(whole))
    found: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for event in spans(streamed):
        if "chunk" in event["args"]:
            found[event["pid"]][event["name"]] += 1
    expected = {rank: dict.fromkeys(calls, STEPS * chunks) for rank, calls in CASES[name][1].items()}
    assert found == expected
