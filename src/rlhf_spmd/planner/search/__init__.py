"""Searches for the fastest plan that fits: ``search(problem, limit, seed)`` of each module. ``Found`` is what they return."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.planner.problem import Plan, Problem


@dataclass(frozen=True)
class Found:
    """``seconds``: of a step of ``plan``. ``lower_bound``: no plan takes fewer, as far as the search knows (0: it proves nothing);
    ``optimal``: it is ``seconds``. ``evaluations``: schedules that were computed. ``search_seconds``: how long it took."""

    plan: Plan
    seconds: float
    lower_bound: float
    optimal: bool
    evaluations: int
    search_seconds: float


class NoPlanError(ValueError):
    """No plan fits into the ranks' memory; says what is missing."""


def no_plan(problem: Problem, searched: str) -> NoPlanError:
    """What stands in the way: a call that fits nowhere by itself, or else the roles together.

    ``searched``: the search's words for plans that it has not tried, empty where it has tried all.
    """
    size, most = problem.size, max(problem.memory)
    needs = (  # of each call (bytes on each rank, ranks) where it needs least
        (min((option.active + option.held * call.home, option.size) for option in call.options), f"{call.name} of {call.role}")
        for call in problem.calls
    )
    (bytes_, ranks), name = max(needs)
    if bytes_ > most:
        return NoPlanError(
            f"no plan fits: {name} needs at least {bytes_ / GIB:.1f} GiB on each of {ranks} ranks, and a rank has {most / GIB:.1f}; "
            f"{_remedy(bytes_ * ranks, most)}"
        )
    held = problem.least_held
    role, total = max(held, key=lambda name: held[name]), sum(held.values())
    hold = (
        f"the roles hold at least {total / size / GIB:.1f} GiB on each of {size} ranks, {role} most of it "
        f"({held[role] / size / GIB:.1f})"
    )
    if total > sum(problem.memory):
        return NoPlanError(f"no plan fits: {hold}, and a rank has {most / GIB:.1f}; {_remedy(total, most)}")
    return NoPlanError(
        f"no plan fits{searched}: {name} needs at least {bytes_ / GIB:.1f} of the {most / GIB:.1f} GiB of a rank, and {hold}; "
        f"{_remedy(total + bytes_ * ranks, most)}"
    )


def _remedy(total: float, memory: float) -> str:
    return f"{-(-total // memory):.0f} ranks or more would hold it if it is divided evenly, or choose devices with more memory"
