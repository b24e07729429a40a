"""The best plan, proved: best-first search over the homes of roles, then branch and bound for movable calls. Pure.

Terms are those of ``problem.py``. Only homes need memory all the time. Once all homes are chosen, a movable call has one fastest option
on each range of ranks: the fastest that fits into the memory left there. From then on only time connects the calls, and the phases of a
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
from rlhf_spmd.planner.search.candidates import CandidateTables, RankRanges, ResidentBytes, fill
from rlhf_spmd.planner.search.phase_scheduling import Fixed, OutOfTimeError, Phase, SearchBudget, Table, phases

Homes = tuple[Choice, ...]  # of the first roles, in the order of the search
Bounds = tuple[float, ...]  # seconds, a lower bound for each phase
INFINITE = float("inf")


def search(problem: Problem, limit: float = 60.0, seed: int = 0) -> SearchResult:
    """Return the best plan, or after ``limit`` seconds the best plan so far and the bound that is proved by then. It never
    stops without a plan. ``seed`` is not read. Raises NoPlanError if no plan fits."""
    return _Exact(problem, limit).run()


class _Exact:
    """One search. ``open``: entries (priority, bounds of phases, homes, ranks of the next role's home or None)."""

    def __init__(self, problem: Problem, limit: float) -> None:
        self.problem = problem
        self.started, self.limit = time.perf_counter(), limit
        self.ranges, self.tables = RankRanges(problem), CandidateTables(problem)
        self.effort = SearchBudget(INFINITE)
        self.phases = [Phase(problem, call_indices, self.ranges, self.effort) for call_indices in phases(problem)]
        self.best = INFINITE
        self.plan: Plan | None = None
        self.roles = sorted(problem.homes, key=lambda role: -problem.least_resident[role])
        self.entry_numbers = count()
        self.last_free: dict[Homes, dict[int, Table]] = {}  # of the last homes
        self.open: list[tuple[tuple[float, float, int], Bounds, Homes, RankRange | None]] = []

    def run(self) -> SearchResult:
        """Return the result. Searches deepest first until there is a plan, then best first."""
        if self.problem.ahead:  # steps that do not overlap fall into phases, and their best plan takes no longer where they do
            apart = search(replace(self.problem, ahead=0, generating=frozenset()), self.limit / 2)
            self.plan, self.best = apart.plan, simulate(self.problem, apart.plan).seconds
            self.effort.evaluations = apart.evaluations
        bounds = self.raised((0.0,) * len(self.phases), {}, self.free(()))
        if bounds:
            self.push(bounds, (), None)
        proved = sum(bounds or ())
        if self.plan:
            self.effort.until = self.started + self.limit
        try:
            while self.open:
                _, bounds, homes, ranks = heapq.heappop(self.open)
                had_plan = self.plan is not None
                if had_plan:
                    proved = sum(bounds)
                    if proved >= self.best:
                        break
                self.expand(bounds, homes, ranks)
                if self.plan and not had_plan:
                    self.effort.until = self.started + self.limit
                    waiting, self.open = self.open, []
                    for entry in waiting:
                        self.push(*entry[1:])
            proved = self.best
        except OutOfTimeError:
            pass
        if self.plan is None:
            raise no_plan(self.problem, "")
        proved = min(proved, self.best)
        seconds = time.perf_counter() - self.started
        return SearchResult(self.plan, self.best, proved, proved == self.best, self.effort.evaluations, seconds)

    def push(self, bounds: Bounds, homes: Homes, ranks: RankRange | None) -> None:
        """Add an entry that may lead to a better plan."""
        bound, depth = sum(bounds), -2 * len(homes) - (ranks is not None)
        if bound < self.best:
            order = (bound, depth) if self.plan else (depth, bound)
            heapq.heappush(self.open, ((*order, next(self.entry_numbers)), bounds, homes, ranks))

    def expand(self, bounds: Bounds, homes: Homes, ranks: RankRange | None) -> None:
        """Add the entries that follow from one: the next role's ranks, then its options on them."""
        if len(homes) == len(self.roles):
            self.finish(bounds, homes)
            return
        if ranks is None:
            self.complete(bounds, homes)
        role = self.roles[len(homes)]
        tied = self.problem.tied[role]
        resident = self.resident(homes)
        fixed = self.fixed(homes)
        free = self.free(homes)
        rest = {call_index: table for call_index, table in free.items() if call_index not in tied}
        if ranks is None:
            occupied = frozenset(home.rank_range for home in homes)
            for size in self.ranges.by_size:
                for place in self.ranges.distinct(size, occupied):
                    room = self.tables.room(resident, place)
                    fastest = {call_index: (place, self.tables.tied(call_index, size).within(room)[0]) for call_index in tied}
                    if raised := self.raised(bounds, fixed | fastest, rest):
                        self.push(raised, homes, place)
            return
        for option in self.tables.homes(role, ranks.count):
            home_calls = {call_index: (ranks, self.problem.calls[call_index].options[option].seconds) for call_index in tied}
            next_homes = (*homes, Choice(ranks, option))
            raised = self.raised(bounds, fixed | home_calls, rest) if self.fits(next_homes) else None
            if raised and (raised := self.raised(raised, fixed | home_calls, self.free(next_homes))):
                self.push(raised, next_homes, None)

    def raised(self, bounds: Bounds, fixed: Fixed, free: Mapping[int, Table]) -> Bounds | None:
        """Return the bounds of phases with these calls, or None if they reach the best plan's seconds."""
        raised = list(bounds)
        for index, phase in enumerate(self.phases):
            budget = self.best - (sum(raised) - raised[index])
            raised[index] = phase.bound(fixed, free, raised[index], budget)
            if raised[index] >= budget:
                return None
        return tuple(raised)

    def decided(self, homes: Homes) -> dict[str, Choice]:
        """Return role -> its home, for the roles that have one."""
        return dict(zip(self.roles, homes, strict=False))

    def resident(self, homes: Homes) -> ResidentBytes:
        """Return the resident bytes at these homes."""
        return tuple((home.rank_range, self.tables.needs(role, home.option)[0]) for role, home in self.decided(homes).items())

    def fits(self, homes: Homes) -> bool:
        """Return True if all tied calls fit into the memory of these homes."""
        resident = self.resident(homes)
        needs = self.tables.needs
        decided = self.decided(homes)
        return all(needs(role, home.option)[1] <= self.tables.room(resident, home.rank_range) for role, home in decided.items())

    def fixed(self, homes: Homes) -> dict[int, tuple[RankRange, float]]:
        """Return ranks and seconds of the calls that run at these homes."""
        calls, tied = self.problem.calls, self.problem.tied
        decided = self.decided(homes).items()
        return {
            call_index: (home.rank_range, calls[call_index].options[home.option].seconds)
            for role, home in decided
            for call_index in tied[role]
        }

    def free(self, homes: Homes) -> dict[int, Table]:
        """Return for each undecided call the fewest seconds on each number of ranks, wherever most memory is left."""
        if homes in self.last_free:
            return self.last_free[homes]
        rooms, decided = self.tables.largest_room(self.resident(homes), self.ranges), self.decided(homes)
        free = {}
        for call_index, call in enumerate(self.problem.calls):
            movable = call_index in self.problem.movable
            if call.role in decided and not movable:
                continue
            table = []
            for size in self.ranges.by_size:
                steps = (
                    self.tables.movable_anywhere(call_index, decided.get(call.role), size)
                    if movable
                    else [self.tables.tied(call_index, size)]
                )
                if (seconds := min(step.within(rooms[size])[0] for step in steps)) < INFINITE:
                    table.append((size, seconds))
            free[call_index] = tuple(table)
        self.last_free = {homes: free}
        return free

    def complete(self, bounds: Bounds, homes: Homes) -> None:
        """Try a plan with these homes, and the others where the packing behind the bound has them."""
        free = self.free(homes)
        fixed = self.fixed(homes)
        decided = self.decided(homes)
        packed: dict[int, RankRange] = {}
        for phase in self.phases:
            packed |= phase.packed(fixed, free)
        places = {
            role: decided[role].rank_range if role in decided else packed.get(self.problem.homes[role]) for role in self.roles
        }
        placed = {role: ranks for role, ranks in places.items() if ranks and self.tables.homes(role, ranks.count)}
        choices = fill(self.tables, placed, {}, {role: home.option for role, home in decided.items()})
        if choices and len(placed) == len(self.roles):
            self.finish(bounds, tuple(choices[self.problem.homes[role]] for role in self.roles))

    def finish(self, bounds: Bounds, homes: Homes) -> None:
        """Find the best plan with these homes, which are all decided, phase by phase."""
        resident = self.resident(homes)
        decided = self.decided(homes)
        calls = self.problem.calls
        free, fixed = self.free(homes), self.fixed(homes)
        occupied = frozenset(home.rank_range for home in homes)

        @cache
        def fastest(call_index: int, ranks: RankRange) -> tuple[float, int]:
            return self.tables.movable(call_index, decided[calls[call_index].role], ranks).within(
                self.tables.room(resident, ranks)
            )

        seconds, movable = list(bounds), dict[int, RankRange]()
        for index, phase in enumerate(self.phases):
            budget = self.best - (sum(seconds) - seconds[index])
            seconds[index], ranges = phase.pack(
                fixed, free, budget, lambda call_index, ranks: fastest(call_index, ranks)[0], occupied
            )
            if ranges is None:
                return
            movable |= ranges
        if sum(seconds) < self.best:
            self.best = sum(seconds)
            self.plan = tuple(
                Choice(movable[call_index], fastest(call_index, movable[call_index])[1])
                if call_index in movable
                else decided[call.role]
                for call_index, call in enumerate(calls)
            )
