"""The branches for NCCL, over gloo: the same run as of one rank on CPUs, in every kind of layout and placement."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_abilities
import tasks
from gpu_abilities import nccl_branches
from overrides import FP64, layout
from ranks import run_ranks
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import transfer
from rlhf_spmd.workers import weight_sync

STEPS = 2
LAYOUTS: dict[str, tuple[str, ...]] = {
    "dp2": (),
    "tp2": tuple(part for role in ("actor", "generation", "critic") for part in layout(role, tp=2)),
    "tp2 -> tp1": (*layout("actor", tp=2), *layout("critic", tp=2)),
    "pp2": tuple(part for role in ("actor", "generation", "critic") for part in layout(role, pp=2)),
    "zero1": tuple(part for role in ("actor", "critic") for part in layout(role, dp=2, zero=1)),
    "zero3": tuple(part for role in ("actor", "critic", "reference") for part in layout(role, dp=2, zero=3)),
    "actor and critic apart": ("placement.strategy=split",),
    "lent for a call": ("models.reference.calls.compute_ref_log_prob.layout.pp=2", *layout("actor", tp=2)),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nccl")


@functools.cache
def one_rank(directory: Path) -> tasks.Run:
    run_ranks(1, tasks.train_here, str(tasks.task() / "ppo.json"), tasks.settings(directory / "one", STEPS, *FP64))
    return tasks.read_run(directory / "one")


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_run_in_fp64(directory: Path, name: str) -> None:
    run_dir = directory / str(sorted(LAYOUTS).index(name))
    given = tasks.settings(run_dir, STEPS, *FP64, *LAYOUTS[name])
    run_ranks(2, gpu_abilities.train_here, str(tasks.task() / "ppo.json"), given)
    one, other = one_rank(directory), tasks.read_run(run_dir)
    assert other.responses == one.responses
    difference, where = tasks.worst_metric(one, other, floor=1e-2)
    assert difference < 1e-10, where
    difference, where = tasks.worst_tensor(one, other)
    assert difference < 1e-9, where


APART = (
    "placement.pools={train: [0], generate: [1, 2]}",
    "placement.max_staleness=1",
    *(f"models.{role}.pool=train" for role in ("actor", "reference", "reward")),
    "models.actor.calls.generate_sequences.pool=generate",
)


def train_ahead(world: World, config: str, given: list[str], nccl: bool) -> list[str]:
    """Names of the threads that received weights on this rank."""
    threads: list[str] = []
    start = transfer.Transfer.__init__

    def noted(self: transfer.Transfer, *args: object, **more: object) -> None:
        threads.append(threading.current_thread().name)
        start(self, *args, **more)  # type: ignore[arg-type]

    transfer.Transfer.__init__ = noted  # type: ignore[method-assign]
    often, weight_sync.POLL_INTERVAL = weight_sync.POLL_INTERVAL, 1
    try:
        (gpu_abilities if nccl else tasks).train_here(world, config, given)
    finally:
        transfer.Transfer.__init__ = start  # type: ignore[method-assign]
        weight_sync.POLL_INTERVAL = often
    return threads


@pytest.mark.parametrize("delta", ["false", "true"])
def test_weights_that_arrive_meanwhile_are_received_by_the_main_thread(directory: Path, delta: str) -> None:
    """By a replica of two slices, which agree when; over gloo by a thread. The same run."""
    config = json.loads((tasks.task() / "ppo.json").read_text())
    config["algorithm"] = {"name": "grpo", "ppo_mini_batch_size": 4, "kl_loss_coef": 0.05}
    actor, reference = config["models"]["actor"], {"path": str(tasks.task() / "reference")}
    config["models"] = {
        "actor": {**actor, "dtype": "float64"},
        "reference": {**reference, "dtype": "float64"},
        "reward": {"dtype": "float64"},
    }
    config["sampling"] = {"n": 3}
    file = directory / "grpo.json"
    file.write_text(json.dumps(config))
    runs = []
    for nccl in (False, True):
        run_dir = directory / f"ahead_{delta}_{nccl}"
        more = ("models.actor.calls.generate_sequences.layout.tp=2", f"models.actor.calls.generate_sequences.delta={delta}")
        threads = run_ranks(3, train_ahead, str(file), tasks.settings(run_dir, 4, *APART, *more), nccl)
        receiving = {name for rank in (1, 2) for name in threads[rank]}
        assert "weights" not in receiving if nccl else "weights" in receiving, receiving
        assert len(threads[1]) == len(threads[2]) >= 3
        runs.append(tasks.read_run(run_dir))
    plain, other = runs
    assert other.responses == plain.responses
    difference, where = tasks.worst_tensor(plain, other)
    assert difference < 1e-9, where


# labels of what lies on the device; all others are small tensors in host memory, which gloo carries on GPUs too
ON_DEVICE = {
    "weight_sync",
    "reshard",
    "gradients",
    "grad_norm",
    "tied_gradients",
    "zero_parameters",
    "zero_gradients",
    "head_grad",
    "head",
}
ON_DEVICE |= {
    "pipeline_forward",
    "pipeline_backward",
    "generation:hidden",
    "generation:tokens",
    "generation:log_probs",
    "tp",
    "logits",
}


def connections(world: World, config: str, given: list[str]) -> tuple[set[str], list[str]]:
    """Labels of what this rank sent from its device, and what of it met NCCL for the first time after the first of it: collectives in a
    group that had not been connected, and messages between two ranks, whose first is sent when they are connected."""
    met, labels, late, events = dict[Any, int](), set[str](), list[str](), itertools.count()
    first: list[int] = []
    meet, note = Group.meet, Group._note

    def noted_meeting(self: Group, device: torch.device, pairs: bool = False) -> None:
        meet(self, device, pairs)
        if self.size > 1:
            met.setdefault(self.process_group, next(events))

    def noted(self: Group, operation: str, label: str, *sizes: Any, **more: Any) -> None:
        note(self, operation, label, *sizes, **more)
        if label not in ON_DEVICE or self.size == 1:
            return
        labels.add(label)
        pair, now = operation in ("isend", "irecv"), next(events)
        at = met.setdefault((self.process_group, operation, more["way"]), now) if pair else met.get(self.process_group, now)
        first.extend([] if pair or first else [now])
        if first and at >= first[0]:
            late.append(f"{operation} {label} on {self.name} {self.ranks}")

    Group.meet, Group._note = noted_meeting, noted  # type: ignore[method-assign]
    try:
        gpu_abilities.train_here(world, config, given)
    finally:
        Group.meet, Group._note = meet, note  # type: ignore[method-assign]
    return labels, late


@pytest.mark.parametrize("name", ["tp2 -> tp1", "pp2", "zero3", "lent for a call"])
def test_communicators_are_made_before_the_first_transfer(directory: Path, name: str) -> None:
    """NCCL's, which are made while others' transfers are open, may wait for these for ever."""
    given = tasks.settings(directory / f"made_{sorted(LAYOUTS).index(name)}", 2, *FP64, *LAYOUTS[name])
    for labels, late in run_ranks(2, connections, str(tasks.task() / "ppo.json"), given):
        assert not late and labels, late


def test_the_branches_are_left_behind() -> None:
    from rlhf_spmd.kernels import devices

    before = devices._CPU
    with nccl_branches():
        assert devices._CPU.nccl and not devices._CPU.batch_invariant
    assert devices._CPU is before
