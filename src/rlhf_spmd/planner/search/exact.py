"""The best plan, proved: best first over the homes of roles, which alone hold memory between calls, then branch and bound for the rest.

Given all homes, a call that is lent has in each mesh one fastest option that fits beside what is held there, so only times couple
these calls, and phases of a step (:func:`~rlhf_spmd.planner.search.packing.phases`) are independent of one another. The bound of
some homes is the sum over phases of the fewest seconds in which they can be packed if the roles that are not decided see only the
memory that is left so far. Positions that differ by a symmetry of the cluster are tried once. Pure.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from itertools import count

from rlhf_spmd.planner.meshes import RankRanges
from rlhf_spmd.planner.problem import Choice, Plan, Problem, RankRange
from rlhf_spmd.planner.search import Found, no_plan
from rlhf_spmd.planner.search.candidates import Candidates, Held
from rlhf_spmd.planner.search.filling import fill
from rlhf_spmd.planner.search.packing import Effort, Fixed, OutOfTimeError, Phase, Table, phases
from rlhf_spmd.planner.simulate import simulate

Homes = tuple[Choice, ...]  # of the first roles, in the order of the search
Parts = tuple[float, ...]  # seconds, a lower bound for each phase
INFINITE = float("inf")


def search(problem: Problem, limit: float = 60.0, seed: int = 0) -> Found:
    """``limit``: seconds after which the best plan so far is returned with the bound that is proved by then; not before there is one.
    ``seed`` is not read. Raises NoPlanError where no plan fits."""
    return _Exact(problem, limit).run()


class _Exact:
    def __init__(self, problem: Problem, limit: float) -> None:
        self.problem, self.started, self.limit = problem, time.perf_counter(), limit
        self.meshes, self.ways = RankRanges(problem), Candidates(problem)
        self.effort = Effort(INFINITE)
        self.phases = [Phase(problem, nodes, self.meshes, self.effort) for nodes in phases(problem)]
        self.best = INFINITE
        self.plan: Plan | None = None
        self.roles = sorted(problem.homes, key=lambda role: -problem.least_held[role])
        self.numbers = count()
        self.tables: dict[Homes, dict[int, Table]] = {}  # of the last homes
        self.open: list[tuple[tuple[float, float, int], Parts, Homes, RankRange | None]] = []

    def run(self) -> Found:
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
                _, parts, homes, mesh = heapq.heappop(self.open)
                had = self.plan
                if had:
                    bound = sum(parts)
                    if bound >= self.best:
                        break
                self.expand(parts, homes, mesh)
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
        return Found(self.plan, self.best, bound, bound == self.best, self.effort.evaluations, seconds)

    def push(self, parts: Parts, homes: Homes, mesh: RankRange | None) -> None:
        bound, depth = sum(parts), -2 * len(homes) - (mesh is not None)
        if bound < self.best:
            first = (bound, depth) if self.plan else (depth, bound)
            heapq.heappush(self.open, ((*first, next(self.numbers)), parts, homes, mesh))

    def expand(self, parts: Parts, homes: Homes, mesh: RankRange | None) -> None:
        if len(homes) == len(self.roles):
            self.finish(parts, homes)
            return
        if mesh is None:
            self.complete(parts, homes)
        role = self.roles[len(homes)]
        tied = self.problem.tied[role]
        held, fixed, free = self.held(homes), self.fixed(homes), self.free(homes)
        rest = {node: table for node, table in free.items() if node not in tied}
        if mesh is None:
            taken = frozenset(home.mesh for home in homes)
            for size in self.meshes.of:
                for place in self.meshes.places(size, taken):
                    room = self.ways.room(held, place)
                    best = {node: (place, self.ways.at_home(node, size).within(room)[0]) for node in tied}
                    if raised := self.raised(parts, fixed | best, rest):
                        self.push(raised, homes, place)
            return
        for option in self.ways.homes(role, mesh.count):
            its = {node: (mesh, self.problem.calls[node].options[option].seconds) for node in tied}
            more = (*homes, Choice(mesh, option))
            raised = self.raised(parts, fixed | its, rest) if self.fits(more) else None
            if raised and (raised := self.raised(raised, fixed | its, self.free(more))):
                self.push(raised, more, None)

    def raised(self, parts: Parts, fixed: Fixed, free: Mapping[int, Table]) -> Parts | None:
        """The bounds of phases for these calls, None where they reach the best plan's seconds."""
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
        return tuple((home.mesh, self.ways.needs(role, home.option)[0]) for role, home in self.decided(homes).items())

    def fits(self, homes: Homes) -> bool:
        held, needs, decided = self.held(homes), self.ways.needs, self.decided(homes)
        return all(needs(role, home.option)[1] <= self.ways.room(held, home.mesh) for role, home in decided.items())

    def fixed(self, homes: Homes) -> dict[int, tuple[RankRange, float]]:
        calls, tied = self.problem.calls, self.problem.tied
        at = self.decided(homes).items()
        return {node: (home.mesh, calls[node].options[home.option].seconds) for role, home in at for node in tied[role]}

    def free(self, homes: Homes) -> dict[int, Table]:
        """Of the calls that are not decided: the fewest seconds on each size of mesh, wherever most memory is left."""
        if homes in self.tables:
            return self.tables[homes]
        rooms, decided = self.ways.most_room(self.held(homes), self.meshes), self.decided(homes)
        found = {}
        for node, call in enumerate(self.problem.calls):
            lent = node in self.problem.lent
            if call.role in decided and not lent:
                continue
            table = []
            for size in self.meshes.of:
                steps = self.ways.lent_anywhere(node, decided.get(call.role), size) if lent else [self.ways.at_home(node, size)]
                if (seconds := min(one.within(rooms[size])[0] for one in steps)) < INFINITE:
                    table.append((size, seconds))
            found[node] = tuple(table)
        self.tables = {homes: found}
        return found

    def complete(self, parts: Parts, homes: Homes) -> None:
        """A plan with these homes soon: the others where the packing behind the bound has them, if options fit there."""
        free, fixed, decided, meshes = self.free(homes), self.fixed(homes), self.decided(homes), dict[int, RankRange]()
        for phase in self.phases:
            meshes |= phase.packed(fixed, free)
        where = {role: decided[role].mesh if role in decided else meshes.get(self.problem.homes[role]) for role in self.roles}
        placed = {role: mesh for role, mesh in where.items() if mesh and self.ways.homes(role, mesh.count)}
        found = fill(self.ways, placed, {}, {role: home.option for role, home in decided.items()})
        if found and len(placed) == len(self.roles):
            self.finish(parts, tuple(found[self.problem.homes[role]] for role in self.roles))

    def finish(self, parts: Parts, homes: Homes) -> None:
        """All homes are decided: the best plan with them, phase by phase."""
        held, decided, calls = self.held(homes), self.decided(homes), self.problem.calls
        free, fixed, taken = self.free(homes), self.fixed(homes), frozenset(home.mesh for home in homes)

        @cache
        def way(node: int, mesh: RankRange) -> tuple[float, int]:
            return self.ways.lent(node, decided[calls[node].role], mesh).within(self.ways.room(held, mesh))

        found, lent = list(parts), dict[int, RankRange]()
        for number, phase in enumerate(self.phases):
            budget = self.best - (sum(found) - found[number])
            found[number], meshes = phase.pack(fixed, free, budget, lambda node, mesh: way(node, mesh)[0], taken)
            if meshes is None:
                return
            lent |= meshes
        if sum(found) < self.best:
            self.best = sum(found)
            self.plan = tuple(
                Choice(lent[node], way(node, lent[node])[1]) if node in lent else decided[call.role]
                for node, call in enumerate(calls)
            )
