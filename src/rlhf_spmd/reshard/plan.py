"""Which rank sends which slice of which parameter to whom, from any ranks and layout to any other (ReaL, section 6). Pure.

A side, source or target, is a list of holdings: ranks and the shards that they hold. All edges of the boxes of both sides together
divide a tensor into cells, so a rank holds all of a cell or nothing::

    source, tp=2     |  rank 0   |  rank 1   |
    target, tp=3     |rank 0 |rank 1 |rank 2 |
    cells            |   a   | b | c |   d   |     rank 0 sends b to rank 1, which has c; rank 1 sends d to rank 2

A rank that needs a cell gets it from the cheapest source: itself, then its own host, then another host. Ranks that need the same cell
take turns over equal sources, and the turn continues from tensor to tensor. So nothing is received twice, and each rank derives its own
part of the plan alone.

Tensors that both sides hold in the same way (those of equal layers) are planned once. A rank looks only at cells that it holds or
needs. Copies of single tensors are made when they are iterated over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import product
from math import gcd, prod
from typing import NamedTuple

from rlhf_spmd.parallel.boxes import Box, ParamShard, box_rows, intersect, zero_shards
from rlhf_spmd.parallel.layout import GenerationLayout, Layout

Shards = Mapping[str, ParamShard]
ShardsAt = Callable[[int, int], Shards]  # (pp, tp) coordinate in a layout -> the shards there, with all rows that ZeRO divides
HostOf = Callable[[int], Hashable]
Index = tuple[int, ...]  # one number per tensor dim


@dataclass(frozen=True)
class Holding:
    """``ranks``, and the shards that each of them holds; no element twice on one rank.

    ``parts``: this many neighbouring ranks share one copy, each with its rows of every parameter (ZeRO: ``zero_rows``); 1: each rank
    holds all rows. It divides the number of ranks. ``whole``: each rank holds all rows, but sends only those that ``parts`` gives it.
    """

    ranks: tuple[int, ...]
    shards: Shards
    parts: int = 1
    whole: bool = False

    def __post_init__(self) -> None:
        assert len(self.ranks) % self.parts == 0, f"{len(self.ranks)} ranks do not hold whole copies of {self.parts} parts"


def holdings(
    layout: Layout | GenerationLayout, shards: ShardsAt, ranks: Sequence[int], group: Iterable[int] | None = None
) -> list[Holding]:
    """Returns what ``ranks`` hold of a model in a layout. ``group``: their pool indices, by default 0, 1, ...

    The ranks of a shard group follow each other in ``group``, which has all of them or none.
    """
    at: dict[tuple[int, int], list[int]] = {}
    for index, rank in zip(range(len(ranks)) if group is None else group, ranks, strict=True):
        pp, _, tp = layout.coordinate(index)
        at.setdefault((pp, tp), []).append(rank)
    return [Holding(tuple(held), shards(*coordinate), layout.dp_shard) for coordinate, held in at.items()]


def held_by(layout: Layout | GenerationLayout, shards: ShardsAt, index: int) -> Shards:
    """Returns the shards of one rank (a pool index), with only its rows under ZeRO."""
    (pp, dp, tp), parts = layout.coordinate(index), layout.dp_shard
    return zero_shards(shards(pp, tp), dp % parts, parts) if parts > 1 else shards(pp, tp)


class ParamSlice(NamedTuple):
    """``parameter[start : start + size]`` of one rank; ``start`` and ``size`` have one entry per tensor dim."""

    parameter: str
    start: Index
    size: Index

    @property
    def numel(self) -> int:
        return prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        return _slices(self.start, self.size)

    def rows(self, first: int, number: int) -> ParamSlice:
        """Returns at most ``number`` of its rows, from row ``first`` on."""
        number = min(number, self.size[0] - first)
        return ParamSlice(self.parameter, (self.start[0] + first, *self.start[1:]), (number, *self.size[1:]))


@lru_cache(maxsize=1 << 12)  # every transfer asks for them; parts of equal layers have the same
def _slices(start: Index, size: Index) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


class SliceCopy(NamedTuple):
    """Copy ``source`` of rank ``sender`` to ``target`` of rank ``receiver``, perhaps the same rank. Both have the same size.

    ``holders``: how many ranks hold the source.
    """

    sender: int
    receiver: int
    source: ParamSlice
    target: ParamSlice
    holders: int = 1


class _Run(NamedTuple):
    """The same copy in some tensors of a :class:`_TensorGroup`: those with these ``numbers``.

    ``boxes``: the number of the box on each side that contains it. ``starts``: where it begins in the parameters.
    """

    sender: int
    receiver: int
    boxes: tuple[int, int]
    starts: tuple[Index, Index]
    size: Index
    numbers: range
    holders: int


class _TensorGroup(NamedTuple):
    """Tensors that both sides hold in the same way, with the copies inside a rank (``local``) and between ranks (``remote``)."""

    tensors: list[_Tensor]
    local: list[_Run]
    remote: list[_Run]


@dataclass(frozen=True)
class Plan:
    """The copies that one rank takes part in, or those of all ranks.

    ``order``: tensor -> its group and its number there. Sender and receiver both follow this order, which is the target side's.
    ``senders``, ``receivers``: the ranks of the two sides, ascending.
    """

    order: Mapping[str, tuple[_TensorGroup, int]]
    every: Sequence[_TensorGroup]
    senders: Sequence[int] = ()
    receivers: Sequence[int] = ()

    def moves(self, tensors: Iterable[str] | None = None) -> Iterator[SliceCopy]:
        """Yields copies between ranks, of all tensors or of these."""
        return self._pieces(tensors, lambda group: group.remote)

    def copies(self, tensors: Iterable[str] | None = None) -> Iterator[SliceCopy]:
        """Yields copies inside a rank, of all tensors or of these."""
        return self._pieces(tensors, lambda group: group.local)

    def _pieces(self, tensors: Iterable[str] | None, runs: Callable[[_TensorGroup], list[_Run]]) -> Iterator[SliceCopy]:
        for name in self.order if tensors is None else tensors:
            group, number = self.order[name]
            sides = group.tensors[number].sides
            for sender, receiver, boxes, starts, size, numbers, holders in runs(group):
                if number in numbers:
                    source, target = (ParamSlice(sides[i][boxes[i]].parameter, starts[i], size) for i in (0, 1))
                    yield SliceCopy(sender, receiver, source, target, holders)

    @property
    def traffic(self) -> Counter[tuple[int, int]]:
        """(sender, receiver) -> elements, for different ranks."""
        total: Counter[tuple[int, int]] = Counter()
        for run in (run for group in self.every for run in group.remote):
            total[run.sender, run.receiver] += len(run.numbers) * prod(run.size)
        return total

    def received(self, rank: int) -> int:
        return sum(n for (_, receiver), n in self.traffic.items() if receiver == rank)


def plan_transfer(source: Sequence[Holding], target: Sequence[Holding], host_of: HostOf, rank: int | None = None) -> Plan:
    """Returns the copies of ``rank`` (None: of all ranks) that fill the target side from the source side.

    ``host_of``: rank -> its host. Every rank must pass the same holdings in the same order. Raises ValueError if the source lacks what
    the rank needs.
    """
    sides, choose, turn, every = (source, target), _chooser(host_of), 0, []
    mine = [{i for i, holding in enumerate(side) if rank in (None, *holding.ranks)} for side in sides]
    for tensors in _tensor_groups(source, target):
        group = _TensorGroup(tensors, [], [])
        if any(held.holding in own for own, boxes in zip(mine, tensors[0].sides, strict=True) for held in boxes):
            for cell in _cells(tensors[0], sides, rank):
                for sender, receiver, numbers in cell.pairs(choose, turn, len(tensors), rank):
                    (a, first), (b, second) = cell.locate(0, sender), cell.locate(1, receiver)
                    span = range(*numbers.indices(len(tensors)))
                    run = _Run(sender, receiver, (a, b), (first, second), cell.size, span, len(cell.sources))
                    (group.local if sender == receiver else group.remote).append(run)
        turn += len(tensors)
        every.append(group)
    placed = [(tensor.position, tensor.name, group, i) for group in every for i, tensor in enumerate(group.tensors)]
    senders, receivers = (sorted({rank for holding in side for rank in holding.ranks}) for side in sides)
    return Plan({name: (group, i) for _, name, group, i in sorted(placed, key=lambda x: x[0])}, every, senders, receivers)


def missing_elements(held: Shards, wanted: Shards) -> int:
    """Returns how many elements of ``wanted`` are outside ``held``: the least that a rank has to receive."""
    index = by_tensor([Holding((0,), held)])
    return sum(
        box.numel - sum(common[0].numel for other in index.get(box.name, []) if (common := intersect(box, other.box)))
        for shard in wanted.values()
        for box in shard.boxes
    )


class HeldBox(NamedTuple):
    """One box of a tensor in one holding: the parameter that has it, and that parameter's rows (0: not split)."""

    holding: int
    parameter: str
    rows: int
    box: Box

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for tensors that a holding holds in the same way."""
        return self.holding, self.rows, self.box[1:]


def by_tensor(side: Sequence[Holding]) -> dict[str, list[HeldBox]]:
    """Returns tensor name -> where it is held."""
    index: dict[str, list[HeldBox]] = {}
    for number, holding in enumerate(side):
        for parameter, shard in holding.shards.items():
            rows = shard.shape[0] if holding.parts > 1 else 0
            for box in shard.boxes:
                index.setdefault(box.name, []).append(HeldBox(number, parameter, rows, box))
    return index


class _Region(NamedTuple):
    """The rows of box ``number`` that ``ranks`` hold."""

    number: int
    ranks: tuple[int, ...]
    box: Box


def _regions(
    side: Sequence[Holding], boxes: Sequence[HeldBox], within: Box | None = None, rank: int | None = None
) -> Iterator[_Region]:
    """Yields the regions of some boxes of one tensor: of split boxes only those with rows in ``within``, and only those of ``rank``."""
    for number, (holding, _, rows, box) in enumerate(boxes):
        ranks, parts, whole = side[holding].ranks, side[holding].parts, side[holding].whole
        if rank is not None and rank not in ranks:
            continue
        if not rows:
            yield _Region(number, ranks, box)
            continue
        chunk, low, high = -(-rows // parts), box.local[0], box.local[0] + box.size[0]
        if within is not None:
            first = within.start[0] + low - box.start[0]
            low, high = max(low, first), min(high, first + within.size[0])
        for index in range(low // chunk, -(-high // chunk)) if rank is None else (ranks.index(rank) % parts,):
            part = box_rows(box, index * chunk, (index + 1) * chunk)
            if part is not None:
                local = part.local if whole else (part.local[0] - index * chunk, *part.local[1:])
                yield _Region(number, ranks[index::parts], part._replace(local=local))


@dataclass
class _Tensor:
    """A global tensor: its position in the target side's order, and its boxes on both sides."""

    name: str
    position: int
    sides: tuple[list[HeldBox], list[HeldBox]]


