"""Schedules the calls of a phase on ranges of ranks so that the phase ends soonest: branch and bound. Pure.

A *phase* is a group of calls between two points of a step for which everything waits. PPO has three, as no call of a phase can begin
before all calls of the phase before have ended:

- phase 1: ``actor.generate_sequences``
- phase 2: ``critic.compute_values``, ``reference.compute_ref_log_prob``
- phase 3: ``critic.update_critic``, ``actor.update_actor``

So the seconds of a step are the sum over its phases, and each phase can be searched by itself (:func:`phases`). A *packing* gives
the calls of a phase their ranks. On 8 ranks, phase 1 may have all of them for generation, and phase 2 may have the critic on
ranks 0-3 and the reference on ranks 4-7 at the same time. A call is *fixed* if its ranks are already decided, and *free* if the
packing chooses them. A :data:`Table` has the seconds of a free call on each extent, the number of ranks of each kind.

:class:`Phase` bounds a phase from below while roles have no home yet, and packs it when all have one. Both are the search of
:class:`_Packing`, which proves its result because it tries all ranges but those that a bound or a symmetry excludes. The search
of a bound may take long, so it has a limit. :class:`HalvesPacking` gives it a good packing to begin with.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np

from rlhf_spmd.planner.problem import CallNode, Extent, Problem, RankRange, num_ranks, start_times
from rlhf_spmd.planner.search.candidates import RankRanges

Table = tuple[tuple[Extent, float], ...]  # of a free call: (extent, the fewest seconds on it)
Free = Mapping[int, Table]  # by index of the call
Fixed = Mapping[int, tuple[RankRange, float]]  # index of the call -> its ranks and seconds
Occupied = frozenset[RankRange]
SecondsOn = Callable[[int, RankRange], float]  # seconds of a call on a range
T = TypeVar("T")
BOUND_ACCURACY = 1e-3  # of bounds by pairs of calls
NEVER = 1e300  # seconds of a call without an option: finite, so that sums stay numbers


def earlier_calls(problem: Problem) -> list[set[int]]:
    """Return for each call the indices of the calls that it waits for, directly or not."""
    earlier: list[set[int]] = []
    for call in problem.calls:
        earlier.append(set(call.after).union(*(earlier[before] for before in call.after)))
    return earlier


def phases(problem: Problem) -> list[range]:
    """Return the calls of a step by phase. Each call waits for all calls of earlier phases.

    If generation runs ahead, steps overlap and there is one phase.
    """
    earlier = earlier_calls(problem)
    size = len(problem.calls)
    cuts = [cut for cut in range(1, size) if all(earlier[call_index] >= set(range(cut)) for call_index in range(cut, size))]
    edges = [0, *([] if problem.ahead else cuts), size]
    return [range(first, end) for first, end in pairwise(edges)]


class OutOfTimeError(Exception):
    """The search's time is up."""


class _OutOfSchedulesError(Exception):
    """A bound is not worth more schedules."""


@dataclass
class SearchBudget:
    """Counts schedules that were computed, and stops the search in time.

    - until: value of ``time.perf_counter`` at which the time is up
    - evaluations: schedules that were computed
    """

    until: float
    evaluations: int = 0

    def spend(self) -> None:
        """Count a schedule. Raises OutOfTimeError."""
        self.evaluations += 1
        if self.evaluations % 256 == 0 and time.perf_counter() > self.until:
            raise OutOfTimeError


def paired_calls(problem: Problem) -> dict[int, list[tuple[int, int]]]:
    """Return home -> (call, number of steps) of its role's calls that it waits for, in steps that overlap.

    The next such call, or the one so many steps later, waits for the home. So the seconds of both are at most those of so many steps.
    """
    earlier = earlier_calls(problem)
    pairs = {}
    for role, home in problem.homes.items():
        before = [i for i in sorted(earlier[home]) if problem.calls[i].role == role]
        pairs[home] = [(i, problem.ahead + 1 if i in problem.generating else 1) for i in before]
    return pairs


