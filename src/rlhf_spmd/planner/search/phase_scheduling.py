"""Schedules the calls of a phase on ranges of ranks so that the phase ends soonest: branch and bound. Pure.

A *phase* is a group of calls between two points of a step for which everything waits. PPO has three, as no call of a phase can begin
before all calls of the phase before have ended:

- phase 1: ``actor.generate_sequences``
- phase 2: ``critic.compute_values``, ``reference.compute_ref_log_prob``
- phase 3: ``critic.update_critic``, ``actor.update_actor``

So the seconds of a step are the sum over its phases, and each phase can be searched by itself (:func:`phases`). A *packing* gives
the calls of a phase their ranks. On 8 ranks, phase 1 may have all of them for generation, and phase 2 may have the critic on
ranks 0-3 and the reference on ranks 4-7 at the same time. A call is *fixed* if its ranks are already decided, and *free* if the
packing chooses them. A :data:`Table` has the seconds of a free call on each number of ranks.

:class:`Phase` bounds a phase from below while roles have no home yet, and packs it when all have one. Both are the search of
:class:`_Packing`, which proves its result because it tries all ranges but those that a bound or a symmetry excludes. The search
of a bound may take long, so it has a limit. :class:`HalvesPacking` gives it a good packing to begin with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeVar

import numpy as np

from rlhf_spmd.planner.problem import Problem, RankRange, start_times
from rlhf_spmd.planner.search.candidates import RankRanges, halves

Table = tuple[tuple[int, float], ...]  # (size, the fewest seconds on as many ranks)
Fixed = Mapping[int, tuple[RankRange, float]]
T = TypeVar("T")
NEVER = 1e300  # seconds of a call without an option: finite, so that sums stay numbers


def phases(problem: Problem) -> list[range]:
    """Return the calls of a step by phase. Each call waits for all calls of earlier phases.

    If generation runs ahead, steps overlap and there is one phase.
    """
    closure: list[set[int]] = []
    for call in problem.calls:
        closure.append(set(call.after).union(*(closure[before] for before in call.after)))
    size = len(problem.calls)
    cuts = [cut for cut in range(1, size) if all(closure[call_index] >= set(range(cut)) for call_index in range(cut, size))]
    edges = [0, *([] if problem.ahead else cuts), size]
    return [range(first, end) for first, end in pairwise(edges)]


class OutOfTimeError(Exception):
    """The search's time is up."""


class _OutOfPatienceError(Exception):
    """A bound is not worth more schedules."""


@dataclass
class SearchBudget:
    """Counts schedules that were computed, and says when to stop."""

    until: float
    evaluations: int = 0

    def spend(self) -> None:
        self.evaluations += 1
        if self.evaluations % 256 == 0 and time.perf_counter() > self.until:
            raise OutOfTimeError


