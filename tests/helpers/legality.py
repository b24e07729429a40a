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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from legality_events import INLINE, Communicator, Connect, Event, Finding, Fork, Join, Launch, Machine, Part, Run, Wait, Where
from legality_waits import check_waits


def check(records: Mapping[int, Sequence[Event]], machine: Machine | None = None) -> list[Finding]:
    """What breaks a rule. Cycles of waits are looked for where all operations have their partners."""
    run = Run({rank: [_own_pair(rank, event) for event in _inlined(events)] for rank, events in records.items()})
    _check_order(run)
    _check_threads(run)
    _check_connections(run)
    if not any(finding.rule in ("order", "pairs") for finding in run.findings):
        check_waits(run, machine or Machine())
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


def _check_order(run: Run) -> None:
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


def _match_collectives(run: Run, comm: Communicator, launched: Mapping[int, list[Launch]]) -> None:
    of = {rank: [launch for launch in launched.get(rank, []) if not launch.parts] for rank in comm.ranks}
    for place, column in enumerate(zip_longest(*of.values())):
        there = dict(zip(of, column, strict=True))
        if len({launch.signature if launch else None for launch in column}) > 1:
            first = next(launch for launch in column if launch)
            other = next(rank for rank, launch in there.items() if launch is None or launch.signature != first.signature)
            one = next(rank for rank, launch in there.items() if launch is first)
            run.find("order", f"{comm}: collective {place} is {first} on rank {one}, {there[other] or 'none'} on rank {other}")
            return
        splits = [launch.splits for launch in column if launch and launch.splits]
        if any(one[0][j] != other[1][i] for i, one in enumerate(splits) for j, other in enumerate(splits)):
            run.find(
                "pairs", f"{comm}: collective {place}, {column[0]}: what one rank sends another does not receive: {splits}"
            )
            return
        run.hubs.append([(rank, launch.number) for rank, launch in there.items() if launch])


def _match_exchanges(run: Run, comm: Communicator, launched: Mapping[int, list[Launch]]) -> None:
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
                alike = [bool(side) for side in sides[:2]] == [bool(side) for side in sides[2:]]
                rule = "pairs" if alike else "order"
                run.find(rule, f"{comm}: exchange {place} of ranks {a} and {b} differs: {one} on rank {a}, {other} on rank {b}")
                break
            if at != there:
                run.find("order", f"{comm}: {one} comes after {at} collectives on rank {a}, after {there} on rank {b}")
                break
            run.partners[a, one.number].append((b, other.number))
            run.partners[b, other.number].append((a, one.number))


def _sizes(launch: Launch, peer: int, sends: bool) -> list[tuple[int, str]]:
    return [(part.numel, part.dtype) for part in launch.parts if part.peer == peer and part.sends == sends]


def _match_tags(run: Run, comm: Communicator, launched: Mapping[int, list[Launch]]) -> None:
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


def _check_threads(run: Run) -> None:
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


def _check_connections(run: Run) -> None:
    """A communicator is made on all its ranks, and while none of them has a transfer of another one open."""
    made: dict[Communicator, set[int]] = defaultdict(set)
    for rank, events in run.events.items():
        open_: dict[int, Launch] = {}
        paired: set[Communicator] = set()
        for event in events:
            if isinstance(event, Wait):
                open_.pop(event.number, None)
            elif isinstance(event, Connect):
                made[event.comm].add(rank)
            elif isinstance(event, Launch) and event.comm.device:
                if rank not in made[event.comm] or (event.kind == "all_to_all" and event.comm not in paired):
                    made[event.comm].add(rank)
                    if event.kind == "all_to_all":  # each rank is connected with each other, which other collectives do not do
                        paired.add(event.comm)
                    if under_way := next((each for each in open_.values() if each.comm != event.comm), None):
                        run.find("connections", f"rank {rank}: {event.comm} is connected, for {event}, while open: {under_way}")
                if event.asynchronous:
                    open_[event.number] = event
    for comm, ranks in made.items():
        if missing := sorted(set(comm.ranks) - ranks):
            run.find("connections", f"{comm} is connected on ranks {sorted(ranks)}, but not on {missing}")
