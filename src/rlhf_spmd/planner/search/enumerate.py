"""HybridFlow's search (section 6, algorithms 1 and 2): all partitions of the roles into sets that share ranks. Proves nothing.
Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache

from rlhf_spmd.planner.problem import Choice, Problem, RankRange, simulate
from rlhf_spmd.planner.search import SearchResult, no_plan
from rlhf_spmd.planner.search.candidates import CandidateTables, RankRanges, fill, plan_of
from rlhf_spmd.planner.search.phase_scheduling import phases

Group = tuple[str, ...]  # roles that share ranks


def search(problem: Problem, limit: float = 60.0, seed: int = 0) -> SearchResult:
    """Return the best plan in which every call runs on its role's ranks. For each partition of the roles, all allocations are tried in
    which no set could get more ranks.

    Layouts come from a cache by (set, number of ranks). An allocation takes as long as the slowest set in each stage (phase of
    the step), since a set's calls take turns. The best one is simulated. Stops after ``limit`` seconds; ``seed`` is not read.
    Raises NoPlanError if nothing fits.
    """
    started = time.perf_counter()
    ranges = RankRanges(problem)
    tables = CandidateTables(problem)
    stages, roles = phases(problem), list(problem.homes)

    @cache
    def auto_parallel(group: Group, size: int) -> tuple[dict[int, Choice], list[float]] | None:
        """Return the choices of these roles' calls on the first ``size`` ranks, and seconds of each stage; None if they do not fit."""
        ranks = ranges.by_size[size][0]
        movable = {call_index: ranks for call_index in problem.movable if problem.calls[call_index].role in group}
        choices = fill(tables, dict.fromkeys(group, ranks), movable)
        if choices is None:
            return None
        seconds = {
            call_index: problem.calls[call_index].options[choice.option].seconds for call_index, choice in choices.items()
        }
        for call_index in movable:
            home = choices[problem.homes[problem.calls[call_index].role]]
            seconds[call_index] = tables.movable(call_index, home, ranks).within(float("inf"))[0]
        return choices, [sum(seconds.get(call_index, 0.0) for call_index in stage) for stage in stages]

    best: tuple[float, Sequence[Group], tuple[int, ...]] | None = None
    evaluations = 0
    for groups in _partitions(roles):
        sizes = [[size for size in ranges.by_size if auto_parallel(group, size)] for group in groups]
        for allocation in _allocations(sizes, problem.size):
            parts = [part for group, size in zip(groups, allocation, strict=True) if (part := auto_parallel(group, size))]
            seconds = sum(map(max, zip(*(stage_seconds for _, stage_seconds in parts), strict=True)))
            evaluations += 1
            if (best is None or seconds < best[0]) and _disjoint(ranges, allocation):
                best = seconds, groups, allocation
        if best and time.perf_counter() - started > limit:
            break
    if best is None:
        raise no_plan(problem, " where every call runs on its role's ranks")
    choices: dict[int, Choice] = {}
    for group, ranks in zip(best[1], _disjoint(ranges, best[2]), strict=True):
        part = auto_parallel(group, ranks.count)
        assert part
        choices |= {call_index: Choice(ranks, choice.option) for call_index, choice in part[0].items()}
    plan = plan_of(choices)
    schedule = simulate(problem, plan)
    if not schedule.fits:  # ranks with unequal memory
        raise no_plan(problem, " on the ranks that enumerate gives it")
    return SearchResult(plan, schedule.seconds, 0.0, False, evaluations, time.perf_counter() - started)


def _partitions(roles: Sequence[str]) -> Iterator[list[Group]]:
    if not roles:
        yield []
        return
    for groups in _partitions(roles[1:]):
        yield [(roles[0],), *groups]
        for index, group in enumerate(groups):
            yield [*groups[:index], (roles[0], *group), *groups[index + 1 :]]


def _allocations(sizes: Sequence[Sequence[int]], ranks: int) -> Iterator[tuple[int, ...]]:
    """Return all picks of one size for each set, at most ``ranks`` together, in which no size could be the next larger one."""

    def grow(chosen: tuple[int, ...], left: int) -> Iterator[tuple[int, ...]]:
        if len(chosen) == len(sizes):
            if all(
                min((n - size for n in choices if n > size), default=ranks) > left
                for size, choices in zip(chosen, sizes, strict=True)
            ):
                yield chosen
            return
        least = sum(min(choices, default=ranks + 1) for choices in sizes[len(chosen) + 1 :])
        for size in sizes[len(chosen)]:
            if size + least <= left:
                yield from grow((*chosen, size), left - size)

    return grow((), ranks)


def _disjoint(ranges: RankRanges, allocation: tuple[int, ...]) -> list[RankRange]:
    """Return disjoint ranges of these sizes, the largest placed first; empty if that fails."""
    placed: dict[int, RankRange] = {}
    for index in sorted(range(len(allocation)), key=lambda index: -allocation[index]):
        candidates = ranges.by_size[allocation[index]]
        ranks = next((ranks for ranks in candidates if not any(map(ranks.overlaps, placed.values()))), None)
        if ranks is None:
            return []
        placed[index] = ranks
    return [placed[index] for index in range(len(allocation))]
