"""Cells of a tensor, and who sends each of them to whom. Pure.

All edges of the boxes of both sides together divide a tensor into cells, so a rank holds all of a cell or nothing::

    source, tp=2     |  rank 0   |  rank 1   |
    target, tp=3     |rank 0 |rank 1 |rank 2 |
    cells            |   a   | b | c |   d   |     rank 0 sends b to rank 1, which has c; rank 1 sends d to rank 2

A rank that needs a cell gets it from the cheapest source: itself, then its own host, then another host. Ranks that need the same cell
take turns over equal sources, from tensor to tensor. So nothing is received twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from math import gcd
from typing import NamedTuple

from rlhf_spmd.parallel.boxes import Box, box_rows, intersect
from rlhf_spmd.reshard.holdings import HeldBox, Holding, by_tensor

HostOf = Callable[[int], Hashable]
Index = tuple[int, ...]  # one number per tensor dim
Sides = tuple[Sequence[Holding], Sequence[Holding]]  # source, target
CellPair = tuple[int, int, slice]  # sender, receiver, which of some tensors
SourceChoice = tuple[list[int], list[int]]  # equal senders, and the receivers that get a cell from them
# (ranks that hold a cell, ranks that need it) -> who sends it to whom
ChooseSources = Callable[[frozenset[int], frozenset[int]], list[SourceChoice]]


@dataclass
class MovedTensor:
    """A global tensor: its position in the target side's order, and its boxes on both sides."""

    name: str
    position: int
    sides: tuple[list[HeldBox], list[HeldBox]]


