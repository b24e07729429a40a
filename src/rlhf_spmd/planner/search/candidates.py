"""Candidates of all searches: ranges of ranks, and the fastest option of a call that fits into the memory left. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import pairwise
from operator import le
from types import MappingProxyType

from rlhf_spmd.planner.problem import Choice, Extent, KindBytes, Plan, Problem, RankRange, WeightLayout, extent_of, num_ranks

DeviceRuns = Sequence[tuple[RankRange, int]]  # ranges of ranks with equal devices, and their kind
NO_OPTION = (float("inf"), -1)  # seconds and index where no option fits
ResidentBytes = tuple[tuple[RankRange, float], ...]  # bytes of homes between calls, on each rank of a range


def halves(ranks: RankRange, local_size: int, device_runs: DeviceRuns) -> tuple[RankRange, RankRange]:
    """Return the two parts into which a range is cut.

    Ranks with several kinds of devices are cut between two kinds, as near to the middle as possible. Equal ranks are halved, in
    complete hosts if there are several, the larger half first. Ranges of equal extents are cut alike.
    """
    borders = [run.first for run, _ in device_runs if ranks.first < run.first < ranks.end]
    first_host = ranks.first // local_size
    num_hosts = -(-ranks.end // local_size) - first_host
    if borders:
        cut = min(borders, key=lambda border: abs(2 * border - ranks.first - ranks.end))
    elif num_hosts > 1:
        cut = (first_host + -(-num_hosts // 2)) * local_size
    else:
        cut = ranks.first + -(-ranks.count // 2)
    return RankRange(ranks.first, cut - ranks.first), RankRange(cut, ranks.end - cut)


def all_ranges(local_size: int, device_runs: DeviceRuns) -> tuple[set[RankRange], set[RankRange]]:
    """Return the repeated halves of the cluster, itself included; and the rest of the cluster beside each of them at its edge."""
    size = device_runs[-1][0].end
    rank_ranges = set()
    todo = [RankRange(0, size)]
    while todo:
        rank_range = todo.pop()
        rank_ranges.add(rank_range)
        todo += halves(rank_range, local_size, device_runs) if rank_range.count > 1 else ()
    rests = {
        RankRange(rank_range.end, size - rank_range.count)
        for rank_range in rank_ranges
        if rank_range.first == 0 and rank_range.count < size
    }
    rests |= {RankRange(0, rank_range.first) for rank_range in rank_ranges if rank_range.end == size and rank_range.first > 0}
    return rank_ranges, rests - rank_ranges


def range_extents(local_size: int, device_runs: DeviceRuns) -> list[Extent]:
    """Return the extents of the ranges that a search may give a call, without duplicates."""
    ranges = sorted(set.union(*all_ranges(local_size, device_runs)))
    return list(dict.fromkeys(extent_of(device_runs, ranks) for ranks in ranges))


class RankRanges:
    """The ranges of ranks that a plan may give a call: those of :func:`all_ranges` for which some call has an option.

    - by_extent, by_size: ranks by kind of device, or number of ranks -> the ranges that have them, ascending
    - rests: the ranges beside a repeated half
    - halves(ranks): the two parts of a range
    """

    def __init__(self, problem: Problem) -> None:
        self.all_ranks = RankRange(0, problem.size)
        self.local_size = problem.local_size
        self.device_runs = problem.device_runs
        self.extent = problem.extent
        extents = {option.extent for call in problem.calls for option in call.options}
        rank_ranges, rests = all_ranges(problem.local_size, problem.device_runs)
        self.rests = sorted(ranks for ranks in rests if self.extent(ranks) in extents)
        self.by_extent: dict[Extent, list[RankRange]] = {}
        for ranks in sorted({*rank_ranges, *self.rests}):
            if self.extent(ranks) in extents:
                self.by_extent.setdefault(self.extent(ranks), []).append(ranks)
        self.by_size: dict[int, list[RankRange]] = {}
        for ranks in sorted(ranks for same_extent in self.by_extent.values() for ranks in same_extent):
            self.by_size.setdefault(ranks.count, []).append(ranks)
        self._memory = problem.memory_runs
        self.halves = cache(lambda ranks: halves(ranks, self.local_size, self.device_runs))
        self.ranges_up_to_symmetry = cache(self._ranges_up_to_symmetry)  # the cache lives as long as this object

    def _ranges_up_to_symmetry(self, extent: Extent, occupied: frozenset[RankRange]) -> tuple[RankRange, ...]:
        """Return ranges of this extent. Of those that differ only by a symmetry, one is returned.

        Two halves can be exchanged if they have the same extent, memory, and parts of each ``occupied`` range. An exchange maps
        hosts to hosts, halves to halves, and each occupied range to itself. So a plan stays a plan if all that it has in the one
        half and in the other is exchanged. An exchange need not map a range of :attr:`rests` to such a range. It does if it keeps
        the halves at the edges of the cluster; where there are such ranges, these halves therefore count as different.
        """
        ranges = [ranks for ranks in self.rests if self.extent(ranks) == extent]
        size = num_ranks(extent)
        todo = [self.all_ranks]
        while todo:
            rank_range = todo.pop()
            if self.extent(rank_range) == extent:
                ranges.append(rank_range)
            elif rank_range.count > size:
                first, second = self.halves(rank_range)
                todo.append(first)
                if self._half_signature(first, occupied) != self._half_signature(second, occupied):
                    todo.append(second)
        return tuple(sorted(ranges))

    def _half_signature(self, rank_range: RankRange, occupied: frozenset[RankRange]) -> tuple[object, ...]:
        """Return what two halves must have in common to be exchanged."""
        edges = (rank_range.first == 0, rank_range.end == self.all_ranks.end) if self.rests else ()
        clips = {(ranks, *_clip(ranks, rank_range)) for ranks in occupied if ranks.overlaps(rank_range)}
        memory = [(*_clip(ranks, rank_range), amount) for ranks, amount in self._memory if ranks.overlaps(rank_range)]
        return self.extent(rank_range), edges, frozenset(clips), tuple(memory)


def _clip(ranks: RankRange, rank_range: RankRange) -> tuple[int, int]:
    """Return first and end of the part of ``ranks`` in ``rank_range``, counted from its first rank."""
    return max(ranks.first - rank_range.first, 0), min(ranks.end - rank_range.first, rank_range.count)


class FastestWithin:
    """A table of the fastest option within a number of bytes, built from (bytes, seconds, option) of each option."""

    def __init__(self, options: Iterable[tuple[KindBytes, float, int]]) -> None:
        self._bytes: list[KindBytes] = []  # each fits where no later one does, or is slower
        self._fastest: list[tuple[float, int]] = []
        for amounts, seconds, option in sorted(options):
            if not self._is_beaten(amounts, seconds):
                self._bytes.append(amounts)
                self._fastest.append((seconds, option))

    def _is_beaten(self, amounts: KindBytes, seconds: float) -> bool:
        """Return True if an option in the table needs no more, and is as fast."""
        if len(amounts) == 1:  # all in the table need less, and the last is the fastest
            return bool(self._fastest) and self._fastest[-1][0] <= seconds
        return any(fits(other, amounts) and self._fastest[i][0] <= seconds for i, other in enumerate(self._bytes))

    def within(self, room: KindBytes) -> tuple[float, int]:
        """Return (seconds, option) of the fastest option within ``room`` bytes, or (inf, -1) if none fits."""
        if len(room) == 1:
            index = bisect_right(self._bytes, room) - 1
            return self._fastest[index] if index >= 0 else NO_OPTION
        fitting = (each for amounts, each in zip(self._bytes, self._fastest, strict=True) if fits(amounts, room))
        return min(fitting, default=NO_OPTION)


NO_OPTIONS = FastestWithin(())


def fits(needed: KindBytes, room: KindBytes) -> bool:
    """Return True if the ranks of each kind have room for what they need."""
    return all(map(le, needed, room))


class CandidateTables:
    """Tables of a problem's options, each built at its first use.

    A cached method is a field, so that its cache lives as long as the object.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.rooms = lru_cache(maxsize=256)(self._rooms)
        self.home_bytes = cache(self._home_bytes)
        self.tied_table = cache(self._tied_table)
        self.home_options = cache(self._home_options)
        self._undominated_options = cache(self._find_undominated_options)
        self._movable_table = cache(self._build_movable_table)

    def _rooms(self, resident: ResidentBytes) -> list[tuple[RankRange, float]]:
        """Return bytes left on each rank, by ranges of equal ranks."""
        cuts = sorted({edge for ranks, _ in (*self.problem.memory_runs, *resident) for edge in (ranks.first, ranks.end)})
        rooms = []
        for first, end in pairwise(cuts):
            resident_bytes = sum(amount for ranks, amount in resident if ranks.first <= first < ranks.end)
            rooms.append((RankRange(first, end - first), self.problem.memory[first] - resident_bytes))
        return rooms

    def room(self, resident: ResidentBytes, ranks: RankRange) -> KindBytes:
        """Return bytes left on the fullest of these ranks that have the same kind of device."""
        rooms = self.rooms(resident)
        return tuple(
            min(left for run, left in rooms if any(run.overlaps(part) for part in parts))
            for parts in self.problem.parts_of_kinds(ranks)
        )

    def largest_room(self, resident: ResidentBytes, ranges: RankRanges) -> dict[Extent, KindBytes]:
        """Return, by extent, the most bytes that a range leaves each kind; for extents with many ranges, those of the emptiest rank.

        No range has more room on any kind. So what does not fit here fits nowhere, and seconds that are found here are lower bounds.
        """
        emptiest = max(left for _, left in self.rooms(resident))
        by_extent = {}
        for extent, same_extent in ranges.by_extent.items():
            if len(same_extent) <= 8:
                rooms = [self.room(resident, ranks) for ranks in same_extent]
                by_extent[extent] = tuple(map(max, zip(*rooms, strict=True)))
            else:
                by_extent[extent] = (emptiest,) * len(self.problem.parts_of_kinds(same_extent[0]))
        return by_extent

    def _home_bytes(self, role: str, option: int) -> tuple[float, KindBytes]:
        """Return bytes on each rank of the role's home: resident bytes, and the largest call bytes of the tied calls."""
        problem = self.problem
        resident = problem.calls[problem.homes[role]].options[option].resident
        amounts = [problem.calls[call_index].options[option].call_bytes for call_index in problem.tied[role]]
        return resident, tuple(map(max, zip(*amounts, strict=True)))

    def fits_home(self, resident: ResidentBytes, role: str, home: Choice) -> bool:
        """Return True if the tied calls of a role fit at its home. ``resident``: of all homes, this one among them."""
        return fits(self.home_bytes(role, home.option)[1], self.room(resident, home.rank_range))

    def _tied_table(self, call_index: int, extent: Extent) -> FastestWithin:
        """Return the table of a tied call."""
        call = self.problem.calls[call_index]
        indices = self.problem.options_by_extent[call_index].get(extent, ())
        rows = []
        for index in indices:
            resident, amounts = self.home_bytes(call.role, index)
            rows.append((tuple(resident + amount for amount in amounts), call.options[index].seconds, index))
        return FastestWithin(rows)

    def _home_options(self, role: str, extent: Extent) -> list[int]:
        """Return options of a role's home, the fastest first, without dominated ones.

        An option dominates another of its extent if it takes no longer in any tied call, needs no more bytes, and has the same
        layout in case the role has movable calls. Then it is as good in every plan: no schedule is later, no rank fuller, and
        copies of weights cost the same.
        """
        problem = self.problem
        indices = problem.options_by_extent[problem.homes[role]].get(extent, [])
        tied_calls = [problem.calls[call_index] for call_index in problem.tied[role]]
        rows = []
        for i in indices:
            resident, amounts = self.home_bytes(role, i)
            rows.append([*(call.options[i].seconds for call in tied_calls), resident, *amounts])
        has_movable = any(problem.calls[call_index].role == role for call_index in problem.movable)
        home = problem.calls[problem.homes[role]]
        kinds = [home.options[i].layout if has_movable else None for i in indices]
        return [indices[i] for i in undominated(rows, kinds)]

    def _build_movable_table(
        self, call_index: int, extent: Extent, num_home_ranks: int, layout: WeightLayout | None, on_one_host: bool
    ) -> FastestWithin:
        """Return the table of a movable call on ranks of ``extent``; see :meth:`Problem.weight_copy_cost_between`.

        ``num_home_ranks`` 0: copying the weights costs nothing.
        """
        call = self.problem.calls[call_index]
        rows = []
        for index in self._undominated_options(call_index, extent):
            option = call.options[index]
            copy_seconds, copy_bytes = 0.0, 0.0
            if num_home_ranks:
                cost = self.problem.weight_copy_cost_between(call.role, layout, num_home_ranks, option, on_one_host)
                copy_seconds, copy_bytes = cost
            amounts = tuple(amount + copy_bytes for amount in option.call_bytes)
            rows.append((amounts, option.seconds + copy_seconds, index))
        return FastestWithin(rows)

    def _find_undominated_options(self, call_index: int, extent: Extent) -> list[int]:
        """Return options of a movable call, without those that another one with the same layout beats."""
        indices = self.problem.options_by_extent[call_index].get(extent, [])
        options = [self.problem.calls[call_index].options[index] for index in indices]
        rows = [[option.seconds, *option.call_bytes] for option in options]
        return [indices[i] for i in undominated(rows, [option.layout for option in options])]

    def movable_table(self, call_index: int, home: Choice, ranks: RankRange) -> FastestWithin:
        """Return the table of a movable call on ``ranks``, copies of the weights from ``home`` included."""
        if self.problem.must_be_apart(self.problem.calls[call_index]) and home.rank_range.overlaps(ranks):
            return NO_OPTIONS
        on_one_host = self.problem.on_one_host(home.rank_range, ranks)
        role = self.problem.calls[call_index].role
        layout = self.problem.home_layout(role, home) if home.rank_range == ranks else None
        return self._movable_table(call_index, self.problem.extent(ranks), home.rank_range.count, layout, on_one_host)

    def movable_tables(self, call_index: int, home: Choice | None, extent: Extent) -> Sequence[FastestWithin]:
        """Return a table for each relation of ranks of ``extent`` to the home's. Without a home, copying costs nothing."""
        if home is None:
            return [self._movable_table(call_index, extent, 0, None, False)]
        num_home_ranks = home.rank_range.count
        on_one_host = self.problem.on_one_host(home.rank_range)
        other_ranks_near = on_one_host and num_ranks(extent) <= self.problem.local_size
        tables = [self._movable_table(call_index, extent, num_home_ranks, None, other_ranks_near)]
        if extent == self.problem.extent(home.rank_range):
            layout = self.problem.home_layout(self.problem.calls[call_index].role, home)
            tables.append(self._movable_table(call_index, extent, num_home_ranks, layout, on_one_host))
        return tables


