"""Places described roles: the pool and the layout of each role, and of its methods that run elsewhere. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from rlhf_spmd.config.schema import nearest
from rlhf_spmd.controller import Graph, GroupShape, ResourcePool
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.models.layout_rules import check_generation_ep, check_layout
from rlhf_spmd.models.quantized import check_quantized
from rlhf_spmd.parallel.layout import GenerationLayout, Layout, LayoutConfig, generation_layout, resolve_layout
from rlhf_spmd.planner.cluster import RoleFacts
from rlhf_spmd.planner.placement import PlacementConfig, place_roles
from rlhf_spmd.preflight.roles import CallPlan, RolePlan
from rlhf_spmd.reshard import METHODS
from rlhf_spmd.workers import ModelWorker, RoleClass
from rlhf_spmd.workers.config import CallConfig
from rlhf_spmd.workers.flops import forward_flops


def place(
    described: Mapping[str, RolePlan],
    placement: PlacementConfig,
    world_size: int,
    local_size: int,
    graph: Callable[[], Graph],
) -> dict[str, RolePlan]:
    """Every role on its pool, in its layout there. ``local_size``: ranks of a host. ``graph``: traces a step of the described
    roles if the strategy needs it. Raises ValueError that names the role, the value and what is allowed."""
    models = {role: plan for role, plan in described.items() if issubclass(plan.worker, ModelWorker)}
    named = {role: plan.config.pool for role, plan in models.items()}
    named |= {
        f"{role}.calls.{method}": call.pool for role, plan in models.items() for method, call in plan.config.calls.items()
    }
    facts = {role: _facts(plan) for role, plan in models.items()}
    pools = place_roles(placement, named, world_size, local_size, facts, graph)
    plans = {role: _place_role(role, plan, pools) for role, plan in models.items()}
    last_trained = [role for role, plan in models.items() if plan.trained][-1]
    for role, plan in described.items():
        if role not in models:
            pool_of: tuple[str, ...] = plan.worker.pool_of  # type: ignore[union-attr]
            pool = plans[next((name for name in pool_of if name in plans), last_trained)].pool
            plans[role] = replace(plan, pool=pool, shape=GroupShape(Layout(dp=len(pool.ranks))))
    return plans


def _facts(plan: RolePlan) -> RoleFacts:
    """What placement strategies know of a described role with a model class."""
    config, layout = plan.config, plan.shape.layout
    if plan.spec is None:
        return RoleFacts(unit=layout.size, fixed=config.layout.dp is not None)
    units = {
        "infer": layout.pp * layout.tp * math.lcm(layout.cp, layout.ep),
        "generate": config.generation.pp * config.generation.tp,
    }
    calls = {name: units[kind] for name, kind in _methods(plan.worker).items() if kind in units}
    own = {name: call.layout for name, call in config.calls.items() if name in calls and call.layout != LayoutConfig()}
    calls |= {name: its.pp * its.tp * math.lcm(its.cp, its.ep) for name, its in own.items()}
    weights = forward_flops(plan.spec, 1, 0) / 2
    return RoleFacts(weights, plan.trained, config.path, layout.size, config.layout.dp is not None, calls)


def _methods(worker: RoleClass) -> dict[str, str]:
    """Registered method -> its kind."""
    return {name: call.spec.kind for name in dir(worker) if hasattr(call := getattr(worker, name), "spec")}


def _place_role(role: str, described: RolePlan, pools: Mapping[str, ResourcePool]) -> RolePlan:
    """The role on its pool, and its methods on theirs. A method that the strategy moves keeps the role's pp, tp, cp and ep, or the
    layout of generation if it generates."""
    config, pool, where = described.config, pools[role], f"models.{role}"
    moved, kinds = dict(config.calls), _methods(described.worker)
    for method in dict.fromkeys([*moved, *(key.partition(".calls.")[2] for key in pools if key.startswith(f"{role}.calls."))]):
        call = moved.get(method, CallConfig())
        if kinds.get(method) == "generate":
            moved[method] = replace(call, layout=_layout_of_generation(where, config.generation, call))
        elif method not in moved:
            own = config.layout
            moved[method] = CallConfig(layout=LayoutConfig(pp=own.pp, tp=own.tp, cp=own.cp, ep=own.ep))
    plan = lay_out(role, replace(described, config=replace(config, calls=moved), pool=pool), config.layout)
    return replace(plan, calls={method: _plan_call(role, plan, method, pools) for method in moved})


def lay_out(role: str, plan: RolePlan, layout: LayoutConfig) -> RolePlan:
    """A role on its pool in this layout. Its methods elsewhere stay as they are. Raises ValueError if the layout cannot be."""
    where, spec = f"models.{role}", plan.spec
    found = resolve_layout(layout, len(plan.pool.ranks), f"{where}.layout on pool '{plan.pool.name}'")
    if spec is not None:
        check_layout(spec, f"{where}.layout", found.pp, found.tp, found.vpp, found.cp, found.ep)
        check_quantized(spec, plan.config.lora, found.tp, f"{where}.lora")
    laid = replace(plan, config=replace(plan.config, layout=layout), shape=GroupShape(found))
    if plan.generation is None or "generate_sequences" in plan.config.calls:
        return laid
    return replace(laid, shape=GroupShape(found, _generation_at_home(where, laid)))


def _layout_of_generation(where: str, generation: GenerationConfig, call: CallConfig) -> LayoutConfig:
    """The layout of generation on ranks of its own, from either of two settings. Raises ValueError if both are given."""
    if call.layout == LayoutConfig():
        return LayoutConfig(pp=generation.pp, tp=generation.tp)
    if (generation.pp, generation.tp) != (1, 1):
        raise ValueError(
            f"{where}.generation.pp={generation.pp} and tp={generation.tp}, and {where}.calls.generate_sequences.layout, both say how "
            "it generates there; leave one of them out"
        )
    return call.layout


def _generation_at_home(where: str, plan: RolePlan) -> GenerationLayout:
    """The generation layout on the role's own ranks. Raises ValueError if it does not fit the training layout."""
    config, layout, spec = plan.config.generation, plan.shape.layout, plan.spec
    assert spec is not None
    whole = check_generation_ep(spec, config.ep, config.tp, f"{where}.generation", f"{where}.generation.tp")
    # stages of different sizes do not join to those of generation
    uneven = config.pp != layout.pp and spec.num_hidden_layers % layout.pp != 0
    try:
        consecutive = METHODS[config.reshard_method].consecutive or uneven
        generation = generation_layout(layout, config.pp, config.tp, consecutive, whole)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error
    check_layout(spec, f"{where}.generation", generation.pp, generation.tp, expert_parallel_generation=whole)
    return generation


