"""The best plan, proved: best-first search over the homes of roles, then branch and bound for movable calls. Pure.

Terms are those of ``problem.py``. Only homes need memory all the time. Once all homes are chosen, a movable call has one fastest option
on each range of ranks: the fastest that fits into the memory left there. From then on only time connects the calls, and the phases of a
step (``phase_scheduling``) can be packed one by one.

While some homes are undecided, the lower bound is a sum over phases: the fewest seconds in which each can be packed if the undecided
roles need no memory. Positions that differ only by a symmetry of the cluster are tried once.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count

from rlhf_spmd.planner.problem import Choice, Plan, Problem, RankRange
from rlhf_spmd.planner.search import NoFasterPlanError, SearchResult, no_plan_error
from rlhf_spmd.planner.search.candidates import CandidateTables, RankRanges, ResidentBytes, greedy_choices, plan_of
from rlhf_spmd.planner.search.overlapping import OverlappingPlans
from rlhf_spmd.planner.search.phase_scheduling import Fixed, Free, OutOfTimeError, Phase, SearchBudget, Table, phases

Homes = tuple[Choice, ...]  # of the first roles, in the order of the search
Bounds = tuple[float, ...]  # seconds, a lower bound for each phase
INFINITE = float("inf")


def search(problem: Problem, limit: float = 60.0, seed: int = 0) -> SearchResult:
    """Return the best plan, or after ``limit`` seconds the best plan so far and the bound that is proved by then. It never
    stops without a plan. ``seed`` is not read. Raises NoPlanError if no plan fits, and NoFasterPlanError for a problem with a
    ceiling below which it has no plan."""
    return _ExactSearch(problem, limit).run()


@dataclass(frozen=True)
class _SearchNode:
    """All plans with these homes of the first roles, and these ranks of the next role's home, if they are decided."""

    bounds: Bounds
    homes: Homes
    ranks: RankRange | None


