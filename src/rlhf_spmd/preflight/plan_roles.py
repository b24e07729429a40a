"""Connects the roles of a run with the planner.

:func:`model_calls` turns unplaced roles into calls to plan. :func:`checked_plan` searches for a plan that training accepts.
:func:`placed_roles` applies a plan to roles. :func:`placed_calls` does the opposite: it returns placed roles as calls of a plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlhf_spmd.config.load import to_dict
from rlhf_spmd.config.schema import read_section
from rlhf_spmd.controller import CallRecord, Graph, RankSpeeds
from rlhf_spmd.kernels import capabilities, model_device
from rlhf_spmd.kernels.devices import total_bytes
from rlhf_spmd.models.layout_rules import check_layout
from rlhf_spmd.planner.cluster import waits
from rlhf_spmd.planner.costs import FormulaTimes
from rlhf_spmd.planner.device_times import CallTimes
from rlhf_spmd.planner.machine import GIB, GPUS, ClusterConfig, Gpu, Machine
from rlhf_spmd.planner.memory import HOST_RESERVE, RESERVE
from rlhf_spmd.planner.model_call import ModelCall
from rlhf_spmd.planner.placement import PlacementConfig
from rlhf_spmd.planner.plan_file import PlacedCall, PlanFile, apply_plan
from rlhf_spmd.planner.planning import PlanResult, best_plan
from rlhf_spmd.planner.problem import RankRange
from rlhf_spmd.planner.profile import ProfileTimes, read_profile
from rlhf_spmd.planner.shapes import Workload, shape_of
from rlhf_spmd.preflight.checks import check_batches
from rlhf_spmd.preflight.memory_estimate import estimate_memory
from rlhf_spmd.preflight.placing import roles_on_pools
from rlhf_spmd.preflight.role_memory import StepFacts, role_settings
from rlhf_spmd.workers import ModelWorker
from rlhf_spmd.workers.actor import ActorWorker, generation_args
from rlhf_spmd.workers.config import BatchLimits
from rlhf_spmd.workers.role_plan import RolePlan, RolePlans

KINDS = ("generate", "infer", "train")
ATTEMPTS = 8  # searches, each with as much less memory as the last plan took too much
SLACK = 1.01
ALIGNED = 8  # sizes of experts that are grouped are multiples of it, as in ``kernels.triton_experts``, which needs triton
BUDGETS = (2.0, 1.0, 0.5, 0.25)  # token budgets of micro-batches that are tried, as shares of the configuration's


def model_calls(graph: Graph, role_plans: RolePlans, work: Workload, versions: int = 0) -> list[ModelCall]:
    """Return the calls of roles with a model, in program order.

    - work: the lengths of rows, and the rows per prompt
    - versions: of the weights that generation ahead of training keeps; 0: it is not ahead
    """
    predecessors = waits(graph)
    nodes = [i for i, call in enumerate(graph.nodes) if call.spec.kind in KINDS and role_plans[call.role.name].spec is not None]
    index_of = {node: i for i, node in enumerate(nodes)}
    calls: list[ModelCall] = []
    for node in nodes:
        call = graph.nodes[node]
        role = call.role.name
        kind = call.spec.kind
        role_plan = role_plans[role]
        assert role_plan.spec is not None and kind is not None and issubclass(role_plan.worker, ModelWorker)
        call_work = replace(
            work, rows=call.num_rows, mini_batches=call.num_mini_batches, epochs=call.epochs, group=_group_size(call)
        )
        if ending := _num_ending_rows(call):
            is_recomputed = role_plan.config.generation.kv_cache == "free"
            call_work = replace(
                call_work, rows=ending, in_flight=call.num_rows, recomputed=(call.num_rows - ending) * is_recomputed
            )
        check_layout(role_plan.spec, f"models.{role}.layout", ep=role_plan.config.layout.ep)
        same_method = sum(other.role.name == role and other.spec.name == call.spec.name for other in graph.nodes)
        calls.append(
            ModelCall(
                name=call.name,
                role=role,
                method=call.spec.name,
                kind=kind,
                after=frozenset(index_of[i] for i in predecessors[node] if i in index_of),
                spec=role_plan.spec,
                shape=shape_of(role_plan.spec, role_plan.worker.head),
                work=call_work,
                settings=role_settings(role_plan),
                generation=role_plan.config.generation,
                lora=role_plan.config.lora,
                num_dealt_units=_num_units(call),
                captures=_may_capture(role_plan),
                # quantized weights are not copied to other ranks
                shares_home=same_method > 1 or kind == "train" or role_plan.config.lora.bits is not None,
                cp=1 if kind == "generate" else role_plan.config.layout.cp,
                versions=max(versions, 1) if kind == "generate" and role_plan.trained else 1,
            )
        )
    for role in dict.fromkeys(call.role for call in calls):
        indices = [i for i, call in enumerate(calls) if call.role == role]
        home = next((i for i in indices if calls[i].kind == "train"), indices[0])
        calls[home] = replace(calls[home], home=True, shares_home=False)
    return calls


def _may_capture(role_plan: RolePlan) -> bool:
    """Return True if decode steps on a GPU can be CUDA graphs, on a GPU that groups experts if the model has any."""
    spec = role_plan.spec
    if role_plan.config.generation.attention in ("torch", "cpp"):
        return False
    if spec is None or spec.experts is None:
        return True
    aligned = spec.hidden_size % ALIGNED == spec.experts.intermediate_size % ALIGNED == 0
    return aligned and role_plan.config.torch_dtype(torch.device("cuda")) == torch.bfloat16


def _group_size(call: CallRecord) -> int:
    """Return the number of rows in an average group."""
    groups = call.rows.num_groups if call.rows is not None else 1
    return max(round(call.num_rows / max(groups, 1)), 1)


def _num_ending_rows(call: CallRecord) -> int:
    """Return the rows that end in a generate call whose other rows go on in the next step (``rollout.in_flight``); else 0."""
    is_generating = call.spec.kind == "generate" and isinstance(call.role, ActorWorker)
    num_groups = generation_args(call).num_groups if is_generating else None
    return 0 if num_groups is None else sum(num_groups) * _group_size(call)


def _num_units(call: CallRecord) -> int:
    """Return the number of units that are distributed over replicas: groups if they stay together, else rows."""
    together = call.spec.kind == "generate" or (bool(call.inputs) and call.inputs[0].partition_spec.keep_groups)
    if not together or call.rows is None:
        return call.num_rows
    ending = _num_ending_rows(call) // _group_size(call)  # both kinds of groups are dealt evenly
    return math.gcd(call.rows.num_groups, ending) if ending else call.rows.num_groups


def placed_calls(calls: Sequence[ModelCall], role_plans: RolePlans) -> dict[str, PlacedCall]:
    """Return the ranks, layouts and settings of ``calls``. Raises ValueError if the ranks of a pool are not consecutive."""
    by_name: dict[str, PlacedCall] = {}
    for call in calls:
        config = role_plans[call.role].config
        placement = role_plans[call.role].placement_of(call.method)
        pool = placement.pool
        layout = placement.shape.layout
        generates = call.kind == "generate"
        trains = call.kind == "train"
        if pool.ranks != tuple(range(pool.ranks[0], pool.ranks[-1] + 1)):
            raise ValueError(
                f"pool '{pool.name}' of {call.name} has ranks {list(pool.ranks)}; a plan can only have neighbouring ranks"
            )
        grid = placement.shape.generating if generates else layout
        level: Any = config.activation_checkpointing if trains else "none"  # auto is decided
        by_name[call.name] = PlacedCall(
            ranks=str(RankRange(pool.ranks[0], len(pool.ranks))),
            pp=grid.pp,
            tp=grid.tp,
            dp=grid.dp,
            cp=1 if generates else layout.cp,
            ep=1 if generates else layout.ep,
            home=call.home,
            zero=0 if generates else layout.zero,
            zero_size=None if generates else layout.zero_size,
            sequence_parallel=trains and layout.sequence_parallel,
            activation_checkpointing=level,
            offload=config.offload and call.home,
            optim_offload=config.optim.offload and call.home,
            max_num_seqs=config.generation.max_num_seqs if generates else None,
        )
    return by_name


def placed_roles(unplaced_roles: RolePlans, file: PlanFile, graph: Callable[[], Graph], ahead: int) -> dict[str, RolePlan]:
    """Return ``unplaced_roles`` with the ranks, layouts and settings of a plan. Raises ValueError as :func:`roles_on_pools`."""
    settings = apply_plan({"models": {role: to_dict(role_plan.config) for role, role_plan in unplaced_roles.items()}}, file)
    role_plans: dict[str, RolePlan] = {}
    for role, role_plan in unplaced_roles.items():
        role_plans[role] = replace(role_plan, config=read_section(type(role_plan.config), settings["models"][role]))
    placement = PlacementConfig(pools=settings["placement"]["pools"])
    return roles_on_pools(role_plans, placement, file.ranks, file.local_size, graph, ahead)


def checked_plan(
    config: Any,
    calls: Sequence[ModelCall],
    unplaced_roles: RolePlans,
    step: StepFacts,
    machine: Machine,
    times: Sequence[CallTimes],
    proved: bool = False,
    time_limit_s: float = 60.0,
    **search: Any,
) -> PlanResult:
    """Return the best plan that training accepts. ``time_limit_s``: of all searches together. ``search``: see :func:`best_plan`.

    The planner estimates the fullest rank of each call; training checks each rank with everything that it holds. If training
    would refuse a plan, the search runs again on a machine with less memory, by the planner's estimate too little for it by as much.
    Then no plan counts as proved optimal.
    Raises ValueError if no plan is accepted, and with ``proved`` if a part of a search ran out of time.
    """
    ahead = config.steps_ahead
    until = time.perf_counter() + time_limit_s
    budgets, key = token_budgets(step.limits, max(call.work.longest for call in calls))
    reduced_machine = machine
    host_reduction = 0.0  # bytes
    for _ in range(ATTEMPTS):
        try:
            left = max(until - time.perf_counter(), 0.0)
            planned = best_plan(calls, reduced_machine, times, budgets, key, ahead, time_limit_s=left, **search)
        except ValueError as error:
            if not (host_reduction and step.copied):
                raise
            raise ValueError(
                f"{error}; run.background_save=false needs no copies in host memory while a checkpoint is written"
            ) from error
        if proved and (planned.search.timed or not planned.search.optimal):
            raise ValueError("no plan was proved to be the best in time; search by `rlhf-spmd plan` and give plan=FILE")
        device_excess, host_excess = _excess_bytes(config, planned.file, unplaced_roles, step, machine)
        if device_excess <= 0 and host_excess <= 0:
            if reduced_machine is machine:
                return planned
            file = _on_devices_with(planned.file, machine.memory[0] - reduced_machine.memory[0])
            return replace(planned, file=file, search=replace(planned.search, optimal=False, lower_bound=0.0))
        device_reduction = SLACK * device_excess + _least_left(planned.file, reduced_machine) if device_excess > 0 else 0.0
        host_reduction = max(host_excess, 0.0) * SLACK
        memory = tuple(size - device_reduction for size in reduced_machine.memory)
        reduced_machine = replace(reduced_machine, memory=memory, host_memory=reduced_machine.host_memory - host_reduction)
    excess, where = (device_excess, "a rank") if device_excess > 0 else (host_excess, "a host")
    raise ValueError(f"no plan was found that fits: the last one needs {excess / GIB:.1f} GiB more than {where} has")


def _on_devices_with(file: PlanFile, more: float) -> PlanFile:
    """Return a plan whose devices have so many more bytes than those for which it was searched."""
    calls = {name: replace(call, room_gb=round(call.room_gb + more / GIB, 2)) for name, call in file.calls.items()}
    return replace(file, calls=calls)


def _least_left(file: PlanFile, machine: Machine) -> float:
    """Return the bytes that the fullest call of a plan leaves on a device by the planner's estimate."""
    reserve = HOST_RESERVE if machine.device.on_host else RESERVE
    left_gb = min(call.room_gb - call.memory_gb for call in file.calls.values())
    return max(left_gb * GIB - reserve, 0.0)


