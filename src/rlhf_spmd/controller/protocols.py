"""Where roles live, and how a call's rows reach their ranks (transfer protocols: HybridFlow, table 3).

A role lives on a :class:`ResourcePool`, whose ranks are its members, and splits it by its :class:`GroupShape`. A protocol splits a
call's rows into ``parts(shape)`` parts by three small functions of that shape. Their indices count ranks inside the pool:

- ``distribute(shape, index)``: the part that a member computes; None if it does not run.
- ``collect(shape)``: the members whose results count. For calls that return rows: one member per part, in the order of the parts.
- ``replicas(shape, part)``: all members that hold the part's result. A consumer that is one of them fetches nothing.

A protocol of your own is another ``Protocol(...)`` value, given to ``@register``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from rlhf_spmd.parallel.layout import GenerationLayout, Layout


@dataclass(frozen=True)
class ResourcePool:
    """A named set of ascending global ranks. Roles on one pool are colocated. Pools may be equal, disjoint or overlap."""

    name: str
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError(f"pool '{self.name}' has no ranks")
        if sorted(set(self.ranks)) != list(self.ranks):
            raise ValueError(f"pool '{self.name}': ranks {list(self.ranks)} must ascend without repeats")

    def __str__(self) -> str:
        members = set(self.ranks)
        starts = [rank for rank in self.ranks if rank - 1 not in members]
        ends = [rank for rank in self.ranks if rank + 1 not in members]
        runs = (f"{a}" if a == b else f"{a} to {b}" for a, b in zip(starts, ends, strict=True))
        return f"{self.name} [{', '.join(runs)}]"


@dataclass(frozen=True)
class GroupShape:
    """What a protocol knows about a role: its layout, and its generation layout if it has one."""

    layout: Layout
    generation: GenerationLayout | None = None

    @property
    def size(self) -> int:
        return self.layout.size

    @cached_property
    def generating(self) -> GenerationLayout:
        """Return the generation layout. Without one, the replicas of the training layout generate."""
        return self.generation or GenerationLayout(self.layout, self.layout.pp, self.layout.tp)


@dataclass(frozen=True, eq=False)
class Protocol:
    """How a call's rows reach the members of a role, and which members hold results. The module describes the functions.

    ``per_member``: an argument that is not a reference has one entry for each member. Otherwise all members get the same argument.
    """

    name: str
    parts: Callable[[GroupShape], int]
    distribute: Callable[[GroupShape, int], int | None]
    collect: Callable[[GroupShape], list[int]]
    replicas: Callable[[GroupShape, int], list[int]] | None = None
    per_member: bool = False

    def holders(self, shape: GroupShape, part: int) -> list[int]:
        """Return the members that hold the rows of ``part`` after the call. Other ranks fetch them from the first one."""
        return self.replicas(shape, part) if self.replicas else [self.collect(shape)[part]]


@dataclass(frozen=True)
class RankSpeeds:
    """The speed of each rank of the world; empty: all are equal. ``generation``: of calls by ``MICRO_DP``; empty: ``compute``."""

    compute: Sequence[float] = ()
    generation: Sequence[float] = ()

    def of(self, protocol: Protocol) -> Sequence[float]:
        """Return the speeds that count in calls by this protocol."""
        return (self.generation or self.compute) if protocol is MICRO_DP else self.compute


EQUAL_SPEEDS = RankSpeeds()


class ProtocolRanks:
    """A protocol on a role's pool, in global ranks. Answers are cached, because every step asks the same questions.

    - part_of: rank -> the part that it computes, for every rank that runs
    - workers(part): the ranks that compute its rows
    - holders(part): the ranks that hold its rows after the call. Other ranks fetch them from the first one
    - are_holders(producers): True if every rank that computes a part already holds that part of what ``producers`` made
    - speeds: the speed of each part; empty if all are equal

    A part runs at the speed of its slowest rank, because tensor slices wait for each other in every layer, and stages in every
    micro-batch.
    """

    def __init__(self, protocol: Protocol, shape: GroupShape, pool: ResourcePool, speeds: RankSpeeds = EQUAL_SPEEDS) -> None:
        rank_speeds = speeds.of(protocol)
        self.num_parts = protocol.parts(shape)
        parts = {rank: protocol.distribute(shape, index) for index, rank in enumerate(pool.ranks)}
        self.part_of = {rank: part for rank, part in parts.items() if part is not None}
        slowest = [math.inf] * self.num_parts
        for rank, part in self.part_of.items() if rank_speeds else ():
            slowest[part] = min(slowest[part], rank_speeds[rank])
        self.speeds = tuple(slowest) if len(set(slowest)) > 1 else ()
        self.workers: Callable[[int], list[int]] = cache(lambda part: [rank for rank, index in parts.items() if index == part])
        self.holders: Callable[[int], list[int]] = cache(lambda part: [pool.ranks[i] for i in protocol.holders(shape, part)])
        self.are_holders: Callable[[ProtocolRanks], bool] = cache(self._are_holders)

    def part_sent_by(self, rank: int) -> int | None:
        """Return the part that others fetch from ``rank``; None if they fetch nothing from it."""
        part = self.part_of.get(rank)
        return part if part is not None and self.holders(part)[0] == rank else None

    def _are_holders(self, producers: ProtocolRanks) -> bool:
        return self.num_parts == producers.num_parts and all(
            rank in producers.holders(part) for rank, part in self.part_of.items()
        )


def _all_members(shape: GroupShape) -> list[int]:
    return list(range(shape.size))


def _by_replica(name: str, grid: Callable[[GroupShape], Layout | GenerationLayout]) -> Protocol:
    """Return a protocol by which each replica of a grid gets its own rows, the same on its pp * cp * tp ranks.

    Results come from its last stage.
    """

    def last_stage(shape: GroupShape, dp: int) -> list[int]:
        layout = grid(shape)
        ranks: list[int] = layout.ranks[layout.pp - 1, dp].reshape(-1).tolist()
        return ranks

    return Protocol(
        name,
        parts=lambda shape: grid(shape).dp,
        distribute=lambda shape, index: grid(shape).coordinate(index).dp,
        collect=lambda shape: [last_stage(shape, dp)[0] for dp in range(grid(shape).dp)],
        replicas=last_stage,
    )


ONE_TO_ALL = Protocol(  # same input for all, results from all: building models, checkpoints
    "ONE_TO_ALL",
    parts=lambda shape: 1,
    distribute=lambda shape, index: 0,
    collect=_all_members,
    replicas=lambda shape, part: _all_members(shape),
)
ALL_TO_ALL = Protocol(  # the caller passes one argument per member: debugging
    "ALL_TO_ALL",
    parts=lambda shape: shape.size,
    distribute=lambda shape, index: index,
    collect=_all_members,
    per_member=True,
)
RANK_ZERO = Protocol(  # only the first member runs
    "RANK_ZERO",
    parts=lambda shape: 1,
    distribute=lambda shape, index: 0 if index == 0 else None,
    collect=lambda shape: [0],
)
DP = replace(ALL_TO_ALL, name="DP", per_member=False)  # every rank is a data-parallel rank
THREE_D = _by_replica("THREE_D", lambda shape: shape.layout)  # one part per training replica
# one part per generation replica: d_g * d of p_g * t_g ranks
MICRO_DP = _by_replica("MICRO_DP", lambda shape: shape.generating)
PP_ONLY = Protocol(  # same input for all, one result per pipeline stage (dp 0, tp 0): inspecting weight names
    "PP_ONLY",
    parts=lambda shape: 1,
    distribute=lambda shape, index: 0,
    collect=lambda shape: [shape.layout.index(pp, 0, 0, 0) for pp in range(shape.layout.pp)],
)
PP_AS_DP = _by_replica(  # each pipeline stage gets its own rows, as if it were a generation replica
    "PP_AS_DP", cache(lambda shape: GenerationLayout(shape.layout, 1, shape.layout.tp))
)
