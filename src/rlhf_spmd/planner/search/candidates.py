"""Candidates of all searches: ranges of ranks, and the fastest option of a call that fits into the memory left. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from operator import le
from types import MappingProxyType

from rlhf_spmd.planner.problem import Choice, Plan, Problem, RankRange, WeightLayout

Held = tuple[tuple[RankRange, float], ...]  # bytes that homes hold on each rank of a range


def halves(ranks: RankRange, local_size: int) -> tuple[RankRange, RankRange]:
    """Return two halves, of whole hosts if there are several, the larger first. Halves of equal size are halved alike."""
    hosts = -(-ranks.end // local_size) - ranks.first // local_size
    cut = (ranks.first // local_size + -(-hosts // 2)) * local_size if hosts > 1 else ranks.first + -(-ranks.count // 2)
    return RankRange(ranks.first, cut - ranks.first), RankRange(cut, ranks.end - cut)


def all_ranges(size: int, local_size: int) -> tuple[set[RankRange], set[RankRange]]:
    """Return the cluster, its halves, their halves and so on; and the rest of the cluster beside one of these at its edge."""
    nodes, todo = set(), [RankRange(0, size)]
    while todo:
        node = todo.pop()
        nodes.add(node)
        todo += halves(node, local_size) if node.count > 1 else ()
    rests = {RankRange(node.end, size - node.count) for node in nodes if node.first == 0 and node.count < size}
    rests |= {RankRange(0, node.first) for node in nodes if node.end == size and node.first > 0}
    return nodes, rests - nodes


def range_sizes(size: int, local_size: int) -> list[int]:
    """Return the numbers of ranks that a search may give a call."""
    return list(dict.fromkeys(ranks.count for ranks in sorted(set.union(*all_ranges(size, local_size)))))


class RankRanges:
    """The ranges of ranks that a plan may give a call: those of :func:`all_ranges`, of sizes for which some call has an option.

    - by_size: size -> its ranges, ascending
    - rests: those of the second kind
    """

    def __init__(self, problem: Problem) -> None:
        self.all_ranks = RankRange(0, problem.size)
        self.local_size = problem.local_size
        sizes = {option.size for call in problem.calls for option in call.options}
        nodes, rests = all_ranges(problem.size, problem.local_size)
        self.rests = sorted(ranks for ranks in rests if ranks.count in sizes)
        self.by_size: dict[int, list[RankRange]] = {}
        for ranks in sorted({*nodes, *self.rests}):
            if ranks.count in sizes:
                self.by_size.setdefault(ranks.count, []).append(ranks)
        self._memory = problem.memory_runs
        self.distinct = cache(self._distinct)

    def _distinct(self, size: int, occupied: frozenset[RankRange]) -> tuple[RankRange, ...]:
        """Return the ranges of this size, one of all that differ only by a symmetry of what is ``occupied``.

        Two halves can be exchanged if they are equal in size, memory and what of each occupied range lies in them. All that any
        later call gets in them is exchanged, too: hosts and halves become hosts and halves, and each occupied range becomes
        itself. For ranges that are no halves this holds only as long as halves at the edges of the cluster stay, so these count
        as different where such ranges exist.
        """
        ranges = [ranks for ranks in self.rests if ranks.count == size]
        todo = [self.all_ranks]
        while todo:
            node = todo.pop()
            if node.count == size:
                ranges.append(node)
            elif node.count > size:
                first, second = halves(node, self.local_size)
                todo.append(first)
                if self._inside(first, occupied) != self._inside(second, occupied):
                    todo.append(second)
        return tuple(sorted(ranges))

    def _inside(self, node: RankRange, occupied: frozenset[RankRange]) -> tuple[object, ...]:
        """Return what distinguishes a half from the other."""
        edges = (node.first == 0, node.end == self.all_ranks.end) if self.rests else ()
        clips = {(ranks, *_clip(ranks, node)) for ranks in occupied if ranks.overlaps(node)}
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
        """Return (seconds, option), or (inf, -1) if nothing fits."""
        index = bisect_right(self._needs, room) - 1
        return self._best[index] if index >= 0 else (float("inf"), -1)


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
        """Return bytes left on each rank, by ranges of equal ranks."""
        memory, ranges = self.problem.memory, [ranks for ranks, _ in (*self.problem.memory_runs, *held)]
        cuts = sorted({edge for ranks in ranges for edge in (ranks.first, ranks.end)})
        kept = [sum(amount for ranks, amount in held if ranks.first <= first < ranks.end) for first in cuts]
        return [(RankRange(a, b - a), memory[a] - amount) for (a, b), amount in zip(pairwise(cuts), kept, strict=False)]

    def room(self, held: Held, ranks: RankRange) -> float:
        """Return bytes left on the fullest of these ranks."""
        return min(left for run, left in self.rooms(held) if run.overlaps(ranks))

    def most_room(self, held: Held, ranges: RankRanges) -> dict[int, float]:
        """Return, by size, bytes left in the emptiest range of this size; for sizes with many ranges, on the emptiest rank."""
        runs, rooms = self.rooms(held), {}
        emptiest = max(left for _, left in runs)
        for size, among in ranges.by_size.items():
            fullest = (min(left for run, left in runs if run.overlaps(ranks)) for ranks in among)
            rooms[size] = max(fullest) if len(among) <= 8 else emptiest
        return rooms

    def _needs(self, role: str, option: int) -> tuple[float, float]:
        """Return bytes on each rank of the role's home: held, and active in the largest of the tied calls."""
        calls = [self.problem.calls[node] for node in self.problem.tied[role]]
        return self.problem.calls[self.problem.homes[role]].options[option].held, max(c.options[option].active for c in calls)

    def _at_home(self, node: int, size: int) -> FastestWithin:
        """Return the table of a tied call."""
        call = self.problem.calls[node]
        numbers = self.problem.options_by_size[node].get(size, ())
        return FastestWithin((sum(self.needs(call.role, number)), call.options[number].seconds, number) for number in numbers)

    def _homes(self, role: str, size: int) -> list[int]:
        """Return options of a role's home, the fastest first, without dominated ones.

        An option dominates another of its size if it takes no longer in any tied call, needs no more bytes, and has the same
        layout in case the role has movable calls. Then it is as good in every plan: no schedule is later, no rank fuller, and
        copies of weights cost the same.
        """
        problem, tied = self.problem, self.problem.tied[role]
        numbers = self.problem.options_by_size[problem.homes[role]].get(size, [])
        rows = [[*(problem.calls[node].options[o].seconds for node in tied), *self.needs(role, o)] for o in numbers]
        moves = any(problem.calls[node].role == role for node in problem.movable)
        options = [problem.calls[problem.homes[role]].options[o] for o in numbers]
        return [numbers[i] for i in best_of(rows, [option.layout if moves else None for option in options])]

    def _movable(self, node: int, size: int, holders: int, layout: WeightLayout | None, near: bool) -> FastestWithin:
        """Return the table of a movable call on ``size`` ranks.

        ``layout``: the home's layout if the ranks are the home's, else None. ``holders``: number of the home's ranks; 0: copying
        the weights costs nothing.
        """
        call, rows = self.problem.calls[node], []
        for number in self.useful(node, size):
            option = call.options[number]
            seconds, moved = self.problem.moved(call.role, layout, holders, option, near) if holders else (0.0, 0.0)
            rows.append((option.active + moved, option.seconds + seconds, number))
        return FastestWithin(rows)

    def _useful(self, node: int, size: int) -> list[int]:
        """Return options of a movable call, without those that another one with the same layout beats."""
        call, numbers = self.problem.calls[node], self.problem.options_by_size[node].get(size, [])
        options = [call.options[number] for number in numbers]
        return [numbers[i] for i in best_of([[o.seconds, o.active] for o in options], [o.layout for o in options])]

    def movable(self, node: int, home: Choice, ranks: RankRange) -> FastestWithin:
        """Return the table of a movable call on ``ranks``, copies of the weights from ``home`` included."""
        same, near = home.rank_range == ranks, self.problem.on_one_host(home.rank_range, ranks)
        layout = self.problem.home_layout(self.problem.calls[node].role, home) if same else None
        return self._tables(node, ranks.count, home.rank_range.count, layout, near)

    def movable_anywhere(self, node: int, home: Choice | None, size: int) -> Sequence[FastestWithin]:
        """Return a table for each relation of ``size`` ranks to the home's. Without a home, copying costs nothing."""
        if home is None:
            return [self._tables(node, size, 0, None, False)]
        holders, inside = home.rank_range.count, self.problem.on_one_host(home.rank_range)
        tables = [self._tables(node, size, holders, None, inside and size <= self.problem.local_size)]
        if size == holders:
            layout = self.problem.home_layout(self.problem.calls[node].role, home)
            tables.append(self._tables(node, size, holders, layout, inside))
        return tables


