"""ReaL's search (section 5.2): a Markov chain over plans, Metropolis with exp(-beta * cost). Proves nothing. Pure."""

from __future__ import annotations

import math
import random
import time

from rlhf_spmd.planner.meshes import RankRanges
from rlhf_spmd.planner.problem import Choice, Plan, Problem
from rlhf_spmd.planner.search import Found, no_plan
from rlhf_spmd.planner.simulate import Schedule, simulate

BETA = 50.0  # a plan that is slower by 2% of the start's cost is taken with a chance of 1/e
OVER = 10.0  # cost of what exceeds a rank's memory, in steps for each time the memory


def search(problem: Problem, limit: float = 10.0, seed: int = 0) -> Found:
    """For ``limit`` seconds. Starts with the fastest option of each call, regardless of memory, and changes mesh and option of a random
    call. Cost is the step's seconds, more where memory is exceeded; ``beta`` is over the start's cost, so it has no unit. Raises
    NoPlanError where no plan that it met fits."""
    started, draw, meshes = time.perf_counter(), random.Random(seed), RankRanges(problem)
    options = [{size: its for size, its in by_size.items() if size in meshes.of} for by_size in problem.options_by_size]

    def moved(plan: Plan, node: int, choice: Choice) -> Plan:
        """With another choice for this call and, at a role's home, for all that run there."""
        call = problem.calls[node]
        nodes = problem.tied[call.role] if call.home else (node,)
        return tuple(choice if other in nodes else one for other, one in enumerate(plan))

    free = [node for node, call in enumerate(problem.calls) if not call.at_home]
    plan: Plan = (Choice(meshes.whole, 0),) * len(problem.calls)
    for node in free:
        its = problem.calls[node].options
        best = min((n for numbers in options[node].values() for n in numbers), key=lambda n: its[n].seconds)
        plan = moved(plan, node, Choice(meshes.of[its[best].size][0], best))
    found: tuple[float, Plan] | None = None
    now, evaluations = simulate(problem, plan), 1
    scale = _cost(now)
    while True:
        if now.fits and (found is None or now.seconds < found[0]):
            found = now.seconds, plan
        if time.perf_counter() - started >= limit:
            break
        node = draw.choice(free)
        size = draw.choice(list(options[node]))
        other = moved(plan, node, Choice(draw.choice(meshes.of[size]), draw.choice(options[node][size])))
        then, evaluations = simulate(problem, other), evaluations + 1
        if draw.random() < math.exp(min(BETA / scale * (_cost(now) - _cost(then)), 0.0)):
            plan, now = other, then
    if found is None:
        raise no_plan(problem, f" of the {evaluations} that mcmc tried")
    return Found(found[1], found[0], 0.0, False, evaluations, time.perf_counter() - started)


def _cost(schedule: Schedule) -> float:
    return schedule.seconds * (1 + (0 if schedule.fits else OVER * schedule.excess))