def planned_run(
    config: Any, file: PlanFile, unplaced_roles: RolePlans, step: StepFacts
) -> tuple[dict[str, RolePlan], StepFacts]:
    """Return the roles of a run that follows the plan, and the facts of its step.

    Raises ValueError for batch sizes that the plan's layouts do not allow, and as :func:`roles_on_pools`.
    """
    role_plans = placed_roles(unplaced_roles, file, lambda: step.graph, config.steps_ahead)
    check_batches(config, role_plans)
    budget = file.algorithm.get(step.limits.where.removeprefix("algorithm."), step.limits.max_tokens)
    speeds = RankSpeeds(file.speeds, file.generation_speeds)
    return role_plans, replace(step, limits=replace(step.limits, max_tokens=budget), speeds=speeds)


def _excess_bytes(
    config: Any, file: PlanFile, unplaced_roles: RolePlans, step: StepFacts, machine: Machine
) -> tuple[float, float]:
    """Return the bytes that a device, and a host, lack for a plan by training's estimate; negative where bytes are left.

    Raises ValueError as :func:`planned_run`.
    """
    report = estimate_memory(*planned_run(config, file, unplaced_roles, step))
    device_memory = report.memory_of_kinds(machine.memory)
    host_bytes = 0.0 if report.host is None else float(report.host.by_host(machine.local_size).max())
    return (max(float(report.peaks[kind]) - memory for kind, memory in device_memory.items()), host_bytes - machine.host_memory)


