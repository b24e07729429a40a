"""HybridFlow's search (section 6, algorithms 1 and 2): all partitions of the roles into sets that share ranks. Proves nothing.
Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache

from rlhf_spmd.planner.problem import Choice, Extent, Problem, RankRange, num_ranks, simulate
from rlhf_spmd.planner.search import SearchResult, no_plan_error
from rlhf_spmd.planner.search.candidates import CandidateTables, RankRanges, greedy_choices, plan_of
from rlhf_spmd.planner.search.phase_scheduling import phases

Group = tuple[str, ...]  # roles that share ranks


def search(problem: Problem, limit: float = 60.0, seed: int = 0) -> SearchResult:
    """Return the best plan in which every call runs on its role's ranks.

    For each partition of the roles, all allocations of ranks are tried in which no set could get more. In each phase of the step
    an allocation takes as long as its slowest set, since the calls of a set take turns. The best allocation is simulated. Stops
    after ``limit`` seconds; ``seed`` is not read. Raises NoPlanError if nothing fits.
    """
    started = time.perf_counter()
    ranges = RankRanges(problem)
    tables = CandidateTables(problem)
    step_phases = phases(problem)

    @cache
    def group_choices(group: Group, extent: Extent) -> tuple[dict[int, Choice], list[float]] | None:
        """Return the choices of these roles' calls on the first ranks of ``extent``, and their seconds in each phase; None if they
        do not fit (HybridFlow's auto_parallel)."""
        ranks = ranges.by_extent[extent][0]
        movable = {call_index: ranks for call_index in problem.movable if problem.calls[call_index].role in group}
        choices = greedy_choices(tables, dict.fromkeys(group, ranks), movable)
        if choices is None:
            return None
        seconds = {i: problem.calls[i].options[choice.option].seconds for i, choice in choices.items()}
        unlimited = (float("inf"),) * len(problem.parts_of_kinds(ranks))
        for call_index in movable:
            home = choices[problem.homes[problem.calls[call_index].role]]
            seconds[call_index] = tables.movable_table(call_index, home, ranks).within(unlimited)[0]
        return choices, [sum(seconds.get(i, 0.0) for i in phase) for phase in step_phases]

    best: tuple[float, Sequence[Group], tuple[Extent, ...]] | None = None
    evaluations = 0
    for groups in _partitions(list(problem.homes)):
        extents = [[extent for extent in ranges.by_extent if group_choices(group, extent)] for group in groups]
        for allocation in _allocations(extents, problem.size):
            parts = [part for group, extent in zip(groups, allocation, strict=True) if (part := group_choices(group, extent))]
            seconds = sum(map(max, zip(*(phase_seconds for _, phase_seconds in parts), strict=True)))
            evaluations += 1
            if (best is None or seconds < best[0]) and _disjoint(ranges, allocation):
                best = seconds, groups, allocation
        if best and time.perf_counter() - started > limit:
            break
    if best is None:
        raise no_plan_error(problem, " where every call runs on its role's ranks")
    choices: dict[int, Choice] = {}
    for group, ranks in zip(best[1], _disjoint(ranges, best[2]), strict=True):
        part = group_choices(group, problem.extent(ranks))
        assert part
        choices |= {call_index: Choice(ranks, choice.option) for call_index, choice in part[0].items()}
    plan = plan_of(choices)
    schedule = simulate(problem, plan)
    if not schedule.fits:  # ranks with unequal memory
        raise no_plan_error(problem, " on the ranks that enumerate gives it")
    return SearchResult(plan, schedule.seconds, 0.0, False, evaluations, time.perf_counter() - started)


def _partitions(roles: Sequence[str]) -> Iterator[list[Group]]:
    """Yield all partitions of the roles into sets."""
    if not roles:
        yield []
        return
    for groups in _partitions(roles[1:]):
        yield [(roles[0],), *groups]
        for index, group in enumerate(groups):
            yield [*groups[:index], (roles[0], *group), *groups[index + 1 :]]


def _allocations(extents: Sequence[Sequence[Extent]], ranks: int) -> Iterator[tuple[Extent, ...]]:
    """Return all picks of one extent for each set, at most ``ranks`` together, in which none could have the next larger size."""
    sizes = [[num_ranks(extent) for extent in choices] for choices in extents]

    def extend(chosen: tuple[Extent, ...], left: int) -> Iterator[tuple[Extent, ...]]:
        if len(chosen) == len(sizes):
            chosen_sizes = [num_ranks(extent) for extent in chosen]
            if all(
                min((n - size for n in choices if n > size), default=ranks) > left
                for size, choices in zip(chosen_sizes, sizes, strict=True)
            ):
                yield chosen
            return
        least = sum(min(choices, default=ranks + 1) for choices in sizes[len(chosen) + 1 :])
        for extent in extents[len(chosen)]:
            size = num_ranks(extent)
            if size + least <= left:
                yield from extend((*chosen, extent), left - size)

    return extend((), ranks)


def _disjoint(ranges: RankRanges, allocation: tuple[Extent, ...]) -> list[RankRange]:
    """Return disjoint ranges of these extents, the largest placed first; empty if that fails."""
    placed: dict[int, RankRange] = {}
    for index in sorted(range(len(allocation)), key=lambda index: -num_ranks(allocation[index])):
        candidates = ranges.by_extent[allocation[index]]
        ranks = next((ranks for ranks in candidates if not any(map(ranks.overlaps, placed.values()))), None)
        if ranks is None:
            return []
        placed[index] = ranks
    return [placed[index] for index in range(len(allocation))]
