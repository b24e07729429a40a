"""The searches for the fastest plan that fits into memory. Terms are those of ``planner/problem.py``. Pure.

Each search is one function ``search(problem, limit, seed)``, which returns a :class:`SearchResult`. Read in this order:

- ``mcmc``: ReaL's Markov chain, the simplest
- ``candidates``: what the other searches share: ranges of ranks, and the fastest options of a call
- ``grid``: APP's ratios
- ``enumerate``: HybridFlow's partitions of the roles
- ``phase_scheduling``: gives the calls of a phase their ranks, for ``exact`` (``enumerate`` reads the phases)
- ``overlapping``: good plans of steps that overlap, with which ``exact`` begins
- ``exact``: branch and bound, which proves its result
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_spmd.planner.machine import GIB
from rlhf_spmd.planner.problem import Plan, Problem


@dataclass(frozen=True)
class SearchResult:
    """A plan, and what is known about it.

    - seconds: of a step
    - lower_bound: seconds; no plan takes fewer; 0 if the search proves nothing
    - optimal: the lower bound is ``seconds``
    - evaluations: schedules that were computed
    - search_seconds: duration of the search
    - timed: a part of it ran out of time, so another search may end with another plan, also with one of equal seconds
    """

    plan: Plan
    seconds: float
    lower_bound: float
    optimal: bool
    evaluations: int
    search_seconds: float
    timed: bool = False


class NoPlanError(ValueError):
    """No plan fits into the ranks' memory; the message says what is missing."""


class NoFasterPlanError(NoPlanError):
    """No plan is faster than ``Problem.ceiling``, or none was found in time. ``lower_bound``: seconds; no plan takes fewer."""

    def __init__(self, lower_bound: float) -> None:
        super().__init__(f"no plan was found that takes less than the best one; none takes less than {lower_bound:.4g} s")
        self.lower_bound = lower_bound


def no_plan_error(problem: Problem, scope: str) -> NoPlanError:
    """Return the error for a problem without a plan: it names a call that fits nowhere alone, or what the roles hold together.

    ``scope``: words that limit what was tried; empty if all plans were.
    """
    size = problem.size
    limit = max(problem.memory)
    needs = (  # (bytes on each rank, ranks) of each call's smallest option
        (
            min((max(option.call_bytes) + option.resident * call.home, option.size) for option in call.options),
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
    role = max(resident, key=lambda name: resident[name])
    total = sum(resident.values())
    hold = (
        f"the roles hold at least {total / size / GIB:.1f} GiB on each of {size} ranks, {role} most of it "
        f"({resident[role] / size / GIB:.1f})"
    )
    if total > sum(problem.memory):
        return NoPlanError(f"no plan fits: {hold}, and a rank has {limit / GIB:.1f}; {_remedy(total, limit)}")
    if problem.ahead:
        return NoPlanError(
            f"no plan was found{scope}: generation ahead of training needs ranks on which its role does not train, with room for "
            f"{problem.ahead + 1} versions of the weights; lower rollout.max_staleness, use more ranks, or search by exact"
        )
    return NoPlanError(
        f"no plan fits{scope}: {name} needs at least {need / GIB:.1f} of the {limit / GIB:.1f} GiB of a rank, and {hold}; "
        f"{_remedy(total + need * ranks, limit)}"
    )


def _remedy(total: float, memory: float) -> str:
    return f"{-(-total // memory):.0f} ranks or more would hold it if it divides evenly; or use devices with more memory"