class _ExactSearch:
    """One search. ``frontier``: (priority, node) of the nodes that are not branched yet, a heap."""

    def __init__(self, problem: Problem, limit: float) -> None:
        self.problem = problem
        self.started = time.perf_counter()
        self.limit = limit
        self.ranges = RankRanges(problem)
        self.tables = CandidateTables(problem)
        self.budget = SearchBudget(INFINITE)
        self.phases = [Phase(problem, call_indices, self.ranges, self.budget) for call_indices in phases(problem)]
        self.best = problem.ceiling
        self.plan: Plan | None = None
        self.timed = False
        self.roles = sorted(problem.homes, key=lambda role: -problem.least_resident[role])
        self.node_numbers = count()
        self.last_tables: dict[Homes, dict[int, Table]] = {}  # of the last homes
        self.frontier: list[tuple[tuple[float, float, int], _SearchNode]] = []

    def run(self) -> SearchResult:
        """Return the result. Searches deepest first until there is a plan or a ceiling, then best first."""
        if self.problem.ahead:
            self.try_overlapping_plans()
        bounds = self.tightened_bounds((0.0,) * len(self.phases), {}, self.least_seconds_tables(()))
        if bounds:
            self.push(_SearchNode(bounds, (), None))
        proved = sum(bounds or ())
        if self.is_best_first:
            self.budget.until = self.started + self.limit
        try:
            while self.frontier:
                _, node = heapq.heappop(self.frontier)
                was_best_first = self.is_best_first
                if was_best_first:
                    proved = sum(node.bounds)
                    if proved >= self.best:
                        break
                self.branch(node)
                if self.is_best_first and not was_best_first:
                    self.budget.until = self.started + self.limit
                    nodes = [waiting for _, waiting in self.frontier]
                    self.frontier = []
                    for waiting in nodes:
                        self.push(waiting)
            proved = self.best
        except OutOfTimeError:
            self.timed = True
        proved = min(proved, self.best)
        if self.plan is None:
            raise NoFasterPlanError(proved) if self.is_best_first else no_plan_error(self.problem, "")
        seconds = time.perf_counter() - self.started
        return SearchResult(self.plan, self.best, proved, proved == self.best, self.budget.evaluations, seconds, self.timed)

    def try_overlapping_plans(self) -> None:
        """Try good plans of steps that overlap, for half of the time."""
        plans = OverlappingPlans(self.problem, self.ranges, self.tables, self.budget.spend)
        starts = plans.separated()
        for start in starts[:1]:  # the fastest; without a plan the search would not stop in time
            self.take(plans.seconds(start), start)
        self.budget.until = self.started + self.limit / 2
        try:
            for start in starts:
                self.take(*plans.improve(start))
        except OutOfTimeError:
            self.timed = True
        self.budget.until = INFINITE

    def take(self, seconds: float, choices: Mapping[int, Choice]) -> None:
        """Make a plan the best one if it is."""
        if seconds < self.best:
            self.best = seconds
            self.plan = plan_of(choices)

    @property
    def is_best_first(self) -> bool:
        """Return True if there is a plan, or a ceiling, that cuts branches."""
        return self.best < INFINITE

    def push(self, node: _SearchNode) -> None:
        """Add a node to the frontier if it may lead to a better plan."""
        bound = sum(node.bounds)
        depth = -2 * len(node.homes) - (node.ranks is not None)
        if bound < self.best:
            order = (bound, depth) if self.is_best_first else (depth, bound)
            heapq.heappush(self.frontier, ((*order, next(self.node_numbers)), node))

    def branch(self, node: _SearchNode) -> None:
        """Add the nodes that follow from one: the next role's ranks, then its options on them."""
        if len(node.homes) == len(self.roles):
            self.search_movable_calls(node.bounds, node.homes)
        elif node.ranks is None:
            self.try_greedy_plan(node.bounds, node.homes)
            self._branch_on_ranks(node.bounds, node.homes)
        else:
            self._branch_on_options(node.bounds, node.homes, node.ranks)

    def _branch_on_ranks(self, bounds: Bounds, homes: Homes) -> None:
        """Add a node for each range of ranks of the next role's home."""
        tied = self.problem.tied[self.roles[len(homes)]]
        resident = self.resident(homes)
        fixed = self.home_assignments(homes)
        free = {i: table for i, table in self.least_seconds_tables(homes).items() if i not in tied}
        occupied = frozenset(home.rank_range for home in homes)
        for extent in self.ranges.by_extent:
            for ranks in self.ranges.ranges_up_to_symmetry(extent, occupied):
                room = self.tables.room(resident, ranks)
                home_calls = {i: (ranks, self.tables.tied_table(i, extent).within(room)[0]) for i in tied}
                if tightened := self.tightened_bounds(bounds, fixed | home_calls, free):
                    self.push(_SearchNode(tightened, homes, ranks))

    def _branch_on_options(self, bounds: Bounds, homes: Homes, ranks: RankRange) -> None:
        """Add a node for each option of the next role's home on ``ranks``."""
        role = self.roles[len(homes)]
        tied = self.problem.tied[role]
        fixed = self.home_assignments(homes)
        free = {i: table for i, table in self.least_seconds_tables(homes).items() if i not in tied}
        for option in self.tables.home_options(role, self.problem.extent(ranks)):
            home_calls = {i: (ranks, self.problem.calls[i].options[option].seconds) for i in tied}
            next_homes = (*homes, Choice(ranks, option))
            tightened = self.tightened_bounds(bounds, fixed | home_calls, free, tied)
            if tightened is None and len(tied) == 1:
                break  # the other options take longer
            if tightened is None or not self.fits(next_homes):
                continue
            tightened = self.tightened_bounds(tightened, fixed | home_calls, self.least_seconds_tables(next_homes))
            if tightened:
                self.push(_SearchNode(tightened, next_homes, None))

    def tightened_bounds(self, bounds: Bounds, fixed: Fixed, free: Free, changed: Sequence[int] = ()) -> Bounds | None:
        """Return the bounds of phases with these calls, or None if they reach the best plan's seconds.

        ``changed``: the only calls that differ from those of ``bounds``; empty: any may.
        """
        tightened = list(bounds)
        for index, phase in enumerate(self.phases):
            if changed and not any(call_index in phase.call_indices for call_index in changed):
                continue
            ceiling = self.best - (sum(tightened) - tightened[index])
            tightened[index] = phase.bound(fixed, free, tightened[index], ceiling)
            if tightened[index] >= ceiling:
                return None
        return tuple(tightened)

    def homes_by_role(self, homes: Homes) -> dict[str, Choice]:
        """Return role -> its home, for the roles that have one."""
        return dict(zip(self.roles, homes, strict=False))

    def resident(self, homes: Homes) -> ResidentBytes:
        """Return the resident bytes at these homes."""
        by_role = self.homes_by_role(homes)
        return tuple((home.rank_range, self.tables.home_bytes(role, home.option)[0]) for role, home in by_role.items())

    def fits(self, homes: Homes) -> bool:
        """Return True if all tied calls fit into the memory of these homes."""
        resident = self.resident(homes)
        return all(self.tables.fits_home(resident, role, home) for role, home in self.homes_by_role(homes).items())

    def home_assignments(self, homes: Homes) -> dict[int, tuple[RankRange, float]]:
        """Return ranks and seconds of the calls that run at these homes."""
        calls = self.problem.calls
        return {
            call_index: (home.rank_range, calls[call_index].options[home.option].seconds)
            for role, home in self.homes_by_role(homes).items()
            for call_index in self.problem.tied[role]
        }

    def least_seconds_tables(self, homes: Homes) -> dict[int, Table]:
        """Return for each undecided call the fewest seconds on each extent, wherever most memory is left."""
        if homes in self.last_tables:
            return self.last_tables[homes]
        rooms = self.tables.largest_room(self.resident(homes), self.ranges)
        by_role = self.homes_by_role(homes)
        undecided = {}
        for call_index, call in enumerate(self.problem.calls):
            is_movable = call_index in self.problem.movable
            if call.role in by_role and not is_movable:
                continue
            table = []
            for extent in self.ranges.by_extent:
                if is_movable:
                    candidates = self.tables.movable_tables(call_index, by_role.get(call.role), extent)
                else:
                    candidates = [self.tables.tied_table(call_index, extent)]
                seconds = min(candidate.within(rooms[extent])[0] for candidate in candidates)
                if seconds < INFINITE:
                    table.append((extent, seconds))
            undecided[call_index] = tuple(table)
        self.last_tables = {homes: undecided}
        return undecided

    def try_greedy_plan(self, bounds: Bounds, homes: Homes) -> None:
        """Try a plan with these homes, and the others where the packing behind the bound has them."""
        free = self.least_seconds_tables(homes)
        fixed = self.home_assignments(homes)
        packed: dict[int, RankRange] = {}
        for phase in self.phases:
            packed |= phase.packed(fixed, free)
        by_role = self.homes_by_role(homes)
        ranks_of = {role: packed[call_index] for role, call_index in self.problem.homes.items() if call_index in packed}
        ranks_of |= {role: home.rank_range for role, home in by_role.items()}
        placed = {role: ranks_of[role] for role in self.roles if role in ranks_of}
        if len(placed) < len(self.roles):
            return
        if not all(self.tables.home_options(role, self.problem.extent(ranks)) for role, ranks in placed.items()):
            return
        choices = greedy_choices(self.tables, placed, {}, {role: home.option for role, home in by_role.items()})
        if choices:
            self.search_movable_calls(bounds, tuple(choices[self.problem.homes[role]] for role in self.roles))

    def search_movable_calls(self, bounds: Bounds, homes: Homes) -> None:
        """Find the best plan with these homes, which are all decided, phase by phase."""
        resident = self.resident(homes)
        by_role = self.homes_by_role(homes)
        calls = self.problem.calls
        free = self.least_seconds_tables(homes)
        fixed = self.home_assignments(homes)
        occupied = frozenset(home.rank_range for home in homes)

        @cache
        def fastest(call_index: int, ranks: RankRange) -> tuple[float, int]:
            table = self.tables.movable_table(call_index, by_role[calls[call_index].role], ranks)
            return table.within(self.tables.room(resident, ranks))

        def seconds_on(call_index: int, ranks: RankRange) -> float:
            return fastest(call_index, ranks)[0]

        seconds = list(bounds)
        movable: dict[int, RankRange] = {}
        for index, phase in enumerate(self.phases):
            ceiling = self.best - (sum(seconds) - seconds[index])
            seconds[index], ranges = phase.pack(fixed, free, ceiling, seconds_on, occupied)
            if ranges is None:
                return
            movable |= ranges
        if sum(seconds) < self.best:
            self.best = sum(seconds)
            choices = {call_index: Choice(ranks, fastest(call_index, ranks)[1]) for call_index, ranks in movable.items()}
            self.plan = tuple(choices.get(call_index, by_role[call.role]) for call_index, call in enumerate(calls))
