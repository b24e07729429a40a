"""Transfer protocols (HybridFlow, table 3): how a call's rows are distributed over a role's ranks and collected from them.

A protocol is three small functions of the role's :class:`GroupShape`; indices count ranks inside the pool. The rows of a call
are cut into ``parts(shape)`` parts. ``distribute(shape, index)`` is the part that a member works on, None if it does not run.
``collect(shape)`` lists the members whose results count: for calls that return rows, one per part in the order of the parts;
``replicas(shape, part)`` lists all members that hold the part's result, so that a consumer that is one of them fetches nothing.
A protocol of one's own is another ``Protocol(...)`` value, given to ``@register``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from rlhf_spmd.controller.pool import GroupShape, ResourcePool
from rlhf_spmd.parallel.layout import GenerationLayout, Layout


@dataclass(frozen=True, eq=False)
class Protocol:
    """``per_member``: an argument that is no reference is a sequence with one entry per member; otherwise all get the same."""

    name: str
    parts: Callable[[GroupShape], int]
    distribute: Callable[[GroupShape, int], int | None]
    collect: Callable[[GroupShape], list[int]]
    replicas: Callable[[GroupShape, int], list[int]] | None = None
    per_member: bool = False

    def holders(self, shape: GroupShape, part: int) -> list[int]:
        """Members that hold the rows of ``part`` after the call; the first is the one that others fetch from."""
        return self.replicas(shape, part) if self.replicas else [self.collect(shape)[part]]


class ProtocolRanks:
    """A protocol on a role's pool, in global ranks. Answers are kept: a script asks for the same ones in every step.

    ``part_of``: the part of each rank that runs. ``workers(part)``: the ranks that work on its rows. ``holders(part)``: those that
    hold them after the call; the first is the one that others fetch from. ``are_holders(makers)``: whether each rank that works on a
    part holds that part of what ``makers`` made.

    ``rank_speeds``: of each rank of the world; empty: all alike. ``speeds``: of each part, that of its slowest rank, since the ranks of
    a replica wait for each other: tensor slices in every layer, stages in every micro-batch. Every part has as many ranks, so
    this is its pace, not the sum. Empty where the parts are equally fast, so that their rows are dealt as without speeds.
    """

    def __init__(self, protocol: Protocol, shape: GroupShape, pool: ResourcePool, rank_speeds: Sequence[float] = ()) -> None:
        self.num_parts = protocol.parts(shape)
        parts = {rank: protocol.distribute(shape, index) for index, rank in enumerate(pool.ranks)}
        self.part_of = {rank: part for rank, part in parts.items() if part is not None}
        slowest = [math.inf] * self.num_parts
        for rank, part in self.part_of.items() if rank_speeds else ():
            slowest[part] = min(slowest[part], rank_speeds[rank])
        self.speeds = tuple(slowest) if len(set(slowest)) > 1 else ()
        self.workers: Callable[[int], list[int]] = cache(lambda part: [rank for rank, its in parts.items() if its == part])
        self.holders: Callable[[int], list[int]] = cache(lambda part: [pool.ranks[i] for i in protocol.holders(shape, part)])
        self.are_holders: Callable[[ProtocolRanks], bool] = cache(self._are_holders)

    def answered(self, rank: int) -> int | None:
        """The part that others fetch from this rank, if there is one."""
        part = self.part_of.get(rank)
        return part if part is not None and self.holders(part)[0] == rank else None

    def _are_holders(self, makers: ProtocolRanks) -> bool:
        return self.num_parts == makers.num_parts and all(rank in makers.holders(part) for rank, part in self.part_of.items())


def _everyone(shape: GroupShape) -> list[int]:
    return list(range(shape.size))


def _by_replica(name: str, grid: Callable[[GroupShape], Layout | GenerationLayout]) -> Protocol:
    """Split over the replicas of a grid, the same rows on the pp * tp ranks of each, results from its last stage."""

    def last_stage(shape: GroupShape, dp: int) -> list[int]:
        layout = grid(shape)
        return [layout.index(layout.pp - 1, dp, tp) for tp in range(layout.tp)]

    return Protocol(
        name,
        parts=lambda shape: grid(shape).dp,
        distribute=lambda shape, index: grid(shape).coordinate(index).dp,
        collect=lambda shape: [last_stage(shape, dp)[0] for dp in range(grid(shape).dp)],
        replicas=last_stage,
    )


ONE_TO_ALL = Protocol(  # the same input everywhere, results from everyone: building models, checkpoints
    "ONE_TO_ALL",
    parts=lambda shape: 1,
    distribute=lambda shape, index: 0,
    collect=_everyone,
    replicas=lambda shape, part: _everyone(shape),
)
ALL_TO_ALL = Protocol(  # no distribution: the caller passes one argument per member (debugging)
    "ALL_TO_ALL",
    parts=lambda shape: shape.size,
    distribute=lambda shape, index: index,
    collect=_everyone,
    per_member=True,
)
RANK_ZERO = Protocol(  # only the first member runs
    "RANK_ZERO",
    parts=lambda shape: 1,
    distribute=lambda shape, index: 0 if index == 0 else None,
    collect=lambda shape: [0],
)
DP = replace(ALL_TO_ALL, name="DP", per_member=False)  # every rank is a data-parallel rank
THREE_D = _by_replica("THREE_D", lambda shape: shape.layout)  # the replicas of training
MICRO_DP = _by_replica("MICRO_DP", lambda shape: shape.generating)  # of the generation layout: d_g * d of p_g * t_g ranks
PP_ONLY = Protocol(  # the same input everywhere, one result per pipeline stage (dp 0, tp 0): looking at weight names
    "PP_ONLY",
    parts=lambda shape: 1,
    distribute=lambda shape, index: 0,
    collect=lambda shape: [shape.layout.index(pp, 0, 0) for pp in range(shape.layout.pp)],
)
PP_AS_DP = _by_replica(  # pipeline stages take rows of their own, as if they were replicas that generate
    "PP_AS_DP", cache(lambda shape: GenerationLayout(shape.layout, 1, shape.layout.tp))
)