class Phase:
    """One of :func:`phases`. Its methods take all calls and look at the phase's own."""

    def __init__(self, problem: Problem, call_indices: range, ranges: RankRanges, effort: SearchBudget) -> None:
        self.problem, self.call_indices = problem, call_indices
        self.ranges, self._effort = ranges, effort
        self._limits: dict[object, tuple[float, float]] = {}  # by calls: a lower bound, and the seconds of a packing
        self._packings: dict[tuple[int, ...], list[dict[int, RankRange]]] = {}  # by free calls: the last that were good
        self.patience = 0 if problem.ahead else 20_000  # schedules for a bound

    def bound(self, fixed: Fixed, free: Mapping[int, Table], floor: float, budget: float) -> float:
        """Return a lower bound of the phase's seconds, limited to ``floor`` .. ``budget``: free calls may take any range of a size.

        The bound is the least time in which the ranks can do the work, raised to the seconds of the best packing by
        :class:`_Packing`'s search if that ends within ``patience`` schedules. A known packing that ends by ``floor`` saves the
        search, because nothing above ``floor`` could be proved.
        """
        fixed, free = self._of_phase(fixed), self._of_phase(free)
        key = (tuple(fixed.items()), tuple(free.items()))
        lower, upper = self._limits.get(key, (-1.0, math.inf))
        if lower >= 0 and max(lower, floor) >= min(budget, upper):
            return min(max(lower, floor), budget)
        packing = _Packing(self, fixed, free, budget)
        packings = self._packings.setdefault(tuple(free), [])
        if lower < 0:
            lower = packing.least_seconds()
            if free and not fixed and not self.problem.ahead and max(lower, floor) < budget:
                packings[:] = [*self._onto_halves(free), *packings[:5]]
        if max(lower, floor) < min(budget, upper):
            upper = min([upper, *(packing.ends(ranges) for ranges in packings)])
        is_worth = budget < math.inf or not packings  # before there is a plan any packing will do
        if is_worth and max(lower, floor) < min(budget, upper):
            try:
                seconds, ranges = packing.run(max(lower, floor), self._effort.evaluations + self.patience)
                if ranges is not None:
                    upper = min(upper, seconds)
                    packings[:] = [ranges, *packings[:5]]
                lower = max(lower, seconds) if seconds > max(lower, floor) else lower
            except _OutOfPatienceError:
                upper = lower
        self._limits[key] = lower, upper
        return min(max(lower, floor), budget)

    def _onto_halves(self, free: Mapping[int, Table]) -> list[dict[int, RankRange]]:
        """Return the best packing of the free calls onto repeated halves of the ranks, if there is one."""
        packing = HalvesPacking(self.ranges, [dict(table) for table in free.values()]).packing()
        return [{call_index: packing[index] for index, call_index in enumerate(free)}] if packing else []

    def packed(self, fixed: Fixed, free: Mapping[int, Table]) -> Mapping[int, RankRange]:
        """Return the best known packing of these calls; empty if none is known."""
        packing = _Packing(self, self._of_phase(fixed), self._of_phase(free), math.inf)
        return min(self._packings.get(tuple(self._of_phase(free)), ()), key=packing.ends, default={})

    def pack(
        self,
        fixed: Fixed,
        free: Mapping[int, Table],
        budget: float,
        seconds_on: Callable[[int, RankRange], float],
        occupied: frozenset[RankRange],
    ) -> tuple[float, dict[int, RankRange] | None]:
        """Return the fewest seconds below ``budget`` and the ranges of the free calls; or ``budget`` and None.

        ``seconds_on``: seconds of a call on a range, never fewer than the table has. ``occupied``: ranges that it depends on.
        """
        return _Packing(self, self._of_phase(fixed), self._of_phase(free), budget, seconds_on, occupied).run()

    def _of_phase(self, calls: Mapping[int, T]) -> dict[int, T]:
        return {call_index: calls[call_index] for call_index in self.call_indices if call_index in calls}

    def end(self, ranges: Sequence[RankRange | None], seconds: Sequence[float], until: float = math.inf) -> float:
        """Return when the phase ends. Raises OutOfTimeError, and _OutOfPatienceError after ``until`` schedules of the search."""
        self._effort.spend()
        if self._effort.evaluations > until:
            raise _OutOfPatienceError
        return start_times(self.problem, self.call_indices, ranges, seconds)[1]


