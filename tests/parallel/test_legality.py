"""Runs on gloo, held against NCCL's rules: nothing is found in them, and each of five faults is found that is planted in one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import expert_tasks
import tasks
from legality import check
from legality_events import Communicator, Event, Finding, Fork, Launch, Machine, Part, Wait
from overrides import STEADY, layout, micro_batches
from recording import record_ranks

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
    "dp2": (2, 1, micro_batches(rows=4)),
    "tp2": (2, 1, (*layout("actor", tp=2), *layout("generation", tp=2), *layout("critic", tp=2))),
    "pp2": (2, 1, (*layout("actor", pp=2), *layout("generation", pp=2), *layout("critic", pp=2), *micro_batches(tokens=32))),
    "two chunks of layers per stage": (2, 1, (*layout("actor", pp=2), "models.actor.layout.vpp=2", *micro_batches(rows=3))),
    "pp4": (4, 1, (*layout("actor", pp=4), *layout("generation", pp=4), *layout("critic", tp=2, dp=2))),
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
    "cp2 dp2": (4, 1, (*layout("actor", cp=2, dp=2, zero=2), *layout("reference", tp=2, cp=2, zero=3), *micro_batches(rows=2))),
    # receives are open when its ranks first share tokens
    "a critic with cp2 pp2": (4, 1, (*layout("actor", dp=4), *layout("critic", pp=2, cp=2), *micro_batches(rows=1))),
    "experts of ep2 in pp2, of ep4 with zero3": (
        4,
        1,
        (
            *layout("actor", pp=2, dp=2, ep=2, zero=1),
            *layout("critic", dp=4, ep=2, zero=2),
            *layout("reference", dp=4, ep=4, zero=3),
            *micro_batches(rows=2),
        ),
    ),
    "tp2 pp2": (4, 1, (*layout("actor", pp=2, tp=2), *layout("critic", pp=2, dp=2, zero=1), *micro_batches(rows=2))),
    "generation and values on ranks of their own": (4, 2, CRITIC_APART),
    "generation ahead": (4, 3, AHEAD),
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
}
WITH_NOTHING_OPEN = ("dp2", "tp2", "zero1, zero3, sequence parallel, muon")  # while a rank computes


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
def records_of(directory: Path, name: str, nccl: bool = True) -> Records:
    ranks, steps, overrides = RUNS[name]
    place = directory / f"{sorted(RUNS).index(name)}{nccl}"
    config = without_critic(directory) if "ahead" in name else str(tasks.task() / "ppo.json")
    config = expert_tasks.config(directory) if "experts" in name else config
    more = () if "ahead" in name else STEADY
    arguments = tasks.settings(place / "run", steps, *overrides, *more)
    return record_ranks(ranks, place / "records", tasks.train_here, config, arguments, nccl=nccl)


def launches(records: Records) -> list[Launch]:
    return [event for events in records.values() for event in events if isinstance(event, Launch)]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_legal_on_nccl(directory: Path, name: str) -> None:
    records = records_of(directory, name)
    assert len(launches(records)) > 50 and any(launch.comm.device for launch in launches(records))
    for machine in (Machine(), Machine(queue=True), *([Machine(allocator=True)] * (name in WITH_NOTHING_OPEN))):
        assert check(records, machine) == [], machine


def test_the_branches_that_gpus_take_were_taken(directory: Path) -> None:
    seen = {(launch.kind, launch.label) for name in RUNS for launch in launches(records_of(directory, name))}
    assert {kind for kind, _ in seen} >= {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "exchange", "message"}
    assert {("exchange", "weight_sync"), ("all_gather", "zero_parameters"), ("reduce_scatter", "zero_gradients")} <= seen
    assert {("message", "pipeline_forward"), ("message", "generation:hidden"), ("broadcast", "generation:tokens")} <= seen
    assert {("exchange", "muon_matrices"), ("all_to_all", "expert_rows"), ("all_to_all", "expert_counts")} <= seen


def test_a_run_on_gloo_as_it_is(directory: Path) -> None:
    """But for connections, which are made before only where there is NCCL."""
    found = check(records_of(directory, "tp2 pp2", nccl=False))
    assert [finding for finding in found if finding.rule != "connections"] == []


@pytest.mark.parametrize("name", ["pp2", "tp2 pp2"])
def test_a_pipeline_whose_hosts_wait_for_their_devices_may_lock(directory: Path, name: str) -> None:
    """What is not proved: a stage has a receive open while it computes, as its neighbour has. See docs/gpus.md."""
    (finding,) = check(records_of(directory, name), Machine(allocator=True))
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


def resized(records: Records) -> str:
    events = records[0]
    place = first(events, lambda launch: launch.label == "pipeline_backward" and not launch.parts[0].sends)
    event = events[place]
    assert isinstance(event, Launch)
    events[place] = replace(event, parts=(event.parts[0]._replace(numel=event.parts[0].numel + 1),))
    return "pipeline_backward"


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
        ("pp2", "pairs", resized),
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


def collective(number: int, comm: Communicator = PAIR, label: str = "x", **more: object) -> Launch:
    return Launch(comm, "all_reduce", label, number, numel=4, dtype="float32", **more)  # type: ignore[arg-type]


def rules(records: Records) -> set[str]:
    return {finding.rule for finding in check(records)}


def test_a_group_in_which_only_some_ranks_connect() -> None:
    three = Communicator("", (0, 1, 2), True)
    exchange = [
        Launch(three, "exchange", "weight_sync", 0, parts=(Part(1 - rank, rank == 0, 4, "float32"),)) for rank in (0, 1)
    ]
    records: Records = {0: [exchange[0]], 1: [exchange[1]], 2: []}
    assert "connections" in rules(records)
    assert rules({rank: [collective(9, three), *events] for rank, events in records.items()}) == set()


def test_a_first_all_to_all_while_a_transfer_is_open() -> None:
    """It connects each rank with each other, which an all-reduce before did not."""
    both = Communicator("back", (0, 1), True)
    reduced, swapped = collective(0, both), Launch(both, "all_to_all", "context_parallel", 3, numel=4, dtype="float32")
    parts = {rank: (Part(1 - rank, rank == 0, 4, "float32"),) for rank in (0, 1)}
    open_: Records = {
        rank: [collective(1), reduced, Launch(PAIR, "exchange", "stage", 2, asynchronous=True, parts=parts[rank]), swapped]
        for rank in (0, 1)
    }
    assert "connections" in rules(open_)
    before = replace(swapped, label="meet", number=1)
    assert "connections" not in rules({rank: [before, *events] for rank, events in open_.items()})


def test_a_batch_that_is_two_on_the_other_side() -> None:
    both = [Part(1, True, 4, "float32"), Part(1, True, 5, "float32")]
    one = Launch(PAIR, "exchange", "weight_sync", 1, parts=tuple(both))
    two = [
        Launch(PAIR, "exchange", "weight_sync", 1 + i, parts=(part._replace(peer=0, sends=False),))
        for i, part in enumerate(both)
    ]
    assert rules({0: [collective(0), one], 1: [collective(0), *two]}) == {"pairs"}


def test_messages_of_two_ranks_that_both_send_first() -> None:
    """Legal on gloo, where tags match them; on NCCL each waits for the other's receive."""

    def ends(rank: int, comm: Communicator) -> list[Event]:
        ways = [
            Launch(comm, "message", "x", i, parts=(Part(1 - rank, i == 0, 4, "float32"),), asynchronous=True) for i in (0, 1)
        ]
        return [*ways, Wait(0), Wait(1)]

    assert rules({rank: ends(rank, PAIR) for rank in (0, 1)}) == {"order"}
    assert rules({rank: ends(rank, PAIR._replace(device=False)) for rank in (0, 1)}) == set()


def test_an_operation_between_other_collectives_than_its_partner() -> None:
    def at(rank: int, late: bool) -> list[Event]:
        exchange = Launch(
            PAIR, "exchange", "weight_sync", 1, parts=(Part(1 - rank, rank == 0, 4, "float32"),), asynchronous=True
        )
        events: list[Event] = [exchange, collective(2)]
        return [collective(0), *(reversed(events) if late else events)]

    assert rules({0: at(0, False), 1: at(1, True)}) == {"order"}
    assert check({0: at(0, False), 1: at(1, False)}) == list[Finding]()


def test_rows_that_are_not_received_are_found(directory: Path) -> None:
    """Ranks that share experts and do not agree on how many rows travel."""
    records = dict(records_of(directory, "experts of ep2 in pp2, of ep4 with zero3"))
    at = first(records[1], lambda launch: launch.label == "expert_rows")
    launch = records[1][at]
    assert isinstance(launch, Launch)
    sent, received = launch.splits
    more = replace(launch, splits=((sent[0] + 1, *sent[1:]), received))
    records[1] = [*records[1][:at], more, *records[1][at + 1 :]]
    assert "pairs" in {finding.rule for finding in check(records)}
