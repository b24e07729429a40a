"""NCCL's rules held against what ranks have launched. Pure: the input is a list of events of each rank, recorded or made up.

What a GPU does with the calls is taken at its strictest, so that what is legal here is legal there:

- A communicator runs its operations one after the other, in the order in which a rank launched them. An operation ends when all
  that take part have begun theirs; nothing is buffered.
- A synchronous operation runs in its thread's stream, an asynchronous one in its communicator's; both begin after what the thread's
  stream holds. A stream waits for an operation where the code waits for it. The host waits for its thread's main stream before all
  that it does next: it may read a value anywhere.
- The first operation of a communicator connects it: the host waits for all members' hosts, and for all that its device has in
  flight (nccl#1082). A pair of ranks that exchanges outside a batch has a communicator of its own on each channel.
- Operations on CPU tensors are gloo's: hosts wait for them, and messages are matched by tag.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
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
    """An operation begins. ``detail``: root or reduction. ``parts``: messages, of kind "exchange" (a batch) or "message" (one)."""

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


Event = Launch | Wait | Connect | Follow | Fork | Join
Where = tuple[int, int]  # a rank and the number of an operation there


class Finding(NamedTuple):
    """``rule``: order, pairs, threads, connections, or waits."""

    rule: str
    text: str


@dataclass(frozen=True)
class Machine:
    """What may happen besides, each of which makes the check stricter. ``allocator``: the host waits for its whole device at any time,
    as where the allocator gives memory back. ``queue``: a rank's device takes up operations in the order of their launch."""

    allocator: bool = False
    queue: bool = False


@dataclass
class _Run:
    events: dict[int, list[Event]]
    partners: dict[Where, list[Where]] = field(default_factory=lambda: defaultdict(list))
    hubs: list[list[Where]] = field(default_factory=list)  # operations that end together
    findings: list[Finding] = field(default_factory=list)

    def find(self, rule: str, text: str) -> None:
        self.findings.append(Finding(rule, text))

    def launches(self, rank: int) -> Iterator[Launch]:
        return (event for event in self.events[rank] if isinstance(event, Launch))


def check(records: Mapping[int, Sequence[Event]], machine: Machine | None = None) -> list[Finding]:
    """What breaks a rule. Cycles of waits are looked for where all operations have their partners."""
    run = _Run({rank: [_own_pair(rank, event) for event in _inlined(events)] for rank, events in records.items()})
    _check_order(run)
    _check_threads(run)
    _check_connections(run)
    if not any(finding.rule in ("order", "pairs") for finding in run.findings):
        _check_waits(run, machine or Machine())
    return run.findings


def _own_pair(rank: int, event: Event) -> Event:
    """NCCL has a communicator for a pair that exchanges outside a batch."""
    if not isinstance(event, Launch) or event.kind != "message" or not event.comm.device:
        return event
    pair = tuple(sorted((rank, event.parts[0].peer)))
    return replace(event, comm=event.comm._replace(ranks=pair, pair=len(event.comm.ranks) > 2))


def _inlined(events: Sequence[Event]) -> list[Event]:
    """With what threads of INLINE did where they were started."""
    inner: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.thread.startswith(INLINE):
            inner[event.thread].append(event)
    made: list[Event] = []

    def add(event: Event, thread: str) -> None:
        child = event.child if isinstance(event, Fork | Join) else ""
        if not child.startswith(INLINE):
            made.append(replace(event, thread=thread))
        elif isinstance(event, Fork):
            for each in inner[child]:
                add(each, thread)

    for event in events:
        if not event.thread.startswith(INLINE):
            add(event, event.thread)
    return made


# -- order and pairs


def _check_order(run: _Run) -> None:
    by_comm: dict[Communicator, dict[int, list[Launch]]] = defaultdict(dict)
    for rank in run.events:
        for launch in run.launches(rank):
            by_comm[launch.comm].setdefault(rank, []).append(launch)
    for comm, launched in by_comm.items():
        _match_collectives(run, comm, launched)
        if comm.device:
            _match_exchanges(run, comm, launched)
        else:
            _match_tags(run, comm, launched)