def kind_weights(calls: Sequence[CallNode], num_kinds: int) -> list[float]:
    """Return how much a rank of each kind counts in bounds by work: its speed in these calls, 1 for the fastest kind.

    Its speed in a call is the inverse of the fewest rank-seconds that the call takes on such ranks. Any weights give a true
    bound; these give a tight one, because a slow rank then neither gains nor saves work.
    """
    if num_kinds == 1:
        return [1.0]
    least = np.full((len(calls), num_kinds), math.inf)  # rank-seconds
    for row, call in zip(least, calls, strict=True):
        for option in call.options:
            if len(option.extent) == 1:
                kind = option.extent[0][0]
                row[kind] = min(row[kind], max(option.size * option.seconds, 1e-12))
    calls_on_kinds = least[np.isfinite(least).any(axis=1)]  # a call may have options only on several kinds together
    work = calls_on_kinds.min(axis=1, keepdims=True)
    speeds = (work * (work / calls_on_kinds)).sum(axis=0)
    return (speeds / speeds.max()).tolist() if speeds.any() else [1.0] * num_kinds


class Phase:
    """One of :func:`phases`. Its methods take all calls and look at the phase's own.

    - weight: the function from an extent to the weight of its ranks, see :func:`kind_weights`
    - pairs: see :func:`paired_calls`
    """

    def __init__(self, problem: Problem, call_indices: range, ranges: RankRanges, budget: SearchBudget) -> None:
        self.problem = problem
        self.call_indices = call_indices
        self.ranges = ranges
        self._budget = budget
        self._bounds_by_calls: dict[object, tuple[float, float]] = {}  # a lower bound, and the seconds of a packing
        self._packings: dict[tuple[int, ...], list[dict[int, RankRange]]] = {}  # by free calls: the last good ones
        self._max_schedules_per_bound = 0 if problem.ahead else 20_000
        weights = kind_weights([problem.calls[i] for i in call_indices], max(kind for _, kind in problem.device_runs) + 1)
        self.pairs = paired_calls(problem) if problem.ahead else {}
        self.weight = cache(lambda extent: sum(count * weights[kind] for kind, count in extent))
        self.total_weight = self.weight(problem.extent(ranges.all_ranks))

    def bound(self, fixed: Fixed, free: Free, floor: float, ceiling: float) -> float:
        """Return a lower bound of the phase's seconds, clipped to ``floor`` .. ``ceiling``: free calls may take any range of an extent.

        The bound is the least time in which the ranks can do the work, raised by :meth:`_search_bound` to the seconds of the best
        packing. A known packing that ends by ``floor`` saves the search, because nothing above ``floor`` could be proved.
        """
        fixed = self._of_phase(fixed)
        free = self._of_phase(free)
        key = (tuple(fixed.items()), tuple(free.items()))
        lower, upper = self._bounds_by_calls.get(key, (None, math.inf))
        if lower is None or max(lower, floor) < min(ceiling, upper):
            packing = _Packing(self, fixed, free, ceiling)
            packings = self._packings.setdefault(tuple(free), [])
            if lower is None:
                lower = packing.least_seconds()
                if free and not fixed and not self.problem.ahead and max(lower, floor) < ceiling:
                    packings[:] = [*self._onto_halves(free), *packings[:5]]
            if max(lower, floor) < min(ceiling, upper):
                upper = min([upper, *(packing.ends(ranges) for ranges in packings)])
            is_worth = ceiling < math.inf or not packings  # before there is a plan any packing will do
            if is_worth and max(lower, floor) < min(ceiling, upper):
                lower, upper = self._search_bound(packing, packings, lower, upper, floor)
            self._bounds_by_calls[key] = lower, upper
        return min(max(lower, floor), ceiling)

    def _search_bound(
        self, packing: _Packing, packings: list[dict[int, RankRange]], lower: float, upper: float, floor: float
    ) -> tuple[float, float]:
        """Return the bounds after a search for the best packing, which is added to ``packings``.

        If the search needs too many schedules, the lower bound counts as the best that can be proved.
        """
        try:
            seconds, ranges = packing.run(max(lower, floor), self._budget.evaluations + self._max_schedules_per_bound)
        except _OutOfSchedulesError:
            return lower, lower
        if ranges is not None:
            upper = min(upper, seconds)
            packings[:] = [ranges, *packings[:5]]
        return (seconds if seconds > max(lower, floor) else lower), upper

    def _onto_halves(self, free: Free) -> list[dict[int, RankRange]]:
        """Return the best packing of the free calls onto repeated halves of the ranks, if there is one."""
        packing = HalvesPacking(self.ranges, [dict(table) for table in free.values()]).packing()
        return [{call_index: packing[index] for index, call_index in enumerate(free)}] if packing else []

    def packed(self, fixed: Fixed, free: Free) -> Mapping[int, RankRange]:
        """Return the best known packing of these calls; empty if none is known."""
        packing = _Packing(self, self._of_phase(fixed), self._of_phase(free), math.inf)
        return min(self._packings.get(tuple(self._of_phase(free)), ()), key=packing.ends, default={})

    def pack(
        self, fixed: Fixed, free: Free, ceiling: float, seconds_on: SecondsOn, occupied: Occupied
    ) -> tuple[float, dict[int, RankRange] | None]:
        """Return the fewest seconds below ``ceiling`` and the ranges of the free calls; or ``ceiling`` and None.

        ``seconds_on``: seconds of a call on a range, never fewer than the table has. ``occupied``: ranges that it depends on.
        """
        return _Packing(self, self._of_phase(fixed), self._of_phase(free), ceiling, seconds_on, occupied).run()

    def _of_phase(self, calls: Mapping[int, T]) -> dict[int, T]:
        return {call_index: calls[call_index] for call_index in self.call_indices if call_index in calls}

    def end(self, ranges: Sequence[RankRange | None], seconds: Sequence[float], max_evaluations: float = math.inf) -> float:
        """Return when the phase ends. Raises OutOfTimeError, and _OutOfSchedulesError when the search has computed more schedules than
        ``max_evaluations``."""
        self._budget.spend()
        if self._budget.evaluations > max_evaluations:
            raise _OutOfSchedulesError
        return start_times(self.problem, self.call_indices, ranges, seconds)[1]


