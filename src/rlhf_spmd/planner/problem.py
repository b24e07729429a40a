"""The search problem: the calls of a step, the options of each, and a simulation of a plan. Numbers only: no models, no roles by name.

- An *option* is one way to run a call on a number of ranks: pp, tp, ZeRO and other settings, with predicted seconds and bytes.
- A *plan* gives every call a range of ranks and one of its options (a :class:`Choice`), as ReaL's execution plan (section 4).
- A role's *home* is where its weights and optimizer stay between calls: the ranks and option of one of its calls.
- A call is *tied* if it must run at its role's home, and *movable* if it may run on other ranks or in another layout. A movable call
  gets a copy of the weights for its duration, which takes seconds and bytes (:meth:`Problem.weight_copy_cost`).
- *resident* bytes are those that a home needs during the entire step; *call bytes* are needed in addition while a call runs.

For example: ``actor.update`` trains on ranks 0-7 and is the actor's home; ``actor.generate`` is movable and may run on ranks 4-7 with
another tp. :func:`simulate` is ReaL's algorithm 1; each rank runs its calls in the order of the script.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

# How weights lie under ZeRO 0 to 3: complete (0), or in shards that are gathered at once (1) or by layers (3)
SHARDING_OF_ZERO = (0, 1, 1, 3)
IMPOSSIBLE = (1e6, 1e15)  # seconds and bytes; finite, so that a search that walks finds its way out
T = TypeVar("T")


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
        """Return the rank behind the last one."""
        return self.first + self.count

    def overlaps(self, other: RankRange) -> bool:
        """Return True if the ranges have ranks in common."""
        return self.first < other.first + other.count and other.first < self.first + self.count

    def __str__(self) -> str:
        """Return the first and the last rank, as in ``plan.yaml``."""
        return str(self.first) if self.count == 1 else f"{self.first}-{self.end - 1}"


# Ranks of a range by kind of device, in order: ((kind, number of ranks), ...). Where all devices are equal: ((0, number of ranks),)
Extent = tuple[tuple[int, int], ...]


KindBytes = tuple[float, ...]  # bytes on the ranks of each kind of device that a range or an option has, kinds ascending


def num_ranks(extent: Extent) -> int:
    """Return the number of ranks of an extent."""
    return sum(count for _, count in extent)


WeightLayout = tuple[int, int, int, int, int]  # how weights lie: pp, tp, SHARDING_OF_ZERO of the ZeRO stage, zero_size, ep


@dataclass(frozen=True)
class Option:
    """One way to run a call on ``size`` ranks.

    - resident: bytes on each rank during the entire step; counts only at the role's home
    - call_bytes: bytes more while the call runs, on a rank of each kind of device, kinds ascending; without copies of weights, which
      :meth:`Problem.weight_copy_cost` counts
    - cache: the part of ``call_bytes`` that a KV cache takes
    - zero, zero_size: ZeRO stage, and ranks that share one copy of the weights; 0: all replicas. ep: ranks that share the experts
    - in_place: at home, the call uses the weights in the home's layout, so ``zero`` must be the home's
    - copies: versions of the weights that a call beside its home keeps, of which it uses one; they count while it runs
    - expert_parallel_generation: ranks of tp share the experts, so weights are copied in the home's layout, too
    - devices: kinds of the ranks for which ``seconds`` are; empty: all devices are equal
    - settings: the option as the caller describes it, a ``PlacedCall``; no search reads it
    """

    size: int
    pp: int
    tp: int
    seconds: float
    resident: float
    call_bytes: KindBytes
    zero: int = 0
    zero_size: int = 0
    ep: int = 1
    in_place: bool = False
    expert_parallel_generation: bool = False
    cache: float = 0.0
    copies: int = 1
    devices: Extent = ()
    settings: Any = None

    @property
    def extent(self) -> Extent:
        """Return the ranks that the option needs, by kind of device."""
        return self.devices or ((0, self.size),)

    @property
    def layout(self) -> WeightLayout:
        """Return how the weights lie."""
        return self.pp, self.tp, SHARDING_OF_ZERO[self.zero], self.zero_size, self.ep


@dataclass(frozen=True)
class CallNode:
    """A call of the dataflow graph.

    - after: the indices of calls that must have ended, all smaller than its own
    - home: this call is its role's home. One call per role is: the first that trains, or the first if none trains
    - shares_home: the call is tied to the home, with the option of the same index

    A call that is neither is movable.
    """

    name: str
    role: str
    after: frozenset[int]
    options: tuple[Option, ...]
    home: bool = False
    shares_home: bool = False


class Choice(NamedTuple):
    """A call's ranks and the index of its chosen option."""

    rank_range: RankRange
    option: int


