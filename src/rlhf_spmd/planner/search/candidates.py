"""What all searches choose from: ranges of ranks, and the fastest option of a call that fits into the memory left. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from rlhf_spmd.planner.problem import STORAGE, Choice, Plan, Problem, RankRange, WeightLayout
from rlhf_spmd.planner.shapes import CallSettings

Held = tuple[tuple[RankRange, float], ...]  # bytes that homes hold on each rank of a range


def halves(ranks: RankRange, local_size: int) -> tuple[RankRange, RankRange]:
    """Returns two halves, of whole hosts if there are several, the larger first. Halves of equal size are halved alike."""
    hosts = -(-ranks.end // local_size) - ranks.first // local_size
    cut = (ranks.first // local_size + -(-hosts // 2)) * local_size if hosts > 1 else ranks.first + -(-ranks.count // 2)
    return RankRange(ranks.first, cut - ranks.first), RankRange(cut, ranks.end - cut)


class RankRanges:
    """The ranges of ranks that a plan may give a call, of sizes for which some call has an option.

    They are the cluster, its halves, their halves and so on; and the rest of the cluster beside one of these at its edge.

    - by_size: size -> its ranges, ascending
    - left: those of the second kind
    """

    def __init__(self, problem: Problem) -> None:
        self.whole, self.local_size = RankRange(0, problem.size), problem.local_size
        sizes = {option.size for call in problem.calls for option in call.options}
        nodes, todo = set(), [self.whole]
        while todo:
            node = todo.pop()
            nodes.add(node)
            todo += halves(node, self.local_size) if node.count > 1 else ()
        left = {RankRange(node.end, problem.size - node.count) for node in nodes if node.first == 0 and node != self.whole}
        left |= {RankRange(0, node.first) for node in nodes if node.end == problem.size and node.first > 0}
        self.left = sorted(ranks for ranks in left - nodes if ranks.count in sizes)
        self.by_size: dict[int, list[RankRange]] = {}
        for ranks in sorted({*nodes, *self.left}):
            if ranks.count in sizes:
                self.by_size.setdefault(ranks.count, []).append(ranks)
        self._memory = problem.memory_runs
        self.distinct = cache(self._distinct)

    def _distinct(self, size: int, taken: frozenset[RankRange]) -> tuple[RankRange, ...]:
        """The ranges of this size, one of all that differ only by a symmetry of what is ``taken``.

        Two halves can be exchanged if they are equal in size, memory and what of each taken range lies in them. All that any
        later call gets in them is exchanged, too: hosts and halves become hosts and halves, and each taken range becomes
        itself. For ranges that are no halves this holds only as long as halves at the edges of the cluster stay, so these count
        as different where such ranges exist.
        """
        found = [ranks for ranks in self.left if ranks.count == size]
        todo = [self.whole]
        while todo:
            node = todo.pop()
            if node.count == size:
                found.append(node)
            elif node.count > size:
                first, second = halves(node, self.local_size)
                todo.append(first)
                if self._inside(first, taken) != self._inside(second, taken):
                    todo.append(second)
        return tuple(sorted(found))

    def _inside(self, node: RankRange, taken: frozenset[RankRange]) -> tuple[object, ...]:
        edges = (node.first == 0, node.end == self.whole.end) if self.left else ()
        clips = {(ranks, *_clip(ranks, node)) for ranks in taken if ranks.overlaps(node)}
        memory = [(*_clip(ranks, node), amount) for ranks, amount in self._memory if ranks.overlaps(node)]
        return node.count, edges, frozenset(clips), tuple(memory)


def _clip(ranks: RankRange, node: RankRange) -> tuple[int, int]:
    return max(ranks.first - node.first, 0), min(ranks.end - node.first, node.count)


class FastestWithin:
    """The fastest option within a number of bytes, made from (bytes, seconds, option) of each."""

    def __init__(self, options: Iterable[tuple[float, float, int]]) -> None:
        self._needs: list[float] = []
        self._best: list[tuple[float, int]] = []
        for need, seconds, option in sorted(options):
            if not self._best or seconds < self._best[-1][0]:
                self._needs.append(need)
                self._best.append((seconds, option))

    def within(self, room: float) -> tuple[float, int]:
        """(seconds, option), or (inf, -1) if nothing fits."""
        at = bisect_right(self._needs, room) - 1
        return self._best[at] if at >= 0 else (float("inf"), -1)


class CandidateTables:
    """Tables of a problem's options. Each is made when it is first asked for."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.rooms = lru_cache(maxsize=256)(self._rooms)
        self.needs = cache(self._needs)
        self.at_home = cache(self._at_home)
        self.homes = cache(self._homes)
        self.useful = cache(self._useful)
        self._tables = cache(self._movable)

    def _rooms(self, held: Held) -> list[tuple[RankRange, float]]:
        """Returns bytes left on each rank, by ranges of equal ranks."""
        memory, ranges = self.problem.memory, [ranks for ranks, _ in (*self.problem.memory_runs, *held)]
        cuts = sorted({edge for ranks in ranges for edge in (ranks.first, ranks.end)})
        kept = [sum(amount for ranks, amount in held if ranks.first <= first < ranks.end) for first in cuts]
        return [(RankRange(a, b - a), memory[a] - amount) for (a, b), amount in zip(pairwise(cuts), kept, strict=False)]

    def room(self, held: Held, ranks: RankRange) -> float:
        """Returns bytes left on the fullest of these ranks."""
        return min(left for run, left in self.rooms(held) if run.overlaps(ranks))

    def most_room(self, held: Held, ranges: RankRanges) -> dict[int, float]:
        """Returns, by size, bytes left in the emptiest range of this size; for sizes with many ranges, on the emptiest rank."""
        runs, found = self.rooms(held), {}
        most = max(left for _, left in runs)
        for size, among in ranges.by_size.items():
            few = len(among) <= 8
            found[size] = max(min(left for run, left in runs if run.overlaps(at)) for at in among) if few else most
        return found

    def _needs(self, role: str, option: int) -> tuple[float, float]:
        """Returns bytes on each rank of the role's home: held, and active in the largest of the tied calls."""
        calls = [self.problem.calls[node] for node in self.problem.tied[role]]
        return self.problem.calls[self.problem.homes[role]].options[option].held, max(c.options[option].active for c in calls)

    def _at_home(self, node: int, size: int) -> FastestWithin:
        """Returns the table of a tied call."""
        call, numbers = self.problem.calls[node], self.problem.options_by_size[node].get(size, ())
        return FastestWithin((sum(self.needs(call.role, o)), call.options[o].seconds, o) for o in numbers)

    def _homes(self, role: str, size: int) -> list[int]:
        """Returns options of a role's home, the fastest first, without dominated ones.

        An option dominates another of its size if it takes no longer in any tied call, needs no more bytes, and has the same
        layout in case the role has movable calls. Then it is as good in every plan: no schedule is later, no rank fuller, and
        copies of weights cost the same.
        """
        problem, tied = self.problem, self.problem.tied[role]
        numbers = self.problem.options_by_size[problem.homes[role]].get(size, [])
        rows = [[*(problem.calls[node].options[o].seconds for node in tied), *self.needs(role, o)] for o in numbers]
        movable = any(problem.calls[node].role == role for node in problem.movable)
        options = [problem.calls[problem.homes[role]].options[o] for o in numbers]
        return [numbers[i] for i in best_of(rows, [o.layout if movable else (0, 0, 0, 0, 0) for o in options])]

    def _movable(self, node: int, size: int, holders: int, layout: WeightLayout | None, near: bool) -> FastestWithin:
        """Returns the table of a movable call on ``size`` ranks.

        ``layout``: the home's layout if the ranks are the home's, else None. ``holders``: number of the home's ranks; 0: copying
        the weights costs nothing.
        """
        call, rows = self.problem.calls[node], []
        for number in self.useful(node, size):
            one = call.options[number]
            more, moved = self.problem.moved(call.role, layout, holders, one, near) if holders else (0.0, 0.0)
            rows.append((one.active + moved, one.seconds + more, number))
        return FastestWithin(rows)

    def _useful(self, node: int, size: int) -> list[int]:
        """Returns options of a movable call, without those that another one with the same layout beats."""
        call, numbers = self.problem.calls[node], self.problem.options_by_size[node].get(size, [])
        options = [call.options[number] for number in numbers]
        return [numbers[i] for i in best_of([[o.seconds, o.active] for o in options], [o.layout for o in options])]

    def movable(self, node: int, home: Choice, ranks: RankRange) -> FastestWithin:
        """Returns the table of a movable call on ``ranks``, copies of the weights from ``home`` included."""
        same, near = home.rank_range == ranks, self.problem.on_one_host(home.rank_range, ranks)
        layout = self.problem.home_layout(self.problem.calls[node].role, home) if same else None
        return self._tables(node, ranks.count, home.rank_range.count, layout, near)

    def movable_anywhere(self, node: int, home: Choice | None, size: int) -> Sequence[FastestWithin]:
        """Returns a table for each relation of ``size`` ranks to the home's. Without a home, copying costs nothing."""
        if home is None:
            return [self._tables(node, size, 0, None, False)]
        holders, inside = home.rank_range.count, self.problem.on_one_host(home.rank_range)
        found = [self._tables(node, size, holders, None, inside and size <= self.problem.local_size)]
        if size == holders:
            layout = self.problem.home_layout(self.problem.calls[node].role, home)
            found.append(self._tables(node, size, holders, layout, inside))
        return found


