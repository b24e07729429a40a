"""The pool and the layout of each role, and of its methods that run elsewhere. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from rlhf_spmd.config.words import nearest
from rlhf_spmd.controller import Graph, GroupShape, ResourcePool
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.models.layout_rules import check_generation_ep, check_layout
from rlhf_spmd.models.quantized import check_quantized
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.layout import GenerationLayout, Layout, LayoutConfig, generation_layout, resolve_layout
from rlhf_spmd.planner.cluster import RoleFacts
from rlhf_spmd.planner.placement import PlacementConfig, place_roles
from rlhf_spmd.preflight.data import read_data
from rlhf_spmd.preflight.exactness import decide_exactness
from rlhf_spmd.preflight.roles import refuse_changes
from rlhf_spmd.preflight.step_graph import trace
from rlhf_spmd.reshard import METHODS
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.workers import ModelWorker, RoleClass
from rlhf_spmd.workers.config import CallConfig
from rlhf_spmd.workers.flops import forward_flops
from rlhf_spmd.workers.role_plan import CallPlan, RolePlan


def place_run(plan: RunPlan) -> RunPlan:
    """Return the plan with its roles on their ranks. Reads the data and traces a step if the placement strategy needs its calls."""

    def graph() -> Graph:
        nonlocal plan
        plan = decide_exactness(read_data(plan))
        return trace(plan)

    roles = place(plan.roles, plan.config.placement, plan.num_ranks, plan.ranks_per_host, graph)
    return replace(plan, roles=roles)


def place(
    unplaced_roles: Mapping[str, RolePlan],
    placement: PlacementConfig,
    num_ranks: int,
    ranks_per_host: int,
    graph: Callable[[], Graph],
) -> dict[str, RolePlan]:
    """Return every role on its pool, in its layout there. ``graph``: traces a step of the unplaced roles if the strategy needs it.

    Raises ValueError that names the role, the value and what is allowed.
    """
    models = {role: plan for role, plan in unplaced_roles.items() if issubclass(plan.worker, ModelWorker)}
    named = {role: plan.config.pool for role, plan in models.items()}
    named |= {
        f"{role}.calls.{method}": call.pool for role, plan in models.items() for method, call in plan.config.calls.items()
    }
    facts = {role: _facts(plan) for role, plan in models.items()}
    pools = place_roles(placement, named, num_ranks, ranks_per_host, facts, graph)
    roles = {role: _place_role(role, plan, pools) for role, plan in models.items()}
    trained = [role for role, plan in models.items() if plan.trained]
    if not trained:
        raise ValueError(f"none of the algorithm's roles is trained ({', '.join(models)}); at least one must be")
    for role, plan in unplaced_roles.items():
        if role not in models:
            pool_of: tuple[str, ...] = plan.worker.pool_of  # type: ignore[union-attr]
            pool = roles[next((name for name in pool_of if name in roles), trained[-1])].pool
            roles[role] = replace(plan, pool=pool, shape=GroupShape(Layout(dp=len(pool.ranks))))
    return roles


def _facts(plan: RolePlan) -> RoleFacts:
    """Return what placement strategies know of an unplaced role with a model class."""
    config, layout = plan.config, plan.shape.layout
    if plan.spec is None:
        return RoleFacts(unit=layout.size, fixed=config.layout.dp is not None)
    units = {
        "infer": layout.pp * layout.tp * math.lcm(layout.cp, layout.ep),
        "generate": config.generation.pp * config.generation.tp,
    }
    calls = {name: units[kind] for name, kind in _methods(plan.worker).items() if kind in units}
    for name, call in config.calls.items():
        if name in calls and call.layout != LayoutConfig():
            calls[name] = call.layout.pp * call.layout.tp * math.lcm(call.layout.cp, call.layout.ep)
    weights = forward_flops(plan.spec, 1, 0) / 2
    return RoleFacts(weights, plan.trained, config.path, layout.size, config.layout.dp is not None, calls)


def _methods(worker: RoleClass) -> dict[str, str]:
    """Return the kind of each registered method."""
    return {name: call.spec.kind for name in dir(worker) if hasattr(call := getattr(worker, name), "spec")}


def _place_role(role: str, unplaced_role: RolePlan, pools: Mapping[str, ResourcePool]) -> RolePlan:
    """Return the role on its pool, and its methods on theirs. A method that the strategy moves keeps the role's pp, tp, cp and ep, or
    the layout of generation if it generates."""
    config, kinds = unplaced_role.config, _methods(unplaced_role.worker)
    calls, layout, generation = dict(config.calls), config.layout, config.generation
    moved = [key.partition(".calls.")[2] for key in pools if key.startswith(f"{role}.calls.")]
    for method in dict.fromkeys([*calls, *moved]):
        call = calls.get(method, CallConfig())
        if kinds.get(method) == "generate" and call.layout == LayoutConfig():
            calls[method] = replace(call, layout=LayoutConfig(pp=generation.pp, tp=generation.tp))
        elif method not in calls:
            calls[method] = CallConfig(layout=LayoutConfig(pp=layout.pp, tp=layout.tp, cp=layout.cp, ep=layout.ep))
    plan = lay_out(role, replace(unplaced_role, config=replace(config, calls=calls), pool=pools[role]), layout)
    return replace(plan, calls={method: _plan_call(role, plan, method, pools) for method in calls})


def lay_out(role: str, plan: RolePlan, config: LayoutConfig) -> RolePlan:
    """Return a role on its pool in this layout. Its methods elsewhere stay as they are. Raises ValueError if the layout cannot be."""
    where, spec = f"models.{role}", plan.spec
    layout = resolve_layout(config, len(plan.pool.ranks), f"{where}.layout on pool '{plan.pool.name}'")
    if spec is not None:
        _check_layout(spec, layout, f"{where}.layout")
        check_quantized(spec, plan.config.lora, layout.tp, f"{where}.lora")
    generates_on_pool = plan.generation is not None and "generate_sequences" not in plan.config.calls
    plan = replace(plan, config=replace(plan.config, layout=config), shape=GroupShape(layout))
    if not generates_on_pool:
        return plan
    return replace(plan, shape=GroupShape(layout, _layout_of_generation(role, plan)))


def _check_layout(spec: ModelSpec, layout: Layout, where: str) -> None:
    """Raise ValueError if a model cannot be split so."""
    shared = layout.expert_parallel_generation
    check_layout(spec, where, layout.pp, layout.tp, layout.vpp, layout.cp, layout.ep, expert_parallel_generation=shared)


def _layout_of_generation(role: str, plan: RolePlan) -> GenerationLayout:
    """Return the generation layout on the role's own ranks. Raises ValueError if it does not fit the training layout."""
    config, layout, spec, where = plan.config.generation, plan.shape.layout, plan.spec, f"models.{role}"
    assert spec is not None, "a role that generates has a model"
    shares_experts = check_generation_ep(spec, config.ep, config.tp, f"{where}.generation", f"{where}.generation.tp")
    # stages of different sizes do not join to those of generation
    uneven = config.pp != layout.pp and spec.num_hidden_layers % layout.pp != 0
    try:
        consecutive = METHODS[config.reshard_method].consecutive or uneven
        generation = generation_layout(layout, config.pp, config.tp, consecutive, shares_experts)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error
    check_layout(spec, f"{where}.generation", generation.pp, generation.tp, expert_parallel_generation=shares_experts)
    return generation


