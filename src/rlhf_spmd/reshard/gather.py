"""One bucket of a gather on its way: what every member of the group sends to all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_spmd.parallel.boxes import Box
from rlhf_spmd.parallel.collectives import Group, Message, Work, wait_all
from rlhf_spmd.reshard.plan import LARGE, Bucket, Piece, cut_messages, elements

LABEL = "reshard"

Locate = Callable[[Piece], Tensor]  # the part of a tensor that a piece is read from or written to
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Route:
    """How a bucket travels to and from one rank, in every transition.

    ``sends``: pieces of a message, and whether they are packed; ``receives``: also the member that they are from, and whether they
    are staged. ``whole``: instead, one all-gather fills this parameter; ``flat``: one all-gather, through a buffer.
    ``buffers``: elements of what is packed and staged.
    """

    bucket: Bucket
    sends: tuple[tuple[tuple[Piece, ...], bool], ...] = ()
    receives: tuple[tuple[int, tuple[Piece, ...], bool], ...] = ()
    whole: str = ""
    flat: bool = False
    buffers: int = 0


def plan_route(
    bucket: Bucket, group: Group, sources: Shapes, targets: Shapes, converted: bool, limit: int, on_gpu: bool
) -> Route:
    """``sources``, ``targets``: shapes of this rank's parameters, which are contiguous. ``converted``: training has another dtype.
    ``limit``: elements of the largest bucket, which buffers and what the bucket replaces together do not exceed.

    Every member of the group takes the same way. On GPUs with equal parts that is an all-gather, else messages.
    """
    total, large = sum(bucket.sizes), min(LARGE, limit // 64)
    messages = [cut_messages(pieces, large) for pieces in bucket.sends]
    if on_gpu and total and len(set(bucket.sizes)) == 1:
        if whole := _stacked(messages, targets):
            return Route(bucket, whole=whole)
        if total + bucket.sizes[0] + elements(bucket.copies) <= limit:
            return Route(bucket, flat=True, buffers=total)
    sends, receives = [], []
    for pieces in messages[group.rank]:
        packed = converted or len(pieces) > 1 or not _rows(pieces[0].source_box, sources[pieces[0].source])
        sends.append((pieces, packed))
    for step in range(1, group.size):
        member = (group.rank - step) % group.size
        for pieces in messages[member]:
            staged = len(pieces) > 1 or not _rows(pieces[0].target_box, targets[pieces[0].target])
            receives.append((member, pieces, staged))
    buffered = [pieces for pieces, packed in sends if packed] + [pieces for _, pieces, staged in receives if staged]
    return Route(bucket, tuple(sends), tuple(receives), buffers=sum(map(elements, buffered)))


def _rows(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box is whole rows of its parameter: one piece of memory."""
    return box.size[1:] == tuple(shape[1:])


def _stacked(messages: Sequence[Sequence[tuple[Piece, ...]]], targets: Shapes) -> str:
    """The parameter that the members' parts make up one below the other, or nothing."""
    if any(len(sent) != 1 or len(sent[0]) != 1 for sent in messages):
        return ""
    pieces = [sent[0][0] for sent in messages]
    target = pieces[0].target
    rows = [0]
    for piece in pieces:
        if piece.target != target or not _rows(piece.target_box, targets[target]) or piece.target_box.local[0] != rows[-1]:
            return ""
        rows.append(rows[-1] + piece.target_box.size[0])
    return target if rows[-1] == targets[target][0] else ""


class Flight(NamedTuple):
    """``staged``: pieces that come into a flat tensor first; ``alive``: everything that is read or written meanwhile."""

    works: list[Work]
    staged: list[tuple[tuple[Piece, ...], Tensor]]
    alive: list[Tensor]


def start_bucket(
    route: Route, group: Group, source: Locate, place: Locate, wholes: Mapping[str, Tensor], dtype: torch.dtype
) -> Flight:
    """Start the transfers and fill in this rank's own part; what lies at ``source`` must not change, nor ``place`` be read, before
    :func:`land_bucket`. ``wholes``: the parameters that are made, by name.

    Collective over the gather group: every rank of it must call, in program order.
    """
    own = (*route.bucket.copies, *route.bucket.sends[group.rank])
    if route.whole:  # an all-gather in place reads this rank's part there
        _copy(own, source, place)
        return Flight([group.start_all_gather(wholes[route.whole].view(-1), LABEL)], [], [])
    flight = (
        _start_flat(route, group, source, wholes, dtype) if route.flat else _start_messages(route, group, source, place, dtype)
    )
    _copy(own, source, place)
    return flight


def land_bucket(flight: Flight, place: Locate) -> None:
    """Wait for the transfers and put what was staged into place."""
    wait_all(flight.works)
    for pieces, flat in flight.staged:
        for piece, part in zip(pieces, flat.split([piece.source_box.numel for piece in pieces]), strict=True):
            place(piece).copy_(part.view(piece.target_box.size))


def _start_flat(route: Route, group: Group, source: Locate, wholes: Mapping[str, Tensor], dtype: torch.dtype) -> Flight:
    bucket = route.bucket
    flat = torch.empty(route.buffers, dtype=dtype, device=wholes[bucket.targets[0]].device)
    parts = list(zip(bucket.sends, flat.split(bucket.sizes), strict=True))
    _pack(*parts.pop(group.rank), source)
    return Flight([group.start_all_gather(flat, LABEL)], parts, [flat])


def _start_messages(route: Route, group: Group, source: Locate, place: Locate, dtype: torch.dtype) -> Flight:
    """From each rank to each other one, without a copy where a piece is contiguous at either end: over gloo this takes a third of
    the time of its all-gather."""
    sends: list[Message] = []
    receives: list[Message] = []
    staged = []
    for pieces, packed in route.sends:
        values = source(pieces[0])
        if packed:
            values = _pack(pieces, torch.empty(elements(pieces), dtype=dtype, device=values.device), source)
        sends += [((group.rank + step) % group.size, values) for step in range(1, group.size)]
    for member, pieces, is_staged in route.receives:
        target = place(pieces[0])
        if is_staged:
            target = target.new_empty(elements(pieces))
            staged.append((pieces, target))
        receives.append((member, target))
    works = group.start_exchange(sends, receives, LABEL) if sends or receives else []
    return Flight(works, staged, [tensor for _, tensor in (*sends, *receives)])


def _copy(pieces: Iterable[Piece], source: Locate, place: Locate) -> None:
    for piece in pieces:
        place(piece).copy_(source(piece))


def _pack(pieces: Sequence[Piece], flat: Tensor, source: Locate) -> Tensor:
    for piece, part in zip(pieces, flat.split([piece.source_box.numel for piece in pieces]), strict=True):
        part.view(piece.source_box.size).copy_(source(piece))
    return flat
