"""The fastest way to run a call in the memory that is left, as tables; and which options a best plan may need. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np

from rlhf_spmd.planner.meshes import RankRanges
from rlhf_spmd.planner.problem import Choice, Layout, Problem, RankRange

Held = tuple[tuple[RankRange, float], ...]  # bytes that homes keep on each rank of a mesh


class Steps:
    """Of (bytes, seconds, option): the fewest seconds among those that need at most so many bytes, and the option."""

    def __init__(self, ways: Iterable[tuple[float, float, int]]) -> None:
        self._needs: list[float] = []
        self._best: list[tuple[float, int]] = []
        for need, seconds, option in sorted(ways):
            if not self._best or seconds < self._best[-1][0]:
                self._needs.append(need)
                self._best.append((seconds, option))

    def within(self, room: float) -> tuple[float, int]:
        """(inf, -1) where nothing fits."""
        at = bisect_right(self._needs, room) - 1
        return self._best[at] if at >= 0 else (float("inf"), -1)


class Candidates:
    """Of a problem; each table is made when it is first asked for."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.rooms = lru_cache(maxsize=256)(self._rooms)
        self.needs = cache(self._needs)
        self.at_home = cache(self._at_home)
        self.homes = cache(self._homes)
        self._tables = cache(self._lent)

    def _rooms(self, held: Held) -> list[tuple[RankRange, float]]:
        """Bytes that are left on each rank, by runs of ranks that are alike."""
        memory, meshes = self.problem.memory, [mesh for mesh, _ in (*self.problem.memory_runs, *held)]
        cuts = sorted({edge for mesh in meshes for edge in (mesh.first, mesh.end)})
        kept = [sum(b for at, b in held if at.first <= first < at.end) for first in cuts]
        return [(RankRange(a, b - a), memory[a] - amount) for (a, b), amount in zip(pairwise(cuts), kept, strict=False)]

    def room(self, held: Held, mesh: RankRange) -> float:
        """Bytes that are left on the fullest rank of ``mesh``."""
        return min(left for run, left in self.rooms(held) if run.overlaps(mesh))

    def most_room(self, held: Held, meshes: RankRanges) -> dict[int, float]:
        """Size -> bytes that are left in the mesh of this size that has most; of small ones, of which there are many, on any rank."""
        runs, found = self.rooms(held), {}
        most = max(left for _, left in runs)
        for size, among in meshes.of.items():
            few = len(among) <= 8
            found[size] = max(min(left for run, left in runs if run.overlaps(at)) for at in among) if few else most
        return found

    def _needs(self, role: str, option: int) -> tuple[float, float]:
        """Bytes on each rank of the role's home: held, and active in the largest of the calls there."""
        calls = [self.problem.calls[node] for node in self.problem.tied[role]]
        return self.problem.calls[self.problem.homes[role]].options[option].held, max(c.options[option].active for c in calls)

    def _at_home(self, node: int, size: int) -> Steps:
        """Of a call that runs at its role's home."""
        call, numbers = self.problem.calls[node], self.problem.options_by_size[node].get(size, ())
        return Steps((sum(self.needs(call.role, o)), call.options[o].seconds, o) for o in numbers)

    def _homes(self, role: str, size: int) -> list[int]:
        """Options of a role's home, the fastest first, without those that another of this size makes superfluous: it takes no longer
        in any of the calls there, holds and needs no more, and has the same layout where calls are lent. Then it is as good in every
        plan: on the same mesh, which leaves every schedule no later and every rank no fuller, and with equal layouts equal moves."""
        problem, tied = self.problem, self.problem.tied[role]
        numbers = self.problem.options_by_size[problem.homes[role]].get(size, [])
        rows = [[*(problem.calls[node].options[o].seconds for node in tied), *self.needs(role, o)] for o in numbers]
        lent = any(problem.calls[node].role == role for node in problem.lent)
        options = [problem.calls[problem.homes[role]].options[o] for o in numbers]
        return [numbers[i] for i in best_of(rows, [o.layout if lent else (0, 0, 0, 0) for o in options])]

    def _lent(self, node: int, size: int, holders: int, layout: Layout | None, near: bool) -> Steps:
        """Of a call on ``size`` ranks that are not its home's, or with ``layout``, the home's, on the same; ``holders`` 0: weights
        that come for nothing. Of two options in one layout moves are equal, so the better one is as good in every plan."""
        call, numbers = self.problem.calls[node], self.problem.options_by_size[node].get(size, [])
        options = [call.options[number] for number in numbers]
        ways = []
        for i in best_of([[o.seconds, o.active] for o in options], [o.layout for o in options]):
            one = options[i]
            more, moved = self.problem.moved(call.role, layout, holders, one, near) if holders else (0.0, 0.0)
            ways.append((one.active + moved, one.seconds + more, numbers[i]))
        return Steps(ways)

    def lent(self, node: int, home: Choice, mesh: RankRange) -> Steps:
        """Of a call on ``mesh`` whose role rests at ``home``, its weights' move included."""
        layout = self.problem.home_layout(self.problem.calls[node].role, home) if home.mesh == mesh else None
        return self._tables(node, mesh.count, home.mesh.count, layout, self.problem.on_one_host(home.mesh, mesh))

    def lent_anywhere(self, node: int, home: Choice | None, size: int) -> Sequence[Steps]:
        """A table for each way in which a mesh of this size can lie to the home's; without a home as if nothing had to move."""
        if home is None:
            return [self._tables(node, size, 0, None, False)]
        holders, inside = home.mesh.count, self.problem.on_one_host(home.mesh)
        found = [self._tables(node, size, holders, None, inside and size <= self.problem.local_size)]
        if size == holders:
            layout = self.problem.home_layout(self.problem.calls[node].role, home)
            found.append(self._tables(node, size, holders, layout, inside))
        return found


def best_of(rows: list[list[float]], kinds: list[Layout]) -> list[int]:
    """Numbers of the rows that no other of the same kind is at least as good as in all columns (of equal ones the first), by the first
    column."""
    if not rows:
        return []
    values, kind = np.array(rows), np.array(kinds)
    order = np.lexsort(values.T[::-1])  # one that is as good comes before: no column of it is larger
    values, kind = values[order], kind[order]
    worse = (values[:, None] <= values[None]).all(-1) & (kind[:, None] == kind[None]).all(-1)
    beaten = np.triu(worse, 1).any(0)
    return [int(i) for i in order[~beaten]]