def best_of(rows: list[list[float]], kinds: list[WeightLayout]) -> list[int]:
    """Returns indices of the rows that no other row of the same kind dominates (of equal rows the first), by the first column."""
    if not rows:
        return []
    values, kind = np.array(rows), np.array(kinds)
    order = np.lexsort(values.T[::-1])  # one that is as good comes before: no column of it is larger
    values, kind = values[order], kind[order]
    worse = (values[:, None] <= values[None]).all(-1) & (kind[:, None] == kind[None]).all(-1)
    beaten = np.triu(worse, 1).any(0)
    return [int(i) for i in order[~beaten]]


def fill(
    tables: CandidateTables,
    homes: Mapping[str, RankRange],
    movable: Mapping[int, RankRange],
    given: Mapping[str, int] = MappingProxyType({}),
) -> dict[int, Choice] | None:
    """Chooses options for calls whose ranks are given, greedily. Returns None if it finds none that fit.

    ``homes``: ranks of each role's home. ``movable``: ranks of the movable calls. ``given``: options of some homes. Roles are
    treated one by one, the one whose calls take longest first. Each gets the fastest option that fits if later roles hold as
    little as they can.
    """
    calls, work, those = tables.problem.calls, {}, {}
    for role, ranks in homes.items():
        options = [given[role]] if role in given else tables.homes(role, ranks.count)
        if not options:
            return None
        those[role] = options
        longest = calls[tables.problem.homes[role]].options[options[0]].seconds
        work[role] = -longest, min(tables.needs(role, o)[0] for o in options)
    order = sorted(homes, key=lambda role: (role not in given, work[role]))
    held: list[tuple[RankRange, float]] = []
    active: dict[str, float] = {}
    found: dict[int, Choice] = {}
    for at, role in enumerate(order):
        ranks, later = homes[role], [(homes[other], work[other][1]) for other in order[at + 1 :]]
        for option in those[role]:
            keeps, active[role] = tables.needs(role, option)
            all_held = (*held, (ranks, keeps), *later)
            if all(need <= tables.room(all_held, homes[other]) for other, need in active.items()):
                break
        else:
            return None
        held.append((ranks, keeps))
        found |= {node: Choice(ranks, option) for node in tables.problem.tied[role]}
    for node, ranks in movable.items():
        home = found[tables.problem.homes[calls[node].role]]
        option = tables.movable(node, home, ranks).within(tables.room(tuple(held), ranks))[1]
        if option < 0:
            return None
        found[node] = Choice(ranks, option)
    return found


def whole_plan(choices: Mapping[int, Choice]) -> Plan:
    return tuple(choices[node] for node in sorted(choices))


def dominated(given: CallSettings, seconds: np.ndarray, held: np.ndarray, active: np.ndarray) -> np.ndarray:
    """bool [n]: True if another alternative in the same layout is as good in seconds, held and active."""
    beaten = np.ones(len(given), dtype=bool)
    storage = np.asarray(STORAGE)[given.zero]
    layout = ((given.pp * (1 + given.tp.max()) + given.tp) * (1 + given.ep.max()) + given.ep) * 4 + storage
    for one in np.unique(layout):
        at = np.flatnonzero(layout == one)
        kept: list[int] = []
        for i in at[np.lexsort((active[at], held[at], seconds[at]))].tolist():
            if not any(held[j] <= held[i] and active[j] <= active[i] for j in kept):
                kept.append(i)
        beaten[kept] = False
    return beaten
