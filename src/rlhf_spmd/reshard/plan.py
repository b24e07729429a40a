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

    ``boxes``: for each side, the number of the box that contains it. ``starts``: for each side, where it begins in the parameter.
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

    - ``order``: tensor -> its group and its number there. Sender and receiver both follow this order, which is the target side's.
    - ``groups``: all groups.
    - ``senders``, ``receivers``: the ranks of the two sides, ascending.
    """

    order: Mapping[str, tuple[_TensorGroup, int]]
    groups: Sequence[_TensorGroup]
    senders: Sequence[int] = ()
    receivers: Sequence[int] = ()

    def remote_copies(self, tensors: Iterable[str] | None = None) -> Iterator[SliceCopy]:
        """Yield copies between ranks, of all tensors or of these."""
        return self._pieces(tensors, lambda group: group.remote)

    def local_copies(self, tensors: Iterable[str] | None = None) -> Iterator[SliceCopy]:
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
        for run in (run for group in self.groups for run in group.remote):
            total[run.sender, run.receiver] += len(run.numbers) * prod(run.size)
        return total

    def received(self, rank: int) -> int:
        return sum(n for (_, receiver), n in self.traffic.items() if receiver == rank)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python from looking for cycles, as it does whenever many objects were made.

    A plan has hundreds of thousands of objects and no cycle: the search takes longer than the plan.
    """
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
    first_tensor = 0
    groups: list[_TensorGroup] = []
    own_holdings = [{i for i, holding in enumerate(side) if rank in (None, *holding.ranks)} for side in sides]
    for tensors in tensor_groups(source, target):
        group = _TensorGroup(tensors, [], [])
        boxes_of_sides = zip(own_holdings, tensors[0].sides, strict=True)
        if any(box.holding in numbers for numbers, boxes in boxes_of_sides for box in boxes):
            for cell in needed_cells(tensors[0], sides, rank):
                for sender, receiver, numbers in cell.pairs(choose, first_tensor, len(tensors), rank):
                    source_box, source_start = cell.locate(0, sender)
                    target_box, target_start = cell.locate(1, receiver)
                    ends = (source_box, target_box), (source_start, target_start)
                    span = range(*numbers.indices(len(tensors)))
                    run = _Run(sender, receiver, *ends, cell.size, span, len(cell.sources))
                    (group.local if sender == receiver else group.remote).append(run)
        first_tensor += len(tensors)
        groups.append(group)
    located = [(tensor.position, tensor.name, group, i) for group in groups for i, tensor in enumerate(group.tensors)]
    senders, receivers = (sorted({rank for holding in side for rank in holding.ranks}) for side in sides)
    order = {name: (group, i) for _, name, group, i in sorted(located, key=lambda item: item[0])}
    return TransferPlan(order, groups, senders, receivers)
