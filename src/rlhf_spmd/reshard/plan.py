"""The plan of a transition, from one rank's view: which part of which training shard sends from where. Pure.

A gather group is ranks that all need the same tensors, which their training shards make up together: everything that one of
them sends goes to all others. Parts that every member holds already (norms that are replicated over tp) are copied locally and
not sent. Which group, which tensors and what becomes of the training shard is an engine's choice, see ``engines``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rlhf_spmd.parallel.boxes import Box, ParamShard, cover, shard_rows, zero_rows

REMEDY = "generation.pp must divide layout.pp, generation.tp layout.tp, and layout.pp the number of layers"

LARGE = 1 << 14  # elements from which a piece is worth a message of its own

Shards = Mapping[str, ParamShard]
ShardsAt = Callable[[int, int], Shards]  # (pp, tp) coordinate in a layout -> the shards there, before ZeRO cuts out its rows


@dataclass(frozen=True)
class Piece:
    """``training[source][source_box]`` and ``generation[target][target_box]`` are the same part of one global tensor."""

    source: str
    source_box: Box
    target: str
    target_box: Box


@dataclass(frozen=True)
class Bucket:
    """Parameters that are made together. sends: what each member sends to all others, in this order. copies: what this rank
    takes from its own shards without communication.
    """

    targets: tuple[str, ...]
    sends: tuple[tuple[Piece, ...], ...]
    copies: tuple[Piece, ...]

    @cached_property
    def sizes(self) -> list[int]:
        """Elements from each member."""
        return [elements(pieces) for pieces in self.sends]

    @cached_property
    def messages(self) -> list[list[tuple[Piece, ...]]]:
        """What each member sends, cut into messages: a large piece is one, so that it can go from place to place without a copy;
        the small ones are one together."""
        return [_cut_messages(pieces) for pieces in self.sends]


@dataclass(frozen=True)
class Home:
    """Where a training parameter's values are inside its rank's own generation shard.

    ``view``: the generation parameter and slices that are exactly the training parameter, or None if no single slice is.
    ``pieces``: the same box by box.
    """

    view: tuple[str, tuple[slice, ...]] | None
    pieces: tuple[Piece, ...]


def elements(pieces: Iterable[Piece]) -> int:
    return sum(piece.source_box.numel for piece in pieces)


def _cut_messages(pieces: tuple[Piece, ...]) -> list[tuple[Piece, ...]]:
    runs: list[Piece] = []
    for piece in pieces:
        if runs and _follows(runs[-1], piece):
            before = runs.pop()
            piece = replace(before, source_box=_extend(before.source_box, piece), target_box=_extend(before.target_box, piece))
        runs.append(piece)
    large: list[tuple[Piece, ...]] = [(piece,) for piece in runs if piece.source_box.numel >= LARGE]
    small = tuple(piece for piece in runs if piece.source_box.numel < LARGE)
    return large + [small] * bool(small)


def _follows(a: Piece, b: Piece) -> bool:
    """Whether b is the next rows after a in both parameters: q, k and v of one rank, although they are three global tensors."""

    def next_rows(x: Box, y: Box) -> bool:
        return y.local == (x.local[0] + x.size[0], *x.local[1:]) and y.size[1:] == x.size[1:]

    same = (a.source, a.target) == (b.source, b.target)
    return same and next_rows(a.source_box, b.source_box) and next_rows(a.target_box, b.target_box)


def _extend(box: Box, by: Piece) -> Box:
    return replace(box, size=(box.size[0] + by.source_box.size[0], *box.size[1:]))


def plan_gather(train: Sequence[Shards], wanted: Shards, me: int, bucket_elements: int = 64 << 20) -> tuple[Bucket, ...]:
    """``train``: the training shards of every member, in group order. ``wanted``: what all of them will hold.

    A bucket is whole units: parameters that come from equally named training parameters, such as one layer's of each stage, so
    that the members send equal amounts. It makes no more than ``bucket_elements`` nor than the largest unit, unless it is one.
    Of members that share a part the first sends it. Raises ValueError where the members do not hold all that is wanted.
    """
    holders = [by_tensor(shards) for shards in train]
    units: dict[str, list[Bucket]] = {}
    for target, shard in wanted.items():
        bucket = _fill(target, shard, holders, me)
        sources = [piece.source for pieces in (*bucket.sends, bucket.copies) for piece in pieces]
        units.setdefault(sources[0] if sources else target, []).append(bucket)
    sizes = [sum(math.prod(wanted[part.targets[0]].shape) for part in parts) for parts in units.values()]
    limit = min(bucket_elements, max(sizes, default=0))
    groups: list[list[Bucket]] = []
    used = limit + 1
    for parts, size in zip(units.values(), sizes, strict=True):
        if used + size > limit:
            groups.append([])
            used = 0
        groups[-1] += parts
        used += size
    return tuple(_merge(group) for group in groups)


def plan_homes(train: Shards, generation: Shards) -> dict[str, Home]:
    """For each training parameter of one rank, its place in the rank's generation shard.

    Raises ValueError where a training parameter is not part of the generation shard.
    """
    index = by_tensor(generation)
    homes = {}
    for name, shard in train.items():
        pieces = []
        for box in shard.boxes:
            candidates = index.get(box.name, [])
            taken, missing = cover(box, [candidate for _, candidate in candidates])
            if missing:
                raise ValueError(
                    f"training parameter {name} ({box.name} from {missing[0].start}) is not part of this rank's generation "
                    f"shard; {REMEDY}"
                )
            pieces += [Piece(name, part, candidates[i][0], place) for i, place, part in taken]
        homes[name] = Home(_single_slice(shard, pieces), tuple(pieces))
    return homes


def by_tensor(shards: Shards) -> dict[str, list[tuple[str, Box]]]:
    """Global tensor name -> (local parameter, box)."""
    index: dict[str, list[tuple[str, Box]]] = {}
    for parameter, shard in shards.items():
        for box in shard.boxes:
            index.setdefault(box.name, []).append((parameter, box))
    return index


def _fill(target: str, shard: ParamShard, holders: Sequence[Mapping[str, list[tuple[str, Box]]]], me: int) -> Bucket:
    """The pieces of one wanted parameter."""
    sends: list[list[Piece]] = [[] for _ in holders]
    copies: list[Piece] = []
    for box in shard.boxes:
        held = [holder.get(box.name, []) for holder in holders]
        if not any(cover(box, [candidate for _, candidate in boxes])[1] for boxes in held):
            taken, _ = cover(box, [candidate for _, candidate in held[me]])
            copies += [Piece(held[me][i][0], source, target, place) for i, source, place in taken]
            continue
        everyone = [(member, parameter, candidate) for member, boxes in enumerate(held) for parameter, candidate in boxes]
        taken, missing = cover(box, [candidate for _, _, candidate in everyone])
        if missing:
            raise ValueError(
                f"generation parameter {target}: no training shard of its group holds {box.name} from {missing[0].start} "
                f"of size {missing[0].size}; {REMEDY}"
            )
        for i, source, place in taken:
            member, parameter, _ = everyone[i]
            sends[member].append(Piece(parameter, source, target, place))
    return Bucket((target,), tuple(map(tuple, sends)), tuple(copies))


def _merge(parts: Sequence[Bucket]) -> Bucket:
    """Several buckets of one group as one."""

    return Bucket(
        tuple(target for part in parts for target in part.targets),
        tuple(tuple(piece for part in parts for piece in part.sends[m]) for m in range(len(parts[0].sends))),
        tuple(piece for part in parts for piece in part.copies),
    )


def _single_slice(shard: ParamShard, pieces: Sequence[Piece]) -> tuple[str, tuple[slice, ...]] | None:
    """The slice of a generation parameter that is the whole training parameter in the same order, if there is one."""
    targets = {piece.target for piece in pieces}
    offsets = {tuple(b - a for a, b in zip(p.source_box.local, p.target_box.local, strict=True)) for p in pieces}
    if len(targets) != 1 or len(offsets) != 1:
        return None
    (offset,) = offsets
    return targets.pop(), tuple(slice(a, a + n) for a, n in zip(offset, shard.shape, strict=True))


def own_share(shards: Shards, part: int, parts: int) -> dict[str, ParamShard]:
    """What one of ``parts`` ranks with the same shards answers for: rows of each parameter, located in the whole parameter.

    Parameters that are replicated beyond those ranks stay whole: most ranks need not receive them at all.
    """
    shares = {name: shard for name, shard in shards.items() if shard.replicated}
    for name, shard in shards.items():
        if name in shares:
            continue
        first, last = zero_rows(shard.shape[0], part, parts)
        boxes = shard_rows(shard, first, last).boxes
        back = tuple(replace(box, local=(box.local[0] + first, *box.local[1:])) for box in boxes)
        shares[name] = ParamShard(shard.shape, back, shard.replicated)
    return shares
