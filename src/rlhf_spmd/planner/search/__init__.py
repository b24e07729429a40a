"""The searches for the fastest plan that fits into memory.

Four modules are one function ``search(problem, limit, seed)`` each, which returns a :class:`SearchResult`: ``exact`` (proves
its result), ``mcmc`` (ReaL), ``enumerate`` (HybridFlow) and ``grid`` (APP). They share ``candidates`` (ranges of ranks, options of a
call) and ``phase_scheduling`` (calls of a phase onto ranks).
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.planner.problem import Plan, Problem


@dataclass(frozen=True)
class SearchResult:
    """A plan, and what is known about it.

    - seconds: of a step
    - lower_bound: no plan takes fewer seconds; 0 if the search proves nothing
    - optimal: the bound is ``seconds``
    - evaluations: schedules that were computed
    - search_seconds: duration of the search
    """

    plan: Plan
    seconds: float
    lower_bound: float
    optimal: bool
    evaluations: int
    search_seconds: float


class NoPlanError(ValueError):
    """No plan fits into the ranks' memory; the message says what is missing."""


def no_plan(problem: Problem, searched: str) -> NoPlanError:
    """Return the error for a problem without a plan: it names a call that fits nowhere alone, or what the roles hold together.

    ``searched``: words that limit what was tried; empty if all plans were.
    """
    size, limit = problem.size, max(problem.memory)
    needs = (  # (bytes on each rank, ranks) of each call's smallest option
        (
            min((option.call_bytes + option.resident * call.home, option.size) for option in call.options),
            f"{call.name} of {call.role}",
        )
        for call in problem.calls
    )
    (need, ranks), name = max(needs)
    if need > limit:
        return NoPlanError(
            f"no plan fits: {name} needs at least {need / GIB:.1f} GiB on each of {ranks} ranks, and a rank has {limit / GIB:.1f}; "
            f"{_remedy(need * ranks, limit)}"
        )
    resident = problem.least_resident
    role, total = max(resident, key=lambda name: resident[name]), sum(resident.values())
    hold = (
        f"the roles hold at least {total / size / GIB:.1f} GiB on each of {size} ranks, {role} most of it "
        f"({resident[role] / size / GIB:.1f})"
    )
    if total > sum(problem.memory):
        return NoPlanError(f"no plan fits: {hold}, and a rank has {limit / GIB:.1f}; {_remedy(total, limit)}")
    return NoPlanError(
        f"no plan fits{searched}: {name} needs at least {need / GIB:.1f} of the {limit / GIB:.1f} GiB of a rank, and {hold}; "
        f"{_remedy(total + need * ranks, limit)}"
    )


def _remedy(total: float, memory: float) -> str:
    return f"{-(-total // memory):.0f} ranks or more would hold it if it divides evenly; or use devices with more memory"