def _match_collectives(run: _Run, comm: Communicator, launched: Mapping[int, list[Launch]]) -> None:
    of = {rank: [launch for launch in launched.get(rank, []) if not launch.parts] for rank in comm.ranks}
    for place, column in enumerate(zip_longest(*of.values())):
        there = dict(zip(of, column, strict=True))
        if len({launch.signature if launch else None for launch in column}) > 1:
            first = next(launch for launch in column if launch)
            other = next(rank for rank, launch in there.items() if launch is None or launch.signature != first.signature)
            one = next(rank for rank, launch in there.items() if launch is first)
            run.find("order", f"{comm}: collective {place} is {first} on rank {one}, {there[other] or 'none'} on rank {other}")
            return
        run.hubs.append([(rank, launch.number) for rank, launch in there.items() if launch])


def _match_exchanges(run: _Run, comm: Communicator, launched: Mapping[int, list[Launch]]) -> None:
    """Of each two ranks, batch by batch: what one sends is what the other receives, between the same collectives."""
    between: dict[tuple[int, int], list[tuple[Launch, int]]] = defaultdict(list)
    for rank, launches in launched.items():
        collectives = 0
        for launch in launches:
            collectives += not launch.parts
            for peer in dict.fromkeys(part.peer for part in launch.parts):
                between[rank, peer].append((launch, collectives))
    for a, b in sorted({(min(pair), max(pair)) for pair in between}):
        for place, (mine, its) in enumerate(zip_longest(between[a, b], between[b, a])):
            if mine is None or its is None:
                rank, (launch, _) = (a, mine) if mine else (b, its)
                run.find("pairs", f"{comm}: exchange {place} of ranks {a} and {b} has no partner: {launch} on rank {rank}")
                break
            (one, at), (other, there) = mine, its
            sides = _sizes(one, b, True), _sizes(one, b, False), _sizes(other, a, False), _sizes(other, a, True)
            if sides[0] != sides[2] or sides[1] != sides[3]:
                turned = sides[0] == sides[3] or sides[1] == sides[2]
                rule = "order" if turned and {bool(sides[0]), bool(sides[2])} == {True, False} else "pairs"
                run.find(rule, f"{comm}: exchange {place} of ranks {a} and {b} differs: {one} on rank {a}, {other} on rank {b}")
                break
            if at != there:
                run.find("order", f"{comm}: {one} comes after {at} collectives on rank {a}, after {there} on rank {b}")
                break
            run.partners[a, one.number].append((b, other.number))
            run.partners[b, other.number].append((a, one.number))


def _sizes(launch: Launch, peer: int, sends: bool) -> list[tuple[int, str]]:
    return [(part.numel, part.dtype) for part in launch.parts if part.peer == peer and part.sends == sends]


def _match_tags(run: _Run, comm: Communicator, launched: Mapping[int, list[Launch]]) -> None:
    """gloo: the messages of one tag from one rank to another, in their order."""
    sent: dict[tuple[int, int, int], list[tuple[Where, Part, Launch]]] = defaultdict(list)
    received: dict[tuple[int, int, int], list[tuple[Where, Part, Launch]]] = defaultdict(list)
    for rank, launches in launched.items():
        for launch in launches:
            for part in launch.parts:
                way = (rank, part.peer) if part.sends else (part.peer, rank)
                (sent if part.sends else received)[*way, part.tag].append(((rank, launch.number), part, launch))
    for key in sorted({*sent, *received}):
        for one, other in zip_longest(sent[key], received[key]):
            if one is None or other is None:
                rank, launch = (key[0], one[2]) if one else (key[1], other[2])
                run.find(
                    "pairs", f"{comm}: from rank {key[0]} to {key[1]} under tag {key[2]} without partner: {launch} on {rank}"
                )
                break
            if (one[1].numel, one[1].dtype) != (other[1].numel, other[1].dtype):
                run.find("pairs", f"{comm}: rank {key[0]} has {one[2]}, rank {key[1]} {other[2]}")
                break
            run.partners[one[0]].append(other[0])
            run.partners[other[0]].append(one[0])


