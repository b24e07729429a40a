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
    """Returns the calls of a step by phase. Each call waits for all calls of earlier phases.

    If generation runs ahead, steps overlap and there is one phase.
    """
    closure: list[set[int]] = []
    for call in problem.calls:
        closure.append(set(call.after).union(*(closure[before] for before in call.after)))
    size = len(problem.calls)
    cuts = [cut for cut in range(1, size) if all(closure[node] >= set(range(cut)) for node in range(cut, size))]
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

    def __init__(self, problem: Problem, nodes: range, ranges: RankRanges, effort: SearchBudget) -> None:
        self.problem, self.nodes, self.ranges, self._effort = problem, nodes, ranges, effort
        self._known: dict[object, tuple[float, float]] = {}  # a lower bound, and a packing's seconds
        self._witnesses: dict[tuple[int, ...], list[dict[int, RankRange]]] = {}
        self.patience = 0 if problem.ahead else 20_000  # schedules for a bound

    def bound(self, fixed: Fixed, free: Mapping[int, Table], floor: float, budget: float) -> float:
        """Returns a lower bound of the phase's seconds, limited to ``floor`` .. ``budget``: free calls may take any range of a size.

        Packings that were found earlier are tried first: one that ends by ``floor`` saves the search.
        """
        fixed, free = self._own(fixed), self._own(free)
        key = (tuple(fixed.items()), tuple(free.items()))
        lower, upper = self._known.get(key, (-1.0, math.inf))
        if lower >= 0 and max(lower, floor) >= min(budget, upper):
            return min(max(lower, floor), budget)
        packing = _Packing(self, fixed, free, budget)
        witnesses = self._witnesses.setdefault(tuple(free), [])
        if lower < 0:
            lower = packing.least_area()
            if free and max(lower, floor) < budget:
                lower = max(lower, packing.least_load())
                witnesses[:] = [*packing.of_nodes(), *witnesses[:5]]
        if max(lower, floor) < min(budget, upper):
            upper = min([upper, *(packing.ends(ranges) for ranges in witnesses)])
        is_worth = budget < math.inf or not witnesses  # before there is a plan any packing will do
        if is_worth and max(lower, floor) < min(budget, upper):
            try:
                found, chosen = packing.run(max(lower, floor), self._effort.evaluations + self.patience)
                if chosen is not None:
                    upper = min(upper, found)
                    witnesses[:] = [chosen, *witnesses[:5]]
                lower = max(lower, found) if found > max(lower, floor) else lower
            except _OutOfPatienceError:
                upper = lower
        self._known[key] = lower, upper
        return min(max(lower, floor), budget)

    def packed(self, fixed: Fixed, free: Mapping[int, Table]) -> Mapping[int, RankRange]:
        """Returns the best known packing of these calls; empty if none is known."""
        packing = _Packing(self, self._own(fixed), self._own(free), math.inf)
        return min(self._witnesses.get(tuple(self._own(free)), ()), key=packing.ends, default={})

    def pack(
        self,
        fixed: Fixed,
        free: Mapping[int, Table],
        budget: float,
        seconds_on: Callable[[int, RankRange], float],
        taken: frozenset[RankRange],
    ) -> tuple[float, dict[int, RankRange] | None]:
        """Returns the fewest seconds below ``budget`` and the ranges of the free calls; or ``budget`` and None.

        ``seconds_on``: seconds of a call on a range, never fewer than the table has. ``taken``: ranges that it depends on.
        """
        return _Packing(self, self._own(fixed), self._own(free), budget, seconds_on, taken).run()

    def _own(self, calls: Mapping[int, T]) -> dict[int, T]:
        return {node: calls[node] for node in self.nodes if node in calls}

    def start_times(self, ranges: Sequence[RankRange | None], seconds: Sequence[float], until: float = math.inf) -> float:
        self._effort.spend()
        if self._effort.evaluations > until:
            raise _OutOfPatienceError
        return start_times(self.problem, self.nodes, ranges, seconds)[1]


