"""HybridFlow's search (section 6, algorithms 1 and 2): roles in sets that share ranks, all ways to do so. Proves nothing. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache

from rlhf_spmd.planner.meshes import RankRanges
from rlhf_spmd.planner.problem import Choice, Problem, RankRange
from rlhf_spmd.planner.search import Found, no_plan
from rlhf_spmd.planner.search.candidates import Candidates
from rlhf_spmd.planner.search.filling import fill, whole_plan
from rlhf_spmd.planner.search.packing import phases
from rlhf_spmd.planner.simulate import simulate

Group = tuple[str, ...]  # roles that share ranks


def search(problem: Problem, limit: float = 60.0, seed: int = 0) -> Found:
    """Every call runs on its role's ranks. For each partition of the roles, each set gets from the fewest ranks that hold it upwards,
    so that none could grow; layouts come from a cache by (set, ranks), the latency from stages (phases of the step): the slowest
    set of each, in which calls take turns. The best by that is simulated. Stops after ``limit`` seconds; ``seed`` is not read.
    Raises NoPlanError where nothing fits."""
    started, meshes, ways = time.perf_counter(), RankRanges(problem), Candidates(problem)
    stages, roles = phases(problem), list(problem.homes)

    @cache
    def auto_parallel(group: Group, size: int) -> tuple[dict[int, Choice], list[float]] | None:
        """Of these roles on so many ranks: the calls' choices on the first mesh of this size, and seconds of each stage."""
        mesh = meshes.of[size][0]
        lent = {node: mesh for node in problem.lent if problem.calls[node].role in group}
        found = fill(ways, dict.fromkeys(group, mesh), lent)
        if found is None:
            return None
        took = {node: problem.calls[node].options[choice.option].seconds for node, choice in found.items()}
        for node in lent:
            home = found[problem.homes[problem.calls[node].role]]
            took[node] = ways.lent(node, home, mesh).within(float("inf"))[0]
        return found, [sum(took.get(node, 0.0) for node in stage) for stage in stages]

    best: tuple[float, Sequence[Group], tuple[int, ...]] | None = None
    evaluations = 0
    for groups in _partitions(roles):
        sizes = [[size for size in meshes.of if auto_parallel(group, size)] for group in groups]
        for allocation in _allocations(sizes, problem.size):
            parts = [part for group, size in zip(groups, allocation, strict=True) if (part := auto_parallel(group, size))]
            seconds = sum(map(max, zip(*(its for _, its in parts), strict=True)))
            evaluations += 1
            if (best is None or seconds < best[0]) and _disjoint(meshes, allocation):
                best = seconds, groups, allocation
        if best and time.perf_counter() - started > limit:
            break
    if best is None:
        raise no_plan(problem, " where every call runs on its role's ranks")
    choices: dict[int, Choice] = {}
    for group, mesh in zip(best[1], _disjoint(meshes, best[2]), strict=True):
        part = auto_parallel(group, mesh.count)
        assert part
        choices |= {node: Choice(mesh, choice.option) for node, choice in part[0].items()}
    plan = whole_plan(choices)
    schedule = simulate(problem, plan)
    if not schedule.fits:  # ranks with unequal memory
        raise no_plan(problem, " on the ranks that enumerate gives it")
    return Found(plan, schedule.seconds, 0.0, False, evaluations, time.perf_counter() - started)


def _partitions(roles: Sequence[str]) -> Iterator[list[Group]]:
    if not roles:
        yield []
        return
    for groups in _partitions(roles[1:]):
        yield [(roles[0],), *groups]
        for at, group in enumerate(groups):
            yield [*groups[:at], (roles[0], *group), *groups[at + 1 :]]


def _allocations(sizes: Sequence[Sequence[int]], ranks: int) -> Iterator[tuple[int, ...]]:
    """One of each set's sizes, ``ranks`` together at most, and none could be exchanged for the next larger one."""

    def grow(chosen: tuple[int, ...], left: int) -> Iterator[tuple[int, ...]]:
        if len(chosen) == len(sizes):
            if all(
                min((n - had for n in those if n > had), default=ranks) > left for had, those in zip(chosen, sizes, strict=True)
            ):
                yield chosen
            return
        least = sum(min(those, default=ranks + 1) for those in sizes[len(chosen) + 1 :])
        for size in sizes[len(chosen)]:
            if size + least <= left:
                yield from grow((*chosen, size), left - size)

    return grow((), ranks)


def _disjoint(meshes: RankRanges, allocation: tuple[int, ...]) -> list[RankRange]:
    """Meshes of these sizes without a common rank, the largest placed first; none where that fails."""
    found: dict[int, RankRange] = {}
    for at in sorted(range(len(allocation)), key=lambda at: -allocation[at]):
        free = (mesh for mesh in meshes.of[allocation[at]] if not any(mesh.overlaps(other) for other in found.values()))
        mesh = next(free, None)
        if mesh is None:
            return []
        found[at] = mesh
    return [found[at] for at in range(len(allocation))]
