"""The branches for NCCL, over gloo: the same run as of one rank on CPUs. What they launch, and in which order, is in test_legality."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import expert_tasks
import tasks
from algorithm_cases import CASES, assert_same_run
from overrides import FP64, layouts
from ranks import run_ranks
from recording import as_on_nccl
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import transfer
from rlhf_spmd.workers import weight_sync
from tiers import tiers

STEPS = 2
LAYOUTS: dict[str, tuple[str, ...]] = {
    "tp2 -> tp1, lent for a call": (
        "models.reference.calls.compute_ref_log_prob.layout.pp=2",
        *layouts("actor tp2, critic tp2"),
    ),
    "pp2": layouts("actor pp2, generation pp2, critic pp2"),
    "zero3": layouts("actor dp2 zero3, critic dp2 zero3, reference dp2 zero3"),
    "experts in ep2": layouts("actor dp2 ep2, critic dp2 ep2, reference dp2 ep2"),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nccl")


Manager = Callable[[], contextlib.AbstractContextManager[Any]]
_entered: list[tuple[contextlib.ExitStack, Any]] = []  # of this process


@contextlib.contextmanager
def on_ranks(size: int, manager: Manager) -> Iterator[list[Any]]:
    """Enters a context manager on every rank of the pool, for the runs inside. The list has at the end what the ranks' managers
    yielded, in rank order.
    """
    results: list[Any] = []
    run_ranks(size, _enter, manager)
    try:
        yield results
    finally:
        results += run_ranks(size, _leave)


def _enter(_: World, manager: Manager) -> None:
    stack = contextlib.ExitStack()
    _entered.append((stack, stack.enter_context(manager())))


def _leave(_: World) -> Any:
    """Nothing on the ranks of a new pool, which follows one that was torn down because a rank failed."""
    if _entered:
        stack, result = _entered.pop()
        stack.close()
        return result
    return None


@functools.cache
def one_rank(directory: Path, config: str | None) -> tasks.Run:
    return tasks.train(1, directory / f"one_rank_{'of_experts' if config else ''}", STEPS, *FP64, config=config)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_run_in_fp64(directory: Path, name: str) -> None:
    config = expert_tasks.config(directory) if "experts" in name else None
    with on_ranks(2, as_on_nccl):
        other = tasks.train(2, directory / str(sorted(LAYOUTS).index(name)), STEPS, *FP64, *LAYOUTS[name], config=config)
    assert_same_run(one_rank(directory, config), other)


APART = (
    "placement.pools={train: [0], generate: [1, 2]}",
    "rollout.max_staleness=1",
    *(f"models.{role}.pool=train" for role in ("actor", "reference", "reward")),
    "models.actor.calls.generate_sequences.pool=generate",
    "models.actor.calls.generate_sequences.layout.tp=2",
)


@contextlib.contextmanager
def names_of_receivers() -> Iterator[list[str]]:
    """Names of the threads that receive weights on this rank, which looks for new ones between any two steps of generation."""
    threads: list[str] = []
    start = transfer.Transfer.__init__

    def noted(self: transfer.Transfer, *args: Any, **more: Any) -> None:
        threads.append(threading.current_thread().name)
        start(self, *args, **more)

    with mock.patch.object(transfer.Transfer, "__init__", noted), mock.patch.object(weight_sync, "POLL_INTERVAL", 1):
        yield threads


@functools.cache
def run_ahead(directory: Path, is_nccl: bool, *more: str) -> tuple[tasks.Run, list[list[str]]]:
    """The run, and for each rank the names of the threads that received."""
    run_dir = directory / f"ahead_{len(list(directory.iterdir()))}"
    with on_ranks(3, as_on_nccl if is_nccl else contextlib.nullcontext), on_ranks(3, names_of_receivers) as threads:
        run = CASES["grpo"].train(run_dir, *APART, *more, ranks=3, steps=4)
    return run, threads


@pytest.mark.parametrize("delta", tiers([True, False], [True]))
def test_weights_that_arrive_meanwhile_are_received_by_the_main_thread(directory: Path, delta: bool) -> None:
    """By a replica of two slices, which agree when; over gloo by a thread. The same run, and whether only changes are sent or all."""
    plain, threads_of_gloo = run_ahead(directory, False)
    sends = f"models.actor.calls.generate_sequences.delta={str(delta).lower()}"
    other, threads = run_ahead(directory, True, sends)
    assert "weights" in {*threads_of_gloo[1], *threads_of_gloo[2]} and "weights" not in {*threads[1], *threads[2]}
    assert len(threads[1]) == len(threads[2]) >= 3
    assert_same_run(plain, other)
