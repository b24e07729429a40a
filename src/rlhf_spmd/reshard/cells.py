"""Cells of a tensor, and who sends each of them to whom. Pure.

All edges of the boxes of both sides together divide a tensor into cells, so a rank holds all of a cell or nothing::

    source, tp=2     |  rank 0   |  rank 1   |
    target, tp=3     |rank 0 |rank 1 |rank 2 |
    cells            |   a   | b | c |   d   |     rank 0 sends b to rank 1, which has c; rank 1 sends d to rank 2

A rank that needs a cell gets it from the cheapest source: itself, then its own host, then another host. Ranks that need the same cell
take turns over equal sources, and the turn continues from tensor to tensor. So nothing is received twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import gcd
from typing import NamedTuple

from rlhf_spmd.parallel.boxes import Box, box_rows, intersect
from rlhf_spmd.reshard.holdings import HeldBox, Holding, by_tensor

HostOf = Callable[[int], Hashable]
Index = tuple[int, ...]  # one number per tensor dim
Choices = list[tuple[list[int], list[int]]]  # (equal sources, ranks that receive from them)


@dataclass
class MovedTensor:
    """A global tensor: its position in the target side's order, and its boxes on both sides."""

    name: str
    position: int
    sides: tuple[list[HeldBox], list[HeldBox]]


def tensor_groups(source: Sequence[Holding], target: Sequence[Holding]) -> list[list[MovedTensor]]:
    """Return the target's tensors in order of first appearance, grouped by how both sides hold them."""
    sources, groups = by_tensor(source), dict[tuple[object, ...], list[MovedTensor]]()
    for position, (name, boxes) in enumerate(by_tensor(target).items()):
        tensor = MovedTensor(name, position, (sources.get(name, []), boxes))
        groups.setdefault(tuple(tuple(box.key for box in side) for side in tensor.sides), []).append(tensor)
    return list(groups.values())


class _Region(NamedTuple):
    """The rows of box ``number`` that ``ranks`` hold."""

    number: int
    ranks: tuple[int, ...]
    box: Box