def _plan_call(role: str, plan: RolePlan, method: str, pools: Mapping[str, ResourcePool]) -> CallPlan:
    """Where a method runs, by ``models.<role>.calls.<method>``. Raises ValueError if it cannot run elsewhere, or not so."""
    where, config, generation = f"models.{role}.calls.{method}", plan.config.calls[method], plan.config.generation
    if plan.spec is None:
        raise ValueError(f"{where}: this role has no model whose weights could be reallocated; set models.{role}.pool")
    if (bits := plan.config.lora.bits) is not None:
        raise ValueError(
            f"{where}: weights in {bits} bits cannot be sent to other ranks; leave models.{role}.lora.bits out, or let "
            "the role's own ranks run it (placement.strategy=colocate)"
        )
    kinds = _methods(plan.worker)
    free = [name for name, kind in kinds.items() if kind in ("generate", "infer")]
    if method not in free:
        why = "stays on the role's own pool;" if method in kinds else f"no such method{nearest(method, free) or ';'}"
        raise ValueError(f"{where}: {why} methods that may run elsewhere are {', '.join(free)}")
    pool = pools.get(f"{role}.calls.{method}", plan.pool)
    layout = resolve_layout(config.layout, len(pool.ranks), f"{where}.layout on pool '{pool.name}'")
    if kinds[method] == "generate":
        own = f"models.{role}.generation"
        whole = check_generation_ep(plan.spec, generation.ep, layout.tp, own, "tp of generation")
        layout = replace(layout, expert_parallel_generation=whole)
    sizes = layout.pp, layout.tp, layout.vpp, layout.cp, layout.ep
    check_layout(plan.spec, f"{where}.layout", *sizes, expert_parallel_generation=layout.expert_parallel_generation)
    if kinds[method] != "generate":
        return CallPlan(pool, GroupShape(layout))
    if layout.zero or max(layout.vpp, layout.cp, layout.ep) > 1:
        raise ValueError(f"{where}.layout is {layout}: generation has none of zero, vpp, cp and ep; leave them out")
    usual = GenerationConfig()
    for key in ("reshard_method", "buffers"):
        if getattr(generation, key) != getattr(usual, key):
            raise ValueError(
                f"models.{role}.generation.{key}={str(getattr(generation, key)).lower()}: weights for "
                f"calls.{method} on other ranks are sent whole; leave it out"
            )
    # that of the weights that come
    grid = GenerationLayout(layout, layout.pp, layout.tp, expert_parallel_generation=layout.expert_parallel_generation)
    return CallPlan(pool, GroupShape(layout, grid))
