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
from rlhf_spmd.preflight.roles import refuse_unused_settings
from rlhf_spmd.preflight.step_graph import trace_early
from rlhf_spmd.reshard import METHODS
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.workers import ModelWorker, RoleClass
from rlhf_spmd.workers.config import CallConfig
from rlhf_spmd.workers.flops import forward_flops
from rlhf_spmd.workers.role_plan import CallPlan, RolePlan, RolePlans


def place_run(run_plan: RunPlan) -> RunPlan:
    """Return the plan with its roles on their ranks. Reads the data and traces a step if the placement strategy needs its calls."""

    def graph() -> Graph:
        nonlocal run_plan
        run_plan = trace_early(run_plan)
        return run_plan.graph

    config = run_plan.config
    role_plans = roles_on_pools(
        run_plan.roles, config.placement, run_plan.num_ranks, run_plan.ranks_per_host, graph, config.steps_ahead
    )
    return replace(run_plan, roles=role_plans)


def roles_on_pools(
    unplaced_roles: RolePlans,
    placement: PlacementConfig,
    num_ranks: int,
    ranks_per_host: int,
    graph: Callable[[], Graph],
    ahead: int = 0,
) -> dict[str, RolePlan]:
    """Return every role on its pool, in its layout there.

    - graph: returns the calls of a step of the unplaced roles; called if the strategy needs them
    - ahead: steps by which generation runs ahead of training

    Raises ValueError that names the role, the value and what is allowed.
    """
    model_roles = {role: role_plan for role, role_plan in unplaced_roles.items() if issubclass(role_plan.worker, ModelWorker)}
    pool_names: dict[str, str | None] = {}
    for role, role_plan in model_roles.items():
        pool_names[role] = role_plan.config.pool
        pool_names |= {f"{role}.calls.{method}": call.pool for method, call in role_plan.config.calls.items()}
    facts = {role: _facts(role_plan) for role, role_plan in model_roles.items()}
    pools = place_roles(placement, pool_names, num_ranks, ranks_per_host, facts, graph)
    trained = [role for role, role_plan in model_roles.items() if role_plan.trained]
    if ahead:
        training_ranks = {rank for role in trained for rank in pools[role].ranks}
        for role, pool in pools.items():
            is_free = role in model_roles and model_roles[role].spec is None and pool_names[role] is None
            covered = {rank for name, other in pools.items() if name != role for rank in other.ranks}
            if (
                is_free and training_ranks.intersection(pool.ranks) and covered.issuperset(pool.ranks)
            ):  # no rank stays without a role
                pools[role] = _generating_pool(model_roles, pools) or pool
    role_plans = {role: _role_on_pools(role, role_plan, pools) for role, role_plan in model_roles.items()}
    if not trained:
        raise ValueError(f"none of the algorithm's roles is trained ({', '.join(model_roles)}); at least one must be")
    for role, role_plan in unplaced_roles.items():
        if role not in model_roles:
            pool_of: tuple[str, ...] = role_plan.worker.pool_of  # type: ignore[union-attr]
            pool = role_plans[next((name for name in pool_of if name in role_plans), trained[-1])].pool
            role_plans[role] = replace(role_plan, pool=pool, shape=GroupShape(Layout(dp=len(pool.ranks))))
    return role_plans


def _generating_pool(roles: Mapping[str, RolePlan], pools: Mapping[str, ResourcePool]) -> ResourcePool | None:
    """Return the ranks that generate, which score the next step's rows while others train; None if no role generates."""
    calls = ((role, name) for role, plan in roles.items() for name, kind in _methods(plan.worker).items() if kind == "generate")
    return next((pools.get(f"{role}.calls.{name}", pools[role]) for role, name in calls), None)


def _facts(role_plan: RolePlan) -> RoleFacts:
    """Return what placement strategies know of an unplaced role with a model class."""
    config = role_plan.config
    layout = role_plan.shape.layout
    if role_plan.spec is None:
        return RoleFacts(unit=layout.size, fixed=config.layout.dp is not None)
    units = {
        "infer": layout.pp * layout.tp * math.lcm(layout.cp, layout.ep),
        "generate": config.generation.pp * config.generation.tp,
    }
    calls = {name: units[kind] for name, kind in _methods(role_plan.worker).items() if kind in units}
    for name, call in config.calls.items():
        if name in calls and call.layout != LayoutConfig():
            calls[name] = call.layout.pp * call.layout.tp * math.lcm(call.layout.cp, call.layout.ep)
    weights = forward_flops(role_plan.spec, 1, 0) / 2
    return RoleFacts(weights, role_plan.trained, config.path, layout.size, config.layout.dp is not None, calls)


def _methods(worker: RoleClass) -> dict[str, str]:
    """Return the kind of each registered method."""
    return {name: call.spec.kind for name in dir(worker) if hasattr(call := getattr(worker, name), "spec")}


