"""Runs on gloo, held against NCCL's rules: nothing is found in them. In records by hand each kind of fault is found."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import expert_tasks
import tasks
from legality import check
from legality_events import Communicator, Event, Fork, Launch, Machine, Part, Pass, Wait
from overrides import STEADY, layout, micro_batches
from recording import record_ranks
from rlhf_spmd.parallel.world import World
from rlhf_spmd.workers import weight_sync
from tiers import tiers

Records = dict[int, list[Event]]

SMALL = ("data.train_batch_size=4", "data.max_response_length=6")
CRITIC_APART = (
    "placement.pools={train: [0, 1], generate: [2, 3]}",
    *(f"models.{role}.pool=train" for role in ("actor", "critic", "reference", "reward")),
    "models.actor.layout.pp=2",
    "models.actor.calls.generate_sequences.pool=generate",
    "models.actor.calls.generate_sequences.layout.tp=2",
    "models.critic.calls.compute_values.pool=generate",
    "models.critic.calls.compute_values.layout.pp=2",
)
AHEAD = (
    "placement.pools={train: [0, 1], generate: [2, 3]}",
    *(f"models.{role}.pool=train" for role in ("actor", "reference", "reward")),
    "models.actor.calls.generate_sequences.pool=generate",
    "rollout.max_staleness=1",
)
# name -> ranks, steps, overrides
RUNS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "pp2": (2, 1, (*layout("actor", pp=2), *layout("generation", pp=2), *layout("critic", pp=2), *micro_batches(tokens=32))),
    "zero1, zero3, sequence parallel, muon": (
        4,
        1,
        (
            *layout("actor", tp=2, dp=2, zero=1),
            "models.actor.layout.sequence_parallel=true",
            "models.actor.optim.name=muon",
            *layout("reference", dp=4, zero=3),
            *layout("critic", dp=4, zero=3),
        ),
    ),
    # the critic's receives are open when its ranks first share tokens
    "cp2 in dp2, pp2 and tp2": (
        4,
        1,
        (
            *layout("actor", cp=2, dp=2, zero=2),
            *layout("critic", pp=2, cp=2),
            *layout("reference", tp=2, cp=2, zero=3),
            *micro_batches(rows=1),
        ),
    ),
    "experts of ep2 in chunks of pp2, of ep4 with zero3": (
        4,
        1,
        (
            *layout("actor", pp=2, dp=2, ep=2, zero=1),
            "models.actor.layout.vpp=2",
            *layout("critic", dp=4, ep=2, zero=2),
            *layout("reference", dp=4, ep=4, zero=3),
            *micro_batches(rows=2),
        ),
    ),
    "generation ahead in slices, what has changed": (
        4,
        3,
        (
            *AHEAD,
            "models.actor.layout.zero=3",
            "models.actor.calls.generate_sequences.layout.tp=2",
            "models.actor.calls.generate_sequences.delta=true",
        ),
    ),
    "generation and values on ranks of their own": (4, 2, CRITIC_APART),
}
SHORT = list(RUNS)[:5]
MACHINES = Machine(), Machine(queue=True), Machine(synchronises=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("legality")


def without_critic(directory: Path) -> str:
    config = json.loads((tasks.task() / "ppo.json").read_text())
    config["algorithm"] = {"name": "grpo", "ppo_mini_batch_size": 4, "ppo_epochs": 2}
    config["models"] = {role: config["models"][role] for role in ("actor", "reference")}
    file = directory / "grpo.json"
    file.write_text(json.dumps(config))
    return str(file)


@functools.cache
def records_of(directory: Path, name: str) -> Records:
    ranks, steps, overrides = RUNS[name]
    config = without_critic(directory) if "ahead" in name else str(tasks.task() / "ppo.json")
    config = expert_tasks.config(directory) if "experts" in name else config
    more = SMALL if "ahead" in name else (*SMALL, *STEADY)
    arguments = tasks.settings(directory / str(sorted(RUNS).index(name)), steps, *overrides, *more)
    return record_ranks(ranks, train_in_small_messages, config, arguments)


def train_in_small_messages(world: World, config: str, arguments: list[str]) -> None:
    """So that weights move in many exchanges, for which there are not as many buffers."""
    with (
        mock.patch.object(weight_sync, "transfer_steps", partial(weight_sync.transfer_steps, message_bytes=1 << 12)),
        mock.patch.object(weight_sync, "start_transfer", partial(weight_sync.start_transfer, buffer_bytes=1 << 14)),
    ):
        tasks.train_here(world, config, arguments)


def launches(records: Records) -> list[Launch]:
    return [event for events in records.values() for event in events if isinstance(event, Launch)]


@pytest.mark.parametrize("name", tiers(RUNS, SHORT))
def test_a_run_is_legal_on_nccl(directory: Path, name: str) -> None:
    records = records_of(directory, name)
    assert len(launches(records)) > 50 and any(launch.comm.device for launch in launches(records))
    for machine in MACHINES:
        assert check(records, machine) == [], machine


def test_the_branches_that_gpus_take_were_taken(directory: Path) -> None:
    seen = {(launch.kind, launch.label) for name in SHORT for launch in launches(records_of(directory, name))}
    assert {kind for kind, _ in seen} >= {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "exchange", "message"}
    assert {("exchange", "weight_sync"), ("all_gather", "zero_parameters"), ("reduce_scatter", "zero_gradients")} <= seen
    assert {("message", "pipeline_forward"), ("message", "generation:hidden"), ("broadcast", "generation:tokens")} <= seen
    assert {("exchange", "muon_matrices"), ("all_to_all", "expert_rows"), ("all_to_all", "expert_counts")} <= seen


# -- by hand

PAIR = Communicator("", (0, 1), True)
BACK = PAIR._replace(name="back")
THREE = Communicator("", (0, 1, 2), True)


def collective(number: int, comm: Communicator = PAIR, kind: str = "all_reduce", **more: Any) -> Launch:
    return Launch(comm, kind, "x", number, numel=4, dtype="float32", **more)


def exchange(number: int, rank: int, sends: bool, comm: Communicator = PAIR, kind: str = "exchange") -> Launch:
    return Launch(comm, kind, "x", number, parts=(Part(1 - rank, sends, 4, "float32"),), asynchronous=True)


def crossed(more: bool) -> Records:
    """Two communicators, each of which has one operation on both ranks. ``more``: the ranks begin with another one."""
    first, second = collective(0), collective(1, BACK)
    meet = [collective(2), collective(3, BACK)]
    return {0: [*meet, first, second], 1: [*meet, *((second, first) if more else (first, second))]}


def swapped(more: bool) -> Records:
    """Two operations of one communicator, on one rank."""
    events = [collective(0), collective(1, kind="broadcast")]
    return {0: events, 1: events[::-1] if more else events}


def lost(more: bool) -> Records:
    """A receive whose send is missing."""
    return {0: [collective(0)] if more else [collective(0), exchange(1, 0, True)], 1: [collective(0), exchange(1, 1, False)]}


def from_two_threads(more: bool) -> Records:
    """A thread that nobody joins launches as the main one does."""
    beside = [Fork("beside"), collective(0), collective(1, thread="beside" if more else "main"), collective(2)]
    return {0: [collective(0), collective(1), collective(2)], 1: beside}


def connected_meanwhile(more: bool) -> Records:
    """A communicator's first operation comes between the begin of a transfer and the wait for it."""
    late = collective(2, BACK)
    return {
        rank: [collective(0), exchange(1, rank, rank == 0), *((late, Wait(1)) if more else (Wait(1), late))] for rank in (0, 1)
    }


