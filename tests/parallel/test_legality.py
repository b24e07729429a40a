"""Runs on gloo, held against NCCL's rules: nothing is found in them, but each of five faults that are planted in one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import expert_tasks
import tasks
from legality import check
from legality_events import Communicator, Event, Fork, Launch, Machine, Part, Wait
from overrides import STEADY, layout, micro_batches
from recording import record_ranks
from tiers import tiers

Records = dict[int, list[Event]]

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
    "placement.max_staleness=1",
)
# name -> ranks, steps, overrides
RUNS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "tp2": (2, 1, (*layout("actor", tp=2), *layout("generation", tp=2), *layout("critic", tp=2))),
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
    "tp2 pp2": (4, 1, (*layout("actor", pp=2, tp=2), *layout("critic", pp=2, dp=2, zero=1), *micro_batches(rows=2))),
    "pp4": (4, 1, (*layout("actor", pp=4), *layout("generation", pp=4), *layout("critic", tp=2, dp=2))),
}
SHORT = list(RUNS)[:6]
WITH_NOTHING_OPEN = ("tp2", "zero1, zero3, sequence parallel, muon")  # while a rank computes


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
    more = () if "ahead" in name else STEADY
    arguments = tasks.settings(directory / str(sorted(RUNS).index(name)), steps, *overrides, *more)
    return record_ranks(ranks, tasks.train_here, config, arguments)


def launches(records: Records) -> list[Launch]:
    return [event for events in records.values() for event in events if isinstance(event, Launch)]


@pytest.mark.parametrize("name", tiers(RUNS, SHORT))
def test_a_run_is_legal_on_nccl(directory: Path, name: str) -> None:
    records = records_of(directory, name)
    assert len(launches(records)) > 50 and any(launch.comm.device for launch in launches(records))
    for machine in (Machine(), Machine(queue=True), *([Machine(allocator=True)] * (name in WITH_NOTHING_OPEN))):
        assert check(records, machine) == [], machine


def test_the_branches_that_gpus_take_were_taken(directory: Path) -> None:
    seen = {(launch.kind, launch.label) for name in SHORT for launch in launches(records_of(directory, name))}
    assert {kind for kind, _ in seen} >= {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "exchange", "message"}
    assert {("exchange", "weight_sync"), ("all_gather", "zero_parameters"), ("reduce_scatter", "zero_gradients")} <= seen
    assert {("message", "pipeline_forward"), ("message", "generation:hidden"), ("broadcast", "generation:tokens")} <= seen
    assert {("exchange", "muon_matrices"), ("all_to_all", "expert_rows"), ("all_to_all", "expert_counts")} <= seen


def test_a_pipeline_whose_hosts_wait_for_their_devices_may_lock(directory: Path) -> None:
    """What is not proved: a stage has a receive open while it computes, as its neighbour has. See docs/gpus.md."""
    (finding,) = check(records_of(directory, "pp2"), Machine(allocator=True))
    assert finding.rule == "waits" and "pipeline_forward" in finding.text and "pipeline_backward" in finding.text


# -- five faults


def first(events: list[Event], matches: Callable[[Launch], bool]) -> int:
    return next(i for i, event in enumerate(events) if isinstance(event, Launch) and matches(event))


def number(event: Event) -> int:
    assert isinstance(event, Launch)
    return event.number


def on_device(launch: Launch) -> bool:
    return launch.comm.device and not launch.parts


def swapped(records: Records) -> str:
    """Two operations of one communicator, on one rank."""
    events = records[1]
    place = first(events, lambda launch: on_device(launch) and launch.label == "mlp")
    comm, signature = events[place].comm, events[place].signature  # type: ignore[union-attr]
    other = place + 1 + first(events[place + 1 :], lambda each: each.comm == comm and each.signature != signature)
    events[place], events[other] = events[other], events[place]
    return "mlp"


def lost(records: Records) -> str:
    """A receive whose send is missing."""
    events = records[0]
    place = first(events, lambda launch: launch.label == "pipeline_forward" and launch.numel == 0 and launch.parts[0].sends)
    records[0] = [event for event in events if getattr(event, "number", None) != number(events[place])]
    return "pipeline_forward"


def from_two_threads(records: Records) -> str:
    """A thread that nobody joins launches some of the sums over tp."""
    events = records[1]
    places = [i for i, event in enumerate(events) if isinstance(event, Launch) and event.label == "attention"]
    for place in places[4:6]:
        events[place] = replace(events[place], thread="beside 1")
    events.insert(places[0], Fork("beside 1"))
    return "attention"


def made_meanwhile(records: Records) -> str:
    """A communicator, made between the begin of a transfer and the wait for it."""
    new = Communicator("new", (0, 1), True)
    events = records[0]
    place = first(events, lambda launch: launch.label == "pipeline_forward" and launch.asynchronous)
    assert any(isinstance(later, Wait) and later.number == number(events[place]) for later in events[place + 1 :])
    events.insert(place + 1, Launch(new, "all_reduce", "late", -1, numel=1, dtype="float32"))
    records[1].append(Launch(new, "all_reduce", "late", -1, numel=1, dtype="float32"))
    return "late"


def crossed(records: Records) -> str:
    """Two streams of one rank each, two communicators, each of which sees one order on both ranks."""
    comms = list(
        dict.fromkeys(launch.comm for launch in launches(records) if launch.comm.device and launch.comm.ranks == (0, 1))
    )
    there, back = [
        Launch(comm, "all_reduce", f"crossed {i}", -1 - i, numel=8, dtype="float32") for i, comm in enumerate(comms[:2])
    ]
    records[0] += [there, back]
    records[1] += [back, there]
    return "crossed 1"


@pytest.mark.parametrize(
    ("name", "rule", "plant"),
    [
        ("tp2", "order", swapped),
        ("pp2", "pairs", lost),
        ("tp2", "threads", from_two_threads),
        ("pp2", "connections", made_meanwhile),
        ("pp2", "waits", crossed),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_planted_fault_is_found(directory: Path, name: str, rule: str, plant: Callable[[Records], str]) -> None:
    records = {rank: list(events) for rank, events in records_of(directory, name).items()}
    assert check(records) == []
    label = plant(records)
    found = [finding for finding in check(records) if finding.rule == rule]
    assert found and all(label in finding.text and "rank" in finding.text for finding in found[:1]), check(records)


# -- by hand

PAIR = Communicator("", (0, 1), True)
BACK = PAIR._replace(name="back")
THREE = Communicator("", (0, 1, 2), True)


def collective(number: int, comm: Communicator = PAIR, kind: str = "all_reduce", **more: Any) -> Launch:
    return Launch(comm, kind, "x", number, numel=4, dtype="float32", **more)


def exchange(number: int, rank: int, sends: bool, comm: Communicator = PAIR, kind: str = "exchange") -> Launch:
    return Launch(comm, kind, "x", number, parts=(Part(1 - rank, sends, 4, "float32"),), asynchronous=True)


def some_connect(first: bool) -> Records:
    """``first``: all three ranks do, before two of them exchange."""
    events: Records = {0: [exchange(0, 0, True, THREE)], 1: [exchange(0, 1, False, THREE)], 2: []}
    return {rank: [collective(9, THREE), *own] for rank, own in events.items()} if first else events


def all_to_all_while_open(first: bool) -> Records:
    """It connects each rank with each other, which an all-reduce before did not. ``first``: one came before."""
    late = [collective(0, BACK), collective(2, BACK, "all_to_all")]
    before = [collective(3, BACK, "all_to_all")] if first else []
    return {rank: [*before, collective(4), late[0], exchange(1, rank, rank == 0), late[1]] for rank in (0, 1)}


def both_send_first(device: bool) -> Records:
    """On gloo tags match them; on NCCL each waits for the other's receive."""
    comm = PAIR._replace(device=device)
    return {rank: [*(exchange(i, rank, i == 0, comm, "message") for i in (0, 1)), Wait(0), Wait(1)] for rank in (0, 1)}


def rows_that_are_not_received(more: int) -> Records:
    """Ranks that share experts and do not agree on how many rows travel."""
    splits = {0: ((1, 2 + more), (1, 3)), 1: ((3, 1), (2, 1))}
    return {rank: [collective(0, kind="all_to_all", splits=splits[rank])] for rank in (0, 1)}


@pytest.mark.parametrize(
    ("illegal", "legal", "rule"),
    [
        (some_connect(False), some_connect(True), "connections"),
        (all_to_all_while_open(False), all_to_all_while_open(True), "connections"),
        (both_send_first(True), both_send_first(False), "order"),
        (rows_that_are_not_received(1), rows_that_are_not_received(0), "pairs"),
    ],
    ids=["connections", "all-to-all", "order", "rows"],
)
def test_what_is_found_in_records_by_hand(illegal: Records, legal: Records, rule: str) -> None:
    assert rule in {finding.rule for finding in check(illegal)}
    assert check(legal) == []
