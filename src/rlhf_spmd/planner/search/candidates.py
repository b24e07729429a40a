"""Candidates of all searches: ranges of ranks, and the fastest option of a call that fits into the memory left. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from operator import le
from types import MappingProxyType

from rlhf_spmd.planner.problem import Choice, Plan, Problem, RankRange, WeightLayout

ResidentBytes = tuple[tuple[RankRange, float], ...]  # bytes of homes between calls, on each rank of a range


def halves(ranks: RankRange, local_size: int) -> tuple[RankRange, RankRange]:
    """Return two halves, of whole hosts if there are several, the larger first. Halves of equal size are halved alike."""
    hosts = -(-ranks.end // local_size) - ranks.first // local_size
    cut = (ranks.first // local_size + -(-hosts // 2)) * local_size if hosts > 1 else ranks.first + -(-ranks.count // 2)
    return RankRange(ranks.first, cut - ranks.first), RankRange(cut, ranks.end - cut)


def all_ranges(size: int, local_size: int) -> tuple[set[RankRange], set[RankRange]]:
    """Return the cluster, its halves, their halves and so on; and the rest of the cluster beside one of these at its edge."""
    rank_ranges, todo = set(), [RankRange(0, size)]
    while todo:
        rank_range = todo.pop()
        rank_ranges.add(rank_range)
        todo += halves(rank_range, local_size) if rank_range.count > 1 else ()
    rests = {
        RankRange(rank_range.end, size - rank_range.count)
        for rank_range in rank_ranges
        if rank_range.first == 0 and rank_range.count < size
    }
    rests |= {RankRange(0, rank_range.first) for rank_range in rank_ranges if rank_range.end == size and rank_range.first > 0}
    return rank_ranges, rests - rank_ranges


def range_sizes(size: int, local_size: int) -> list[int]:
    """Return the indices of ranks that a search may give a call."""
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
        rank_ranges, rests = all_ranges(problem.size, problem.local_size)
        self.rests = sorted(ranks for ranks in rests if ranks.count in sizes)
        self.by_size: dict[int, list[RankRange]] = {}
        for ranks in sorted({*rank_ranges, *self.rests}):
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
            rank_range = todo.pop()
            if rank_range.count == size:
                ranges.append(rank_range)
            elif rank_range.count > size:
                first, second = halves(rank_range, self.local_size)
                todo.append(first)
                if self._inside(first, occupied) != self._inside(second, occupied):
                    todo.append(second)
        return tuple(sorted(ranges))

    def _inside(self, rank_range: RankRange, occupied: frozenset[RankRange]) -> tuple[object, ...]:
        """Return what distinguishes a half from the other."""
        edges = (rank_range.first == 0, rank_range.end == self.all_ranks.end) if self.rests else ()
        clips = {(ranks, *_clip(ranks, rank_range)) for ranks in occupied if ranks.overlaps(rank_range)}
        memory = [(*_clip(ranks, rank_range), amount) for ranks, amount in self._memory if ranks.overlaps(rank_range)]
        return rank_range.count, edges, frozenset(clips), tuple(memory)


def _clip(ranks: RankRange, rank_range: RankRange) -> tuple[int, int]:
    return max(ranks.first - rank_range.first, 0), min(ranks.end - rank_range.first, rank_range.count)


class FastestWithin:
    """The fastest option within a number of bytes, from (bytes, seconds, option) of each."""

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
    """Tables of a problem's options, each built at its first use."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.rooms = lru_cache(maxsize=256)(self._rooms)
        self.needs = cache(self._needs)
        self.tied = cache(self._tied)
        self.homes = cache(self._homes)
        self.useful = cache(self._useful)
        self._tables = cache(self._movable)

    def _rooms(self, resident: ResidentBytes) -> list[tuple[RankRange, float]]:
        """Return bytes left on each rank, by ranges of equal ranks."""
        memory, ranges = self.problem.memory, [ranks for ranks, _ in (*self.problem.memory_runs, *resident)]
        cuts = sorted({edge for ranks in ranges for edge in (ranks.first, ranks.end)})
        resident_bytes = [sum(amount for ranks, amount in resident if ranks.first <= first < ranks.end) for first in cuts]
        return [
            (RankRange(a, b - a), memory[a] - amount) for (a, b), amount in zip(pairwise(cuts), resident_bytes, strict=False)
        ]

    def room(self, resident: ResidentBytes, ranks: RankRange) -> float:
        """Return bytes left on the fullest of these ranks."""
        return min(left for run, left in self.rooms(resident) if run.overlaps(ranks))

    def largest_room(self, resident: ResidentBytes, ranges: RankRanges) -> dict[int, float]:
        """Return, by size, bytes left in the emptiest range of this size; for sizes with many ranges, on the emptiest rank."""
        runs, rooms = self.rooms(resident), {}
        emptiest = max(left for _, left in runs)
        for size, among in ranges.by_size.items():
            fullest = (min(left for run, left in runs if run.overlaps(ranks)) for ranks in among)
            rooms[size] = max(fullest) if len(among) <= 8 else emptiest
        return rooms

    def _needs(self, role: str, option: int) -> tuple[float, float]:
        """Return bytes on each rank of the role's home: resident bytes, and the largest call bytes of the tied calls."""
        calls = [self.problem.calls[call_index] for call_index in self.problem.tied[role]]
        return self.problem.calls[self.problem.homes[role]].options[option].resident, max(
            c.options[option].call_bytes for c in calls
        )

    def _tied(self, call_index: int, size: int) -> FastestWithin:
        """Return the table of a tied call."""
        call = self.problem.calls[call_index]
        indices = self.problem.options_by_size[call_index].get(size, ())
        return FastestWithin((sum(self.needs(call.role, index)), call.options[index].seconds, index) for index in indices)

    def _homes(self, role: str, size: int) -> list[int]:
        """Return options of a role's home, the fastest first, without dominated ones.

        An option dominates another of its size if it takes no longer in any tied call, needs no more bytes, and has the same
        layout in case the role has movable calls. Then it is as good in every plan: no schedule is later, no rank fuller, and
        copies of weights cost the same.
        """
        problem, tied = self.problem, self.problem.tied[role]
        indices = self.problem.options_by_size[problem.homes[role]].get(size, [])
        rows = [[*(problem.calls[call_index].options[o].seconds for call_index in tied), *self.needs(role, o)] for o in indices]
        moves = any(problem.calls[call_index].role == role for call_index in problem.movable)
        options = [problem.calls[problem.homes[role]].options[o] for o in indices]
        return [indices[i] for i in best_of(rows, [option.layout if moves else None for option in options])]

    def _movable(self, call_index: int, size: int, holders: int, layout: WeightLayout | None, near: bool) -> FastestWithin:
        """Return the table of a movable call on ``size`` ranks.

        ``layout``: the home's layout if the ranks are the home's, else None. ``holders``: number of the home's ranks; 0: copying
        the weights costs nothing.
        """
        call, rows = self.problem.calls[call_index], []
        for index in self.useful(call_index, size):
            option = call.options[index]
            seconds, copied = (
                self.problem.weight_copy_cost_between(call.role, layout, holders, option, near) if holders else (0.0, 0.0)
            )
            rows.append((option.call_bytes + copied, option.seconds + seconds, index))
        return FastestWithin(rows)

    def _useful(self, call_index: int, size: int) -> list[int]:
        """Return options of a movable call, without those that another one with the same layout beats."""
        call, indices = self.problem.calls[call_index], self.problem.options_by_size[call_index].get(size, [])
        options = [call.options[index] for index in indices]
        return [indices[i] for i in best_of([[o.seconds, o.call_bytes] for o in options], [o.layout for o in options])]

    def movable(self, call_index: int, home: Choice, ranks: RankRange) -> FastestWithin:
        """Return the table of a movable call on ``ranks``, copies of the weights from ``home`` included."""
        same, near = home.rank_range == ranks, self.problem.on_one_host(home.rank_range, ranks)
        layout = self.problem.home_layout(self.problem.calls[call_index].role, home) if same else None
        return self._tables(call_index, ranks.count, home.rank_range.count, layout, near)

    def movable_anywhere(self, call_index: int, home: Choice | None, size: int) -> Sequence[FastestWithin]:
        """Return a table for each relation of ``size`` ranks to the home's. Without a home, copying costs nothing."""
        if home is None:
            return [self._tables(call_index, size, 0, None, False)]
        holders, inside = home.rank_range.count, self.problem.on_one_host(home.rank_range)
        tables = [self._tables(call_index, size, holders, None, inside and size <= self.problem.local_size)]
        if size == holders:
            layout = self.problem.home_layout(self.problem.calls[call_index].role, home)
            tables.append(self._tables(call_index, size, holders, layout, inside))
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
    """Return a choice for each call whose ranks are decided, greedily; None if none fit.

    ``homes``: ranks of each role's home. ``movable``: ranks of the movable calls. ``chosen``: options of some homes. Roles are
    treated one by one, the one whose calls take longest first. Each gets the fastest option that fits if later roles hold as
    little as they can.
    """
    calls = tables.problem.calls
    options: dict[str, list[int]] = {}
    least_resident: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for role, ranks in homes.items():
        options[role] = [chosen[role]] if role in chosen else tables.homes(role, ranks.count)
        if not options[role]:
            return None
        seconds[role] = calls[tables.problem.homes[role]].options[options[role][0]].seconds
        least_resident[role] = min(tables.needs(role, option)[0] for option in options[role])
    order = sorted(homes, key=lambda role: (role not in chosen, -seconds[role], least_resident[role]))
    resident: list[tuple[RankRange, float]] = []
    call_bytes: dict[str, float] = {}
    choices: dict[int, Choice] = {}
    for index, role in enumerate(order):
        later = [(homes[other], least_resident[other]) for other in order[index + 1 :]]
        for option in options[role]:
            home_bytes, call_bytes[role] = tables.needs(role, option)
            all_resident = (*resident, (homes[role], home_bytes), *later)
            if all(need <= tables.room(all_resident, homes[other]) for other, need in call_bytes.items()):
                break
        else:
            return None
        resident.append((homes[role], home_bytes))
        choices |= {call_index: Choice(homes[role], option) for call_index in tables.problem.tied[role]}
    for call_index, ranks in movable.items():
        home = choices[tables.problem.homes[calls[call_index].role]]
        option = tables.movable(call_index, home, ranks).within(tables.room(tuple(resident), ranks))[1]
        if option < 0:
            return None
        choices[call_index] = Choice(ranks, option)
    return choices


def plan_of(choices: Mapping[int, Choice]) -> Plan:
    """Return the plan of these choices by index of the call."""
    return tuple(choices[call_index] for call_index in sorted(choices))