def _plan_call(role: str, plan: RolePlan, method: str, pools: Mapping[str, ResourcePool]) -> CallPlan:
    """Return where a method runs, by ``models.<role>.calls.<method>``. Raises ValueError if it cannot run elsewhere, or not so."""
    where, config, generation = f"models.{role}.calls.{method}", plan.config.calls[method], plan.config.generation
    if plan.spec is None:
        raise ValueError(f"{where}: this role has no model whose weights could be reallocated; set models.{role}.pool")
    kinds = _methods(plan.worker)
    movable = [name for name, kind in kinds.items() if kind in ("generate", "infer")]
    if method not in movable:
        why = "stays on the role's own pool;" if method in kinds else f"no such method{nearest(method, movable) or ';'}"
        raise ValueError(f"{where}: {why} methods that may run elsewhere are {', '.join(movable)}")
    pool = pools.get(f"{role}.calls.{method}", plan.pool)
    layout = resolve_layout(config.layout, len(pool.ranks), f"{where}.layout on pool '{pool.name}'")
    if kinds[method] != "generate":
        _check_layout(plan.spec, layout, f"{where}.layout")
        return CallPlan(pool, GroupShape(layout))
    key = f"models.{role}.generation"
    shares_experts = check_generation_ep(plan.spec, generation.ep, layout.tp, key, "tp of generation")
    layout = replace(layout, expert_parallel_generation=shares_experts)
    _check_layout(plan.spec, layout, f"{where}.layout")
    if layout.zero or max(layout.vpp, layout.cp, layout.ep) > 1:
        raise ValueError(f"{where}.layout is {layout}: generation has none of zero, vpp, cp and ep; leave them out")
    default = GenerationConfig()
    keys = ("reshard_method", "buffers")
    reshard_settings = replace(default, **{name: getattr(generation, name) for name in keys})
    refuse_changes(reshard_settings, default, key, f"weights for calls.{method} on other ranks are sent whole")
    grid = GenerationLayout(
        layout, layout.pp, layout.tp, expert_parallel_generation=shares_experts
    )  # that of the weights that come
    return CallPlan(pool, GroupShape(layout, grid))
