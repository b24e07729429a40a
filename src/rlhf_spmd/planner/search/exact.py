"""Finds the best plan and proves it: best-first search over the homes of roles, then branch and bound for movable calls. Pure.

Terms are those of ``problem.py``. Only homes need memory all the time. Once all homes are chosen, a movable call has one
fastest option on
each range of ranks: the fastest that fits into the memory left there. From then on only time connects the calls, and the phases of a
step (``phase_scheduling``) can be packed one by one.

While some homes are open, the lower bound is a sum over phases: the fewest seconds in which each can be packed if the open roles
need no memory. Positions that differ only by a symmetry of the cluster are tried once.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import count

from rlhf_spmd.planner.problem import Choice, Plan, Problem, RankRange, simulate
from rlhf_spmd.planner.search import SearchResult, no_plan
from rlhf_spmd.planner.search.candidates import CandidateTables, Held, RankRanges, fill
from rlhf_spmd.planner.search.phase_scheduling import Fixed, OutOfTimeError, Phase, SearchBudget, Table, phases

Homes = tuple[Choice, ...]  # of the first roles, in the order of the search
Parts = tuple[float, ...]  # seconds, a lower bound for each phase
INFINITE = float("inf")


def search(problem: Problem, limit: float = 60.0, seed: int = 0) -> SearchResult:
    """Returns the best plan, or after ``limit`` seconds the best plan so far and the bound that is proved by then. It never
    stops without a plan. ``seed`` is not read. Raises NoPlanError if no plan fits."""
    return _Exact(problem, limit).run()


class _Exact:
    """One search. ``open``: entries (priority, bounds of phases, homes, ranks of the next role's home or None)."""

    def __init__(self, problem: Problem, limit: float) -> None:
        self.problem, self.started, self.limit = problem, time.perf_counter(), limit
        self.ranges, self.tables = RankRanges(problem), CandidateTables(problem)
        self.effort = SearchBudget(INFINITE)
        self.phases = [Phase(problem, nodes, self.ranges, self.effort) for nodes in phases(problem)]
        self.best = INFINITE
        self.plan: Plan | None = None
        self.roles = sorted(problem.homes, key=lambda role: -problem.least_held[role])
        self.numbers = count()
        self.last_free: dict[Homes, dict[int, Table]] = {}  # of the last homes
        self.open: list[tuple[tuple[float, float, int], Parts, Homes, RankRange | None]] = []

    def run(self) -> SearchResult:
        """Deepest first until there is a plan, then best first."""
        if self.problem.ahead:  # steps that do not overlap fall into phases, and their best plan takes no longer where they do
            apart = search(replace(self.problem, ahead=0, generating=frozenset()), self.limit / 2)
            self.plan, self.best = apart.plan, simulate(self.problem, apart.plan).seconds
            self.effort.evaluations = apart.evaluations
        parts = self.raised((0.0,) * len(self.phases), {}, self.free(()))
        if parts:
            self.push(parts, (), None)
        bound = sum(parts or ())
        if self.plan:
            self.effort.until = self.started + self.limit
        try:
            while self.open:
                _, parts, homes, ranks = heapq.heappop(self.open)
                had = self.plan
                if had:
                    bound = sum(parts)
                    if bound >= self.best:
                        break
                self.expand(parts, homes, ranks)
                if self.plan and not had:
                    self.effort.until = self.started + self.limit
                    waiting, self.open = self.open, []
                    for entry in waiting:
                        self.push(*entry[1:])
            bound = self.best
        except OutOfTimeError:
            pass
        if self.plan is None:
            raise no_plan(self.problem, "")
        bound = min(bound, self.best)
        seconds = time.perf_counter() - self.started
        return SearchResult(self.plan, self.best, bound, bound == self.best, self.effort.evaluations, seconds)

    def push(self, parts: Parts, homes: Homes, ranks: RankRange | None) -> None:
        bound, depth = sum(parts), -2 * len(homes) - (ranks is not None)
        if bound < self.best:
            first = (bound, depth) if self.plan else (depth, bound)
            heapq.heappush(self.open, ((*first, next(self.numbers)), parts, homes, ranks))

    def expand(self, parts: Parts, homes: Homes, ranks: RankRange | None) -> None:
        if len(homes) == len(self.roles):
            self.finish(parts, homes)
            return
        if ranks is None:
            self.complete(parts, homes)
        role = self.roles[len(homes)]
        tied = self.problem.tied[role]
        held, fixed, free = self.held(homes), self.fixed(homes), self.free(homes)
        rest = {node: table for node, table in free.items() if node not in tied}
        if ranks is None:
            taken = frozenset(home.rank_range for home in homes)
            for size in self.ranges.by_size:
                for there in self.ranges.distinct(size, taken):
                    room = self.tables.room(held, there)
                    best = {node: (there, self.tables.at_home(node, size).within(room)[0]) for node in tied}
                    if raised := self.raised(parts, fixed | best, rest):
                        self.push(raised, homes, there)
            return
        for option in self.tables.homes(role, ranks.count):
            its = {node: (ranks, self.problem.calls[node].options[option].seconds) for node in tied}
            more = (*homes, Choice(ranks, option))
            raised = self.raised(parts, fixed | its, rest) if self.fits(more) else None
            if raised and (raised := self.raised(raised, fixed | its, self.free(more))):
                self.push(raised, more, None)

    def raised(self, parts: Parts, fixed: Fixed, free: Mapping[int, Table]) -> Parts | None:
        """The bounds of phases with these calls, or None if they reach the best plan's seconds."""
        found = list(parts)
        for number, phase in enumerate(self.phases):
            budget = self.best - (sum(found) - found[number])
            found[number] = phase.bound(fixed, free, found[number], budget)
            if found[number] >= budget:
                return None
        return tuple(found)

    def decided(self, homes: Homes) -> dict[str, Choice]:
        return dict(zip(self.roles, homes, strict=False))

    def held(self, homes: Homes) -> Held:
        return tuple((home.rank_range, self.tables.needs(role, home.option)[0]) for role, home in self.decided(homes).items())

    def fits(self, homes: Homes) -> bool:
        held, needs, decided = self.held(homes), self.tables.needs, self.decided(homes)
        return all(needs(role, home.option)[1] <= self.tables.room(held, home.rank_range) for role, home in decided.items())

    def fixed(self, homes: Homes) -> dict[int, tuple[RankRange, float]]:
        calls, tied = self.problem.calls, self.problem.tied
        at = self.decided(homes).items()
        return {node: (home.rank_range, calls[node].options[home.option].seconds) for role, home in at for node in tied[role]}

    def free(self, homes: Homes) -> dict[int, Table]:
        """For each undecided call the fewest seconds on each number of ranks, wherever most memory is left."""
        if homes in self.last_free:
            return self.last_free[homes]
        rooms, decided = self.tables.most_room(self.held(homes), self.ranges), self.decided(homes)
        found = {}
        for node, call in enumerate(self.problem.calls):
            movable = node in self.problem.movable
            if call.role in decided and not movable:
                continue
            table = []
            for size in self.ranges.by_size:
                steps = (
                    self.tables.movable_anywhere(node, decided.get(call.role), size)
                    if movable
                    else [self.tables.at_home(node, size)]
                )
                if (seconds := min(one.within(rooms[size])[0] for one in steps)) < INFINITE:
                    table.append((size, seconds))
            found[node] = tuple(table)
        self.last_free = {homes: found}
        return found

    def complete(self, parts: Parts, homes: Homes) -> None:
        """Tries a plan with these homes, and the others where the packing behind the bound has them."""
        free, fixed, decided, ranges = self.free(homes), self.fixed(homes), self.decided(homes), dict[int, RankRange]()
        for phase in self.phases:
            ranges |= phase.packed(fixed, free)
        where = {
            role: decided[role].rank_range if role in decided else ranges.get(self.problem.homes[role]) for role in self.roles
        }
        placed = {role: ranks for role, ranks in where.items() if ranks and self.tables.homes(role, ranks.count)}
        found = fill(self.tables, placed, {}, {role: home.option for role, home in decided.items()})
        if found and len(placed) == len(self.roles):
            self.finish(parts, tuple(found[self.problem.homes[role]] for role in self.roles))

    def finish(self, parts: Parts, homes: Homes) -> None:
        """Finds the best plan with these homes, which are all decided, phase by phase."""
        held, decided, calls = self.held(homes), self.decided(homes), self.problem.calls
        free, fixed, taken = self.free(homes), self.fixed(homes), frozenset(home.rank_range for home in homes)

        @cache
        def fastest(node: int, ranks: RankRange) -> tuple[float, int]:
            return self.tables.movable(node, decided[calls[node].role], ranks).within(self.tables.room(held, ranks))

        found, movable = list(parts), dict[int, RankRange]()
        for number, phase in enumerate(self.phases):
            budget = self.best - (sum(found) - found[number])
            found[number], ranges = phase.pack(fixed, free, budget, lambda node, ranks: fastest(node, ranks)[0], taken)
            if ranges is None:
                return
            movable |= ranges
        if sum(found) < self.best:
            self.best = sum(found)
            self.plan = tuple(
                Choice(movable[node], fastest(node, movable[node])[1]) if node in movable else decided[call.role]
                for node, call in enumerate(calls)
            )
