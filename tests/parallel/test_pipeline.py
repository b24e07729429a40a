"""Pipeline schedules as pure functions, and the loop that runs them: its transfers are legal on NCCL.

``tests/workers/test_engine_layouts.py`` has what it computes on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from legality import check
from legality_events import Communicator, Event, Launch, Machine, Part, Pass, Wait
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.pipeline import (
    Action,
    Schedule,
    connect_stages,
    run_pipeline,
    schedule_1f1b,
    schedule_forward,
    simulate,
)

CASES = [(m, pp, vpp) for vpp in (1, 2, 3) for pp in (1, 2, 3, 4, 7) for m in (0, 1, 2, 3, 5, 8, 13) if pp > 1 or vpp == 1]


@pytest.mark.parametrize(("m", "pp", "vpp"), CASES)
def test_1f1b_is_complete_bounded_and_as_short_as_the_formula(m: int, pp: int, vpp: int) -> None:
    schedules = [schedule_1f1b(m, pp, rank, vpp) for rank in range(pp)]
    longest_round = 0 if not m else m if m < 2 * pp else -(-m // (m // pp))
    assert longest_round < 2 * pp and (m % pp or longest_round == min(m, pp))
    for rank, actions in enumerate(schedules):
        for kind in ("F", "B"):
            for chunk in range(vpp):
                assert [a.micro_batch for a in actions if (a.kind, a.chunk) == (kind, chunk)] == list(range(m))
        alive = most = 0
        for action in actions:
            alive += 1 if action.kind == "F" else -1
            most = max(most, alive)
        limit = pp - rank if vpp == 1 else 2 * (pp - 1 - rank) + (vpp - 1) * longest_round + 1
        assert most == min(limit, m * vpp)
    for backward in (1, 2):
        length = max(simulate(schedules, vpp, backward).values(), default=0)
        if m >= pp or vpp == 1:
            assert length == ((1 + backward) * (m * vpp + pp - 1) if m else 0)


@pytest.mark.parametrize(("m", "pp", "vpp"), CASES)
def test_forward_schedule_takes_vm_plus_p_minus_1_slots(m: int, pp: int, vpp: int) -> None:
    schedules = [schedule_forward(m, pp, rank, vpp) for rank in range(pp)]
    for actions in schedules:
        for chunk in range(vpp):
            assert [a for a in actions if a.chunk == chunk] == [Action("F", i, chunk) for i in range(m)]
    length = max(simulate(schedules, vpp).values(), default=0)
    if m >= pp or vpp == 1:
        assert length == (m * vpp + pp - 1 if m else 0)


# -- on paper: groups that note for ``legality`` what is launched on them, and carry nothing

MACHINES = Machine(), Machine(queue=True), Machine(synchronises=True)
CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass
class Paper:
    """What a rank does, with as much of a ``World`` as groups and meshes need."""

    rank: int
    size: int
    events: list[Event] = field(default_factory=list)
    device: torch.device = CPU

    def group(self, ranks: Sequence[int], name: str, channel: str = "") -> Group | None:
        members = tuple(ranks)
        return PaperGroup(name, members, members.index(self.rank), None, channel, self) if self.rank in members else None

    def begin(self, group: PaperGroup, kind: str, label: str, **more: Any) -> PaperWork:
        number = len(self.events)
        self.events.append(Launch(Communicator(group.channel, group.ranks, True), kind, label, number, **more))
        return PaperWork(self, number)


@dataclass
class PaperWork:
    paper: Paper
    number: int

    def wait(self) -> None:
        self.paper.events.append(Wait(self.number))


@dataclass(frozen=True, eq=False)
class PaperGroup(Group):
    """Every operation takes part in nothing: a result is its argument."""

    channel: str = ""
    paper: Paper = field(default_factory=lambda: Paper(0, 1))

    @property
    def connected(self) -> bool:
        return True

    def connect(self, exchanges: torch.device | None = None) -> None:
        if exchanges is not None:
            self.connect_nccl(exchanges)

    def connect_nccl(self, device: torch.device) -> None:
        self.all_reduce(torch.zeros(1, device=device), "meet")

    def all_reduce(self, tensor: Tensor, label: str, op: str = "sum") -> Tensor:
        if self.size > 1:
            self.paper.begin(self, "all_reduce", label, numel=tensor.numel(), detail=op).wait()
        return tensor

    def isend(self, tensor: Tensor, to: int, label: str, tag: int = 0) -> Any:
        return self._message(True, tensor, to, label)

    def irecv(self, tensor: Tensor, source: int, label: str, tag: int = 0) -> Any:
        return self._message(False, tensor, source, label)

    def _message(self, sends: bool, tensor: Tensor, member: int, label: str) -> PaperWork:
        part = Part(self.ranks[member], sends, tensor.numel(), str(tensor.dtype))
        return self.paper.begin(self, "message", label, parts=(part,), asynchronous=True)


def train_on_paper(paper: Paper, layout: Layout, schedule: Schedule, num_micro_batches: int) -> None:
    """Two updates: forward and backward passes with sums over tp, then the sums over dp and the norm."""
    mesh = build_mesh(paper, range(layout.size), layout)  # type: ignore[arg-type]
    shapes = [(96 + i, 64) for i in range(num_micro_batches)]
    for group in (mesh.tp, mesh.dp, mesh.pool):
        group.connect_nccl(CPU)
    connect_stages(mesh, CPU)

    def compute(action: Action, received: Tensor | None) -> Tensor:
        for label in ("attention", "mlp"):
            mesh.tp.all_reduce(torch.empty(shapes[action.micro_batch], device=META), label)
        paper.events.append(Pass())
        return torch.empty(shapes[action.micro_batch], dtype=torch.bfloat16, device=META)

    for _ in range(2):  # updates
        run_pipeline(schedule, mesh, shapes, torch.bfloat16, META, compute, compute)
        mesh.dp.all_reduce(torch.empty(1000, device=META), "gradients")
        mesh.pool.all_reduce(torch.zeros(1), "grad_norm")


def records_of(layout: Layout, schedule: Schedule, num_micro_batches: int) -> dict[int, list[Event]]:
    papers = [Paper(rank, layout.size) for rank in range(layout.size)]
    for paper in papers:
        train_on_paper(paper, layout, schedule, num_micro_batches)
    return {paper.rank: paper.events for paper in papers}


@pytest.mark.parametrize("schedule", [schedule_1f1b, schedule_forward])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 2), (5, 3)])
def test_transfers_do_not_lock(pp: int, vpp: int, schedule: Schedule) -> None:
    for num_micro_batches in (1, 2, 3, 5, 9):
        records = records_of(Layout(pp=pp, vpp=vpp), schedule, num_micro_batches)
        for machine in MACHINES:
            assert check(records, machine) == [], machine


def test_transfers_of_64_ranks() -> None:
    records = records_of(Layout(8, 4, 2, vpp=2), schedule_1f1b, 16)
    for machine in MACHINES:
        assert check(records, machine) == [], machine


def test_it_would_be_seen_that_ways_there_and_back_share_a_communicator() -> None:
    """Why ``Mesh.pp_back`` is there: in 1F1B a stage sends forward while its neighbour sends back."""
    records = records_of(Layout(4), schedule_1f1b, 6)
    shared = {
        rank: [replace(event, comm=event.comm._replace(name="")) if isinstance(event, Launch) else event for event in events]
        for rank, events in records.items()
    }
    assert check(records) == [] and {finding.rule for finding in check(shared)} == {"order"}