class _Packing:
    """Searches depth first: the call with most work first, on the range where it ends earliest first.

    Two bounds cut a branch that cannot beat the best packing. Both hold for all of its packings:

    - the end of the calls that have ranks, if the others take their least seconds and no ranks
    - the weighted rank-seconds of all calls, the least of those without ranks, over the weight of all ranks
    """

    def __init__(
        self,
        phase: Phase,
        fixed: Fixed,
        free: Free,
        ceiling: float,
        seconds_on: SecondsOn | None = None,
        occupied: Occupied = frozenset(),
    ) -> None:
        self._phase = phase
        self._free = free
        self._seconds_on = seconds_on
        self._occupied = occupied
        self._extent = phase.problem.extent
        self._weight = phase.weight
        self._total_weight = phase.total_weight
        self._ranges: list[RankRange | None] = [None] * len(phase.problem.calls)
        self._seconds = [0.0] * len(phase.problem.calls)
        for call_index, (ranks, seconds) in fixed.items():
            self._give(call_index, ranks, seconds)
        for call_index, table in free.items():
            self._seconds[call_index] = min((seconds for _, seconds in table), default=math.inf)
        # weighted rank-seconds of fixed calls
        self._area = sum(self._weight(self._extent(ranks)) * seconds for ranks, seconds in fixed.values())
        self._order = sorted(free, key=lambda call_index: -self._least_area(call_index, math.inf))
        self._work_tables: dict[
            int, tuple[list[float], list[float]]
        ] = {}  # seconds, ascending; fewest rank-seconds within them
        self._best = ceiling
        self._best_ranges: dict[int, RankRange] | None = None

    def _least_area(self, call_index: int, below: float) -> float:
        """Return the fewest weighted rank-seconds of a call that takes less than ``below`` seconds."""
        weight = self._weight
        return min(
            (weight(extent) * seconds for extent, seconds in self._free[call_index] if seconds < below), default=math.inf
        )

    def least_seconds(self) -> float:
        """Return the fewest seconds T in which all ranks together have the rank-seconds that calls need to end within T."""
        table_seconds = {seconds for table in self._free.values() for _, seconds in table}
        bound = max(self._seconds)
        if bound < self._best:
            bound = self._phase.end(self._ranges, self._seconds)
        while bound < self._best:
            within = math.nextafter(bound * (1 + 1e-12), math.inf)
            area = self._area + sum(self._least_area(call_index, within) for call_index in self._order)
            work_seconds = area / self._total_weight
            if work_seconds <= within:
                break
            bound = min([work_seconds, *(seconds for seconds in table_seconds if seconds > within)])
        if not self._phase.pairs or bound >= self._best:
            return bound
        # the same for pairs of calls; the work that is needed falls as the seconds grow, so halving finds where both meet
        upper = min(self._best, 2 * bound)
        if self._paired_work(upper) > upper * self._total_weight:
            return upper
        while upper - bound > BOUND_ACCURACY * upper:
            middle = (bound + upper) / 2
            if self._paired_work(middle) > middle * self._total_weight * (1 + 1e-12):
                bound = middle
            else:
                upper = middle
        return bound

    def _paired_work(self, period: float) -> float:
        """Return the fewest weighted rank-seconds of all calls in steps of ``period`` seconds, with what :func:`paired_calls` says."""
        limits = dict.fromkeys(self._free, period)
        alone = set(self._free)
        work = self._area
        for home, pairs in self._phase.pairs.items():
            for call_index, steps in pairs:
                if home not in self._free and call_index in self._free:
                    limits[call_index] = min(limits[call_index], steps * period - self._seconds[home])
                elif home in self._free and call_index not in self._free:
                    limits[home] = min(limits[home], steps * period - self._seconds[call_index])
        for home, pairs in self._phase.pairs.items():
            free = [(call_index, steps) for call_index, steps in pairs if call_index in self._free]
            if home in self._free and free:
                alone -= {home, *(call_index for call_index, _ in free)}
                work += min(
                    (
                        self._weight(extent) * seconds
                        + sum(
                            self._work_beside(i, min(limits[i], steps * period - seconds), steps, extent) for i, steps in free
                        )
                        for extent, seconds in self._free[home]
                        if seconds <= limits[home]
                    ),
                    default=math.inf,
                )
        return work + sum(self._work_within(i, limits[i]) for i in alone)

    def _work_beside(self, call_index: int, limit: float, steps: int, home: Extent) -> float:
        """Return :meth:`_work_within` of a call whose home has ranks of extent ``home``; a call that runs ahead has none of them."""
        if steps == 1 or call_index not in self._phase.problem.movable:
            return self._work_within(call_index, limit)
        room = (self._total_weight - self._weight(home)) * (1 + 1e-12)
        fitting = ((self._weight(extent), seconds) for extent, seconds in self._free[call_index] if seconds <= limit)
        return min((weight * seconds for weight, seconds in fitting if weight <= room), default=math.inf)

    def _work_within(self, call_index: int, limit: float) -> float:
        """Return the fewest weighted rank-seconds of a free call that takes at most ``limit`` seconds."""
        if call_index not in self._work_tables:
            table = sorted((seconds, self._weight(extent) * seconds) for extent, seconds in self._free[call_index])
            self._work_tables[call_index] = (
                [seconds for seconds, _ in table],
                list(accumulate((work for _, work in table), min)),
            )
        ends, works = self._work_tables[call_index]
        index = bisect_right(ends, limit * (1 + 1e-12)) - 1
        return works[index] if index >= 0 else math.inf

    def ends(self, packing: Mapping[int, RankRange]) -> float:
        """Return when a packing of the free calls ends."""
        ranges = list(self._ranges)
        seconds = list(self._seconds)
        for call_index, ranks in packing.items():
            ranges[call_index] = ranks
            seconds[call_index] = dict(self._free[call_index]).get(self._extent(ranks), math.inf)
        return self._phase.end(ranges, seconds) if max(seconds) < self._best else math.inf

    def run(self, floor: float = -1.0, max_evaluations: float = math.inf) -> tuple[float, dict[int, RankRange] | None]:
        """Return the best packing's end and ranges, or the ceiling and None. The first packing that ends by ``floor`` suffices."""
        self._floor = floor
        self._max_evaluations = max_evaluations
        if max(self._seconds) < self._best:
            end = self._phase.end(self._ranges, self._seconds, max_evaluations)
            if end < self._best:
                self._descend(0, self._area, end)
        return self._best, self._best_ranges

    def _descend(self, depth: int, area: float, end: float) -> None:
        """Try all ranges of the call at ``depth`` of the order. ``area``: weighted rank-seconds of the calls that have ranks."""
        if depth == len(self._order):
            self._best = end
            self._best_ranges = {call_index: ranks for call_index in self._order if (ranks := self._ranges[call_index])}
            return
        call_index = self._order[depth]
        least_seconds = self._seconds[call_index]
        other_area = area + sum(self._least_area(other, self._best) for other in self._order[depth + 1 :])
        occupied = self._occupied.union(ranks for ranks in self._ranges if ranks)
        branches = []
        for extent, least in self._free[call_index]:
            weight = self._weight(extent)
            if least >= self._best or other_area + weight * least >= self._best * self._total_weight:
                continue
            for ranks in self._phase.ranges.ranges_up_to_symmetry(extent, occupied):
                seconds = self._seconds_on(call_index, ranks) if self._seconds_on else least
                if seconds >= self._best or other_area + weight * seconds >= self._best * self._total_weight:
                    continue
                self._give(call_index, ranks, seconds)
                branch_end = self._phase.end(self._ranges, self._seconds, self._max_evaluations)
                if branch_end < self._best:
                    branches.append((branch_end, weight * seconds, ranks, seconds))
        for branch_end, branch_area, ranks, seconds in sorted(branches):
            if branch_end >= self._best or self._best <= self._floor:
                break
            self._give(call_index, ranks, seconds)
            self._descend(depth + 1, area + branch_area, branch_end)
        self._give(call_index, None, least_seconds)

    def _give(self, call_index: int, ranks: RankRange | None, seconds: float) -> None:
        """Set the ranks and seconds of a call; None takes its ranks away."""
        self._ranges[call_index] = ranks
        self._seconds[call_index] = seconds