def tensor_groups(source: Sequence[Holding], target: Sequence[Holding]) -> list[list[MovedTensor]]:
    """Return the target's tensors in order of first appearance, grouped by how both sides hold them."""
    sources = by_tensor(source)
    groups: dict[tuple[object, ...], list[MovedTensor]] = {}
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
            low = max(low, first)
            high = min(high, first + within.size[0])
        for index in range(low // chunk, -(-high // chunk)) if rank is None else (ranks.index(rank) % parts,):
            part = box_rows(box, index * chunk, (index + 1) * chunk)
            if part is not None:
                local = part.local if side[holding].replicated else (part.local[0] - index * chunk, *part.local[1:])
                yield _Region(number, ranks[index::parts], part._replace(local=local))


def source_chooser(host_of: HostOf) -> ChooseSources:
    """Return a function that says which of the ranks that hold a cell send it to which of those that need it."""

    @cache
    def choose(sources: frozenset[int], targets: frozenset[int]) -> list[SourceChoice]:
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
    """A part of a tensor of which each rank holds all or nothing.

    - position: its number along each dim
    - regions: for each side, the regions that contain it, by number
    - sources, targets: the ranks that hold it on either side
    - cell_number, cells_of_region: its number among the cells of its source region, and their count
    """

    position: Index
    start: Index
    size: Index
    regions: tuple[dict[int, _Region], dict[int, _Region]] = field(default_factory=lambda: ({}, {}))
    sources: frozenset[int] = frozenset()
    targets: frozenset[int] = frozenset()
    cell_number: int = 0
    cells_of_region: int = 1

    def locate(self, side: int, rank: int) -> tuple[int, Index]:
        """Return the number of the box in which a rank holds the cell, and the cell's start in the rank's parameter."""
        regions = self.regions[side].values()
        number, _, box = next(region for region in regions if len(regions) == 1 or rank in region.ranks)
        return number, tuple([local + a - b for local, a, b in zip(box.local, self.start, box.start, strict=True)])

    def pairs(self, choose: ChooseSources, first_tensor: int, count: int, rank: int | None) -> Iterator[tuple[int, int, slice]]:
        """Yield (sender, receiver, which of ``count`` tensors) for the pairs with ``rank`` in them, or for all pairs.

        ``first_tensor``: the number of the first of these tensors among all tensors.
        """
        for holder in self.sources & self.targets:
            if rank in (holder, None):
                yield holder, holder, slice(None)
        if len(self.sources) == 1 and rank in self.targets and rank not in self.sources:
            yield min(self.sources), rank, slice(None)
            return
        for choice in choose(self.sources, self.targets):
            yield from self._round_robin_pairs(choice, first_tensor, count, rank)

    def _round_robin_pairs(self, choice: SourceChoice, first_tensor: int, count: int, rank: int | None) -> Iterator[CellPair]:
        """Yield what :meth:`pairs` does, for receivers that take turns over equal senders.

        A cell begins with the sender after the one that was last for the cell before. So no sender sends more than others. An example
        with three senders, four receivers and one cell per tensor::

            receiver     r0  r1  r2  r3
            tensor 0     s0  s1  s2  s0
            tensor 1     s1  s2  s0  s1
            tensor 2     s2  s0  s1  s2
            tensor 3     as tensor 0: the period is 3, and tensors 0, 3, 6 form one run
        """
        senders, receivers = choice
        shift = len(receivers) % len(senders)  # from the first sender of a cell to that of the next
        period = len(senders) // gcd(self.cells_of_region * shift, len(senders))
        for number in range(min(period, count)):
            first = ((first_tensor + number) * self.cells_of_region + self.cell_number) * shift % len(senders)
            numbers = slice(number, None, period)
            if rank is None:
                yield from ((senders[(first + k) % len(senders)], receiver, numbers) for k, receiver in enumerate(receivers))
            if rank in receivers:
                yield senders[(first + receivers.index(rank)) % len(senders)], rank, numbers
            if rank in senders:
                offset = (senders.index(rank) - first) % len(senders)
                yield from ((rank, receiver, numbers) for receiver in receivers[offset :: len(senders)])


class _Grid:
    """All edges of boxes along each dim, which divide a tensor into cells. A cell's position is its number along each dim."""

    def __init__(self, edges_of_boxes: Iterable[list[set[int]]]) -> None:
        self.edges = [sorted(set().union(*edges)) for edges in zip(*edges_of_boxes, strict=True)]
        self._numbers = [{edge: i for i, edge in enumerate(edges)} for edges in self.edges]

    def spans(self, box: Box) -> list[range]:
        """Return the numbers of a box's cells along each dim."""
        return [range(numbers[a], numbers[a + n]) for numbers, a, n in zip(self._numbers, box.start, box.size, strict=True)]

    def cell(self, position: Index) -> Cell:
        start = tuple([edges[i] for edges, i in zip(self.edges, position, strict=True)])
        size = tuple([edges[i + 1] - edges[i] for edges, i in zip(self.edges, position, strict=True)])
        return Cell(position, start, size)


def needed_cells(tensor: MovedTensor, sides: Sides, rank: int | None) -> list[Cell]:
    """Return the cells of a tensor that the target side needs; with ``rank``, only those that it holds on either side."""
    grid = _Grid(edges for side, boxes in zip(sides, tensor.sides, strict=True) for edges in _edges(side, boxes))
    cells: dict[Index, Cell] = {}
    for number in (1,) if rank is None else (0, 1):
        for region in _regions(sides[number], tensor.sides[number], rank=rank):
            for position in product(*grid.spans(region.box)):
                if position not in cells:
                    cells[position] = grid.cell(position)
            _note_regions(cells, grid, tensor, sides, region.box)

    @cache
    def union(ranks: tuple[tuple[int, ...], ...]) -> frozenset[int]:
        holders = frozenset().union(*ranks)
        assert len(holders) == sum(map(len, ranks)), "a rank holds a part of a tensor twice"
        return holders

    needed = [cell for _, cell in sorted(cells.items()) if cell.regions[1]]
    for cell in needed:
        if not cell.regions[0]:
            raise ValueError(f"{tensor.name}: no rank of the source side holds the part from {cell.start} of size {cell.size}")
        cell.sources, cell.targets = (union(tuple([region.ranks for region in side.values()])) for side in cell.regions)
        if len(cell.sources) > 1:
            source_region = next(iter(cell.regions[0].values()))
            for i, span in zip(cell.position, grid.spans(source_region.box), strict=True):
                cell.cell_number = cell.cell_number * len(span) + i - span.start
                cell.cells_of_region *= len(span)
    return needed


def _note_regions(cells: Mapping[Index, Cell], grid: _Grid, tensor: MovedTensor, sides: Sides, within: Box) -> None:
    """Note with the cells in ``within`` the regions of both sides that contain them."""
    for side, boxes in enumerate(tensor.sides):
        for region in _regions(sides[side], boxes, within):
            common = intersect(region.box, within)
            for position in product(*grid.spans(common[0])) if common else ():
                cells[position].regions[side][region.number] = region


def _edges(side: Sequence[Holding], boxes: Sequence[HeldBox]) -> Iterator[list[set[int]]]:
    """Yield for each box the positions along each dim where it starts, ends, or passes from rank to rank."""
    for holding, _, rows, box in boxes:
        edges = [{a, a + n} for a, n in zip(box.start, box.size, strict=True)]
        if rows:
            chunk = -(-rows // side[holding].parts)
            edges[0].update(range(box.start[0] + -box.local[0] % chunk, box.start[0] + box.size[0], chunk))
        yield edges
