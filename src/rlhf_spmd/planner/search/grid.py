"""APP's planner (section V.C): candidate model placement ratios for every role, the best by simulation. Proves nothing. Pure."""

from __future__ import annotations

import time
from itertools import product

from rlhf_spmd.planner.meshes import RankRanges
from rlhf_spmd.planner.problem import Plan, Problem, RankRange
from rlhf_spmd.planner.search import Found, no_plan
from rlhf_spmd.planner.search.candidates import Candidates
from rlhf_spmd.planner.search.filling import fill, next_to, whole_plan
from rlhf_spmd.planner.simulate import simulate

RATIOS = (1.0, 0.5, 0.25, 0.125)


def search(problem: Problem, limit: float = 60.0, seed: int = 0) -> Found:
    """A ratio of the ranks for each role and, where a role has calls that may run elsewhere, for its copy that predicts (APP's Pred
    Actor), or the role's own ranks. The first stands on the first ranks, the others behind one another, from the first rank again where
    these end. Ratios with which a role by itself does not fit are left out (APP's MinResourceChecker). Stops after ``limit`` seconds;
    ``seed`` is not read. Raises NoPlanError where nothing fits."""
    started, meshes, ways = time.perf_counter(), RankRanges(problem), Candidates(problem)
    roles = list(problem.homes)
    copies = sorted({problem.calls[node].role for node in problem.lent}, key=roles.index)
    sizes = {size for ratio in RATIOS if (size := max(int(ratio * problem.size), 1)) in meshes.of}
    fitting = {role: [size for size in sorted(sizes) if fill(ways, {role: meshes.of[size][0]}, {})] for role in roles}
    found: tuple[float, Plan] | None = None
    evaluations = 0
    candidates = [*(fitting[role] for role in roles), *([0, *sorted(sizes)] for _ in copies)]
    for chosen in product(*(reversed(those) for those in candidates)):
        if found and time.perf_counter() - started > limit:
            break
        at, placed = 0, list[RankRange | None]()
        for size in chosen:
            mesh = next_to(meshes.of[size], at % problem.size) if size else None
            placed.append(mesh)
            at = mesh.end if mesh else at
        homes = {role: mesh for role, mesh in zip(roles, placed, strict=False) if mesh}
        predicts = dict(zip(copies, placed[len(roles) :], strict=True))
        lent = {node: problem.calls[node].role for node in problem.lent}
        choices = fill(ways, homes, {node: predicts[role] or homes[role] for node, role in lent.items()})
        if choices:
            evaluations += 1
            plan = whole_plan(choices)
            schedule = simulate(problem, plan)
            if schedule.fits and (found is None or schedule.seconds < found[0]):
                found = schedule.seconds, plan
    if found is None:
        raise no_plan(problem, f" with ratios of {', '.join(map(str, RATIOS))}")
    return Found(found[1], found[0], 0.0, False, evaluations, time.perf_counter() - started)
