"""The best plan that training accepts: what a search found is placed and measured as training does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_spmd.config.load import to_dict
from rlhf_spmd.config.schema import Reader
from rlhf_spmd.controller import Graph
from rlhf_spmd.planner.machine import Machine
from rlhf_spmd.planner.placement import PlacementConfig
from rlhf_spmd.planner.plan_file import PlanFile, apply_plan
from rlhf_spmd.training import checks
from rlhf_spmd.training.memory import StepFacts, measure
from rlhf_spmd.training.placing import place
from rlhf_spmd.training.planned_calls import PlannedNode
from rlhf_spmd.training.planning import Planned, Times, best_plan
from rlhf_spmd.training.roles import RolePlan

ATTEMPTS = 8  # each with as much less memory as the last plan took too much
SLACK = 1.01


def checked_plan(
    config: Any,
    nodes: Sequence[PlannedNode],
    described: Mapping[str, RolePlan],
    step: StepFacts,
    machine: Machine,
    times: Times,
    proved: bool = False,
    **search: Any,
) -> Planned:
    """``search``: see :func:`best_plan`. The planner's model of memory is coarser than training's (a version that is kept, a bucket):
    where training would refuse a plan, the search gets less memory and is asked again; then the plan is not proved to be the best.
    Raises ValueError where no plan is accepted, and with ``proved`` where a search did not end by itself."""
    ahead, room, least, pinned = config.placement.max_staleness, machine, 0.0, 0.0
    for _ in range(ATTEMPTS):
        planned = best_plan(nodes, room, times, step.limits, ahead, **search)
        if proved and not planned.found.optimal:
            raise ValueError("no plan was proved to be the best in time; search by `rlhf-spmd plan` and give plan=FILE")
        plans = planned_roles(described, planned.file, lambda: step.graph, ahead)
        checks.check_batches(config, plans)
        budget = next(iter(planned.file.algorithm.values()), step.limits.max_tokens)
        report = measure(plans, replace(step, limits=replace(step.limits, max_tokens=budget)))
        over = [float(report.peaks[k]) - least for k, least in report.judged(machine.memory, None).items()]
        on_hosts = 0.0 if report.host is None else float(report.host.by_host(machine.local_size).max())
        if max(over) <= 0 and on_hosts <= machine.host_memory:
            found = planned.found if least == pinned == 0 else replace(planned.found, optimal=False, lower_bound=0.0)
            return replace(planned, found=found)
        least, pinned = max(*over, 0.0) * SLACK, max(on_hosts - machine.host_memory, 0.0) * SLACK
        room = replace(room, memory=tuple(size - least for size in room.memory), host_memory=room.host_memory - pinned)
    if max(over) <= 0:
        raise ValueError(f"no plan was found that fits: the last one offloads {pinned / 2**30:.1f} GiB more than a host has")
    raise ValueError(f"no plan was found that fits: the last one takes {max(over) / 2**30:.1f} GiB more than a rank has")


def planned_roles(
    described: Mapping[str, RolePlan], file: PlanFile, graph: Callable[[], Graph], ahead: int
) -> dict[str, RolePlan]:
    """``described`` roles where and how a plan has them. Raises ValueError as :func:`place`."""
    settings = apply_plan({"models": {role: to_dict(plan.config) for role, plan in described.items()}}, file)
    roles = {}
    for role, plan in described.items():
        reader = Reader(type(plan.config), {}, settings["models"][role], interpolated=False)
        roles[role] = replace(plan, config=reader.read())
    placement = PlacementConfig(pools=settings["placement"]["pools"], max_staleness=ahead)
    return place(roles, placement, file.ranks, file.local_size, graph)
