"""Parameter reallocation (ReaL, section 6) as a plan: from any ranks and layout to any other. Pure.

A side is a list of holdings: ranks and the shards that they hold. The common refinement of both sides' boxes cuts each tensor
into cells that every rank holds whole or not at all. A rank that needs a cell takes it from the cheapest source: itself, then its
own host, then another host; ranks that need the same cell take turns over equal sources, and what is left over of a round moves
on from tensor to tensor. So nothing is received twice, and each rank derives its own part of the plan alone.

Tensors that are held alike (those of equal layers) are cut once, a rank looks only at cells that it holds or needs, and the parts
of single tensors are made when somebody goes through them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import gcd, prod
from typing import NamedTuple

from rlhf_spmd.parallel.boxes import Box, intersect
from rlhf_spmd.reshard.plan import Held, Holding, Region, by_tensor, regions

HostOf = Callable[[int], Hashable]
Index = tuple[int, ...]  # one number per tensor dim


class Part(NamedTuple):
    """``parameter[start : start + size]`` of one rank; ``start`` and ``size`` have one entry per tensor dim."""

    parameter: str
    start: Index
    size: Index

    @property
    def numel(self) -> int:
        return prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))


@dataclass
class Parts:
    """Parts of one rank, tensor after tensor, which are made when one goes through them. Kept are ``cells`` of tensors that lie
    alike: where it is, (position of the tensor, parameter) of each, start and size."""

    cells: list[tuple[Index, Sequence[tuple[int, str]], Index, Index]] = field(default_factory=list)

    def __iter__(self) -> Iterator[Part]:
        parts = [(i, at, name, start, size) for at, names, start, size in self.cells for i, name in names]
        return (Part(*part[2:]) for part in sorted(parts))

    @property
    def numel(self) -> int:
        return sum(len(names) * prod(size) for _, names, _, size in self.cells)


@dataclass(frozen=True)
class RankPlan:
    """What one rank does. Both ends of a pair list its parts in the same order: tensors as the target side lists them.

    ``sends``: target rank -> parts of this rank's source parameters; ``receives``: source rank -> parts of its target parameters;
    ``copies``: (source part, target part) that do not leave the rank.
    """

    sends: dict[int, Parts] = field(default_factory=dict)
    receives: dict[int, Parts] = field(default_factory=dict)
    copies: list[tuple[Part, Part]] = field(default_factory=list)

    @property
    def elements_received(self) -> int:
        return sum(parts.numel for parts in self.receives.values())


def plan_reallocation(source: Sequence[Holding], target: Sequence[Holding], host_of: HostOf, rank: int) -> RankPlan:
    """One rank's part in filling the target side from the source side. ``host_of``: global rank -> the host it is on.

    Every rank must pass the same holdings in the same order. Raises ValueError where the source lacks what this rank needs.
    """
    sides, books = (source, target), (defaultdict[int, Parts](Parts), defaultdict[int, Parts](Parts))
    mine = [{index for index, holding in enumerate(side) if rank in holding.ranks} for side in sides]
    choose, turn = _chooser(host_of), 0
    for alike in _alike(source, target):
        names = {
            (side, number): [(tensor.position, tensor.sides[side][number].parameter) for tensor in alike]
            for side, boxes in enumerate(alike[0].sides)
            for number, held in enumerate(boxes)
            if held.holding in mine[side]
        }
        for cell in _cut(alike[0], sides, rank) if names else ():
            for *pair, numbers in cell.pairs(choose, turn, len(alike), rank):
                for side, book in enumerate(books):
                    if pair[side] == rank:
                        number, _, box = cell.own[side]
                        start = tuple([at + a - b for at, a, b in zip(box.local, cell.start, box.start, strict=True)])
                        book[pair[1 - side]].cells.append((cell.at, names[side, number][numbers], start, cell.size))
        turn += len(alike)
    copies = zip(*[book.pop(rank, ()) for book in books], strict=True)
    return RankPlan(dict(books[0]), dict(books[1]), list(copies))


def plan_traffic(source: Sequence[Holding], target: Sequence[Holding], host_of: HostOf) -> Counter[tuple[int, int]]:
    """The whole plan as elements per (source rank, target rank); what stays on a rank is under (rank, rank)."""
    traffic: Counter[tuple[int, int]] = Counter()
    choose, turn = _chooser(host_of), 0
    for alike in _alike(source, target):
        for cell in _cut(alike[0], (source, target), None):
            for giver, taker, numbers in cell.pairs(choose, turn, len(alike), None):
                traffic[giver, taker] += prod(cell.size) * len(alike[numbers])
        turn += len(alike)
    return traffic


@dataclass
class _Tensor:
    """A global tensor: its place in the target side's order, and the boxes of both sides."""

    position: int
    sides: tuple[list[Held], list[Held]]


def _alike(source: Sequence[Holding], target: Sequence[Holding]) -> list[list[_Tensor]]:
    """The target's tensors, those that lie alike on both sides together, in order of first appearance."""
    sources, groups = by_tensor(source), dict[tuple[object, ...], list[_Tensor]]()
    for position, (name, held) in enumerate(by_tensor(target).items()):
        tensor = _Tensor(position, (sources.get(name, []), held))
        groups.setdefault(tuple(tuple(held.key for held in side) for side in tensor.sides), []).append(tensor)
    return list(groups.values())


Choices = list[tuple[list[int], list[int]]]  # (equal sources, ranks that take from them)