def token_budgets(limits: BatchLimits, longest: float) -> tuple[list[int], str | None]:
    """Return the token budgets to try, and the name of the algorithm's setting of the budget.

    If micro-batches are limited by rows, there is one budget and no setting.
    """
    if limits.rows is not None:
        return [round(limits.rows * longest)], None
    budgets = [round(limits.max_tokens * share) for share in BUDGETS]
    return [budget for budget in budgets if budget >= longest] or [limits.max_tokens], limits.where.removeprefix("algorithm.")


def plan_run(config: Any, unplaced_roles: RolePlans, step: StepFacts, work: Workload, size: int, local_size: int) -> PlanFile:
    """Return the plan of ``placement.strategy=auto`` for ``size`` ranks, the same on every rank.

    Raises ValueError if none fits, or if none is proved optimal: a search that runs out of time may end with another plan on
    each rank.
    """
    where = "placement.strategy='auto'"
    measured = None
    if config.placement.profile is not None:
        measured = read_profile(config.placement.profile, "placement.profile")
        measured.check_ranks(size, "placement.profile")
    elif not capabilities(model_device()).streams:
        raise ValueError(
            f"{where}: on CPUs a plan needs measured times; set placement.profile to a file that `rlhf-spmd plan profile` writes"
        )
    device = measured.device if measured else gpu_by_name(torch.cuda.get_device_name(), where)
    memory = device.memory if device.on_host else total_bytes(model_device(), local_size)  # the same on all ranks
    machine = Machine(size, local_size, device, (memory,) * size, ClusterConfig().network_gb_s * 1e9)
    times = ProfileTimes(measured, machine) if measured else FormulaTimes(machine)
    calls = model_calls(step.graph, unplaced_roles, work, step.versions)
    return checked_plan(config, calls, unplaced_roles, step, machine, [times], proved=True).file


def gpu_by_name(name: str, where: str) -> Gpu:
    """Return the GPU of the table that the driver calls ``name``. Raises ValueError if there is none."""
    words = name.lower().replace("-", " ").split()
    if any(word in words for word in ("mig", "grid", "pcie", "nvl")):
        raise ValueError(f"{where}: the GPU {name!r} is another form of one in the table; profile it and set placement.profile")
    kinds = [kind for kind in GPUS if kind.split("_")[0] in words]
    if not kinds:
        raise ValueError(
            f"{where}: the GPU {name!r} is not in the table ({', '.join(GPUS)}); profile it and set placement.profile"
        )
    small = [kind for kind in kinds if "_" in kind and kind.split("_")[1] + "gb" in name.lower()]
    return GPUS[(small or kinds)[0]]
