"""Parameter reallocation (ReaL, section 6) as a plan: from any ranks and layout to any other. Pure.

A side is a list of holdings: ranks and the shards that they hold. The common refinement of both sides' boxes cuts each tensor
into cells that every rank holds whole or not at all. A rank that needs a cell takes it from the cheapest source: itself, then its
own host, then another host; ranks that need the same cell take turns over equal sources, and what is left over of a round moves
on from tensor to tensor. So nothing is received twice, and each rank derives its own part of the plan alone.

Tensors that are held alike (those of equal layers) are cut once, and a rank looks only at cells that it holds or needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from rlhf_spmd.parallel.boxes import Box, zero_rows
from rlhf_spmd.parallel.layout import GenerationLayout, Layout
from rlhf_spmd.reshard.plan import Shards, ShardsAt

HostOf = Callable[[int], Hashable]
Index = tuple[int, ...]  # one number per tensor dim


@dataclass(frozen=True)
class Holding:
    """Global ``ranks`` that hold these parameters whole or, with ``split``, each its rows of every one (ZeRO: ``zero_rows``).

    On one side a rank holds no element of a tensor twice.
    """

    ranks: tuple[int, ...]
    shards: Shards
    split: bool = False


def holdings(layout: Layout | GenerationLayout, shards: ShardsAt, ranks: Sequence[int]) -> list[Holding]:
    """What each rank of a pool holds of a model in a layout."""
    split = isinstance(layout, Layout) and layout.zero > 0 and layout.dp > 1
    return [
        Holding(tuple(ranks[layout.index(pp, dp, tp)] for dp in range(layout.dp)), shards(pp, tp), split)
        for pp in range(layout.pp)
        for tp in range(layout.tp)
    ]


class Part(NamedTuple):
    """``parameter[start : start + size]`` of one rank; ``start`` and ``size`` have one entry per tensor dim."""

    parameter: str
    start: Index
    size: Index

    @property
    def numel(self) -> int:
        n = 1
        for extent in self.size:
            n *= extent
        return n

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))


@dataclass(frozen=True)
class RankPlan:
    """What one rank does. Both ends of a pair list its parts in the same order: tensors as the target side lists them.

    ``sends``: target rank -> parts of this rank's source parameters; ``receives``: source rank -> parts of its target parameters;
    ``copies``: (source part, target part) that do not leave the rank.
    """

    sends: dict[int, list[Part]] = field(default_factory=dict)
    receives: dict[int, list[Part]] = field(default_factory=dict)
    copies: list[tuple[Part, Part]] = field(default_factory=list)

    @property
    def elements_received(self) -> int:
        return sum(part.numel for parts in self.receives.values() for part in parts)


def plan_reallocation(source: Sequence[Holding], target: Sequence[Holding], host_of: HostOf, rank: int) -> RankPlan:
    """One rank's part in filling the target side from the source side. ``host_of``: global rank -> the host it is on.

    Every rank must pass the same holdings in the same order. Raises ValueError where the source lacks what this rank needs.
    """
    plan = RankPlan()
    sides = source, target
    mine = [{index for index, holding in enumerate(side) if rank in holding.ranks} for side in sides]
    moves = []
    turn = 0
    for alike in _alike(source, target):
        if any(held.holding in mine[number] for number in (0, 1) for held in alike[0].sides[number]):
            cells = _cut(alike[0], sides, host_of, rank)
            for number, tensor in enumerate(alike):
                for cell in cells:
                    moves += [(tensor.position, cell.at, pair, tensor, cell) for pair in cell.pairs(turn + number, rank)]
        turn += len(alike)
    for _, _, (giver, taker), tensor, cell in sorted(moves, key=lambda move: move[:3]):
        if giver == taker:
            plan.copies.append((cell.part(tensor, 0, giver), cell.part(tensor, 1, taker)))
        elif giver == rank:
            plan.sends.setdefault(taker, []).append(cell.part(tensor, 0, giver))
        else:
            plan.receives.setdefault(giver, []).append(cell.part(tensor, 1, taker))
    return plan


def plan_traffic(source: Sequence[Holding], target: Sequence[Holding], host_of: HostOf) -> Counter[tuple[int, int]]:
    """The whole plan as elements per (source rank, target rank); what stays on a rank is under (rank, rank)."""
    traffic: Counter[tuple[int, int]] = Counter()
    turn = 0
    for alike in _alike(source, target):
        for cell in _cut(alike[0], (source, target), host_of, None):
            for number in range(len(alike)):
                for pair in cell.pairs(turn + number, None):
                    traffic[pair] += cell.numel
        turn += len(alike)
    return traffic


@dataclass(frozen=True)
class _Held:
    """One box of a tensor in one holding: the parameter it lies in, and that parameter's rows (0 where they are not split)."""

    holding: int
    parameter: str
    rows: int
    box: Box

    @property
    def key(self) -> tuple[object, ...]:
        return self.holding, self.rows, self.box.shape, self.box.start, self.box.size, self.box.local