def _regions(
    side: Sequence[Holding], boxes: Sequence[HeldBox], within: Box | None = None, rank: int | None = None
) -> Iterator[_Region]:
    """Yield the regions of some boxes of one tensor: of split boxes only those with rows in ``within``, and only those of ``rank``."""
    for number, (holding, _, rows, box) in enumerate(boxes):
        ranks, parts = side[holding].ranks, side[holding].parts
        if rank is not None and rank not in ranks:
            continue
        if not rows:
            yield _Region(number, ranks, box)
            continue
        chunk = -(-rows // parts)
        low = box.local[0]
        high = box.local[0] + box.size[0]
        if within is not None:
            first = within.start[0] + low - box.start[0]
            low, high = max(low, first), min(high, first + within.size[0])
        for index in range(low // chunk, -(-high // chunk)) if rank is None else (ranks.index(rank) % parts,):
            part = box_rows(box, index * chunk, (index + 1) * chunk)
            if part is not None:
                local = part.local if side[holding].replicated else (part.local[0] - index * chunk, *part.local[1:])
                yield _Region(number, ranks[index::parts], part._replace(local=local))


def source_chooser(host_of: HostOf) -> Callable[[frozenset[int], frozenset[int]], Choices]:
    """Return a function of the ranks that hold a cell and those that need it: which of the former send to which of the latter."""

    @cache
    def choose(sources: frozenset[int], targets: frozenset[int]) -> Choices:
        on_host, receivers = dict[Hashable, list[int]](), dict[Hashable, list[int]]()
        for rank in sorted(sources):
            on_host.setdefault(host_of(rank), []).append(rank)
        for rank in sorted(targets - sources):
            host = host_of(rank)
            receivers.setdefault(host if host in on_host else None, []).append(rank)
        return [(on_host.get(host) or sorted(sources), ranks) for host, ranks in receivers.items()]

    return choose


@dataclass
class Cell:
    """A part of a tensor of which each rank holds all or nothing. ``position``: its number along each dim.

    ``regions``: for each side, the regions that contain it, by number. ``sources``, ``targets``: the ranks that hold it. ``turn``,
    ``turns``: its number among the cells of its source region, and their count.
    """

    position: Index
    start: Index
    size: Index
    regions: tuple[dict[int, _Region], dict[int, _Region]] = field(default_factory=lambda: ({}, {}))
    sources: frozenset[int] = frozenset()
    targets: frozenset[int] = frozenset()
    turn: int = 0
    turns: int = 1

    def locate(self, side: int, rank: int) -> tuple[int, Index]:
        """Return the number of the box in which a rank holds the cell, and the cell's start in the rank's parameter."""
        regions = self.regions[side].values()
        number, _, box = next(region for region in regions if len(regions) == 1 or rank in region.ranks)
        return number, tuple([local + a - b for local, a, b in zip(box.local, self.start, box.start, strict=True)])

    def pairs(
        self, choose: Callable[[frozenset[int], frozenset[int]], Choices], turn: int, count: int, rank: int | None
    ) -> Iterator[tuple[int, int, slice]]:
        """Yield (sender, receiver, which of ``count`` tensors) for the pairs with ``rank`` in them, or for all pairs.

        The first tensor is the ``turn``-th of all. Receivers are assigned to senders in rounds. If the last round is incomplete, the
        next cell starts ``step`` senders later, so no sender sends more than others; otherwise ``step`` is 0. A tensor has ``turns``
        such cells. After ``period`` tensors the same sender is first again: tensors that far apart form one run.
        """
        for holder in self.sources & self.targets:
            if rank in (holder, None):
                yield holder, holder, slice(None)
        if len(self.sources) == 1 and rank in self.targets and rank not in self.sources:
            yield min(self.sources), rank, slice(None)
            return
        for senders, receivers in choose(self.sources, self.targets):
            step = len(receivers) % len(senders)
            period = len(senders) // gcd(self.turns * step, len(senders))
            for number in range(min(period, count)):
                first, numbers = ((turn + number) * self.turns + self.turn) * step % len(senders), slice(number, None, period)
                if rank is None:
                    yield from (
                        (senders[(first + k) % len(senders)], receiver, numbers) for k, receiver in enumerate(receivers)
                    )
                if rank in receivers:
                    yield senders[(first + receivers.index(rank)) % len(senders)], rank, numbers
                if rank in senders:
                    offset = (senders.index(rank) - first) % len(senders)
                    yield from ((rank, receiver, numbers) for receiver in receivers[offset :: len(senders)])


def needed_cells(tensor: MovedTensor, sides: tuple[Sequence[Holding], Sequence[Holding]], rank: int | None) -> list[Cell]:
    """Return the cells of a tensor that the target side needs; with ``rank``, only those that it holds on either side."""
    every = [edges for side, boxes in zip(sides, tensor.sides, strict=True) for edges in _edges(side, boxes)]
    bounds = [sorted(set().union(*edges)) for edges in zip(*every, strict=True)]
    index = [{edge: i for i, edge in enumerate(edges)} for edges in bounds]

    def spans(box: Box) -> list[range]:
        return [range(numbers[a], numbers[a + n]) for numbers, a, n in zip(index, box.start, box.size, strict=True)]

    @cache
    def together(ranks: tuple[tuple[int, ...], ...]) -> frozenset[int]:
        union = frozenset().union(*ranks)
        assert len(union) == sum(map(len, ranks)), "a rank holds a part of a tensor twice"
        return union

    cells: dict[Index, Cell] = {}
    for number in (1,) if rank is None else (0, 1):
        for held_region in _regions(sides[number], tensor.sides[number], rank=rank):
            for position in product(*spans(held_region.box)):
                if position not in cells:
                    start = tuple([edges[i] for edges, i in zip(bounds, position, strict=True)])
                    size = tuple([edges[i + 1] - edges[i] for edges, i in zip(bounds, position, strict=True)])
                    cells[position] = Cell(position, start, size)
            for side, boxes in enumerate(tensor.sides):
                for region in _regions(sides[side], boxes, held_region.box):
                    common = intersect(region.box, held_region.box)
                    for position in product(*spans(common[0])) if common else ():
                        cells[position].regions[side][region.number] = region
    wanted = [cell for _, cell in sorted(cells.items()) if cell.regions[1]]
    for cell in wanted:
        if not cell.regions[0]:
            raise ValueError(f"{tensor.name}: no rank of the source side holds the part from {cell.start} of size {cell.size}")
        cell.sources, cell.targets = (together(tuple([region.ranks for region in side.values()])) for side in cell.regions)
        if len(cell.sources) > 1:
            for i, span in zip(cell.position, spans(next(iter(cell.regions[0].values())).box), strict=True):
                cell.turn, cell.turns = cell.turn * len(span) + i - span.start, cell.turns * len(span)
    return wanted


def _edges(side: Sequence[Holding], boxes: Sequence[HeldBox]) -> Iterator[list[set[int]]]:
    """Yield for each box the positions along each dim where it starts, ends, or passes from rank to rank."""
    for holding, _, rows, box in boxes:
        edges = [{a, a + n} for a, n in zip(box.start, box.size, strict=True)]
        if rows:
            chunk = -(-rows // side[holding].parts)
            edges[0].update(range(box.start[0] + -box.local[0] % chunk, box.start[0] + box.size[0], chunk))
        yield edges
