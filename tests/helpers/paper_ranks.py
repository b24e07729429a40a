"""Ranks on paper: groups that note for ``legality`` what is launched on them, and carry nothing.

So the code that plans and starts transfers runs for 64 ranks in one process, as long as what it does depends on no number that
another rank has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from legality_events import MAIN, Communicator, Event, Follow, Launch, Part, Wait
from recording import SIDE, on_host
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.launch import Launch as Start
from rlhf_spmd.reshard import Transfer


@dataclass
class Paper:
    """What a rank does, with as much of a ``World`` as groups and meshes need."""

    rank: int
    size: int
    events: list[Event] = field(default_factory=list)
    stream: str = MAIN
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _met: set[Communicator] = field(default_factory=set)

    @property
    def launch(self) -> Start:
        return Start(self.rank, self.size, self.rank % 8, 8)

    @cached_property
    def all(self) -> Group:
        return PaperGroup("world", tuple(range(self.size)), self.rank, None, "", self)

    def group(self, ranks: Sequence[int], name: str, channel: str = "") -> Group | None:
        members = tuple(ranks)
        return PaperGroup(name, members, members.index(self.rank), None, channel, self) if self.rank in members else None

    def begin(
        self, group: PaperGroup, kind: str, label: str, tensor: Tensor | None, detail: str = "", **more: Any
    ) -> PaperWork:
        comm = Communicator(group.channel, group.ranks, not on_host(label))
        numel, dtype = (0, "") if tensor is None else (tensor.numel(), _dtype(tensor))
        number = len(self.events)
        self._met.add(comm)
        launch = Launch(comm, kind, label, number, MAIN, self.stream, numel=numel, dtype=dtype, detail=detail, **more)
        self.events.append(launch)
        return PaperWork(self, number)

    def first(self, group: PaperGroup) -> bool:
        return Communicator(group.channel, group.ranks, True) not in self._met


@dataclass
class PaperWork:
    paper: Paper
    number: int

    def wait(self) -> None:
        self.paper.events.append(Wait(self.number, MAIN, self.paper.stream))


@dataclass(frozen=True, eq=False)
class PaperGroup(Group):
    """Every operation takes part in nothing: results are what was given."""

    channel: str = ""
    paper: Paper = field(default_factory=lambda: Paper(0, 1))

    @property
    def connected(self) -> bool:
        return True

    def connect(self, exchanges: torch.device | None = None) -> None:
        if exchanges is not None and self.paper.first(self):
            self.meet(exchanges)

    def meet(self, device: torch.device) -> None:
        self.all_reduce(torch.zeros(1, device=device), "meet")

    def all_reduce(self, tensor: Tensor, label: str, op: str = "sum") -> Tensor:
        if self.size > 1:
            work = self.paper.begin(self, "all_reduce", label, tensor, op.upper())
            work.wait()
        return tensor

    def start_exchange(self, sends: Sequence[Any], receives: Sequence[Any], label: str) -> list[Any]:
        ways = [(True, message) for message in sends] + [(False, message) for message in receives]
        parts = tuple(Part(self.ranks[member], way, tensor.numel(), _dtype(tensor)) for way, (member, tensor) in ways)
        return [self.paper.begin(self, "exchange", label, None, parts=parts, asynchronous=True)] if parts else []

    def start_all_gather(self, flat: Tensor, label: str) -> Any:
        return self.paper.begin(self, "all_gather", label, flat.chunk(self.size)[self.rank], asynchronous=True)

    def isend(self, tensor: Tensor, to: int, label: str, tag: int = 0) -> Any:
        return self._message(True, tensor, to, label, tag)

    def irecv(self, tensor: Tensor, source: int, label: str, tag: int = 0) -> Any:
        return self._message(False, tensor, source, label, tag)

    def _message(self, sends: bool, tensor: Tensor, member: int, label: str, tag: int) -> PaperWork:
        part = Part(self.ranks[member], sends, tensor.numel(), _dtype(tensor), tag)
        return self.paper.begin(self, "message", label, None, parts=(part,), asynchronous=True)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def on_paper(size: int, body: Callable[[Paper], object]) -> dict[int, list[Event]]:
    """The events of all ranks, one after the other."""
    papers = [Paper(rank, size) for rank in range(size)]
    for paper in papers:
        body(paper)
    return {paper.rank: paper.events for paper in papers}


def beside(paper: Paper, transfer: Callable[[], Transfer]) -> Transfer:
    """A transfer on a stream of its own, as GPUs have one; nobody waits for it here, but all of it is launched."""
    paper.events.append(Follow(SIDE, MAIN))
    paper.stream = SIDE
    try:
        started = transfer()
        started.wait()
    finally:
        paper.stream = MAIN
    return started