class _Packing:
    """Searches depth first: the call with most work first, on the range where it ends earliest first.

    Two bounds cut a branch that cannot beat the best packing. Both hold for all of its packings:

    - the end of the calls that have ranks, if the others take their least seconds and no ranks
    - the rank-seconds of all calls, the least of those without ranks, over all ranks
    """

    def __init__(
        self,
        phase: Phase,
        fixed: Fixed,
        free: Mapping[int, Table],
        budget: float,
        seconds_on: Callable[[int, RankRange], float] | None = None,
        occupied: frozenset[RankRange] = frozenset(),
    ) -> None:
        self._phase, self._free = phase, free
        self._seconds_on, self._occupied = seconds_on, occupied
        self._num_ranks = phase.problem.size
        self._ranges: list[RankRange | None] = [None] * len(phase.problem.calls)
        self._seconds = [0.0] * len(phase.problem.calls)
        for call_index, (ranks, seconds) in fixed.items():
            self._ranges[call_index], self._seconds[call_index] = ranks, seconds
        for call_index, table in free.items():
            self._seconds[call_index] = min((seconds for _, seconds in table), default=math.inf)
        self._area = sum(ranks.count * seconds for ranks, seconds in fixed.values())
        self._order = sorted(free, key=lambda call_index: -self._least_area(call_index, math.inf))
        self._best = budget
        self._chosen: dict[int, RankRange] | None = None

    def _least_area(self, call_index: int, below: float) -> float:
        """Return the fewest rank-seconds of a call that takes less than ``below`` seconds."""
        return min((size * seconds for size, seconds in self._free[call_index] if seconds < below), default=math.inf)

    def least_seconds(self) -> float:
        """Return the fewest seconds T in which all ranks together have the rank-seconds that calls need to end within T."""
        table_seconds = sorted({seconds for table in self._free.values() for _, seconds in table})
        bound = max(self._seconds)
        if bound < self._best:
            bound = self._phase.end(self._ranges, self._seconds)
        while bound < self._best:
            within = math.nextafter(bound * (1 + 1e-12), math.inf)
            need = (self._area + sum(self._least_area(call_index, within) for call_index in self._order)) / self._num_ranks
            if need <= within:
                break
            bound = min([need, *(seconds for seconds in table_seconds if seconds > within)])
        return bound

    def ends(self, packing: Mapping[int, RankRange]) -> float:
        """Return when a packing of the free calls ends."""
        ranges, seconds = list(self._ranges), list(self._seconds)
        for call_index, ranks in packing.items():
            ranges[call_index], seconds[call_index] = ranks, dict(self._free[call_index]).get(ranks.count, math.inf)
        return self._phase.end(ranges, seconds) if max(seconds) < self._best else math.inf

    def run(self, floor: float = -1.0, until: float = math.inf) -> tuple[float, dict[int, RankRange] | None]:
        """Return the best packing's end and ranges, or the budget and None. The first packing that ends by ``floor`` is good enough."""
        self._until, self._floor = until, floor
        if max(self._seconds) < self._best:
            end = self._phase.end(self._ranges, self._seconds, until)
            if end < self._best:
                self._descend(0, self._area, end)
        return self._best, self._chosen

    def _descend(self, depth: int, area: float, end: float) -> None:
        """Try all ranges of the call at ``depth`` of the order. ``area``: rank-seconds of the calls that have ranks."""
        if depth == len(self._order):
            self._best = end
            self._chosen = {call_index: ranks for call_index in self._order if (ranks := self._ranges[call_index])}
            return
        call_index = self._order[depth]
        without_ranks = self._seconds[call_index]
        rest = area + sum(self._least_area(other, self._best) for other in self._order[depth + 1 :])
        occupied = self._occupied.union(ranks for ranks in self._ranges if ranks)
        branches = []
        for size, least in self._free[call_index]:
            if least >= self._best or rest + size * least >= self._best * self._num_ranks:
                continue
            for ranks in self._phase.ranges.distinct(size, occupied):
                seconds = self._seconds_on(call_index, ranks) if self._seconds_on else least
                if seconds >= self._best or rest + size * seconds >= self._best * self._num_ranks:
                    continue
                self._ranges[call_index], self._seconds[call_index] = ranks, seconds
                branch_end = self._phase.end(self._ranges, self._seconds, self._until)
                if branch_end < self._best:
                    branches.append((branch_end, size * seconds, ranks, seconds))
        for branch_end, branch_area, ranks, seconds in sorted(branches):
            if branch_end >= self._best or self._best <= self._floor:
                break
            self._ranges[call_index], self._seconds[call_index] = ranks, seconds
            self._descend(depth + 1, area + branch_area, branch_end)
        self._ranges[call_index], self._seconds[call_index] = None, without_ranks