@dataclass
class _Tensor:
    """A global tensor: its place in the target side's order, and the boxes of both sides."""

    position: int
    sides: tuple[list[_Held], list[_Held]]


def _alike(source: Sequence[Holding], target: Sequence[Holding]) -> list[list[_Tensor]]:
    """The target's tensors, those that lie alike on both sides together, in order of first appearance."""
    tensors: dict[str, _Tensor] = {}
    for number, side in ((1, target), (0, source)):
        for index, holding in enumerate(side):
            for parameter, shard in holding.shards.items():
                rows = shard.shape[0] if holding.split else 0
                for box in shard.boxes:
                    if number and box.name not in tensors:
                        tensors[box.name] = _Tensor(len(tensors), ([], []))
                    if box.name in tensors:
                        tensors[box.name].sides[number].append(_Held(index, parameter, rows, box))
    groups: dict[tuple[object, ...], list[_Tensor]] = {}
    for tensor in tensors.values():
        key = tuple(tuple(held.key for held in side) for side in tensor.sides)
        groups.setdefault(key, []).append(tensor)
    return list(groups.values())


class _Region(NamedTuple):
    """A box as ranks hold it, rows split: ``number`` of the box in its tensor, ``local`` index of ``start`` in the parameter."""

    number: int
    ranks: tuple[int, ...]
    start: Index
    stop: Index
    local: Index


def _regions(side: Sequence[Holding], boxes: Sequence[_Held]) -> Iterator[_Region]:
    for number, held in enumerate(boxes):
        box, ranks = held.box, side[held.holding].ranks
        stop = tuple(a + n for a, n in zip(box.start, box.size, strict=True))
        if not held.rows:
            yield _Region(number, ranks, box.start, stop, box.local)
            continue
        for index, rank in enumerate(ranks):
            low, high = zero_rows(held.rows, index, len(ranks))
            first, last = max(low, box.local[0]), min(high, box.local[0] + box.size[0])
            if first < last:
                offset = box.start[0] - box.local[0]
                start, end = (first + offset, *box.start[1:]), (last + offset, *stop[1:])
                yield _Region(number, (rank,), start, end, (first - low, *box.local[1:]))