def best_of(rows: Sequence[list[float]], kinds: Sequence[Hashable]) -> list[int]:
    """Return indices of the rows that no other row of the same kind dominates (of equal rows the first), by the first column."""
    best: list[int] = []
    rivals: dict[Hashable, list[list[float]]] = {}
    for index in sorted(range(len(rows)), key=lambda index: rows[index]):
        # one that is as good in all columns comes before
        undominated = rivals.setdefault(kinds[index], [])
        if not any(all(map(le, rival, rows[index])) for rival in undominated):
            undominated.append(rows[index])
            best.append(index)
    return best


def fill(
    tables: CandidateTables,
    homes: Mapping[str, RankRange],
    movable: Mapping[int, RankRange],
    chosen: Mapping[str, int] = MappingProxyType({}),
) -> dict[int, Choice] | None:
    """Choose options for calls whose ranks are known, greedily. Return None if none fit.

    ``homes``: ranks of each role's home. ``movable``: ranks of the movable calls. ``chosen``: options of some homes. Roles are
    treated one by one, the one whose calls take longest first. Each gets the fastest option that fits if later roles hold as
    little as they can.
    """
    calls = tables.problem.calls
    options: dict[str, list[int]] = {}
    least_held: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for role, ranks in homes.items():
        options[role] = [chosen[role]] if role in chosen else tables.homes(role, ranks.count)
        if not options[role]:
            return None
        seconds[role] = calls[tables.problem.homes[role]].options[options[role][0]].seconds
        least_held[role] = min(tables.needs(role, option)[0] for option in options[role])
    order = sorted(homes, key=lambda role: (role not in chosen, -seconds[role], least_held[role]))
    held: list[tuple[RankRange, float]] = []
    active: dict[str, float] = {}
    choices: dict[int, Choice] = {}
    for number, role in enumerate(order):
        later = [(homes[other], least_held[other]) for other in order[number + 1 :]]
        for option in options[role]:
            home_bytes, active[role] = tables.needs(role, option)
            all_held = (*held, (homes[role], home_bytes), *later)
            if all(need <= tables.room(all_held, homes[other]) for other, need in active.items()):
                break
        else:
            return None
        held.append((homes[role], home_bytes))
        choices |= {node: Choice(homes[role], option) for node in tables.problem.tied[role]}
    for node, ranks in movable.items():
        home = choices[tables.problem.homes[calls[node].role]]
        option = tables.movable(node, home, ranks).within(tables.room(tuple(held), ranks))[1]
        if option < 0:
            return None
        choices[node] = Choice(ranks, option)
    return choices


def whole_plan(choices: Mapping[int, Choice]) -> Plan:
    return tuple(choices[node] for node in sorted(choices))