def undominated(rows: Sequence[list[float]], kinds: Sequence[Hashable]) -> list[int]:
    """Return the indices of undominated rows, ordered by the first column.

    A row dominates another of the same kind if no column of it is larger. Of equal rows the first stays.
    """
    indices: list[int] = []
    rows_of_kind: dict[Hashable, list[list[float]]] = {}
    for index in sorted(range(len(rows)), key=lambda index: rows[index]):  # a row comes after those that dominate it
        rivals = rows_of_kind.setdefault(kinds[index], [])
        if not any(all(map(le, rival, rows[index])) for rival in rivals):
            rivals.append(rows[index])
            indices.append(index)
    return indices


def greedy_choices(
    tables: CandidateTables,
    homes: Mapping[str, RankRange],
    movable: Mapping[int, RankRange],
    decided_options: Mapping[str, int] = MappingProxyType({}),
) -> dict[int, Choice] | None:
    """Return a choice for each call whose ranks are decided, greedily; None if none fit.

    ``homes``: ranks of each role's home. ``movable``: ranks of the movable calls. ``decided_options``: options of some homes.
    """
    choices = _choose_homes(tables, homes, decided_options)
    return None if choices is None else choose_movable(tables, choices, movable)


def _choose_homes(
    tables: CandidateTables, homes: Mapping[str, RankRange], decided_options: Mapping[str, int]
) -> dict[int, Choice] | None:
    """Return a choice for each home and the calls that share it; None if none fit.

    Roles are treated one by one, the one whose home takes longest first. Each gets the fastest option that fits if later roles
    hold as little as they can.
    """
    problem = tables.problem
    options: dict[str, list[int]] = {}
    least_resident: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for role, ranks in homes.items():
        extent = problem.extent(ranks)
        options[role] = [decided_options[role]] if role in decided_options else tables.home_options(role, extent)
        if not options[role]:
            return None
        seconds[role] = problem.calls[problem.homes[role]].options[options[role][0]].seconds
        least_resident[role] = min(tables.home_bytes(role, option)[0] for option in options[role])
    order = sorted(homes, key=lambda role: (role not in decided_options, -seconds[role], least_resident[role]))
    resident: list[tuple[RankRange, float]] = []
    chosen: dict[str, Choice] = {}
    choices: dict[int, Choice] = {}
    for index, role in enumerate(order):
        later = [(homes[other], least_resident[other]) for other in order[index + 1 :]]
        for option in options[role]:
            home_bytes = tables.home_bytes(role, option)[0]
            chosen[role] = Choice(homes[role], option)
            all_resident = (*resident, (homes[role], home_bytes), *later)
            if all(tables.fits_home(all_resident, other, home) for other, home in chosen.items()):
                break
        else:
            return None
        resident.append((homes[role], home_bytes))
        choices |= {call_index: Choice(homes[role], option) for call_index in problem.tied[role]}
    return choices


def choose_movable(
    tables: CandidateTables, choices: dict[int, Choice], movable: Mapping[int, RankRange]
) -> dict[int, Choice] | None:
    """Return ``choices``, those of homes, with the fastest choice that fits for each movable call; None if none fits."""
    homes = {tables.problem.calls[call_index].role: choice for call_index, choice in choices.items()}
    resident = tuple((home.rank_range, tables.home_bytes(role, home.option)[0]) for role, home in homes.items())
    for call_index, ranks in movable.items():
        home = homes[tables.problem.calls[call_index].role]
        _, option = tables.movable_table(call_index, home, ranks).within(tables.room(resident, ranks))
        if option < 0:
            return None
        choices[call_index] = Choice(ranks, option)
    return choices


def plan_of(choices: Mapping[int, Choice]) -> Plan:
    """Return the plan of ``choices``: index of the call -> its choice."""
    return tuple(choices[call_index] for call_index in sorted(choices))
