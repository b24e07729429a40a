"""From copies to messages: what a plan sends together, directly or through a buffer, in which order. Pure.

A large copy is a message of its own, and needs no buffer if it is contiguous in memory. Small ones are packed. If all members of a
group need the same and send equal parts, one all-gather replaces the messages. A member is a rank of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from rlhf_spmd.reshard.plan import ParamSlice, SliceCopy, TransferPlan

ALONE = 1 << 14  # elements from which a copy that all others receive is a message of its own
ALONE_BETWEEN_TWO = 1 << 16  # the same for a copy that one rank receives: packing smaller ones costs less than a message

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class TransferMessage:
    """``parts`` of source parameters that this rank sends, to one or several members, or of target parameters that it receives.

    ``offset``: the position in the step's buffer; None: the single part is sent from, or received into, its own memory.
    """

    sends: bool
    parts: tuple[ParamSlice, ...]
    offset: int | None

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of each part."""
        return [part.numel for part in self.parts]

    @cached_property
    def numel(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class TransferStep:
    """Messages that start together, and copies inside the rank.

    - ``transfers``: (index of a message, member of the group). Two members list what goes between them in the same order.
    - ``buffer``: its elements. ``gathers``: one all-gather moves the buffer, or the whole target parameter ``into`` if there is none.
      Otherwise the messages are one exchange.
    - ``extra``: other elements that are allocated until the step has ended, and are not needed afterwards.
    """

    messages: Sequence[TransferMessage] = ()
    transfers: Sequence[tuple[int, int]] = ()
    copies: Sequence[SliceCopy] = ()
    buffer: int = 0
    gathers: bool = False
    into: str = ""
    extra: int = 0

    @cached_property
    def exchanged(self) -> int:
        """Elements of all messages of an exchange, packed or not."""
        return 0 if self.gathers else sum(message.numel for message in self.messages)


@dataclass(frozen=True)
class TransferContext:
    """What a rank knows of itself and its group when it turns a plan into messages.

    - ``rank``: its number in plans. ``members``: the ranks of the group, in its order, by the same numbers.
    - ``sources``, ``targets``: shapes of its parameters, which are contiguous.
    - ``converted``: the sources have another dtype than the messages.
    - ``limit``: the most elements of a step's buffer, and of a message.
    """

    rank: int
    members: Sequence[int]
    sources: Shapes
    targets: Shapes
    converted: bool
    limit: int


def plan_steps(plan: TransferPlan, context: TransferContext) -> list[TransferStep]:
    """Return the steps of a plan: exchanges in one order on all ranks.

    The order is by the distance of sender and receiver, each counted on its own side (separate pools have as many distances as the
    larger one has ranks), then by the number of the message between the two. So in each exchange a rank sends one message and receives
    one. All ranks of the first unfinished exchange have always started it. Therefore no order of arrival and no limit can deadlock,
    even if transfers of one group run one after the other (NCCL). Copies inside the rank come first: they run when as many messages as
    fit are in flight.
    """
    alone = max(context.limit // 64, ALONE_BETWEEN_TWO)
    pairs = _in_order(plan.moves(), (plan.senders, plan.receivers), context, alone)
    steps = [_exchange(list(some), (), context) for _, some in groupby(pairs, key=lambda pair: pair[0][:2])]
    copies = list(plan.copies())
    return [*[TransferStep(copies=copies)] * bool(copies), *steps]


def plan_bucket(
    moves: Sequence[SliceCopy], copies: Sequence[SliceCopy], context: TransferContext, on_gpu: bool
) -> TransferStep:
    """Return one step for parameters that every member fills; on GPUs one all-gather if all members send equal parts."""
    if on_gpu and moves and (step := _all_gather(moves, copies, context)):
        return step
    pairs = _in_order(moves, (context.members, context.members), context, min(ALONE, context.limit // 64))
    return _exchange(pairs, copies, context)


def _all_gather(moves: Sequence[SliceCopy], copies: Sequence[SliceCopy], context: TransferContext) -> TransferStep | None:
    """Return the all-gather; None if members' parts differ in size, if some but not all hold a part, or if a buffer has no room.

    Every member needs, and so sees, all parts of the bucket. So all members decide alike.
    """
    if any(1 < piece.holders < len(context.members) for piece in (*moves, *copies)):
        return None
    sent_by: dict[int, list[SliceCopy]] = {member: [] for member in context.members}
    receiver = next((piece.receiver for piece in moves if piece.sender == context.rank), None)
    for piece in moves:
        if piece.receiver in (context.rank, receiver):
            sent_by[piece.sender].append(piece)
    parts = [list(joined(pieces)) for pieces in sent_by.values()]
    sizes = {sum(piece.source.numel for piece in pieces) for pieces in parts}
    if len(sizes) != 1:
        return None
    (size,), into = sizes, _stacked(parts, context.targets)
    buffer = 0 if into else size * len(parts)
    if not into and buffer + sum(piece.source.numel for piece in copies) > context.limit:
        return None
    sides = [(member == context.rank, pieces) for member, pieces in zip(context.members, parts, strict=True)]
    messages = [
        TransferMessage(sends, _slices_of(pieces, sends), None if into else i * size) for i, (sends, pieces) in enumerate(sides)
    ]
    return TransferStep(messages, copies=copies, buffer=buffer, gathers=True, into=into)


def _slices_of(pieces: Iterable[SliceCopy], sends: bool) -> tuple[ParamSlice, ...]:
    return tuple(piece.source if sends else piece.target for piece in pieces)


def _stacked(parts: Sequence[Sequence[SliceCopy]], targets: Shapes) -> str:
    """Return the parameter that the members' parts form, one below the other; "" if they form none."""
    if any(len(pieces) != 1 for pieces in parts):
        return ""
    target, row = parts[0][0].target.parameter, 0
    for (piece,) in parts:
        start, size = piece.target.start, piece.target.size
        if piece.target.parameter != target or size[1:] != tuple(targets[target][1:]) or start[0] != row:
            return ""
        row += size[0]
    return target if row == targets[target][0] else ""


Pair = tuple[
    tuple[int, int, int], bool, int, tuple[ParamSlice, ...]
]  # position in the global order, whether it sends, peer, parts


def _in_order(
    moves: Iterable[SliceCopy], sides: tuple[Sequence[int], Sequence[int]], context: TransferContext, alone: int
) -> list[Pair]:
    """Return the messages between this rank and each other rank, in order. ``sides``: all ranks that send, and all that receive."""
    among, to = ({rank: i for i, rank in enumerate(side)} for side in sides)
    index_of, rounds = {rank: i for i, rank in enumerate(context.members)}, max(map(len, sides))
    pieces_of: dict[tuple[int, int], list[SliceCopy]] = {}
    for piece in moves:
        pieces_of.setdefault((piece.sender, piece.receiver), []).append(piece)
    pairs = list[Pair]()
    for (sender, receiver), pieces in pieces_of.items():
        sends, distance = sender == context.rank, (to[receiver] - among[sender]) % rounds
        for number, run in enumerate(split_messages(pieces, context.limit, alone)):
            pairs.append(
                ((distance, number, index_of[sender]), sends, index_of[receiver if sends else sender], _slices_of(run, sends))
            )
    return sorted(pairs, key=lambda pair: pair[0])


def _exchange(pairs: Sequence[Pair], copies: Sequence[SliceCopy], context: TransferContext) -> TransferStep:
    """Return one step of these messages. Equal parts that go to several members are packed once, as one message."""
    numbers: dict[tuple[bool, tuple[ParamSlice, ...]], int] = {}
    messages = list[TransferMessage]()
    transfers = list[tuple[int, int]]()
    used = 0
    for _, sends, peer, parts in pairs:
        number = numbers.setdefault((sends, parts), len(messages))
        if number == len(messages):
            in_memory = _in_memory(sends, parts, context)
            messages.append(TransferMessage(sends, parts, None if in_memory else used))
            used += 0 if in_memory else messages[-1].numel
        transfers.append((number, peer))
    return TransferStep(messages, transfers, copies, used)


def split_messages(pieces: Iterable[SliceCopy], limit: int, alone: int) -> Iterator[list[SliceCopy]]:
    """Yield runs of copies with at most half of ``limit`` elements.

    A copy of ``alone`` elements or more goes by itself, cut by rows to ``limit`` elements where a row is smaller. If ``alone`` is a
    fraction of ``limit``, the number of messages is bounded too.
    """
    run: list[SliceCopy] = []
    used = 0
    for piece in joined(pieces):
        numel, rows = piece.source.numel, piece.source.size[0]
        if numel >= alone:
            max_rows = max(limit // (numel // rows), 1)
            for first in range(0, rows, max_rows):
                yield [piece._replace(source=piece.source.rows(first, max_rows), target=piece.target.rows(first, max_rows))]
            continue
        if used and used + numel > limit // 2:
            yield run
            run, used = [], 0
        run.append(piece)
        used += numel
    if run:
        yield run


def joined(pieces: Iterable[SliceCopy]) -> Iterator[SliceCopy]:
    """Yield the copies of one sender and receiver; those whose rows follow each other at both ends are joined.

    So q, k and v of a rank, three global tensors, become one copy.
    """
    last: SliceCopy | None = None
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


def _follows(a: ParamSlice, b: ParamSlice) -> bool:
    below = b.start == (a.start[0] + a.size[0], *a.start[1:])
    return below and a.parameter == b.parameter and a.size[1:] == b.size[1:]


def _in_memory(sends: bool, parts: Sequence[ParamSlice], context: TransferContext) -> bool:
    """Return True if a message is contiguous in this rank's memory, in the dtype in which it is sent."""
    if len(parts) > 1 or (sends and context.converted):
        return False
    size, shape = parts[0].size, tuple((context.sources if sends else context.targets)[parts[0].parameter])
    return size[1:] == shape[1:] or (size[0] == 1 and size[2:] == shape[2:])