class HalvesPacking:
    """The best packing of calls that wait only for ranks and for their order onto repeated halves of the ranks, by dynamic
    programming.

    The ranks are halved again and again. Ranges of equal size are alike.

    ``tables``: the calls in program order, size -> seconds. E(range, S), when the calls S can end on a range, is the least over
    subsets A that run on the complete range. Ranks run calls in program order, so a call on the range begins when both halves have
    ended what came before it. E is therefore the seconds of A, plus for each run R of other calls between them the least
    max(E(first half, .), E(second half, .)) over the ways to deal R to the halves. Sets of calls are bits of a number.
    """

    def __init__(self, ranges: RankRanges, tables: Sequence[Mapping[int, float]]) -> None:
        self.ranges, self.tables = ranges, tables
        self.subsets, self.rests, self.starts = _splits(len(tables))
        self.ends = cache(self._ends)

    @property
    def seconds(self) -> float:
        """Return the seconds until the last call ends; inf if there is no packing."""
        end = float(self.ends(self.ranges.all_ranks.count)[0][-1])
        return end if end < NEVER else math.inf

    def packing(self) -> dict[int, RankRange]:
        """Return the ranks of each call, by its index; empty if there is no packing."""
        if self.seconds == math.inf:
            return {}
        return self._place(self.ranges.all_ranks, (1 << len(self.tables)) - 1)

    def _ends(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return for a range of ``count`` ranks: the least end of each set of calls; and for each pair of a set and a subset the end if
        the subset has the first half, and the end if the subset runs on the complete range."""
        alone = _members(len(self.tables)) @ np.array([table.get(count, NEVER) for table in self.tables])
        if count == 1:
            return alone, np.full(len(self.subsets), NEVER), alone[self.subsets] + NEVER * (self.rests > 0)
        first, second = (self.ends(half.count)[0] for half in halves(RankRange(0, count), self.ranges.local_size))
        dealt = np.maximum(first[self.subsets], second[self.rests])
        below = np.minimum.reduceat(dealt, self.starts)
        together = alone[self.subsets] + below[_runs(len(self.tables))].sum(0)
        return np.minimum.reduceat(together, self.starts), dealt, together

    def _place(self, ranks: RankRange, calls: int) -> dict[int, RankRange]:
        """Return the ranks of a set of calls on a range."""
        _, dealt_ends, together = self.ends(ranks.count)
        pair = self._best(together, calls)
        places = {call: ranks for call in range(len(self.tables)) if self.subsets[pair] >> call & 1}
        for run in filter(None, _runs(len(self.tables))[:, pair]):
            dealt = self._best(dealt_ends, run)
            for half, part in zip(halves(ranks, self.ranges.local_size), (self.subsets[dealt], self.rests[dealt]), strict=True):
                places |= self._place(half, part) if part else {}
        return places

    def _best(self, ends: np.ndarray, calls: int) -> int:
        """Return the pair of a set and a subset that ends first, among those of ``calls``."""
        pairs = slice(self.starts[calls], [*self.starts, len(ends)][calls + 1])
        return int(self.starts[calls] + np.argmin(ends[pairs]))


@cache
def _members(calls: int) -> np.ndarray:
    """Return [sets, calls]: 1 where a set has a call."""
    return (np.arange(1 << calls)[:, None] >> np.arange(calls) & 1).astype(float)


@cache
def _splits(calls: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return all subsets of each set of calls and what they leave, one set after the other; and where each set's subsets begin."""
    sets = np.arange(1 << calls, dtype=np.int32)
    wholes, rests = np.nonzero(sets & ~sets[:, None] == 0)
    return wholes - rests, rests, np.searchsorted(wholes, sets)


@cache
def _runs(calls: int) -> np.ndarray:
    """Return [calls + 1, pairs]: what each subset of :func:`_splits` leaves, in runs between its calls."""
    subsets, rests, _ = _splits(calls)
    run, pairs = np.zeros(len(subsets), dtype=np.int64), np.arange(len(subsets))
    runs = np.zeros((calls + 1, len(subsets)), dtype=np.int64)
    for call in range(calls):
        runs[run, pairs] |= rests & 1 << call
        run += subsets >> call & 1
    return runs
