"""The plan of a transition, from one rank's view: which part of which training shard sends from where. Pure.

A gather group is ranks that all need the same tensors, which their training shards make up together: everything that one of
them sends goes to all others. Parts that every member holds already (norms that are replicated over tp) are copied locally and
not sent. Which group, which tensors and what becomes of the training shard is an engine's choice, see ``engines``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rlhf_spmd.parallel.boxes import Box, ParamShard, box_rows, cover
from rlhf_spmd.parallel.layout import GenerationLayout, Layout

REMEDY = "generation.pp must divide layout.pp, generation.tp layout.tp, and layout.pp the number of layers"

LARGE = 1 << 14  # elements from which a piece is worth a message of its own

Shards = Mapping[str, ParamShard]
ShardsAt = Callable[[int, int], Shards]  # (pp, tp) coordinate in a layout -> the shards there, before ZeRO cuts out its rows


@dataclass(frozen=True)
class Holding:
    """``ranks`` that hold these parameters whole or, with ``split``, each its rows of every one (ZeRO: ``zero_rows``).

    ``whole``: the ranks hold all of them, and each answers for its rows. On one side a rank holds no element of a tensor twice.
    """

    ranks: tuple[int, ...]
    shards: Shards
    split: bool = False
    whole: bool = False


def holdings(
    layout: Layout | GenerationLayout, shards: ShardsAt, ranks: Sequence[int], group: Iterable[int] | None = None
) -> list[Holding]:
    """What each rank of a pool holds of a model in a layout; ``group``: of these pool indices, ``ranks`` in the same order."""
    split = isinstance(layout, Layout) and layout.zero > 0 and layout.dp > 1
    at: dict[tuple[int, int], list[int]] = {}
    for index, rank in zip(range(len(ranks)) if group is None else group, ranks, strict=True):
        pp, _, tp = layout.coordinate(index)
        at.setdefault((pp, tp), []).append(rank)
    return [Holding(tuple(held), shards(*coordinate), split) for coordinate, held in at.items()]


class Held(NamedTuple):
    """One box of a tensor in one holding: the parameter it lies in, and that parameter's rows (0 where they are not split)."""

    holding: int
    parameter: str
    rows: int
    box: Box

    @property
    def key(self) -> tuple[object, ...]:
        """The same for tensors that lie alike."""
        return self.holding, self.rows, self.box[1:]


class Region(NamedTuple):
    """A box as ``ranks`` hold it, rows split; ``number`` of the box it is of."""

    number: int
    ranks: tuple[int, ...]
    box: Box


def by_tensor(side: Sequence[Holding]) -> dict[str, list[Held]]:
    """Global tensor name -> where it is held."""
    index: dict[str, list[Held]] = {}
    for number, holding in enumerate(side):
        for parameter, shard in holding.shards.items():
            rows = shard.shape[0] if holding.split else 0
            for box in shard.boxes:
                index.setdefault(box.name, []).append(Held(number, parameter, rows, box))
    return index