Plan = tuple[Choice, ...]  # one for each call


def runs_of_equals(values: Sequence[T]) -> list[tuple[RankRange, T]]:
    """Return ranges of ranks with equal values, and their value. ``values``: one for each rank."""
    starts = [rank for rank in range(len(values)) if rank == 0 or values[rank] != values[rank - 1]]
    return [(RankRange(first, end - first), values[first]) for first, end in pairwise([*starts, len(values)])]


def device_runs(kinds: Sequence[int], size: int) -> list[tuple[RankRange, int]]:
    """Return ranges of ranks with equal devices, and their kind. ``kinds``: of each rank; empty: all of ``size`` ranks are equal."""
    return runs_of_equals(kinds or (0,) * size)


def extent_of(device_runs: Sequence[tuple[RankRange, int]], rank_range: RankRange) -> Extent:
    """Return the ranks of ``rank_range`` by kind of device. ``device_runs``: :func:`device_runs` of the cluster."""
    return tuple(
        (kind, min(run.end, rank_range.end) - max(run.first, rank_range.first))
        for run, kind in device_runs
        if run.overlaps(rank_range)
    )


@dataclass(frozen=True)
class Problem:
    """Input of a search.

    - calls: in program order. A call starts when all its ranks are free and the calls in its ``after`` have ended
    - local_size: ranks of a host
    - memory: usable bytes of each rank
    - kinds: kind of each rank's device; empty: all devices are equal
    - ceiling: seconds; a search may end without a plan if none takes less, or none was found in time
    - weights: bytes of each role's weights
    - link, network: bytes/s of a rank inside a host and between hosts
    - ahead: steps that generation runs ahead of training (``max_staleness``)
    - generating: indices of the calls that run ahead, on other ranks than their home
    """

    calls: tuple[CallNode, ...]
    local_size: int
    memory: tuple[float, ...]
    weights: Mapping[str, float]
    link: float
    network: float
    ahead: int = 0
    generating: frozenset[int] = field(default_factory=frozenset)
    kinds: tuple[int, ...] = ()
    ceiling: float = math.inf

    def __post_init__(self) -> None:
        homes = [call.role for call in self.calls if call.home]
        assert sorted(homes) == sorted({call.role for call in self.calls}), f"one home for each role, not {homes}"
        for call_index, call in enumerate(self.calls):
            home = self.calls[self.homes[call.role]]
            is_ordered = all(before < call_index for before in call.after)
            assert call.options and is_ordered, f"{call.name} needs options, and waits only for earlier calls"
            has_home_extents = [option.extent for option in call.options] == [option.extent for option in home.options]
            assert not call.shares_home or has_home_extents, f"{call.name} must have options of the same sizes as {home.name}"
            has_all_kinds = all(len(option.call_bytes) == len({*dict(option.extent)}) for option in call.options)
            assert has_all_kinds, f"{call.name} needs bytes for each kind of device"

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return len(self.memory)

    @cached_property
    def memory_runs(self) -> list[tuple[RankRange, float]]:
        """Return ranges of ranks with equal memory, and their memory."""
        return runs_of_equals(self.memory)

    @cached_property
    def device_runs(self) -> list[tuple[RankRange, int]]:
        """Return :func:`device_runs` of all ranks."""
        return device_runs(self.kinds, self.size)

    @cached_property
    def extent(self) -> Callable[[RankRange], Extent]:
        """Return the function from a range to its ranks by kind of device."""
        return cache(partial(extent_of, self.device_runs))

    @cached_property
    def parts_of_kinds(self) -> Callable[[RankRange], tuple[tuple[RankRange, ...], ...]]:
        """Return the function from a range to its parts with each kind of device, kinds ascending."""

        def parts(ranks: RankRange) -> tuple[tuple[RankRange, ...], ...]:
            by_kind: dict[int, list[RankRange]] = {}
            first = ranks.first
            for kind, count in self.extent(ranks):
                by_kind.setdefault(kind, []).append(RankRange(first, count))
                first += count
            return tuple(tuple(by_kind[kind]) for kind in sorted(by_kind))

        return cache(parts)

    @cached_property
    def options_by_extent(self) -> list[dict[Extent, list[int]]]:
        """Return for each call: ranks by kind of device -> the indices of its options for them."""
        by_extent: list[dict[Extent, list[int]]] = [{} for _ in self.calls]
        for indices, call in zip(by_extent, self.calls, strict=True):
            for index, option in enumerate(call.options):
                indices.setdefault(option.extent, []).append(index)
        return by_extent

    @cached_property
    def least_resident(self) -> dict[str, float]:
        """Return role -> the fewest resident bytes, summed over its ranks."""
        homes = {role: self.calls[call_index] for role, call_index in self.homes.items()}
        return {role: min(option.resident * option.size for option in home.options) for role, home in homes.items()}

    @cached_property
    def homes(self) -> dict[str, int]:
        """Return role -> index of the call that is its home."""
        return {call.role: call_index for call_index, call in enumerate(self.calls) if call.home}

    @cached_property
    def tied(self) -> dict[str, tuple[int, ...]]:
        """Return role -> its home and the calls that share it."""
        at_home = [(i, call.role) for i, call in enumerate(self.calls) if call.home or call.shares_home]
        return {role: tuple(i for i, call_role in at_home if call_role == role) for role in self.homes}

    @cached_property
    def movable(self) -> tuple[int, ...]:
        """Return the indices of the movable calls."""
        return tuple(call_index for call_index, call in enumerate(self.calls) if not call.home and not call.shares_home)

    def on_one_host(self, *ranges: RankRange) -> bool:
        """Return True if all ranks of these ranges are on the same host."""
        return len({rank // self.local_size for ranks in ranges for rank in (ranks.first, ranks.end - 1)}) == 1

    @cached_property
    def _names_ahead(self) -> frozenset[str]:
        return frozenset(self.calls[i].name for i in self.generating)

    def must_be_apart(self, call: CallNode) -> bool:
        """Return True if a call runs ahead of training, and so on other ranks than its home."""
        return self.ahead > 0 and call.name in self._names_ahead

    def home_layout(self, role: str, home: Choice) -> WeightLayout:
        """Return how the weights of a role lie at its home."""
        return self.calls[self.homes[role]].options[home.option].layout

    def weight_copy_cost(self, call: CallNode, home: Choice, choice: Choice) -> tuple[float, float]:
        """Return seconds, and bytes on each rank of the call, of copying the weights from ``home``.

        - A home, a tied call, or same ranks and same layout: nothing moves.
        - Same ranks, and the call's pp and tp divide the home's: each rank keeps its part and gets the rest of its shard
          (HybridFlow, table 2: (tp - t_g p_g) / (t_g p_g t p) of the weights).
        - Otherwise each rank gets a complete shard beside what it has (ReaL, section 6).

        In the second case ranks gather in rings: ranks of a host that need the same shard get it once from other hosts, by all their
        adapters. In the third each gets its own.

        The slower of receiving and sending counts; the home's ranks share the sending. ``IMPOSSIBLE`` if the trainer cannot do
        it: a call with ``zero`` runs only in its home's layout, and a call that runs ahead on none of its home's ranks.
        """
        if call.home or call.shares_home:
            return 0.0, 0.0
        if self.must_be_apart(call) and home.rank_range.overlaps(choice.rank_range):
            return IMPOSSIBLE
        on_one_host = self.on_one_host(home.rank_range, choice.rank_range)
        layout = self.home_layout(call.role, home) if home.rank_range == choice.rank_range else None
        option = call.options[choice.option]
        return self.weight_copy_cost_between(call.role, layout, home.rank_range.count, option, on_one_host)

    def weight_copy_cost_between(
        self, role: str, layout: WeightLayout | None, num_home_ranks: int, option: Option, on_one_host: bool
    ) -> tuple[float, float]:
        """Return :meth:`weight_copy_cost`'s seconds and bytes, from what they depend on.

        - layout: the home's if the call has the home's ranks, else None
        - num_home_ranks: between different ranks only this number matters, and the search relies on that
        - on_one_host: all ranks are on one host
        """
        if layout == option.layout and not option.expert_parallel_generation:
            return 0.0, 0.0
        if option.zero or (layout and option.in_place and layout[:2] == option.layout[:2]):
            return IMPOSSIBLE
        num_slices = option.pp * option.tp
        shard = self.weights[role] / num_slices
        network = self.network
        if layout:
            pp, tp, zero, zero_size, ep = layout
            num_shards = max(pp * tp * zero_size if zero_size else num_home_ranks if zero else pp * tp, pp * tp * ep)
            if not (option.in_place or option.expert_parallel_generation) and pp % option.pp == 0 and tp % option.tp == 0:
                shard -= self.weights[role] / num_shards
                network = min(self.link, self.network * max(self.local_size // num_slices, 1))
            on_one_host = on_one_host or num_shards <= self.local_size
        sent = shard * option.size / num_home_ranks
        return max(shard, sent) / (self.link if on_one_host else network), shard * option.copies


@dataclass(frozen=True)
class Schedule:
    """When the calls of a plan run, and what each rank needs.

    - spans: start and end of each call in seconds, transfers of weights included. If generation runs ahead, they are those of
      the steady state, in which each step is ``seconds`` later than the last
    - seconds: of a step
    - peaks: bytes on each rank
    - excess: share of its memory by which the fullest rank exceeds it; 0 if all fit
    """

    spans: tuple[tuple[float, float], ...]
    seconds: float
    peaks: tuple[float, ...]
    excess: float

    @property
    def fits(self) -> bool:
        """Return True if no rank exceeds its memory."""
        return self.excess <= 1e-9  # for rounding


def simulate(problem: Problem, plan: Plan) -> Schedule:
    """Return when the calls of a plan run, and what each rank needs."""
    seconds = []
    call_bytes: list[tuple[RankRange, float]] = []
    resident = []
    for call, choice in zip(problem.calls, plan, strict=True):
        ranks = choice.rank_range
        option = call.options[choice.option]
        home = plan[problem.homes[call.role]]
        assert option.extent == problem.extent(ranks), f"{call.name} has an option for {option.extent} on ranks {ranks}"
        assert choice == home or not call.shares_home, f"{call.name} must run at its role's home"
        if call.home:
            resident.append((ranks, option.resident))
        copy_seconds, copy_bytes = problem.weight_copy_cost(call, home, choice)
        seconds.append(option.seconds + copy_seconds)
        for parts, amount in zip(problem.parts_of_kinds(ranks), option.call_bytes, strict=True):
            call_bytes += [(part, amount + copy_bytes) for part in parts]
    call_indices = range(len(plan))
    starts, period = start_times(problem, call_indices, [choice.rank_range for choice in plan], seconds)
    peaks = rank_peaks(problem.size, resident, call_bytes)
    excess = max(peak / memory - 1 for peak, memory in zip(peaks, problem.memory, strict=True))
    return Schedule(tuple((starts[i], starts[i] + seconds[i]) for i in call_indices), period, peaks, max(excess, 0.0))


def rank_peaks(
    size: int, resident: Sequence[tuple[RankRange, float]], call_bytes: Sequence[tuple[RankRange, float]]
) -> tuple[float, ...]:
    """Return bytes on each rank: the sum of what is resident on it, plus the largest call bytes."""
    edges = {edge for ranks, _ in (*resident, *call_bytes) for edge in (ranks.first, ranks.end)}
    peaks: list[float] = []
    for first, end in pairwise(sorted({0, size} | edges)):
        resident_bytes = sum(amount for ranks, amount in resident if ranks.first <= first < ranks.end)
        largest = max((amount for ranks, amount in call_bytes if ranks.first <= first < ranks.end), default=0.0)
        peaks += [resident_bytes + largest] * (end - first)
    return tuple(peaks)


def start_times(
    problem: Problem, call_indices: Sequence[int], ranges: Sequence[RankRange | None], seconds: Sequence[float]
) -> tuple[list[float], float]:
    """Return starts of all calls (0 for calls outside ``call_indices``), and the seconds of a step.

    ``call_indices`` ascend and wait only for each other. A call without ranks takes time but occupies no rank; with such calls both
    results are lower bounds.
    """
    if problem.ahead:
        return _steady_state(problem, ranges, seconds)
    starts = [0.0] * len(problem.calls)
    ends = [0.0] * len(problem.calls)
    done: list[int] = []
    for call_index in call_indices:
        start = 0.0
        ranks = ranges[call_index]
        after = problem.calls[call_index].after
        for earlier in done:
            if ends[earlier] > start:
                other = ranges[earlier]
                if earlier in after or (ranks is not None and other is not None and ranks.overlaps(other)):
                    start = ends[earlier]
        done.append(call_index)
        starts[call_index] = start
        ends[call_index] = start + seconds[call_index]
    return starts, max(ends)


def _steady_state(problem: Problem, ranges: Sequence[RankRange | None], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Return :func:`start_times` of steps that overlap without end.

    An edge (before, after, n) demands start[after] >= start[before] + seconds[before] - n * period. The shortest possible period
    is the largest sum(seconds) / sum(n) among all cycles of edges (max-plus algebra). Newton's method finds it.
    """
    edges = _waiting_edges(problem, ranges)
    size = len(seconds)
    period = max(seconds)
    while True:
        # 1. find starts that satisfy all edges, as Bellman and Ford; if they settle, this period is possible
        starts = [0.0] * size
        cause = [-1] * size  # by call: the call that decides its start
        moved = -1
        for _ in range(size + 1):
            moved = -1
            for before, after, steps in edges:
                start = starts[before] + seconds[before] - steps * period
                if start > starts[after] + 1e-12 * period:
                    starts[after] = start
                    cause[after] = before
                    moved = after
            if moved < 0:
                return starts, period
        # 2. otherwise follow the causes back into a cycle that takes longer than its steps allow, and once around it
        for _ in range(size):
            moved = cause[moved]
        cycle = [moved]
        while cause[cycle[-1]] != moved:
            cycle.append(cause[cycle[-1]])
        # 3. the next period is that of the cycle: sum(seconds) / sum(n)
        pairs = [(cause[call_index], call_index) for call_index in cycle]
        cycle_steps = sum(min(steps for *ends, steps in edges if tuple(ends) == pair) for pair in pairs)
        cycle_period = sum(seconds[call_index] for call_index in cycle) / cycle_steps
        if cycle_period <= period:  # by no more than rounding
            return starts, period
        period = cycle_period


def _waiting_edges(problem: Problem, ranges: Sequence[RankRange | None]) -> list[tuple[int, int, int]]:
    """Return (before, after, n): the call ``after`` of a step waits for the call ``before`` of the step n earlier.

    A call needs the weights of the step before; one of ``generating`` needs those of the step ``ahead`` + 1 before.
    """
    edges = []
    for call_index, call in enumerate(problem.calls):
        edges += [(before, call_index, 0) for before in sorted(call.after)]
        lag = problem.ahead + 1 if call_index in problem.generating else 1
        edges += [(train, call_index, lag) for train in problem.tied[call.role] if train != call_index]
        for before in range(call_index):
            ranks = ranges[call_index]
            other = ranges[before]
            if ranks is not None and other is not None and ranks.overlaps(other):
                edges += [(before, call_index, 0), (call_index, before, 1)]
    return edges
