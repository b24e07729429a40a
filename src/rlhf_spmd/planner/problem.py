"""What is searched: the calls of a step, the ways to run each, and what moves between them. Numbers only: no models, no roles by name.

Terms are ReaL's (section 4): a plan gives every call a mesh of ranks and one of its options there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, order=True)
class RankRange:
    """``count`` ranks from ``first`` on."""

    first: int
    count: int

    def __hash__(self) -> int:  # the searches look up little else
        return self.first << 32 | self.count

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def end(self) -> int:
        return self.first + self.count

    def overlaps(self, other: RankRange) -> bool:
        return self.first < other.first + other.count and other.first < self.first + self.count


Layout = tuple[int, int, int, int]  # how weights lie: pp, tp, ``zero`` and ``zero_size`` of an option
IMPOSSIBLE = 1e6, 1e15  # seconds and bytes; finite, so that a search that walks finds its way out


@dataclass(frozen=True)
class Option:
    """A way to run a call on ``size`` ranks, in a layout of ``pp`` stages and ``tp`` slices.

    ``held``: bytes on each of its ranks during the whole step, what the role keeps; only of a role's home. ``active``: bytes more
    while the call runs. Weights that come from the home for the call are not in it: :meth:`Problem.move` counts them. ``choice``: what
    it stands for. ``zero``: weights lie in rows over the ranks, gathered for a call together (1; ZeRO 1 and 2) or layer by layer (3);
    0: they lie whole. ``zero_size``: in rows over so many neighbours; 0: over all ranks of a stage and slice. ``in_place``: on the
    home's ranks in its layout the call takes the weights as they lie there, so ``zero`` must be the home's."""

    size: int
    pp: int
    tp: int
    seconds: float
    held: float
    active: float
    choice: Any = None
    zero: int = 0
    zero_size: int = 0
    in_place: bool = False

    @property
    def layout(self) -> Layout:
        return self.pp, self.tp, self.zero, self.zero_size


@dataclass(frozen=True)
class Call:
    """A node of the dataflow graph. ``after``: nodes that must have ended, as the numbers of their places, all of them smaller.

    The first of a role's calls that trains, or of a role that none trains its first one, is the role's ``home``: the ranks and the
    layout in which its weights stay. Others of its calls may run elsewhere. One that trains, too, has ``at_home``: it runs on the same
    ranks by the option with the same number."""

    name: str
    role: str
    after: frozenset[int]
    options: tuple[Option, ...]
    home: bool = False
    at_home: bool = False


@dataclass(frozen=True)
class Choice:
    """Of one call: where it runs and how; ``option`` is a number among the call's."""

    mesh: RankRange
    option: int


Plan = tuple[Choice, ...]  # one for each call


