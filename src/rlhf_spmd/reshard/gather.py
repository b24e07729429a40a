"""One bucket of a gather on its way: what every member of the group sends to all others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_spmd.parallel.collectives import Group, Message, Work, wait_all
from rlhf_spmd.reshard.plan import Bucket, Piece, elements

LABEL = "reshard"

Locate = Callable[[Piece], Tensor]  # the part of a tensor that a piece is read from or written to


class Flight(NamedTuple):
    """``staged``: pieces that come into a flat tensor first; ``alive``: everything that is read or written meanwhile."""

    works: list[Work]
    staged: list[tuple[tuple[Piece, ...], Tensor]]
    alive: list[Tensor]


def start_bucket(bucket: Bucket, group: Group, source: Locate, place: Locate, dtype: torch.dtype) -> Flight:
    """Start the transfers; what lies at ``source`` must not change, nor ``place`` be read, before :func:`land_bucket`.

    Collective over the gather group: every rank of it must call, in program order.
    """
    if not any(bucket.sizes):
        return Flight([], [], [])
    device = place(next(piece for pieces in bucket.sends for piece in pieces)).device
    if device.type == "cuda" and len(set(bucket.sizes)) == 1:
        return _start_flat(bucket, group, source, torch.empty(sum(bucket.sizes), dtype=dtype, device=device))
    return _start_messages(bucket, group, source, place, dtype)


def land_bucket(flight: Flight, place: Locate) -> None:
    """Wait for the transfers and put what was staged into place."""
    wait_all(flight.works)
    for pieces, flat in flight.staged:
        for piece, part in zip(pieces, flat.split([piece.source_box.numel for piece in pieces]), strict=True):
            place(piece).copy_(part.view(piece.target_box.size))


def _start_flat(bucket: Bucket, group: Group, source: Locate, flat: Tensor) -> Flight:
    """One all-gather through a buffer: the fastest way on GPUs, where copies cost little."""
    parts = list(zip(bucket.sends, flat.split(bucket.sizes), strict=True))
    _pack(*parts.pop(group.rank), source)
    return Flight([group.start_all_gather(flat, LABEL)], parts, [flat])


def _start_messages(bucket: Bucket, group: Group, source: Locate, place: Locate, dtype: torch.dtype) -> Flight:
    """From each rank to each other one, without a copy where a piece is contiguous at either end: over gloo this takes a third of
    the time of its all-gather."""
    sends: list[Message] = []
    receives: list[Message] = []
    staged = []
    for pieces in bucket.messages[group.rank]:
        values = source(pieces[0])
        if len(pieces) > 1 or not values.is_contiguous() or values.dtype != dtype:
            values = _pack(pieces, torch.empty(elements(pieces), dtype=dtype, device=values.device), source)
        sends += [((group.rank + step) % group.size, values) for step in range(1, group.size)]
    for step in range(1, group.size):
        member = (group.rank - step) % group.size
        for pieces in bucket.messages[member]:
            target = place(pieces[0])
            if len(pieces) > 1 or not target.is_contiguous():
                target = target.new_empty(elements(pieces))
                staged.append((pieces, target))
            receives.append((member, target))
    works = group.start_exchange(sends, receives, LABEL)
    return Flight(works, staged, [tensor for _, tensor in (*sends, *receives)])


def _pack(pieces: Sequence[Piece], flat: Tensor, source: Locate) -> Tensor:
    for piece, part in zip(pieces, flat.split([piece.source_box.numel for piece in pieces]), strict=True):
        part.view(piece.source_box.size).copy_(source(piece))
    return flat
