"""Circles of waits: all that must come before what, of all ranks, as a graph (``legality``). Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from legality_events import MAIN, Communicator, Connect, Event, Follow, Fork, Join, Launch, Machine, Run, Wait, Where


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


def check_waits(run: Run, machine: Machine) -> None:
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
    last: dict[str, Event] = {}  # of each thread
    for event in events:
        thread, stream = event.thread, event.stream
        if thread in at.inherited and stream != MAIN:  # its stream waits for what its parent's held
            at.streams[stream] = graph.add("", rank, "", at.streams.get(stream), at.inherited.pop(thread))
        at.used[thread].add(stream)
        host = graph.add("", rank, "", at.threads.get(thread))
        before = graph.before[host]
        behind = _is_message(last.get(thread)) and (isinstance(event, Wait) or _is_message(event))
        if machine.synchronises and not behind:
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
        elif isinstance(event, Join) and event.child in at.threads:  # others were started before the recording
            before.append(at.threads[event.child])
            others = [at.streams.get(each) for each in at.used[event.child] - {stream}]
            at.streams[stream] = graph.add("", rank, "", at.streams.get(stream), *others)
        at.threads[thread] = host
        last[thread] = last.get(thread, event) if isinstance(event, Wait) else event


def _is_message(event: Event | None) -> bool:
    return isinstance(event, Launch) and event.kind == "message"


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
