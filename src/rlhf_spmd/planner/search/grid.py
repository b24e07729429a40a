"""APP's planner (section V.C): candidate model placement ratios for every role, the best by simulation. Proves nothing. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product

from rlhf_spmd.planner.problem import Plan, Problem, RankRange, simulate
from rlhf_spmd.planner.search import SearchResult, no_plan_error
from rlhf_spmd.planner.search.candidates import CandidateTables, RankRanges, greedy_choices, plan_of

RATIOS = (1.0, 0.5, 0.25, 0.125)


def search(problem: Problem, limit: float = 60.0, seed: int = 0) -> SearchResult:
    """Return the best of the plans in which each role gets a ratio of the ranks.

    The movable calls of a role get a ratio, too (APP's Pred Actor), or the role's own ranks. Ranges of ranks follow one another,
    from the first rank again when the ranks end. Ratios with which a role does not fit by itself are left out (APP's
    MinResourceChecker). Stops after ``limit`` seconds; ``seed`` is not read. Raises NoPlanError if nothing fits.
    """
    started = time.perf_counter()
    ranges = RankRanges(problem)
    tables = CandidateTables(problem)
    roles = list(problem.homes)
    movable = {call_index: problem.calls[call_index].role for call_index in problem.movable}
    copied_roles = sorted(set(movable.values()), key=roles.index)
    sizes = sorted({size for ratio in RATIOS if (size := max(int(ratio * problem.size), 1)) in ranges.by_size})
    candidates: list[list[int]] = []
    for role in roles:
        candidates.append(
            [size for size in sizes if any(greedy_choices(tables, {role: ranks}, {}) for ranks in ranges.by_size[size])]
        )
    candidates += [[0, *sizes] for _ in copied_roles]  # 0: the role's own ranks
    best: tuple[float, Plan] | None = None
    evaluations = 0
    for chosen_sizes in product(*(reversed(part_sizes) for part_sizes in candidates)):
        if best and time.perf_counter() - started > limit:
            break
        first = 0
        placed: list[RankRange | None] = []
        for size in chosen_sizes:
            ranks = _next_to(ranges.by_size[size], first % problem.size) if size else None
            placed.append(ranks)
            first = ranks.end if ranks else first
        homes = {role: ranks for role, ranks in zip(roles, placed, strict=False) if ranks}
        copies = dict(zip(copied_roles, placed[len(roles) :], strict=True))
        choices = greedy_choices(tables, homes, {i: copies[role] or homes[role] for i, role in movable.items()})
        if choices:
            evaluations += 1
            plan = plan_of(choices)
            schedule = simulate(problem, plan)
            if schedule.fits and (best is None or schedule.seconds < best[0]):
                best = schedule.seconds, plan
    if best is None:
        raise no_plan_error(problem, f" with ratios of {', '.join(map(str, RATIOS))}")
    return SearchResult(best[1], best[0], 0.0, False, evaluations, time.perf_counter() - started)


def _next_to(ranges: Sequence[RankRange], first: int) -> RankRange:
    """Return the range that begins at this rank or soonest after it, else the first one."""
    return next((ranks for ranks in ranges if ranks.first >= first), ranges[0])