class _Packing:
    """Searches depth first: the call with most work first, on the range where it ends earliest first.

    Three bounds cut a branch that cannot beat the best packing: the schedule of its calls if the others take no ranks; the ranks'
    seconds that all calls need together; and :class:`LoadBound`.
    """

    def __init__(
        self,
        phase: Phase,
        fixed: Fixed,
        free: Mapping[int, Table],
        budget: float,
        seconds_on: Callable[[int, RankRange], float] | None = None,
        taken: frozenset[RankRange] = frozenset(),
    ) -> None:
        self._phase, self._free, self._seconds_on, self._taken = phase, free, seconds_on, taken
        size = len(phase.problem.calls)
        self._ranges: list[RankRange | None] = [None] * size
        self._seconds = [0.0] * size
        for node, (ranks, seconds) in fixed.items():
            self._ranges[node], self._seconds[node] = ranks, seconds
        for node, table in free.items():
            self._seconds[node] = min((seconds for _, seconds in table), default=math.inf)
        self._area = sum(ranks.count * seconds for ranks, seconds in fixed.values())
        self._order = sorted(free, key=lambda node: -self._least(node, math.inf))
        self._best = budget
        self._chosen: dict[int, RankRange] | None = None
        self._loads: dict[int, LoadBound] = {}  # of the calls from each depth on

    def _least(self, node: int, below: float) -> float:
        """The fewest rank-seconds of a call that takes less than ``below`` seconds."""
        return min((size * seconds for size, seconds in self._free[node] if seconds < below), default=math.inf)

    def least_area(self) -> float:
        """The fewest seconds T in which all ranks together have the rank-seconds that calls need to end within T."""
        whole = len(self._phase.problem.memory)
        steps = sorted({seconds for table in self._free.values() for _, seconds in table})
        value = max(self._seconds)
        if value < self._best:
            value = self._phase.start_times(self._ranges, self._seconds)
        while value < self._best:
            within = math.nextafter(value * (1 + 1e-12), math.inf)
            need = (self._area + sum(self._least(node, within) for node in self._order)) / whole
            if need <= within:
                break
            value = min([need, *(seconds for seconds in steps if seconds > within)])
        return value

    def least_load(self, depth: int = 0) -> float:
        """:class:`LoadBound` of the calls from ``depth`` on, beside those that have ranks."""
        if depth not in self._loads:
            tables = [dict(table) for node, table in self._free.items() if node in self._order[depth:]]
            self._loads[depth] = LoadBound(self._phase.ranges, tables, not self._phase.problem.ahead)
        return self._loads[depth].least([(ranks, its) for ranks, its in zip(self._ranges, self._seconds, strict=True) if ranks])

    def of_nodes(self) -> list[dict[int, RankRange]]:
        """Returns the best packing of the free calls onto repeated halves of the ranks, if no other call has ranks."""
        if self._phase.problem.ahead or any(self._ranges):
            return []
        packing = LoadBound(self._phase.ranges, [dict(table) for table in self._free.values()], True, nodes_only=True).packing()
        return [{node: packing[number] for number, node in enumerate(self._free)}] if packing else []

    def ends(self, ranges: Mapping[int, RankRange]) -> float:
        """Returns when a packing of the free calls ends."""
        its, seconds = list(self._ranges), list(self._seconds)
        for node, ranks in ranges.items():
            its[node], seconds[node] = ranks, dict(self._free[node]).get(ranks.count, math.inf)
        return self._phase.start_times(its, seconds) if max(seconds) < self._best else math.inf

    def run(self, floor: float = -1.0, until: float = math.inf) -> tuple[float, dict[int, RankRange] | None]:
        """Stops at the first packing that ends by ``floor``."""
        self._until, self._floor = until, floor
        if max(self._seconds) < self._best:
            value = self._phase.start_times(self._ranges, self._seconds, until)
            if value < self._best:
                self._descend(0, self._area, value)
        return self._best, self._chosen

    def _descend(self, depth: int, area: float, value: float) -> None:
        if depth == len(self._order):
            self._best, self._chosen = value, {node: ranks for node in self._order if (ranks := self._ranges[node])}
            return
        node, alone = self._order[depth], self._seconds[self._order[depth]]
        if 0 < depth <= len(self._order) - 3 and self.least_load(depth) >= self._best:
            return
        whole = len(self._phase.problem.memory)
        rest = area + sum(self._least(other, self._best) for other in self._order[depth + 1 :])
        taken = self._taken.union(ranks for ranks in self._ranges if ranks)
        branches = []
        for size, least in self._free[node]:
            if least >= self._best or rest + size * least >= self._best * whole:
                continue
            for ranks in self._phase.ranges.distinct(size, taken):
                seconds = self._seconds_on(node, ranks) if self._seconds_on else least
                if seconds >= self._best or rest + size * seconds >= self._best * whole:
                    continue
                self._ranges[node], self._seconds[node] = ranks, seconds
                end = self._phase.start_times(self._ranges, self._seconds, self._until)
                if end < self._best:
                    branches.append((end, size * seconds, ranks, seconds))
        for end, its, ranks, seconds in sorted(branches):
            if end >= self._best or self._best <= self._floor:
                break
            self._ranges[node], self._seconds[node] = ranks, seconds
            self._descend(depth + 1, area + its, end)
        self._ranges[node], self._seconds[node] = None, alone


