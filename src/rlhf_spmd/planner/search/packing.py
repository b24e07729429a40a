"""Calls onto meshes such that a phase of a step ends soonest: branch and bound over meshes, given the seconds on each. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from rlhf_spmd.planner.meshes import RankRanges
from rlhf_spmd.planner.problem import Problem, RankRange
from rlhf_spmd.planner.search.loads import Loads
from rlhf_spmd.planner.simulate import start_times

Table = tuple[tuple[int, float], ...]  # (size, the fewest seconds on as many ranks)
Fixed = Mapping[int, tuple[RankRange, float]]
T = TypeVar("T")


def phases(problem: Problem) -> list[range]:
    """Runs of calls of which each call waits for all of those before the run: a step takes as long as its phases one after the other.
    One run where generation is ahead, which has no such cut."""
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
class Effort:
    """Schedules computed, and when to stop."""

    until: float
    evaluations: int = 0

    def spend(self) -> None:
        self.evaluations += 1
        if self.evaluations % 256 == 0 and time.perf_counter() > self.until:
            raise OutOfTimeError


class Phase:
    """One of :func:`phases`. Of the calls that its methods are given it looks at its own."""

    def __init__(self, problem: Problem, nodes: range, meshes: RankRanges, effort: Effort) -> None:
        self.problem, self.nodes, self.meshes, self._effort = problem, nodes, meshes, effort
        self._known: dict[object, tuple[float, float]] = {}  # a lower bound, and a packing's seconds
        self._witnesses: dict[tuple[int, ...], list[dict[int, RankRange]]] = {}
        self.patience = 0 if problem.ahead else 20_000  # schedules for a bound

    def bound(self, fixed: Fixed, free: Mapping[int, Table], floor: float, budget: float) -> float:
        """The fewest seconds, from ``floor`` to ``budget``, where free calls may take any mesh for the seconds of its size.

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
            upper = min([upper, *(packing.ends(meshes) for meshes in witnesses)])
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
        """The best known packing of these calls, empty where there is none."""
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
        """The fewest seconds below ``budget`` and the meshes of the free calls, or ``budget`` and None.

        ``seconds_on`` says more than the tables, whose seconds it never goes below; ``taken``: meshes that it depends on.
        """
        return _Packing(self, self._own(fixed), self._own(free), budget, seconds_on, taken).run()

    def _own(self, calls: Mapping[int, T]) -> dict[int, T]:
        return {node: calls[node] for node in self.nodes if node in calls}

    def start_times(self, meshes: Sequence[RankRange | None], seconds: Sequence[float], until: float = math.inf) -> float:
        self._effort.spend()
        if self._effort.evaluations > until:
            raise _OutOfPatienceError
        return start_times(self.problem, self.nodes, meshes, seconds)[1]


class _Packing:
    """Depth first, the call with most work first, of its meshes the one with the earliest end first. A branch ends where its calls
    alone, the others taking no ranks, the ranks' seconds that all need together, or the least load of the busiest rank reach the best
    found."""

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
        self._meshes: list[RankRange | None] = [None] * size
        self._seconds = [0.0] * size
        for node, (mesh, seconds) in fixed.items():
            self._meshes[node], self._seconds[node] = mesh, seconds
        for node, table in free.items():
            self._seconds[node] = min((seconds for _, seconds in table), default=math.inf)
        self._area = sum(mesh.count * seconds for mesh, seconds in fixed.values())
        self._order = sorted(free, key=lambda node: -self._least(node, math.inf))
        self._best = budget
        self._chosen: dict[int, RankRange] | None = None
        self._loads: dict[int, Loads] = {}  # of the calls from each depth on

    def _least(self, node: int, below: float) -> float:
        """Ranks times seconds that a call needs at least if it is to take less than so many seconds."""
        return min((size * seconds for size, seconds in self._free[node] if seconds < below), default=math.inf)

    def least_area(self) -> float:
        """The fewest seconds T of all ranks together that hold the ranks' seconds which each call needs if it is to end within T."""
        whole = len(self._phase.problem.memory)
        steps = sorted({seconds for table in self._free.values() for _, seconds in table})
        value = max(self._seconds)
        if value < self._best:
            value = self._phase.start_times(self._meshes, self._seconds)
        while value < self._best:
            within = math.nextafter(value * (1 + 1e-12), math.inf)
            need = (self._area + sum(self._least(node, within) for node in self._order)) / whole
            if need <= within:
                break
            value = min([need, *(seconds for seconds in steps if seconds > within)])
        return value

    def least_load(self, depth: int = 0) -> float:
        """Of the calls from ``depth`` on, beside those that have a mesh."""
        if depth not in self._loads:
            tables = [dict(table) for node, table in self._free.items() if node in self._order[depth:]]
            self._loads[depth] = Loads(self._phase.meshes, tables, not self._phase.problem.ahead)
        return self._loads[depth].least([(mesh, its) for mesh, its in zip(self._meshes, self._seconds, strict=True) if mesh])

    def of_nodes(self) -> list[dict[int, RankRange]]:
        """The best packing of the free calls onto nodes of the tree of halves, where nothing stands in their way."""
        if self._phase.problem.ahead or any(self._meshes):
            return []
        packing = Loads(self._phase.meshes, [dict(table) for table in self._free.values()], True, nodes_only=True).packing()
        return [{node: packing[number] for number, node in enumerate(self._free)}] if packing else []

    def ends(self, meshes: Mapping[int, RankRange]) -> float:
        """Of a packing of the free calls."""
        its, seconds = list(self._meshes), list(self._seconds)
        for node, mesh in meshes.items():
            its[node], seconds[node] = mesh, dict(self._free[node]).get(mesh.count, math.inf)
        return self._phase.start_times(its, seconds) if max(seconds) < self._best else math.inf

    def run(self, floor: float = -1.0, until: float = math.inf) -> tuple[float, dict[int, RankRange] | None]:
        """Ends with the first packing that ends by ``floor``."""
        self._until, self._floor = until, floor
        if max(self._seconds) < self._best:
            value = self._phase.start_times(self._meshes, self._seconds, until)
            if value < self._best:
                self._descend(0, self._area, value)
        return self._best, self._chosen

    def _descend(self, depth: int, area: float, value: float) -> None:
        if depth == len(self._order):
            self._best, self._chosen = value, {node: mesh for node in self._order if (mesh := self._meshes[node])}
            return
        node, alone = self._order[depth], self._seconds[self._order[depth]]
        if 0 < depth <= len(self._order) - 3 and self.least_load(depth) >= self._best:
            return
        whole = len(self._phase.problem.memory)
        rest = area + sum(self._least(other, self._best) for other in self._order[depth + 1 :])
        taken = self._taken.union(mesh for mesh in self._meshes if mesh)
        branches = []
        for size, least in self._free[node]:
            if least >= self._best or rest + size * least >= self._best * whole:
                continue
            for mesh in self._phase.meshes.places(size, taken):
                seconds = self._seconds_on(node, mesh) if self._seconds_on else least
                if seconds >= self._best or rest + size * seconds >= self._best * whole:
                    continue
                self._meshes[node], self._seconds[node] = mesh, seconds
                end = self._phase.start_times(self._meshes, self._seconds, self._until)
                if end < self._best:
                    branches.append((end, size * seconds, mesh, seconds))
        for end, its, mesh, seconds in sorted(branches):
            if end >= self._best or self._best <= self._floor:
                break
            self._meshes[node], self._seconds[node] = mesh, seconds
            self._descend(depth + 1, area + its, end)
        self._meshes[node], self._seconds[node] = None, alone