def _role_on_pools(role: str, unplaced_role: RolePlan, pools: Mapping[str, ResourcePool]) -> RolePlan:
    """Return the role on its pool, and its methods on theirs.

    A method that the strategy moves keeps the role's pp, tp, cp and ep, or the layout of generation if it generates.
    """
    config = unplaced_role.config
    kinds = _methods(unplaced_role.worker)
    calls = dict(config.calls)
    layout = config.layout
    generation = config.generation
    moved = [key.partition(".calls.")[2] for key in pools if key.startswith(f"{role}.calls.")]
    for method in dict.fromkeys([*calls, *moved]):
        call = calls.get(method, CallConfig())
        if kinds.get(method) == "generate" and call.layout == LayoutConfig():
            calls[method] = replace(call, layout=LayoutConfig(pp=generation.pp, tp=generation.tp))
        elif method not in calls:
            calls[method] = CallConfig(layout=LayoutConfig(pp=layout.pp, tp=layout.tp, cp=layout.cp, ep=layout.ep))
    role_plan = role_in_layout(role, replace(unplaced_role, config=replace(config, calls=calls), pool=pools[role]), layout)
    return replace(role_plan, calls={method: _plan_call(role, role_plan, method, pools) for method in calls})


def role_in_layout(role: str, role_plan: RolePlan, config: LayoutConfig) -> RolePlan:
    """Return a role on its pool in this layout. Its methods on other ranks stay as they are.

    Raises ValueError for a layout that the model or the pool cannot have.
    """
    where = f"models.{role}"
    spec = role_plan.spec
    layout = resolve_layout(config, len(role_plan.pool.ranks), f"{where}.layout on pool '{role_plan.pool.name}'")
    if spec is not None:
        _check_layout(spec, layout, f"{where}.layout")
        check_quantized(spec, role_plan.config.lora, layout.tp, f"{where}.lora")
    generates_on_pool = role_plan.generation is not None and "generate_sequences" not in role_plan.config.calls
    role_plan = replace(role_plan, config=replace(role_plan.config, layout=config), shape=GroupShape(layout))
    if not generates_on_pool:
        return role_plan
    return replace(role_plan, shape=GroupShape(layout, _layout_of_generation(role, role_plan)))


def _check_layout(spec: ModelSpec, layout: Layout, where: str) -> None:
    """Raise ValueError if the model cannot be split in this layout."""
    shared = layout.expert_parallel_generation
    check_layout(spec, where, layout.pp, layout.tp, layout.vpp, layout.cp, layout.ep, expert_parallel_generation=shared)


def _layout_of_generation(role: str, role_plan: RolePlan) -> GenerationLayout:
    """Return the generation layout on the role's own ranks. Raises ValueError if it does not fit the training layout."""
    where = f"models.{role}"
    config = role_plan.config.generation
    layout = role_plan.shape.layout
    spec = role_plan.spec
    assert spec is not None, "a role that generates has a model"
    shares_experts = check_generation_ep(spec, config.ep, config.tp, f"{where}.generation", f"{where}.generation.tp")
    # stages of different sizes cannot be joined to the stages of generation
    uneven = config.pp != layout.pp and spec.num_hidden_layers % layout.pp != 0
    try:
        consecutive = METHODS[config.reshard_method].consecutive or uneven
        generation = generation_layout(layout, config.pp, config.tp, consecutive, shares_experts)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error
    check_layout(spec, f"{where}.generation", generation.pp, generation.tp, expert_parallel_generation=shares_experts)
    return generation


def _plan_call(role: str, role_plan: RolePlan, method: str, pools: Mapping[str, ResourcePool]) -> CallPlan:
    """Return where ``models.<role>.calls.<method>`` lets a method run. Raises ValueError if it cannot run there."""
    where = f"models.{role}.calls.{method}"
    config = role_plan.config.calls[method]
    generation = role_plan.config.generation
    if role_plan.spec is None:
        raise ValueError(f"{where}: this role has no model whose weights could be reallocated; set models.{role}.pool")
    kinds = _methods(role_plan.worker)
    movable = [name for name, kind in kinds.items() if kind in ("generate", "infer")]
    if method not in movable:
        reason = "stays on the role's own pool;" if method in kinds else f"no such method{nearest(method, movable) or ';'}"
        raise ValueError(f"{where}: {reason} methods that may run elsewhere are {', '.join(movable)}")
    pool = pools.get(f"{role}.calls.{method}", role_plan.pool)
    layout = resolve_layout(config.layout, len(pool.ranks), f"{where}.layout on pool '{pool.name}'")
    if kinds[method] != "generate":
        _check_layout(role_plan.spec, layout, f"{where}.layout")
        return CallPlan(pool, GroupShape(layout))
    key = f"models.{role}.generation"
    shares_experts = check_generation_ep(role_plan.spec, generation.ep, layout.tp, key, "tp of generation")
    layout = replace(layout, expert_parallel_generation=shares_experts)
    _check_layout(role_plan.spec, layout, f"{where}.layout")
    if layout.zero or max(layout.vpp, layout.cp, layout.ep) > 1:
        raise ValueError(f"{where}.layout is {layout}: generation has none of zero, vpp, cp and ep; leave them out")
    default = GenerationConfig()
    reshard_settings = replace(default, reshard_method=generation.reshard_method, buffers=generation.buffers)
    refuse_unused_settings(reshard_settings, default, key, f"weights for calls.{method} on other ranks are sent whole")
    # the weights arrive in the layout in which they generate
    grid = GenerationLayout(layout, layout.pp, layout.tp, expert_parallel_generation=shares_experts)
    return CallPlan(pool, GroupShape(layout, grid))