def some_connect(more: bool) -> Records:
    """Two of three ranks exchange, and the third has not connected."""
    events: Records = {0: [exchange(0, 0, True, THREE)], 1: [exchange(0, 1, False, THREE)], 2: []}
    return events if more else {rank: [collective(9, THREE), *own] for rank, own in events.items()}


def all_to_all_while_open(more: bool) -> Records:
    """It connects each rank with each other, which an all-reduce before did not."""
    late = [collective(0, BACK), collective(2, BACK, "all_to_all")]
    before = [] if more else [collective(3, BACK, "all_to_all")]
    return {rank: [*before, collective(4), late[0], exchange(1, rank, rank == 0), late[1]] for rank in (0, 1)}


def both_send_first(more: bool) -> Records:
    """On gloo tags match them; on NCCL each waits for the other's receive."""
    comm = PAIR._replace(device=more)
    return {rank: [*(exchange(i, rank, i == 0, comm, "message") for i in (0, 1)), Wait(0), Wait(1)] for rank in (0, 1)}


def rows_that_are_not_received(more: bool) -> Records:
    """Ranks that share experts and do not agree on how many rows travel."""
    splits = {0: ((1, 2 + more), (1, 3)), 1: ((3, 1), (2, 1))}
    return {rank: [collective(0, kind="all_to_all", splits=splits[rank])] for rank in (0, 1)}


def test_a_receive_that_is_open_in_a_pass_may_lock_ranks_that_load_kernels() -> None:
    """Each rank sends what it has computed, and waits for its whole device while it computes."""
    way, back = ((comm, "message") for comm in (PAIR, BACK))
    ahead: Records = {
        0: [exchange(0, 0, False, *back), Pass(), exchange(1, 0, True, *way), Wait(0)],
        1: [exchange(0, 1, False, *way), Pass(), exchange(1, 1, True, *back), Wait(0)],
    }
    receive, launched, send, wait = ahead[0]
    behind = ahead | {0: [launched, send, receive, wait]}
    met: Records = {0: [collective(7), collective(8, BACK)], 1: [collective(7), collective(8, BACK)]}
    found = [
        check({rank: [*met[rank], *some[rank]] for rank in met}, machine) for some in (ahead, behind) for machine in MACHINES
    ]
    assert [[finding.rule for finding in findings] for findings in found] == [[], [], ["waits"], [], [], []]


@pytest.mark.parametrize(
    ("records", "rule"),
    [
        (swapped, "order"),
        (both_send_first, "order"),
        (lost, "pairs"),
        (rows_that_are_not_received, "pairs"),
        (from_two_threads, "threads"),
        (connected_meanwhile, "connections"),
        (some_connect, "connections"),
        (all_to_all_while_open, "connections"),
        (crossed, "waits"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_fault_is_found(records: Callable[[bool], Records], rule: str) -> None:
    assert rule in {finding.rule for finding in check(records(True))}
    assert check(records(False)) == []