class LoadBound:
    """A lower bound of when calls end that wait only for ranks and for their order, by dynamic programming.

    The ranks are halved again and again; a *node* is one of these ranges.

    ``free``: the calls in program order, each a table size -> seconds. E(node, S), when the calls S can end on a node of the
    tree of halves, is the least over subsets A that take the node itself. Ranks run calls in program order, so a call on the
    node begins when both halves have ended what came before it. E is therefore the seconds of A, plus for each run R of other
    calls between them the least max(E(first half, .), E(second half, .)) over the ways to deal R to the halves. This is exact
    for ranges that are nodes.

    Without ``ordered`` the other calls count as one run: then E is the seconds of the busiest rank, a bound for overlapping
    steps, too. A range that is no node contains one of the root's halves, and a call there counts as a call on that half,
    unless ``nodes_only``.
    """

    def __init__(
        self, ranges: RankRanges, free: Sequence[Mapping[int, float]], ordered: bool, nodes_only: bool = False
    ) -> None:
        self.ranges, self.free, self.ordered = ranges, free, ordered
        self.subsets, self.rests, self.starts = _splits(len(free))
        self.inside = {half.count for half in halves(ranges.whole, ranges.local_size)} if ranges.whole.count > 1 else set()
        self.left = {ranks.count for ranks in ranges.left if not nodes_only}
        self.times, self.ends = cache(self._times), cache(self._ends)

    def least(self, fixed: Sequence[tuple[RankRange, float]] = ()) -> float:
        """Returns the least seconds together with the ``fixed`` calls, in any order; inf if there is no packing."""
        least = float(self._end(self.ranges.whole, fixed)[-1])
        return least if least < NEVER else math.inf

    def packing(self) -> dict[int, RankRange]:
        """Returns ranks by call with which the bound is reached; with ``nodes_only`` it is a schedule."""
        found: dict[int, RankRange] = {}
        if self.least() < math.inf:
            self._place(self.ranges.whole, (1 << len(self.free)) - 1, found)
        return found

    def _times(self, count: int) -> np.ndarray:
        left = self.left if count in self.inside else ()
        seconds = [min([table.get(count, NEVER), *(table.get(n, NEVER) for n in left)]) for table in self.free]
        return _members(len(self.free)) @ np.array(seconds) if self.free else np.zeros(1)

    def _end(self, ranks: RankRange, among: Sequence[tuple[RankRange, float]]) -> np.ndarray:
        """When each set of free calls can end on a node, beside those ``among`` that lie in it or around it."""
        load, partly = 0.0, []
        for other, seconds in among:
            if other.first <= ranks.first and ranks.end <= other.end:
                load += seconds
            elif other.overlaps(ranks):
                partly.append((other, seconds))
        if not partly:
            return load + self.ends(ranks.count)[0]
        first, second = (self._end(half, partly) for half in halves(ranks, self.ranges.local_size))
        below = np.minimum.reduceat(np.maximum(first[self.subsets], second[self.rests]), self.starts)
        return load + np.minimum.reduceat(self.times(ranks.count)[self.subsets] + below[self.rests], self.starts)

    def _ends(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For a node of ``count`` ranks: the least end of each set of calls; and for each pair of a set and a subset the end if
        the subset has the first half, and the end if the subset takes the node."""
        if count == 1:
            ends = self.times(1)
            return ends, np.full(len(self.subsets), NEVER), ends[self.subsets] + NEVER * (self.rests > 0)
        first, second = (self.ends(half.count)[0] for half in halves(RankRange(0, count), self.ranges.local_size))
        dealt = np.maximum(first[self.subsets], second[self.rests])
        below = np.minimum.reduceat(dealt, self.starts)
        others = below[_runs(len(self.free))].sum(0) if self.ordered else below[self.rests]
        taken = self.times(count)[self.subsets] + others
        return np.minimum.reduceat(taken, self.starts), dealt, taken

    def _place(self, ranks: RankRange, calls: int, found: dict[int, RankRange]) -> None:
        _, _, taken = self.ends(ranks.count)
        at = self._best(taken, calls)
        found |= {call: ranks for call in range(len(self.free)) if self.subsets[at] >> call & 1}
        for run in _runs(len(self.free))[:, at]:
            if run:
                at = self._best(self.ends(ranks.count)[1], run)
                for half, its in zip(halves(ranks, self.ranges.local_size), (self.subsets[at], self.rests[at]), strict=True):
                    if its:
                        self._place(half, its, found)

    def _best(self, ends: np.ndarray, calls: int) -> int:
        pairs = slice(self.starts[calls], [*self.starts, len(ends)][calls + 1])
        return int(self.starts[calls] + np.argmin(ends[pairs]))


@cache
def _members(calls: int) -> np.ndarray:
    """[sets, calls]: 1 where a set, as bits, has a call."""
    return (np.arange(1 << calls)[:, None] >> np.arange(calls) & 1).astype(float)


@cache
def _splits(calls: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All subsets of each set of calls and what they leave, as bits, one set after the other; and where each set's subsets
    begin."""
    sets = np.arange(1 << calls, dtype=np.int32)
    wholes, rests = np.nonzero(sets & ~sets[:, None] == 0)
    return wholes - rests, rests, np.searchsorted(wholes, sets)


@cache
def _runs(calls: int) -> np.ndarray:
    """[calls + 1, pairs]: what each subset of :func:`_splits` leaves, in runs between its calls."""
    subsets, rests, _ = _splits(calls)
    run, pairs = np.zeros(len(subsets), dtype=np.int64), np.arange(len(subsets))
    runs = np.zeros((calls + 1, len(subsets)), dtype=np.int64)
    for call in range(calls):
        runs[run, pairs] |= rests & 1 << call
        run += subsets >> call & 1
    return runs
