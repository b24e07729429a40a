"""Which rank sends which slice of which parameter to whom, from any ranks and layout to any other (ReaL, section 6). Pure.

Each rank derives its own part of the plan alone. It looks only at cells (``cells.py``) that it holds or needs. Tensors that both sides
hold in the same way, those of equal layers, are planned once: copies of single tensors are made when they are iterated over.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from rlhf_spmd.reshard.cells import HostOf, Index, MovedTensor, needed_cells, source_chooser, tensor_groups
from rlhf_spmd.reshard.holdings import Holding


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
        """Return at most ``number`` of its rows, from row ``first`` on."""
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

    tensors: list[MovedTensor]
    local: list[_Run]
    remote: list[_Run]


@dataclass(frozen=True)
class TransferPlan:
    """The copies that one rank takes part in, or those of all ranks.

    ``order``: tensor -> its group and its number there. Sender and receiver both follow this order, which is the target side's.
    ``senders``, ``receivers``: the ranks of the two sides, ascending.
    """

    order: Mapping[str, tuple[_TensorGroup, int]]
    every: Sequence[_TensorGroup]
    senders: Sequence[int] = ()
    receivers: Sequence[int] = ()

    def moves(self, tensors: Iterable[str] | None = None) -> Iterator[SliceCopy]:
        """Yield copies between ranks, of all tensors or of these."""
        return self._pieces(tensors, lambda group: group.remote)

    def copies(self, tensors: Iterable[str] | None = None) -> Iterator[SliceCopy]:
        """Yield copies inside a rank, of all tensors or of these."""
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


@contextmanager
def _without_collections() -> Iterator[None]:
    """Python looks for cycles whenever many objects were made. A plan has hundreds of thousands and no cycle: the search takes longer
    than the plan."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collections()
def plan_transfer(
    source: Sequence[Holding], target: Sequence[Holding], host_of: HostOf, rank: int | None = None
) -> TransferPlan:
    """Return the copies of ``rank`` (None: of all ranks) that fill the target side from the source side.

    ``host_of``: rank -> its host. Every rank must pass the same holdings in the same order. Raises ValueError if the source lacks what
    the rank needs.
    """
    sides = (source, target)
    choose = source_chooser(host_of)
    turn = 0
    every: list[_TensorGroup] = []
    mine = [{i for i, holding in enumerate(side) if rank in (None, *holding.ranks)} for side in sides]
    for tensors in tensor_groups(source, target):
        group = _TensorGroup(tensors, [], [])
        boxes_of_sides = zip(mine, tensors[0].sides, strict=True)
        if any(box.holding in numbers for numbers, boxes in boxes_of_sides for box in boxes):
            for cell in needed_cells(tensors[0], sides, rank):
                for sender, receiver, numbers in cell.pairs(choose, turn, len(tensors), rank):
                    (a, first), (b, second) = cell.locate(0, sender), cell.locate(1, receiver)
                    span = range(*numbers.indices(len(tensors)))
                    run = _Run(sender, receiver, (a, b), (first, second), cell.size, span, len(cell.sources))
                    (group.local if sender == receiver else group.remote).append(run)
        turn += len(tensors)
        every.append(group)
    placed = [(tensor.position, tensor.name, group, i) for group in every for i, tensor in enumerate(group.tensors)]
    senders, receivers = (sorted({rank for holding in side for rank in holding.ranks}) for side in sides)
    return TransferPlan(
        {name: (group, i) for _, name, group, i in sorted(placed, key=lambda x: x[0])}, every, senders, receivers
    )
