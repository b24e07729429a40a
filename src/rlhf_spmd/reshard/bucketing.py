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

MIN_SEPARATE = 1 << 14  # elements from which a copy that all others receive is a message of its own
MIN_SEPARATE_OF_PAIR = 1 << 16  # the same for a copy that one rank receives: packing smaller ones costs less than a message

Shapes = Mapping[str, Sequence[int]]
Copies = Sequence[SliceCopy]


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
        """Return the elements of each part."""
        return [part.numel for part in self.parts]

    @cached_property
    def numel(self) -> int:
        return sum(self.sizes)


@dataclass(frozen=True)
class TransferStep:
    """Messages that start together, and copies inside the rank.

    - ``transfers``: (index of a message, member of the group). Two members list what goes between them in the same order.
    - ``buffer``: the elements of the step's buffer; 0: it has none.
    - ``gathers``: one all-gather moves the buffer, or without a buffer the target parameter ``gathered_parameter``. Otherwise the
      messages are one exchange.
    - ``temporary_elements``: other elements that are allocated until the step has ended, and are not needed afterwards.
    """

    messages: Sequence[TransferMessage] = ()
    transfers: Sequence[tuple[int, int]] = ()
    copies: Sequence[SliceCopy] = ()
    buffer: int = 0
    gathers: bool = False
    gathered_parameter: str = ""
    temporary_elements: int = 0

    @cached_property
    def exchanged(self) -> int:
        """Return the elements of all messages of an exchange, packed or not."""
        return 0 if self.gathers else sum(message.numel for message in self.messages)


@dataclass(frozen=True)
class TransferContext:
    """What a rank knows of itself and its group when it turns a plan into messages.

    - ``rank``: this rank's number in plans. ``members``: the ranks of the group, in its order, by the same numbers.
    - ``sources``, ``targets``: the shapes of its parameters, which are contiguous.
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
    min_separate = max(context.limit // 64, MIN_SEPARATE_OF_PAIR)
    pairs = _in_order(plan.remote_copies(), (plan.senders, plan.receivers), context, min_separate)
    exchanges = groupby(pairs, key=lambda pair: pair[0][:2])
    steps = [_exchange(list(pairs_of_exchange), (), context) for _, pairs_of_exchange in exchanges]
    copies = list(plan.local_copies())
    return [*[TransferStep(copies=copies)] * bool(copies), *steps]


def plan_bucket(remote_copies: Copies, local_copies: Copies, context: TransferContext, on_gpu: bool) -> TransferStep:
    """Return one step for parameters that every member fills; on GPUs one all-gather if all members send equal parts."""
    if on_gpu and remote_copies and (step := _all_gather(remote_copies, local_copies, context)):
        return step
    min_separate = min(MIN_SEPARATE, context.limit // 64)
    pairs = _in_order(remote_copies, (context.members, context.members), context, min_separate)
    return _exchange(pairs, local_copies, context)


def _all_gather(remote_copies: Copies, local_copies: Copies, context: TransferContext) -> TransferStep | None:
    """Return the all-gather; None if members' parts differ in size, if some but not all hold a part, or if a buffer has no room.

    Every member needs, and so sees, all parts of the bucket. So all members decide alike.
    """
    if any(1 < piece.holders < len(context.members) for piece in (*remote_copies, *local_copies)):
        return None
    sent_by: dict[int, list[SliceCopy]] = {member: [] for member in context.members}
    receiver = next((piece.receiver for piece in remote_copies if piece.sender == context.rank), None)
    for piece in remote_copies:
        if piece.receiver in (context.rank, receiver):
            sent_by[piece.sender].append(piece)
    parts = [list(joined(pieces)) for pieces in sent_by.values()]
    sizes = {sum(piece.source.numel for piece in pieces) for pieces in parts}
    if len(sizes) != 1:
        return None
    (size,) = sizes
    gathered_parameter = _stacked(parts, context.targets)
    buffer = 0 if gathered_parameter else size * len(parts)
    if not gathered_parameter and buffer + sum(piece.source.numel for piece in local_copies) > context.limit:
        return None
    messages = []
    for number, (member, pieces) in enumerate(sent_by.items()):
        sends = member == context.rank
        offset = None if gathered_parameter else number * size
        messages.append(TransferMessage(sends, _slices_of(joined(pieces), sends), offset))
    return TransferStep(messages, (), local_copies, buffer, gathers=True, gathered_parameter=gathered_parameter)


def _slices_of(pieces: Iterable[SliceCopy], sends: bool) -> tuple[ParamSlice, ...]:
    return tuple(piece.source if sends else piece.target for piece in pieces)


def _stacked(parts: Sequence[Sequence[SliceCopy]], targets: Shapes) -> str:
    """Return the parameter that the members' parts form, one below the other; "" if they form none."""
    if any(len(pieces) != 1 for pieces in parts):
        return ""
    target = parts[0][0].target.parameter
    row = 0
    for (piece,) in parts:
        start, size = piece.target.start, piece.target.size
        if piece.target.parameter != target or size[1:] != tuple(targets[target][1:]) or start[0] != row:
            return ""
        row += size[0]
    return target if row == targets[target][0] else ""


# a message between two ranks: position in the global order, whether this rank sends it, peer, parts
Pair = tuple[tuple[int, int, int], bool, int, tuple[ParamSlice, ...]]


def _in_order(
    copies: Iterable[SliceCopy], sides: tuple[Sequence[int], Sequence[int]], context: TransferContext, min_separate: int
) -> list[Pair]:
    """Return the messages between this rank and each other rank, in order. ``sides``: all ranks that send, and all that receive."""
    sender_index, receiver_index = ({rank: i for i, rank in enumerate(side)} for side in sides)
    member_index = {rank: i for i, rank in enumerate(context.members)}
    num_distances = max(map(len, sides))
    pieces_of: dict[tuple[int, int], list[SliceCopy]] = {}
    for piece in copies:
        pieces_of.setdefault((piece.sender, piece.receiver), []).append(piece)
    pairs = list[Pair]()
    for (sender, receiver), pieces in pieces_of.items():
        sends = sender == context.rank
        peer = member_index[receiver if sends else sender]
        distance = (receiver_index[receiver] - sender_index[sender]) % num_distances
        for number, run in enumerate(split_messages(pieces, context.limit, min_separate)):
            pairs.append(((distance, number, member_index[sender]), sends, peer, _slices_of(run, sends)))
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


def split_messages(pieces: Iterable[SliceCopy], limit: int, min_separate: int) -> Iterator[list[SliceCopy]]:
    """Yield runs of copies with at most half of ``limit`` elements.

    A copy of ``min_separate`` elements or more goes by itself, cut by rows to ``limit`` elements where a row is smaller. If that
    number is a fraction of ``limit``, the number of messages is bounded too.
    """
    run: list[SliceCopy] = []
    used = 0
    for piece in joined(pieces):
        numel, rows = piece.source.numel, piece.source.size[0]
        if numel >= min_separate:
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
    size = parts[0].size
    shape = tuple((context.sources if sends else context.targets)[parts[0].parameter])
    return size[1:] == shape[1:] or (size[0] == 1 and size[2:] == shape[2:])
