"""From pieces to messages: what of a plan travels together, in memory or through a buffer, in which order. Pure.

A piece that is worth it is a message of its own, and needs no buffer where it lies in one piece in memory; small ones are packed.
Where the members of a group all need the same and give equal parts, one all-gather takes the place of the messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from rlhf_spmd.reshard.plan import Part, Piece, Plan

ALONE = 1 << 14  # elements from which a piece of a gather, which all others take, is worth a message of its own
ALONE_BETWEEN_TWO = 1 << 16  # and one that a single rank takes: a message costs more than a copy of so many

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Message:
    """``parts`` of this rank's source parameters that go to members of the group, or of its target parameters that come from one.
    What goes to several is packed once.

    ``offset``: where in its step's buffer; None: the one part travels from or to its place in memory.
    """

    sends: bool
    parts: tuple[Part, ...]
    offset: int | None

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of the parts."""
        return [part.numel for part in self.parts]

    @cached_property
    def numel(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class Step:
    """Messages that start together, and pieces that stay on the rank. ``transfers``: (number of a message, member of the group), those
    between two members in the same order at both ends. ``buffer``: elements. ``gathers``: one all-gather moves the buffer, or without
    one the whole target parameter ``into``; else the messages are one exchange. ``held``: elements that stay allocated while it is
    under way and are not needed afterwards."""

    messages: Sequence[Message] = ()
    transfers: Sequence[tuple[int, int]] = ()
    copies: Sequence[Piece] = ()
    buffer: int = 0
    gathers: bool = False
    into: str = ""
    held: int = 0

    @cached_property
    def exchanged(self) -> int:
        """Elements of the messages of an exchange, from wherever they travel."""
        return 0 if self.gathers else sum(message.numel for message in self.messages)


@dataclass(frozen=True)
class Endpoints:
    """What a rank must know of itself and of its group. ``rank``: as plans call it; ``members``: the group, in its order, by the same
    names. ``sources``, ``targets``: shapes of its parameters, which are contiguous. ``converted``: what is sent has another dtype than
    what travels. ``limit``: elements that a step's buffer and a message at most have."""

    rank: int
    members: Sequence[int]
    sources: Shapes
    targets: Shapes
    converted: bool
    limit: int


def plan_steps(plan: Plan, ends: Endpoints) -> list[Step]:
    """Exchanges in one order on all ranks: by the distance of giver and taker, each counted on its own side (pools that lie apart
    have as many distances as the larger one has ranks), then by the number of the message between the two. So a rank sends one message
    in each and receives one, and the first exchange that is not done is always started by all that have a part in it: no order of
    arrival and no limit can lock ranks into waiting, nor does it where transfers of one group follow each other (NCCL). What stays on
    the rank comes first: it is copied when all that there is room for is on its way."""
    alone = max(ends.limit // 64, ALONE_BETWEEN_TWO)
    pairs = _in_order(plan.moves(), (plan.givers, plan.takers), ends, alone)
    steps = [_exchange(list(some), (), ends) for _, some in groupby(pairs, key=lambda pair: pair[0][:2])]
    copies = list(plan.copies())
    return [*[Step(copies=copies)] * bool(copies), *steps]


def plan_bucket(moves: Sequence[Piece], copies: Sequence[Piece], ends: Endpoints, on_gpu: bool) -> Step:
    """All messages of parameters that every member of the group makes; on GPUs one all-gather if all give equal parts."""
    if on_gpu and moves and (step := _all_gather(moves, copies, ends)):
        return step
    pairs = _in_order(moves, (ends.members, ends.members), ends, min(ALONE, ends.limit // 64))
    return _exchange(pairs, copies, ends)


def _all_gather(moves: Sequence[Piece], copies: Sequence[Piece], ends: Endpoints) -> Step | None:
    """None where members' parts differ in size, some but not all hold a part, or a buffer has no room. Every member sees all parts of
    the bucket, as it needs them all, so that all members decide alike."""
    if any(1 < piece.holders < len(ends.members) for piece in (*moves, *copies)):
        return None
    given: dict[int, list[Piece]] = {member: [] for member in ends.members}
    taker = next((piece.taker for piece in moves if piece.giver == ends.rank), None)
    for piece in moves:
        if piece.taker in (ends.rank, taker):
            given[piece.giver].append(piece)
    parts = [list(joined(pieces)) for pieces in given.values()]
    sizes = {sum(piece.source.numel for piece in pieces) for pieces in parts}
    if len(sizes) != 1:
        return None
    (size,), into = sizes, _stacked(parts, ends.targets)
    buffer = 0 if into else size * len(parts)
    if not into and buffer + sum(piece.source.numel for piece in copies) > ends.limit:
        return None
    sides = [(member == ends.rank, pieces) for member, pieces in zip(ends.members, parts, strict=True)]
    messages = [Message(sends, _ends_of(pieces, sends), None if into else i * size) for i, (sends, pieces) in enumerate(sides)]
    return Step(messages, copies=copies, buffer=buffer, gathers=True, into=into)


def _ends_of(pieces: Iterable[Piece], sends: bool) -> tuple[Part, ...]:
    return tuple(piece.source if sends else piece.target for piece in pieces)


def _stacked(parts: Sequence[Sequence[Piece]], targets: Shapes) -> str:
    """The parameter that the members' parts make up one below the other, or nothing."""
    if any(len(pieces) != 1 for pieces in parts):
        return ""
    target, row = parts[0][0].target.parameter, 0
    for (piece,) in parts:
        start, size = piece.target.start, piece.target.size
        if piece.target.parameter != target or size[1:] != tuple(targets[target][1:]) or start[0] != row:
            return ""
        row += size[0]
    return target if row == targets[target][0] else ""


Pair = tuple[tuple[int, int, int], bool, int, tuple[Part, ...]]  # place in the global order, whether it sends, peer, parts


def _in_order(moves: Iterable[Piece], sides: tuple[Sequence[int], Sequence[int]], ends: Endpoints, alone: int) -> list[Pair]:
    """The messages between this rank and each other one. ``sides``: the ranks that give and that take, whether this one knows of it
    or not."""
    among, to = ({rank: i for i, rank in enumerate(side)} for side in sides)
    place, rounds = {rank: i for i, rank in enumerate(ends.members)}, max(map(len, sides))
    pieces_of: dict[tuple[int, int], list[Piece]] = {}
    for piece in moves:
        pieces_of.setdefault((piece.giver, piece.taker), []).append(piece)
    pairs = list[Pair]()
    for (giver, taker), pieces in pieces_of.items():
        sends, distance = giver == ends.rank, (to[taker] - among[giver]) % rounds
        for number, cut in enumerate(cut_messages(pieces, ends.limit, alone)):
            pairs.append(((distance, number, place[giver]), sends, place[taker if sends else giver], _ends_of(cut, sends)))
    return sorted(pairs, key=lambda pair: pair[0])


def _exchange(pairs: Sequence[Pair], copies: Sequence[Piece], ends: Endpoints) -> Step:
    """One step of these messages; equal parts that go to several are one."""
    numbers: dict[tuple[bool, tuple[Part, ...]], int] = {}
    messages, transfers, used = list[Message](), list[tuple[int, int]](), 0
    for _, sends, peer, parts in pairs:
        number = numbers.setdefault((sends, parts), len(messages))
        if number == len(messages):
            in_memory = _in_memory(sends, parts, ends)
            messages.append(Message(sends, parts, None if in_memory else used))
            used += 0 if in_memory else messages[-1].numel
        transfers.append((number, peer))
    return Step(messages, transfers, copies, used)


def cut_messages(pieces: Iterable[Piece], limit: int, alone: int) -> Iterator[list[Piece]]:
    """Runs of pieces of at most half of ``limit`` elements. Those of ``alone`` elements or more go by themselves, cut to ``limit``
    along their rows as far as a row is smaller. With a part of ``limit`` as ``alone`` the number of messages is bounded too."""
    run: list[Piece] = []
    used = 0
    for piece in joined(pieces):
        numel, rows = piece.source.numel, piece.source.size[0]
        if numel >= alone:
            most = max(limit // (numel // rows), 1)
            for first in range(0, rows, most):
                yield [piece._replace(source=piece.source.rows(first, most), target=piece.target.rows(first, most))]
            continue
        if used and used + numel > limit // 2:
            yield run
            run, used = [], 0
        run.append(piece)
        used += numel
    if run:
        yield run


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Pieces of one giver and taker, those whose rows follow each other at both ends as one: q, k and v of a rank, although they are
    three global tensors."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None and _follows(last.source, piece.source) and _follows(last.target, piece.target):
            size = last.source.size[0] + piece.source.size[0], *piece.source.size[1:]
            last = last._replace(source=last.source._replace(size=size), target=last.target._replace(size=size))
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _follows(a: Part, b: Part) -> bool:
    below = b.start == (a.start[0] + a.size[0], *a.start[1:])
    return below and a.parameter == b.parameter and a.size[1:] == b.size[1:]


def _in_memory(sends: bool, parts: Sequence[Part], ends: Endpoints) -> bool:
    """Whether a message lies in one piece in this rank's memory, as it travels."""
    if len(parts) > 1 or (sends and ends.converted):
        return False
    size, shape = parts[0].size, tuple((ends.sources if sends else ends.targets)[parts[0].parameter])
    return size[1:] == shape[1:] or (size[0] == 1 and size[2:] == shape[2:])