@dataclass
class _Cell:
    """A part of a tensor that ranks hold whole or not at all. ``holders``: (source, target) rank -> the region it is in.

    ``turn``, ``turns``: its number among the cells of its source region, and how many those are. ``choices``: (equal sources,
    ranks that take from them).
    """

    at: Index
    start: Index
    size: Index
    turn: int = 0
    turns: int = 1
    holders: tuple[dict[int, _Region], dict[int, _Region]] = field(default_factory=lambda: ({}, {}))
    choices: list[tuple[list[int], list[int]]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return Part("", self.start, self.size).numel

    def part(self, tensor: _Tensor, side: int, rank: int) -> Part:
        region = self.holders[side][rank]
        local = tuple(at + a - b for at, a, b in zip(region.local, self.start, region.start, strict=True))
        return Part(tensor.sides[side][region.number].parameter, local, self.size)

    def choose(self, host_of: HostOf) -> None:
        sources, targets = self.holders
        on_host: dict[Hashable, list[int]] = {}
        for rank in sorted(sources):
            on_host.setdefault(host_of(rank), []).append(rank)
        takers: dict[Hashable, list[int]] = {}
        for rank in sorted(targets.keys() - sources.keys()):
            host = host_of(rank)
            takers.setdefault(host if host in on_host else None, []).append(rank)
        self.choices = [(on_host.get(host, sorted(sources)), ranks) for host, ranks in takers.items()]

    def pairs(self, number: int, rank: int | None) -> Iterator[tuple[int, int]]:
        """(source, target) of this cell in the ``number``-th tensor: those that ``rank`` is in, or all of them."""
        for kept in self.holders[0].keys() & self.holders[1].keys() if rank is None else (rank,):
            if all(kept in side for side in self.holders):
                yield kept, kept
        for givers, takers in self.choices:
            # only what does not go round evenly moves on, so that pairs stay the same where they can
            first = (number * self.turns + self.turn) * (len(takers) % len(givers))
            if rank is None:
                yield from ((givers[(first + k) % len(givers)], taker) for k, taker in enumerate(takers))
                continue
            if rank in takers:
                yield givers[(first + takers.index(rank)) % len(givers)], rank
            if rank in givers:
                offset = (givers.index(rank) - first) % len(givers)
                yield from ((rank, taker) for taker in takers[offset :: len(givers)])


def _cut(tensor: _Tensor, sides: tuple[Sequence[Holding], Sequence[Holding]], host_of: HostOf, rank: int | None) -> list[_Cell]:
    """The cells of a tensor, or only those that ``rank`` holds on one side or the other, with their choices of sources."""
    regions = [list(_regions(side, boxes)) for side, boxes in zip(sides, tensor.sides, strict=True)]
    every = [*regions[0], *regions[1]]
    dims = range(len(every[0].start))
    cuts = [sorted({edge for region in every for edge in (region.start[dim], region.stop[dim])}) for dim in dims]
    index = [{edge: i for i, edge in enumerate(edges)} for edges in cuts]
    mine = [region for region in every if rank is None or rank in region.ranks]
    cells: dict[Index, _Cell] = {}
    for side, held in enumerate(regions):
        for region in held:
            if rank is not None and not any(_overlap(region, other) for other in mine):
                continue
            spans = [range(index[dim][region.start[dim]], index[dim][region.stop[dim]]) for dim in dims]
            inside = list(product(*spans))
            for turn, at in enumerate(inside):
                if at not in cells:
                    start = tuple(cuts[dim][i] for dim, i in enumerate(at))
                    size = tuple(cuts[dim][i + 1] - cuts[dim][i] for dim, i in enumerate(at))
                    cells[at] = _Cell(at, start, size, turn, len(inside))
                holders = cells[at].holders[side]
                assert not any(held in holders for held in region.ranks), "a rank holds a part of a tensor twice"
                holders.update(dict.fromkeys(region.ranks, region))
    wanted = [cell for _, cell in sorted(cells.items()) if cell.holders[1] and (rank is None or _has(cell, rank))]
    for cell in wanted:
        if not cell.holders[0]:
            name = tensor.sides[1][0].box.name
            raise ValueError(f"{name}: no rank of the source side holds the part from {cell.start} of size {cell.size}")
        cell.choose(host_of)
    return wanted


def _has(cell: _Cell, rank: int) -> bool:
    return rank in cell.holders[0] or rank in cell.holders[1]


def _overlap(a: _Region, b: _Region) -> bool:
    return all(x < n and y < m for x, m, y, n in zip(a.start, a.stop, b.start, b.stop, strict=True))