@dataclass(frozen=True)
class Problem:
    """``calls`` in program order: ranks walk the script, so a rank runs its calls in this order and a call starts when all its ranks
    are free and those before it have ended.

    ``memory``: bytes that each rank can use. ``weights``: bytes of each role's weights. ``link`` and ``network``: bytes/s of a rank
    inside a host of ``local_size`` ranks and between hosts. ``ahead``: steps that generation runs ahead of training
    (``max_staleness``); ``generating``: the nodes that do.
    """

    calls: tuple[Call, ...]
    local_size: int
    memory: tuple[float, ...]
    weights: Mapping[str, float]
    link: float
    network: float
    ahead: int = 0
    generating: frozenset[int] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        homes = [call.role for call in self.calls if call.home]
        assert sorted(homes) == sorted({call.role for call in self.calls}), f"one home for each role, not {homes}"
        for node, call in enumerate(self.calls):
            home = self.calls[self.homes[call.role]]
            assert call.options and all(before < node for before in call.after), f"{call.name}: options, and calls before it"
            assert not call.at_home or [o.size for o in call.options] == [o.size for o in home.options], (
                f"{call.name}: as {home.name}"
            )

    @property
    def size(self) -> int:
        return len(self.memory)

    @cached_property
    def memory_runs(self) -> list[tuple[RankRange, float]]:
        """Ranks in succession that have equal memory, and how much."""
        memory = self.memory
        starts = [rank for rank in range(self.size) if rank == 0 or memory[rank] != memory[rank - 1]]
        return [(RankRange(a, b - a), memory[a]) for a, b in pairwise([*starts, self.size])]

    @cached_property
    def options_by_size(self) -> list[dict[int, list[int]]]:
        """Of each call: number of ranks -> the options on as many, by their numbers."""
        found: list[dict[int, list[int]]] = []
        for call in self.calls:
            found.append({})
            for number, option in enumerate(call.options):
                found[-1].setdefault(option.size, []).append(number)
        return found

    @cached_property
    def least_held(self) -> dict[str, float]:
        """Role -> the fewest bytes that it can hold on all of its ranks together."""
        return {role: min(o.held * o.size for o in self.calls[node].options) for role, node in self.homes.items()}

    @cached_property
    def homes(self) -> dict[str, int]:
        """Role -> the node that is its home."""
        return {call.role: node for node, call in enumerate(self.calls) if call.home}

    @cached_property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Role -> its home and the calls that are ``at_home``."""
        return {
            role: tuple(node for node, call in enumerate(self.calls) if call.role == role and (call.home or call.at_home))
            for role in self.homes
        }

    @cached_property
    def lent(self) -> tuple[int, ...]:
        """The nodes that may run elsewhere than their role's home."""
        return tuple(node for node, call in enumerate(self.calls) if not call.home and not call.at_home)

    def on_one_host(self, *meshes: RankRange) -> bool:
        hosts = {rank // self.local_size for mesh in meshes for rank in (mesh.first, mesh.first + mesh.count - 1)}
        return len(hosts) == 1

    def home_layout(self, role: str, home: Choice) -> Layout:
        return self.calls[self.homes[role]].options[home.option].layout

    def move(self, call: Call, home: Choice, choice: Choice) -> tuple[float, float]:
        """What a call that runs by ``choice`` costs more because its role's weights rest at ``home``: seconds, and bytes on each of its
        ranks.

        On the same ranks in the same layout nothing moves; where generation's layout is a part of the home's, each rank keeps what it
        has and gets the rest of its shard (HybridFlow, table 2: (tp - t_g p_g) / (t_g p_g t p) of the weights). Everywhere else a
        whole shard comes beside what is there (ReaL, section 6). The slower of receiving and of sending, which the holders share,
        counts. ``IMPOSSIBLE`` where the trainer cannot do it: a call with ``zero`` runs only as its home lies.
        """
        layout = self.home_layout(call.role, home) if home.mesh == choice.mesh else None
        near = self.on_one_host(home.mesh, choice.mesh)
        return self.moved(call.role, layout, home.mesh.count, call.options[choice.option], near)

    def moved(self, role: str, layout: Layout | None, holders: int, option: Option, near: bool) -> tuple[float, float]:
        """:meth:`move` as it depends on where the meshes lie: whether both are on one host, and the home's ``layout`` where they are
        the same. Between different ones it does not matter, only the number of the home's ranks: the search relies on it."""
        if layout == option.layout:
            return 0.0, 0.0
        if option.zero or (layout and option.in_place and layout[:2] == option.layout[:2]):
            return IMPOSSIBLE
        shard = self.weights[role] / (option.pp * option.tp)
        if layout:
            pp, tp, zero, zero_size = layout
            here = pp * tp * zero_size if zero_size else holders if zero else pp * tp
            if not option.in_place and pp % option.pp == 0 and tp % option.tp == 0:
                shard -= self.weights[role] / here
            near = near or here <= self.local_size
        sent = shard * option.size / holders
        return max(shard, sent) / (self.link if near else self.network), shard
