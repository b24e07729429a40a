"""What ranks launch, in the words of ``legality``: operations, waits, connections, streams and threads. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

MAIN = "main"  # the stream of a thread that has entered no other
INLINE = "reshard"  # threads that stand for a stream: on a GPU their parent launches all that they do where it starts them


class Communicator(NamedTuple):
    """``name``: of the channel. ``device``: NCCL's, otherwise gloo's. ``pair``: of two ranks of a larger group."""

    name: str
    ranks: tuple[int, ...]
    device: bool
    pair: bool = False

    def __str__(self) -> str:
        kind = "nccl" if self.device else "gloo"
        return f"{kind}{' pair' * self.pair} {self.name or 'default'}{list(self.ranks)}"


class Part(NamedTuple):
    """One message of an exchange."""

    peer: int
    sends: bool
    numel: int
    dtype: str
    tag: int = 0


@dataclass(frozen=True)
class Launch:
    """An operation begins. ``detail``: root or reduction. ``parts``: messages, of kind "exchange" (a batch) or "message" (one).
    ``splits``: rows of an all-to-all by rank of the group, those sent and those received, if they differ between ranks."""

    comm: Communicator
    kind: str
    label: str
    number: int
    thread: str = MAIN
    stream: str = MAIN
    asynchronous: bool = False
    numel: int = 0
    dtype: str = ""
    detail: str = ""
    parts: tuple[Part, ...] = ()
    splits: tuple[tuple[int, ...], ...] = ()

    @property
    def signature(self) -> tuple[object, ...]:
        return self.kind, self.label, self.numel, self.dtype, self.detail

    def __str__(self) -> str:
        if self.parts:
            ways = ", ".join(
                f"{'to' if part.sends else 'from'} {part.peer}: {part.numel} {part.dtype}" for part in self.parts[:4]
            )
            return f"{self.kind} {self.label!r} ({ways}) on {self.comm}"
        return f"{self.kind} {self.label!r} ({self.numel} {self.dtype} {self.detail}) on {self.comm}".replace(" )", ")")


@dataclass(frozen=True)
class Wait:
    """For the operation ``number``: the stream waits, of gloo's the host."""

    number: int
    thread: str = MAIN
    stream: str = MAIN


@dataclass(frozen=True)
class Connect:
    """gloo's part of a group is made."""

    comm: Communicator
    thread: str = MAIN
    stream: str = MAIN


@dataclass(frozen=True)
class Follow:
    """``stream`` waits for all that ``on`` holds."""

    stream: str
    on: str
    thread: str = MAIN


@dataclass(frozen=True)
class Fork:
    """``thread`` starts ``child``."""

    child: str
    thread: str = MAIN
    stream: str = MAIN


@dataclass(frozen=True)
class Join:
    """``thread`` waits for the end of ``child``."""

    child: str
    thread: str = MAIN
    stream: str = MAIN


@dataclass(frozen=True)
class Pass:
    """The host has launched kernels."""

    thread: str = MAIN
    stream: str = MAIN


Event = Launch | Wait | Connect | Follow | Fork | Join | Pass
Where = tuple[int, int]  # a rank and the number of an operation there


class Finding(NamedTuple):
    """``rule``: order, pairs, threads, connections, or waits."""

    rule: str
    text: str


@dataclass(frozen=True)
class Machine:
    """What may happen besides, each of which makes the check stricter.

    ``synchronises``: the host waits for its whole device at any time, as where CUDA loads a kernel at its first launch and where the
    allocator gives memory back; not between messages that follow each other, which need neither. ``queue``: a rank's device takes up
    operations in the order of their launch.
    """

    synchronises: bool = False
    queue: bool = False


@dataclass
class Run:
    events: dict[int, list[Event]]
    partners: dict[Where, list[Where]] = field(default_factory=lambda: defaultdict(list))
    hubs: list[list[Where]] = field(default_factory=list)  # operations that end together
    findings: list[Finding] = field(default_factory=list)

    def find(self, rule: str, text: str) -> None:
        self.findings.append(Finding(rule, text))

    def launches(self, rank: int) -> Iterator[Launch]:
        return (event for event in self.events[rank] if isinstance(event, Launch))