# -- threads


def _check_threads(run: _Run) -> None:
    """Two uses of a communicator by two threads of a rank need an order, by a thread's start or end between them."""
    for rank, events in run.events.items():
        clocks: dict[str, dict[str, int]] = defaultdict(dict)  # of each thread: how many events of each other come before
        last: dict[Communicator, tuple[Launch, int]] = {}
        told = set[Communicator]()
        for event in events:
            clock = clocks[event.thread]
            clock[event.thread] = clock.get(event.thread, 0) + 1
            if isinstance(event, Fork):
                clocks[event.child] = dict(clock)
            elif isinstance(event, Join):
                for thread, count in clocks[event.child].items():
                    clock[thread] = max(clock.get(thread, 0), count)
            elif isinstance(event, Launch) and (event.comm.device or not event.parts):
                before, count = last.get(event.comm, (event, 0))
                if clock.get(before.thread, 0) < count and event.comm not in told:
                    told.add(event.comm)
                    run.find(
                        "threads",
                        f"rank {rank}: {before} in thread {before.thread} and {event.label!r} in {event.thread}, unordered",
                    )
                last[event.comm] = event, clock[event.thread]


# -- connections


def _check_connections(run: _Run) -> None:
    """A communicator is made on all its ranks, and while none of them has a transfer of another one open."""
    made: dict[Communicator, set[int]] = defaultdict(set)
    for rank, events in run.events.items():
        open_: dict[int, Launch] = {}
        for event in events:
            if isinstance(event, Wait):
                open_.pop(event.number, None)
            elif isinstance(event, Connect):
                made[event.comm].add(rank)
            elif isinstance(event, Launch) and event.comm.device:
                if rank not in made[event.comm]:
                    made[event.comm].add(rank)
                    if under_way := next((each for each in open_.values() if each.comm != event.comm), None):
                        run.find("connections", f"rank {rank}: {event.comm} is connected, for {event}, while open: {under_way}")
                if event.asynchronous:
                    open_[event.number] = event
    for comm, ranks in made.items():
        if missing := sorted(set(comm.ranks) - ranks):
            run.find("connections", f"{comm} is connected on ranks {sorted(ranks)}, but not on {missing}")


# -- waits


class _Graph:
    """What must come before what. Each node is a thing that happens on a rank."""

    def __init__(self) -> None:
        self.names: list[tuple[str, int, object]] = []
        self.before: list[list[int]] = []

    def add(self, what: str, rank: int, of: object, *before: int | None) -> int:
        self.names.append((what, rank, of))
        self.before.append([node for node in before if node is not None])
        return len(self.names) - 1

    def cycle(self) -> list[str]:
        """The things of one circle of waits; none if all can happen."""
        after: list[list[int]] = [[] for _ in self.names]
        missing = [len(nodes) for nodes in self.before]
        for node, nodes in enumerate(self.before):
            for each in nodes:
                after[each].append(node)
        ready = [node for node, count in enumerate(missing) if not count]
        while ready:
            for node in after[ready.pop()]:
                missing[node] -= 1
                if not missing[node]:
                    ready.append(node)
        node = next((node for node, count in enumerate(missing) if count), -1)
        way: dict[int, None] = {}
        while node >= 0 and node not in way:
            way[node] = None
            node = next(each for each in self.before[node] if missing[each])
        circle = list(way)[list(way).index(node) :] if way else []
        said = [f"rank {rank} {what} {of}".rstrip() for what, rank, of in map(self.names.__getitem__, circle) if what]
        return list(dict.fromkeys(said))


@dataclass
class _Rank:
    """Where a rank stands: the last node of each thread, stream and communicator."""

    threads: dict[str, int] = field(default_factory=dict)
    streams: dict[str, int] = field(default_factory=dict)
    comms: dict[Communicator, int] = field(default_factory=dict)
    inherited: dict[str, int | None] = field(default_factory=dict)  # thread -> what its parent's stream held
    used: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # thread -> streams
    queued: int | None = None

    def device(self) -> list[int]:
        return [*self.streams.values(), *self.comms.values()]