def _chooser(host_of: HostOf) -> Callable[[frozenset[int], frozenset[int]], Choices]:
    @cache
    def by_host(ranks: frozenset[int]) -> dict[Hashable, list[int]]:
        hosts: dict[Hashable, list[int]] = {}
        for rank in sorted(ranks):
            hosts.setdefault(host_of(rank), []).append(rank)
        return hosts

    @cache
    def choose(sources: frozenset[int], targets: frozenset[int]) -> Choices:
        on_host, takers = by_host(sources), dict[Hashable, list[int]]()
        for rank in sorted(targets - sources):
            host = host_of(rank)
            takers.setdefault(host if host in on_host else None, []).append(rank)
        return [(on_host.get(host) or sorted(sources), ranks) for host, ranks in takers.items()]

    return choose


@dataclass
class _Cell:
    """A part of a tensor that ranks hold whole or not at all.

    ``regions``: of each side, by number, those that it is in; ``own``: side -> the region of the rank that plans. ``sources``,
    ``targets``: the ranks that hold it. ``turn``, ``turns``: its number among the cells of its source region, and how many those are.
    """

    at: Index
    start: Index
    size: Index
    regions: tuple[dict[int, Region], dict[int, Region]] = field(default_factory=lambda: ({}, {}))
    own: dict[int, Region] = field(default_factory=dict)
    sources: frozenset[int] = frozenset()
    targets: frozenset[int] = frozenset()
    turn: int = 0
    turns: int = 1

    def pairs(
        self, choose: Callable[[frozenset[int], frozenset[int]], Choices], turn: int, count: int, rank: int | None
    ) -> Iterator[tuple[int, int, slice]]:
        """(source, target, in which of ``count`` tensors, the first of which is the ``turn``-th): those that ``rank`` is in, or all."""
        for kept in self.sources & self.targets:
            if rank in (kept, None):
                yield kept, kept, slice(None)
        if len(self.sources) == 1 and rank in self.targets - self.sources:
            yield min(self.sources), rank, slice(None)
            return
        for givers, takers in choose(self.sources, self.targets):
            # only what does not go round evenly moves on, so that pairs stay the same where they can
            step = len(takers) % len(givers)
            period = len(givers) // gcd(self.turns * step, len(givers))
            for number in range(min(period, count)):
                first, numbers = ((turn + number) * self.turns + self.turn) * step % len(givers), slice(number, None, period)
                if rank is None:
                    yield from ((givers[(first + k) % len(givers)], taker, numbers) for k, taker in enumerate(takers))
                if rank in takers:
                    yield givers[(first + takers.index(rank)) % len(givers)], rank, numbers
                if rank in givers:
                    offset = (givers.index(rank) - first) % len(givers)
                    yield from ((rank, taker, numbers) for taker in takers[offset :: len(givers)])


def _cut(tensor: _Tensor, sides: tuple[Sequence[Holding], Sequence[Holding]], rank: int | None) -> list[_Cell]:
    """The cells of a tensor that the target side needs, or only those that ``rank`` holds on one side or the other."""
    every = [edges for side, boxes in zip(sides, tensor.sides, strict=True) for edges in _edges(side, boxes)]
    cuts = [sorted(set().union(*edges)) for edges in zip(*every, strict=True)]
    index = [{edge: i for i, edge in enumerate(edges)} for edges in cuts]

    def spans(box: Box) -> list[range]:
        return [range(at[a], at[a + n]) for at, a, n in zip(index, box.start, box.size, strict=True)]

    @cache
    def together(ranks: tuple[tuple[int, ...], ...]) -> frozenset[int]:
        union = frozenset().union(*ranks)
        assert len(union) == sum(map(len, ranks)), "a rank holds a part of a tensor twice"
        return union

    cells: dict[Index, _Cell] = {}
    for number in (1,) if rank is None else (0, 1):
        for own in regions(sides[number], tensor.sides[number], rank=rank):
            for at in product(*spans(own.box)):
                if at not in cells:
                    start = tuple([edges[i] for edges, i in zip(cuts, at, strict=True)])
                    cells[at] = _Cell(at, start, tuple([edges[i + 1] - edges[i] for edges, i in zip(cuts, at, strict=True)]))
                cells[at].own[number] = own
            for side, boxes in enumerate(tensor.sides):
                for region in regions(sides[side], boxes, own.box):
                    common = intersect(region.box, own.box)
                    for at in product(*spans(common[0])) if common else ():
                        cells[at].regions[side][region.number] = region
    wanted = [cell for _, cell in sorted(cells.items()) if cell.regions[1]]
    for cell in wanted:
        if not cell.regions[0]:
            name = tensor.sides[1][0].box.name
            raise ValueError(f"{name}: no rank of the source side holds the part from {cell.start} of size {cell.size}")
        cell.sources, cell.targets = (together(tuple([region.ranks for region in side.values()])) for side in cell.regions)
        if len(cell.sources) > 1:
            for i, span in zip(cell.at, spans(next(iter(cell.regions[0].values())).box), strict=True):
                cell.turn, cell.turns = cell.turn * len(span) + i - span.start, cell.turns * len(span)
    return wanted


def _edges(side: Sequence[Holding], boxes: Sequence[Held]) -> Iterator[list[set[int]]]:
    """Of each box where it begins, ends, and passes from rank to rank, along each dim."""
    for holding, _, rows, box in boxes:
        edges = [{a, a + n} for a, n in zip(box.start, box.size, strict=True)]
        if rows:
            chunk = -(-rows // len(side[holding].ranks))
            edges[0].update(range(box.start[0] + -box.local[0] % chunk, box.start[0] + box.size[0], chunk))
        yield edges
