"""ReaL's search (section 5.2): a Markov chain over plans, Metropolis with exp(-beta * cost). Proves nothing. Pure."""

from __future__ import annotations

import math
import random
import time

from rlhf_spmd.planner.problem import Choice, Plan, Problem, Schedule, simulate
from rlhf_spmd.planner.search import SearchResult, no_plan_error
from rlhf_spmd.planner.search.candidates import RankRanges

BETA = 50.0  # a plan that is slower by 2% of the start's seconds is accepted with probability 1/e
EXCESS_COST = 10.0  # steps that a plan costs more if it exceeds a rank's memory by as much again


def search(problem: Problem, limit: float = 10.0, seed: int = 0) -> SearchResult:
    """Return the best plan of a walk of ``limit`` seconds.

    It starts with the fastest option of each call, whatever its memory, and changes ranks and option of a random call. The cost
    is the step's seconds, more if memory is exceeded; ``BETA`` is divided by the seconds of the start's calls. The start's own
    cost would not do: where its weights cannot be copied, it is so large that every plan is accepted. Raises NoPlanError if no
    plan on the way fits.
    """
    started = time.perf_counter()
    draw = random.Random(seed)
    ranges = RankRanges(problem)
    options = [
        {extent: indices for extent, indices in by_extent.items() if extent in ranges.by_extent}
        for by_extent in problem.options_by_extent
    ]

    def with_choice(plan: Plan, call_index: int, choice: Choice) -> Plan:
        """Return the plan with another choice for this call, and if it is a home for all calls that run there."""
        call = problem.calls[call_index]
        call_indices = problem.tied[call.role] if call.home else (call_index,)
        return tuple(choice if other in call_indices else current for other, current in enumerate(plan))

    independent = [call_index for call_index, call in enumerate(problem.calls) if not call.shares_home]
    plan: Plan = (Choice(ranges.all_ranks, 0),) * len(problem.calls)
    scale = 0.0
    for call_index in independent:
        call_options = problem.calls[call_index].options
        indices = (index for same_extent in options[call_index].values() for index in same_extent)
        fastest = min(indices, key=lambda index: call_options[index].seconds)
        scale += call_options[fastest].seconds
        plan = with_choice(plan, call_index, Choice(ranges.by_extent[call_options[fastest].extent][0], fastest))
    best: tuple[float, Plan] | None = None
    schedule = simulate(problem, plan)
    evaluations = 1
    while True:
        if schedule.fits and (best is None or schedule.seconds < best[0]):
            best = schedule.seconds, plan
        if time.perf_counter() - started >= limit:
            break
        call_index = draw.choice(independent)
        extent = draw.choice(list(options[call_index]))
        choice = Choice(draw.choice(ranges.by_extent[extent]), draw.choice(options[call_index][extent]))
        next_plan = with_choice(plan, call_index, choice)
        next_schedule = simulate(problem, next_plan)
        evaluations += 1
        if draw.random() < math.exp(min(BETA / scale * (_cost(schedule) - _cost(next_schedule)), 0.0)):
            plan, schedule = next_plan, next_schedule
    if best is None:
        raise no_plan_error(problem, f" of the {evaluations} that mcmc tried")
    return SearchResult(best[1], best[0], 0.0, False, evaluations, time.perf_counter() - started)


def _cost(schedule: Schedule) -> float:
    return schedule.seconds * (1 + (0 if schedule.fits else EXCESS_COST * schedule.excess))
