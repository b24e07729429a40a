"""Runs of models whose experts several ranks share: one rank's responses, metrics and weights, checkpoints in any layout."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import gpu_abilities
import tasks
from expert_tasks import ARCHITECTURES, config
from overrides import FP64, layout, micro_batches
from ranks import run_ranks

STEPS = 2
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ep2": (2, tuple(part for role in ARCHITECTURES for part in layout(role, dp=2, ep=2))),
    "ep2 with generation in tp2": (
        4,
        (
            *layout("actor", tp=2, dp=2, ep=2),
            *layout("generation", tp=2),
            *layout("critic", pp=2, dp=2, ep=2),
            *layout("reference", dp=4, ep=4, zero=3),
            *micro_batches(rows=3),
        ),
    ),
    "ep2 of ZeRO's copies, generation in a grid of its own": (
        4,
        (
            *layout("actor", dp=4, ep=2, zero=3),
            *layout("generation", tp=2),
            *layout("critic", dp=4, ep=4, zero=2, zero_size=2),
            *layout("reference", tp=2, cp=2, ep=2),
            *micro_batches(rows=2),
        ),
    ),
    "ep2 in stages, regrouped for generation": (
        4,
        (
            *layout("actor", pp=2, dp=2, ep=2, zero=1),
            *layout("critic", dp=4, ep=2, zero=1),
            *layout("reference", pp=2, dp=2, ep=2),
        ),
    ),
    "weights on loan": (
        4,
        (
            "placement.pools.b=[2,3]",
            "models.actor.calls.generate_sequences.pool=b",
            "models.critic.calls.compute_values.layout.ep=4",
            *layout("actor", dp=4, ep=4, zero=2),
            *layout("critic", tp=2, dp=2, ep=2),
            *layout("reference", dp=4, ep=2),
        ),
    ),
    "gathered whole": (
        2,
        (*layout("actor", dp=2, ep=2), *layout("critic", dp=2), "models.actor.generation.reshard_method=full_gather"),
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@functools.cache
def run(directory: Path, name: str) -> tasks.Run:
    ranks, overrides = LAYOUTS[name] if name else (1, ())
    run_dir = directory / f"run_{sorted(LAYOUTS).index(name) if name else 'one_rank'}"
    run_ranks(ranks, tasks.train_here, config(directory), tasks.settings(run_dir, STEPS, *overrides, *FP64))
    return tasks.read_run(run_dir)


def assert_same(one: tasks.Run, other: tasks.Run) -> None:
    assert other.responses == one.responses
    difference, where = tasks.worst_metric(one, other, floor=1e-2)
    weights, tensor = tasks.worst_tensor(one, other)
    print(f"metrics {difference:.1e} ({where}), weights {weights:.1e} ({tensor})")
    assert difference < 1e-10, where
    assert weights < 1e-9, tensor


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_run_in_fp64(directory: Path, name: str) -> None:
    assert_same(run(directory, ""), run(directory, name))


def test_the_same_run_by_the_branches_of_nccl(directory: Path) -> None:
    given = tasks.settings(directory / "nccl", STEPS, *LAYOUTS["ep2"][1], *FP64)
    run_ranks(2, gpu_abilities.train_here, config(directory), given)
    assert_same(run(directory, ""), tasks.read_run(directory / "nccl"))
