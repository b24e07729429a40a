"""From configuration to roles: each role's model, pool and layout resolved and checked (pure), then built on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlhf_spmd.config.schema import nearest
from rlhf_spmd.controller import Controller, GroupShape, ResourcePool
from rlhf_spmd.models.sharding import check_layout
from rlhf_spmd.models.spec import ModelSpec, read_eos_ids, read_spec
from rlhf_spmd.objectives.kl import KLControlConfig, build_kl_controller
from rlhf_spmd.parallel.layout import GenerationLayout, Layout, resolve_layout
from rlhf_spmd.planner.placement import PlacementConfig, place_roles
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.workers.actor import ActorWorker
from rlhf_spmd.workers.advantage import AdvantageWorker
from rlhf_spmd.workers.config import RoleConfig
from rlhf_spmd.workers.critic import CriticWorker
from rlhf_spmd.workers.model_worker import Build
from rlhf_spmd.workers.reference import ReferenceWorker
from rlhf_spmd.workers.reward import RewardWorker

ARITHMETIC_HOME = {"advantage": "critic"}  # roles without a model live where their inputs are


@dataclass(frozen=True)
class RolePlan:
    """A role, decided: ``spec`` is None for roles without a model."""

    config: RoleConfig
    pool: ResourcePool
    shape: GroupShape
    spec: ModelSpec | None


def plan_roles(
    models: Mapping[str, RoleConfig], needed: Sequence[str], placement: PlacementConfig, reward: RewardConfig, world_size: int
) -> dict[str, RolePlan]:
    """Every needed role with its pool, layout and model. Reads config.json files, no weights.

    Raises ValueError that names the role, the value and what is allowed.
    """
    known = [role for role in needed if role not in ARITHMETIC_HOME]
    for role in models:
        if role not in known:
            hint = nearest(role, known) or ";"
            raise ValueError(f"models.{role}: this algorithm has no such role{hint} its roles are {', '.join(known)}")
    configs = {role: models.get(role, RoleConfig()) for role in known}
    if configs["actor"].path is None:
        raise ValueError("models.actor.path must be given: a Hugging Face model directory")
    for role in ("critic", "reference"):
        if role in configs and configs[role].path is None:
            actor = configs["actor"]
            configs[role] = replace(configs[role], path=actor.path, random_init=configs[role].random_init or actor.random_init)
    if "reward" in configs and configs["reward"].path is None and reward.function is None:
        raise ValueError("there is no reward: give reward.function, or a reward model as models.reward.path")
    pools = place_roles(placement, {role: config.pool for role, config in configs.items()}, world_size)
    plans = {role: _plan_role(role, config, pools[role]) for role, config in configs.items()}
    for role, home in ARITHMETIC_HOME.items():
        if role in needed:
            pool = plans[home].pool
            plans[role] = RolePlan(RoleConfig(), pool, GroupShape(Layout(dp=len(pool.ranks))), None)
    _same_vocabulary(plans)
    return plans


def _plan_role(role: str, config: RoleConfig, pool: ResourcePool) -> RolePlan:
    where = f"models.{role}"
    layout = resolve_layout(config.layout, len(pool.ranks), f"{where}.layout on pool '{pool.name}'")
    if config.path is None:
        return RolePlan(config, pool, GroupShape(layout), None)
    spec = read_spec(config.path)
    check_layout(spec, layout.pp, layout.tp, f"{where}.layout")
    if role != "actor":
        return RolePlan(config, pool, GroupShape(layout), spec)
    generation = GenerationLayout(layout, config.generation.pp, config.generation.tp)
    check_layout(spec, generation.pp, generation.tp, f"{where}.generation")
    if generation.pp != layout.pp and spec.num_hidden_layers % layout.pp:
        raise ValueError(
            f"{where}.generation.pp={generation.pp} regroups stages, so layout.pp={layout.pp} must divide the model's "
            f"{spec.num_hidden_layers} layers"
        )
    return RolePlan(config, pool, GroupShape(layout, generation), spec)


def _same_vocabulary(plans: Mapping[str, RolePlan]) -> None:
    actor = plans["actor"].spec
    assert actor is not None
    for role, plan in plans.items():
        if plan.spec is not None and plan.spec.vocab_size != actor.vocab_size:
            raise ValueError(
                f"models.{role}.path={plan.config.path!r} has a vocabulary of {plan.spec.vocab_size}, the actor's has "
                f"{actor.vocab_size}; all roles read the same token ids"
            )


def build_models(
    plans: Mapping[str, RolePlan],
    build: Build,
    kl_ctrl: KLControlConfig,
    reward: RewardConfig,
    tokenizer: Any,
    num_samples: int,
) -> SimpleNamespace:
    """The role objects by name, the same on every rank. Collective over the world: every rank of it must call."""
    models = SimpleNamespace()
    for role, plan in plans.items():
        setattr(models, role, _build_role(role, plan, build, kl_ctrl, reward, tokenizer, num_samples))
    return models


def _build_role(
    role: str, plan: RolePlan, build: Build, kl_ctrl: KLControlConfig, reward: RewardConfig, tokenizer: Any, num_samples: int
) -> Any:
    if role == "advantage":
        return AdvantageWorker(build.controller, build.world, plan.pool, build_kl_controller(kl_ctrl))
    if role == "reward":
        return RewardWorker(build, role, plan.pool, plan.shape, plan.config, plan.spec, reward, tokenizer, num_samples)
    if role == "actor":
        assert plan.config.path is not None
        return ActorWorker(build, role, plan.pool, plan.shape, plan.config, plan.spec, read_eos_ids(plan.config.path))
    worker = {"critic": CriticWorker, "reference": ReferenceWorker}[role]
    return worker(build, role, plan.pool, plan.shape, plan.config, plan.spec)


def model_directory(plans: Mapping[str, RolePlan], role: str) -> Path:
    path = plans[role].config.path
    assert path is not None, f"role {role} has no model"
    return Path(path)


def pools_of(controller: Controller, plans: Mapping[str, RolePlan]) -> list[str]:
    """Names of the pools that this rank is in, for the timeline."""
    return sorted({plan.pool.name for plan in plans.values() if controller.rank in plan.pool.ranks})