class HalvesPacking:
    """The best packing of calls onto repeated halves of the ranks, by dynamic programming.

    Calls wait only for their ranks and their order. Let E(r, S) be when the calls S can end on the range r. A subset A of S runs on
    the complete range, and splits the other calls of S, in program order, into runs R. Each run is dealt to the two halves h1 and
    h2 of r:

        E(r, S) = min over A of [seconds of A on r + sum over R of min over B in R of max(E(h1, B), E(h2, R - B))]

    Ranks run calls in program order, so a call of A begins when both halves have ended the run before it.

    For example, calls 0 and 1 take 4 seconds on one rank and 3 on two. On two ranks the subset A = {0, 1} ends after 3 + 3 = 6 seconds;
    A = {0} after 3 + max(4, 0) = 7; the empty A has one run {0, 1}, which ends after max(4, 4) = 4, the least.

    ``tables``: for each call in program order: extent -> seconds. Ranges of equal extents are alike. A set of calls is a number,
    whose bits are its calls.
    """

    def __init__(self, ranges: RankRanges, tables: Sequence[Mapping[Extent, float]]) -> None:
        self.ranges = ranges
        self.tables = tables
        self.subsets, self.rests, self.starts = _splits(len(tables))
        self._first_of_extent: dict[Extent, RankRange] = {}
        self._ends_of = cache(self._compute_ends)

    @property
    def seconds(self) -> float:
        """Return the seconds until the last call ends; inf if there is no packing."""
        end = float(self.ends(self.ranges.all_ranks)[0][-1])
        return end if end < NEVER else math.inf

    def packing(self) -> dict[int, RankRange]:
        """Return the ranks of each call, by its index; empty if there is no packing."""
        if self.seconds == math.inf:
            return {}
        return self._place(self.ranges.all_ranks, (1 << len(self.tables)) - 1)

    def ends(self, ranks: RankRange) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return :meth:`_compute_ends` of the first range with this extent."""
        return self._ends_of(self._first_of_extent.setdefault(self.ranges.extent(ranks), ranks))

    def _compute_ends(self, ranks: RankRange) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return E(r, S) for the range r = ``ranks``.

        1. for each set of calls: the least end
        2. for each pair of a set and a subset: the end if the halves take the subset and the other calls
        3. for each pair: the end if the subset runs on the complete range
        """
        extent = self.ranges.extent(ranks)
        alone = _members(len(self.tables)) @ np.array([table.get(extent, NEVER) for table in self.tables])
        if num_ranks(extent) == 1:
            return alone, np.full(len(self.subsets), NEVER), alone[self.subsets] + NEVER * (self.rests > 0)
        first, second = (self.ends(half)[0] for half in self.ranges.halves(ranks))
        halved = np.maximum(first[self.subsets], second[self.rests])
        least_halved = np.minimum.reduceat(halved, self.starts)
        complete = alone[self.subsets] + least_halved[_runs(len(self.tables))].sum(0)
        return np.minimum.reduceat(complete, self.starts), halved, complete

    def _place(self, ranks: RankRange, calls: int) -> dict[int, RankRange]:
        """Return the ranks of a set of calls on a range."""
        _, halved, complete = self.ends(ranks)
        pair = self._best_pair(complete, calls)
        places = {call: ranks for call in range(len(self.tables)) if self.subsets[pair] >> call & 1}
        for run in filter(None, _runs(len(self.tables))[:, pair]):
            split = self._best_pair(halved, run)
            parts = (self.subsets[split], self.rests[split])
            for half, part in zip(self.ranges.halves(ranks), parts, strict=True):
                places |= self._place(half, part) if part else {}
        return places

    def _best_pair(self, ends: np.ndarray, calls: int) -> int:
        """Return the pair of a set and a subset that ends first, among those of ``calls``."""
        pairs = slice(self.starts[calls], [*self.starts, len(ends)][calls + 1])
        return int(self.starts[calls] + np.argmin(ends[pairs]))


@cache
def _members(calls: int) -> np.ndarray:
    """Return [sets, calls]: 1 where a set has a call."""
    return (np.arange(1 << calls)[:, None] >> np.arange(calls) & 1).astype(float)


@cache
def _splits(calls: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all pairs of a set of calls and a subset, one set after the other: the subsets, and the other calls of the sets; and
    where each set's pairs begin."""
    sets = np.arange(1 << calls, dtype=np.int32)
    set_of_pair, rests = np.nonzero(sets & ~sets[:, None] == 0)
    return set_of_pair - rests, rests, np.searchsorted(set_of_pair, sets)


@cache
def _runs(calls: int) -> np.ndarray:
    """Return [calls + 1, pairs]: the runs into which the subset of each pair of :func:`_splits` splits the other calls."""
    subsets, rests, _ = _splits(calls)
    run = np.zeros(len(subsets), dtype=np.int64)
    pairs = np.arange(len(subsets))
    runs = np.zeros((calls + 1, len(subsets)), dtype=np.int64)
    for call in range(calls):
        runs[run, pairs] |= rests & 1 << call
        run += subsets >> call & 1
    return runs