def _tensor_groups(source: Sequence[Holding], target: Sequence[Holding]) -> list[list[_Tensor]]:
    """Returns the target's tensors in order of first appearance, grouped by how both sides hold them."""
    sources, groups = by_tensor(source), dict[tuple[object, ...], list[_Tensor]]()
    for position, (name, held) in enumerate(by_tensor(target).items()):
        tensor = _Tensor(name, position, (sources.get(name, []), held))
        groups.setdefault(tuple(tuple(held.key for held in side) for side in tensor.sides), []).append(tensor)
    return list(groups.values())


Choices = list[tuple[list[int], list[int]]]  # (equal sources, ranks that take from them)


def _chooser(host_of: HostOf) -> Callable[[frozenset[int], frozenset[int]], Choices]:
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
class _Cell:
    """A part of a tensor of which each rank holds all or nothing.

    ``regions``: for each side, the regions that contain it, by number. ``sources``, ``targets``: the ranks that hold it. ``turn``,
    ``turns``: its number among the cells of its source region, and their count.
    """

    at: Index
    start: Index
    size: Index
    regions: tuple[dict[int, _Region], dict[int, _Region]] = field(default_factory=lambda: ({}, {}))
    sources: frozenset[int] = frozenset()
    targets: frozenset[int] = frozenset()
    turn: int = 0
    turns: int = 1

    def locate(self, side: int, rank: int) -> tuple[int, Index]:
        """Returns the number of the box in which a rank holds the cell, and the cell's start in the rank's parameter."""
        regions = self.regions[side].values()
        number, _, box = next(region for region in regions if len(regions) == 1 or rank in region.ranks)
        return number, tuple([at + a - b for at, a, b in zip(box.local, self.start, box.start, strict=True)])

    def pairs(
        self, choose: Callable[[frozenset[int], frozenset[int]], Choices], turn: int, count: int, rank: int | None
    ) -> Iterator[tuple[int, int, slice]]:
        """Yields (sender, receiver, which of ``count`` tensors) for the pairs with ``rank`` in them, or for all pairs.

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


def _cells(tensor: _Tensor, sides: tuple[Sequence[Holding], Sequence[Holding]], rank: int | None) -> list[_Cell]:
    """Returns the cells of a tensor that the target side needs; with ``rank``, only those that it holds on either side."""
    every = [edges for side, boxes in zip(sides, tensor.sides, strict=True) for edges in _edges(side, boxes)]
    bounds = [sorted(set().union(*edges)) for edges in zip(*every, strict=True)]
    index = [{edge: i for i, edge in enumerate(edges)} for edges in bounds]

    def spans(box: Box) -> list[range]:
        return [range(at[a], at[a + n]) for at, a, n in zip(index, box.start, box.size, strict=True)]

    @cache
    def together(ranks: tuple[tuple[int, ...], ...]) -> frozenset[int]:
        union = frozenset().union(*ranks)
        assert len(union) == sum(map(len, ranks)), "a rank holds a part of a tensor twice"
        return union

    cells: dict[Index, _Cell] = {}
    for number in (1,) if rank is None else (0, 1):
        for own in _regions(sides[number], tensor.sides[number], rank=rank):
            for at in product(*spans(own.box)):
                if at not in cells:
                    start = tuple([edges[i] for edges, i in zip(bounds, at, strict=True)])
                    cells[at] = _Cell(at, start, tuple([edges[i + 1] - edges[i] for edges, i in zip(bounds, at, strict=True)]))
            for side, boxes in enumerate(tensor.sides):
                for region in _regions(sides[side], boxes, own.box):
                    common = intersect(region.box, own.box)
                    for at in product(*spans(common[0])) if common else ():
                        cells[at].regions[side][region.number] = region
    wanted = [cell for _, cell in sorted(cells.items()) if cell.regions[1]]
    for cell in wanted:
        if not cell.regions[0]:
            raise ValueError(f"{tensor.name}: no rank of the source side holds the part from {cell.start} of size {cell.size}")
        cell.sources, cell.targets = (together(tuple([region.ranks for region in side.values()])) for side in cell.regions)
        if len(cell.sources) > 1:
            for i, span in zip(cell.at, spans(next(iter(cell.regions[0].values())).box), strict=True):
                cell.turn, cell.turns = cell.turn * len(span) + i - span.start, cell.turns * len(span)
    return wanted


def _edges(side: Sequence[Holding], boxes: Sequence[HeldBox]) -> Iterator[list[set[int]]]:
    """Yields for each box the positions along each dim where it starts, ends, or passes from rank to rank."""
    for holding, _, rows, box in boxes:
        edges = [{a, a + n} for a, n in zip(box.start, box.size, strict=True)]
        if rows:
            chunk = -(-rows // side[holding].parts)
            edges[0].update(range(box.start[0] + -box.local[0] % chunk, box.start[0] + box.size[0], chunk))
        yield edges