def _check_waits(run: _Run, machine: Machine) -> None:
    graph = _Graph()
    ends: dict[Where, tuple[int, int]] = {}  # of an operation: the nodes of its beginning and its end
    entries: dict[Communicator, list[tuple[int, int]]] = defaultdict(list)  # of a connection, at each member: come, and gone on
    for rank, events in run.events.items():
        _add_rank(graph, rank, events, machine, ends, entries)
    for comm, nodes in entries.items():
        together = graph.add("", comm.ranks[0], "", *(come for come, _ in nodes))
        for _, gone in nodes:
            graph.before[gone].append(together)
    for members in run.hubs:
        together = graph.add("", members[0][0], "", *(ends[where][0] for where in members))
        for where in members:
            graph.before[ends[where][1]].append(together)
    for where, partners in run.partners.items():
        graph.before[ends[where][1]] += [ends[partner][0] for partner in partners]
    if circle := graph.cycle():
        run.find("waits", "each waits for the next: " + "; ".join(circle))


def _add_rank(
    graph: _Graph,
    rank: int,
    events: Sequence[Event],
    machine: Machine,
    ends: dict[Where, tuple[int, int]],
    entries: dict[Communicator, list[tuple[int, int]]],
) -> None:
    at = _Rank()
    on_device: dict[int, bool] = {}
    connected = set[Communicator]()
    for event in events:
        thread, stream = event.thread, event.stream
        if thread in at.inherited and stream != MAIN:  # its stream waits for what its parent's held
            at.streams[stream] = graph.add("", rank, "", at.streams.get(stream), at.inherited.pop(thread))
        at.used[thread].add(stream)
        host = graph.add("", rank, "", at.threads.get(thread))
        before = graph.before[host]
        if machine.allocator:
            before += at.device()
        elif stream == MAIN and MAIN in at.streams and not isinstance(event, Follow):
            before.append(at.streams[MAIN])
        if isinstance(event, Connect) or (isinstance(event, Launch) and event.comm.device and event.comm not in connected):
            graph.names[host] = ("connects", rank, event.comm)
            come = graph.add("connects", rank, event.comm, *before, *(at.device() if event.comm.device else ()))
            entries[event.comm].append((come, host))
            connected |= {event.comm} if event.comm.device else set()
        if isinstance(event, Launch):
            on_device[event.number] = event.comm.device
            ends[rank, event.number] = _add_launch(graph, rank, event, host, at, machine)
        elif isinstance(event, Wait):
            _, end = ends[rank, event.number]
            if on_device[event.number]:
                at.streams[stream] = graph.add("", rank, "", end, at.streams.get(stream))
            else:
                before.append(end)
        elif isinstance(event, Follow):
            at.streams[stream] = graph.add("", rank, "", at.streams.get(stream), at.streams.get(event.on))
        elif isinstance(event, Fork):
            at.threads[event.child], at.inherited[event.child] = host, at.streams.get(stream)
        elif isinstance(event, Join):
            before.append(at.threads[event.child])
            others = [at.streams.get(each) for each in at.used[event.child] - {stream}]
            at.streams[stream] = graph.add("", rank, "", at.streams.get(stream), *others)
        at.threads[thread] = host


def _add_launch(graph: _Graph, rank: int, launch: Launch, host: int, at: _Rank, machine: Machine) -> tuple[int, int]:
    last = at.comms.get(launch.comm) if launch.comm.device or not launch.parts else None
    if not launch.comm.device:  # gloo takes part by itself, its collectives one after the other
        end = graph.add("waits for", rank, launch, host, last)
        if not launch.parts:
            at.comms[launch.comm] = end
        return host, end
    begin = graph.add("begins", rank, launch, host, last, at.streams.get(launch.stream), at.queued if machine.queue else None)
    end = graph.add("ends", rank, launch, begin)
    at.comms[launch.comm], at.queued = end, begin
    if not launch.asynchronous:
        at.streams[launch.stream] = end
    return begin, end