def regions(
    side: Sequence[Holding], boxes: Sequence[Held], within: Box | None = None, rank: int | None = None
) -> Iterator[Region]:
    """The regions of some boxes of one tensor: of split ones only those with rows in ``within``, only those of ``rank``."""
    for number, (holding, _, rows, box) in enumerate(boxes):
        ranks, whole = side[holding].ranks, side[holding].whole
        if rank is not None and rank not in ranks:
            continue
        if not rows:
            yield Region(number, ranks, box)
            continue
        chunk, low, high = -(-rows // len(ranks)), box.local[0], box.local[0] + box.size[0]
        if within is not None:
            first = within.start[0] + low - box.start[0]
            low, high = max(low, first), min(high, first + within.size[0])
        for index in range(low // chunk, -(-high // chunk)) if rank is None else (ranks.index(rank),):
            part = box_rows(box, index * chunk, (index + 1) * chunk)
            if part is not None:
                local = part.local if whole else (part.local[0] - index * chunk, *part.local[1:])
                yield Region(number, ranks[index : index + 1], part._replace(local=local))


class Piece(NamedTuple):
    """``training[source][source_box]`` and ``generation[target][target_box]`` are the same part of one global tensor."""

    source: str
    source_box: Box
    target: str
    target_box: Box


Spot = tuple[int, Box, Box]  # a piece of a parameter: the number of its source, the boxes in the source and in the parameter
Made = tuple[str, Sequence[str], "Fill"]  # a parameter, the names of its sources, and how it is made of them


class Fill(NamedTuple):
    """How a parameter is made, and all that lie alike: what each member sends to all others, what this rank takes from its own
    shards, and the number of the first source of all."""

    sends: Mapping[int, Sequence[Spot]]
    copies: Sequence[Spot]
    first: int | None


@dataclass(frozen=True)
class Bucket:
    """Parameters that are made together, by a group of ``members``."""

    parts: tuple[Made, ...]
    members: int

    @cached_property
    def targets(self) -> tuple[str, ...]:
        return tuple(target for target, _, _ in self.parts)

    def sent_by(self, member: int) -> tuple[Piece, ...]:
        """What one member sends to all others, in this order."""
        return self._pieces(lambda fill: fill.sends.get(member, ()))

    @cached_property
    def sends(self) -> tuple[tuple[Piece, ...], ...]:
        return tuple(self.sent_by(member) for member in range(self.members))

    @cached_property
    def copies(self) -> tuple[Piece, ...]:
        """What this rank takes from its own shards without communication."""
        return self._pieces(lambda fill: fill.copies)

    def _pieces(self, of: Callable[[Fill], Sequence[Spot]]) -> tuple[Piece, ...]:
        return tuple(
            Piece(names[source], source_box, target, target_box)
            for target, names, fill in self.parts
            for source, source_box, target_box in of(fill)
        )

    @cached_property
    def sizes(self) -> list[int]:
        """Elements from each member."""
        return [elements(pieces) for pieces in self.sends]


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


def cut_messages(pieces: Iterable[Piece], large: int) -> list[tuple[Piece, ...]]:
    """What a member sends as messages: a piece from ``large`` elements on is one, so that it can go from place to place without a
    copy; the small ones are one together."""
    runs: list[Piece] = []
    for piece in pieces:
        if runs and _follows(runs[-1], piece):
            before = runs.pop()
            piece = before._replace(source_box=_extend(before.source_box, piece), target_box=_extend(before.target_box, piece))
        runs.append(piece)
    alone: list[tuple[Piece, ...]] = [(piece,) for piece in runs if piece.source_box.numel >= large]
    small = tuple(piece for piece in runs if piece.source_box.numel < large)
    return alone + [small] * bool(small)


def _follows(a: Piece, b: Piece) -> bool:
    """Whether b is the next rows after a in both parameters: q, k and v of one rank, although they are three global tensors."""

    def next_rows(x: Box, y: Box) -> bool:
        return y.local == (x.local[0] + x.size[0], *x.local[1:]) and y.size[1:] == x.size[1:]

    same = (a.source, a.target) == (b.source, b.target)
    return same and next_rows(a.source_box, b.source_box) and next_rows(a.target_box, b.target_box)


def _extend(box: Box, by: Piece) -> Box:
    return box._replace(size=(box.size[0] + by.source_box.size[0], *box.size[1:]))


def plan_gather(train: Sequence[Holding], wanted: Shards, me: int, bucket_elements: int = 64 << 20) -> tuple[Bucket, ...]:
    """``train``: the training shards of all members, whose ranks are places in the group. ``wanted``: what all will hold.

    A bucket is whole units: parameters that come from equally named training parameters, such as one layer's of each stage, so
    that the members send equal amounts. It makes no more than ``bucket_elements`` nor than half the largest unit, unless it is one.
    Of members that share a part the first sends it. Raises ValueError where the members do not hold all that is wanted.
    """
    index, members = by_tensor(train), len({rank for holding in train for rank in holding.ranks})
    fills: dict[tuple[object, ...], Fill] = {}  # of parameters that lie alike, those of equal layers: one
    units: dict[str, list[Made]] = {}
    for target, shard in wanted.items():
        held = [index.get(box.name, []) for box in shard.boxes]
        key = tuple((box[1:], *[source.key for source in some]) for box, some in zip(shard.boxes, held, strict=True))
        if key not in fills:
            fills[key] = _fill(target, shard, train, held, members, me)
        sources, first = [source.parameter for some in held for source in some], fills[key].first
        units.setdefault(target if first is None else sources[first], []).append((target, sources, fills[key]))
    sizes = [sum(math.prod(wanted[target].shape) for target, _, _ in parts) for parts in units.values()]
    limit = min(bucket_elements, max(sizes, default=0) // 2)
    groups: list[list[Made]] = []
    used = limit + 1
    for parts, size in zip(units.values(), sizes, strict=True):
        if used + size > limit:
            groups.append([])
            used = 0
        groups[-1] += parts
        used += size
    return tuple(Bucket(tuple(group), members) for group in groups)


def plan_homes(train: Shards, generation: Shards) -> dict[str, Home]:
    """For each training parameter of one rank, its place in the rank's generation shard.

    Raises ValueError where a training parameter is not part of the generation shard.
    """
    index = by_tensor([Holding((0,), generation)])
    homes = {}
    for name, shard in train.items():
        pieces = []
        for box in shard.boxes:
            candidates = index.get(box.name, [])
            taken, missing = cover(box, [candidate.box for candidate in candidates])
            if missing:
                raise ValueError(
                    f"training parameter {name} ({box.name} from {missing[0].start}) is not part of this rank's generation "
                    f"shard; {REMEDY}"
                )
            pieces += [Piece(name, part, candidates[i].parameter, place) for i, place, part in taken]
        homes[name] = Home(_single_slice(shard, pieces), tuple(pieces))
    return homes


def _fill(
    target: str, shard: ParamShard, train: Sequence[Holding], held: Sequence[Sequence[Held]], members: int, me: int
) -> Fill:
    """The pieces of one wanted parameter; ``held``: where each of its boxes is."""
    sends: dict[int, list[Spot]] = {}
    copies: list[Spot] = []
    base = 0
    for box, some in zip(shard.boxes, held, strict=True):
        whole = {source.holding for source in some if not source.rows}
        alone = [n for n in whole if not cover(box, [source.box for source in some if source.holding == n])[1]]
        everywhere = sum(len(train[n].ranks) for n in alone) == members
        found = sorted(regions(train, some, box, me if everywhere else None), key=lambda region: region.ranks[0])
        taken, missing = cover(box, [region.box for region in found])
        if missing:
            raise ValueError(
                f"generation parameter {target}: no training shard of its group holds {box.name} from {missing[0].start} "
                f"of size {missing[0].size}; {REMEDY}"
            )
        for i, source, place in taken:
            number, ranks, _ = found[i]
            (copies if everywhere else sends.setdefault(ranks[0], [])).append((base + number, source, place))
        base += len(some)
    spots = [*(sends[min(sends)] if sends else ()), *copies]
    return Fill(sends, copies, spots[0][0] if spots else None)


def _single_slice(shard: ParamShard, pieces: Sequence[Piece]) -> tuple[str, tuple[slice, ...]] | None:
    """The slice of a generation parameter that is the whole training parameter in the same order, if there is one."""
    targets = {piece.target for piece in pieces}
    offsets = {tuple(b - a for a, b in zip(p.source_box.local, p.target_box.local, strict=True)) for p in pieces}
    if len(targets) != 1 or len(offsets) != 1:
        return None
    (offset,) = offsets
    return targets.pop(), tuple(slice(a, a + n) for a, n in zip(offset, shard.shape, strict=True))
