"""From configuration to roles: each role's model, pool and layout resolved and checked (pure), then built on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from rlhf_spmd.config.schema import nearest
from rlhf_spmd.controller import Controller, GroupShape, ResourcePool
from rlhf_spmd.data.encoding import PackedIds
from rlhf_spmd.models.sharding import check_layout
from rlhf_spmd.models.spec import ModelSpec, read_spec
from rlhf_spmd.models.weights import check_pretrained
from rlhf_spmd.parallel.layout import GenerationLayout, Layout, resolve_layout
from rlhf_spmd.planner.placement import PlacementConfig, place_roles
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.workers.actor import ActorWorker
from rlhf_spmd.workers.arithmetic import ArithmeticWorker, RoleClass
from rlhf_spmd.workers.config import RoleConfig
from rlhf_spmd.workers.model_worker import Build, ModelWorker


@dataclass(frozen=True)
class RolePlan:
    """A role, decided: ``spec`` is None for roles without a model."""

    worker: RoleClass
    config: RoleConfig
    pool: ResourcePool
    shape: GroupShape
    spec: ModelSpec | None


def plan_roles(
    models: Mapping[str, RoleConfig],
    roles: Mapping[str, RoleClass],
    placement: PlacementConfig,
    reward: RewardConfig,
    world_size: int,
) -> dict[str, RolePlan]:
    """Every role with its pool, layout and model. ``roles``: name -> class, an actor among them.

    Reads config.json files and the headers of weights. Raises ValueError that names the role, the value and what is allowed.
    """
    known = {role: worker for role, worker in roles.items() if issubclass(worker, ModelWorker)}
    for role in models:
        if role not in known:
            hint = nearest(role, list(known)) or ";"
            raise ValueError(f"models.{role}: this algorithm has no such role{hint} its roles are {', '.join(known)}")
    configs = {role: models.get(role, RoleConfig()) for role in known}
    if configs["actor"].path is None:
        raise ValueError("models.actor.path must be given: a Hugging Face model directory")
    for role, worker in known.items():
        if configs[role].path is None and worker.model_of is not None:
            other = configs[worker.model_of]
            configs[role] = replace(configs[role], path=other.path, random_init=configs[role].random_init or other.random_init)
    if "reward" in configs:
        configs["reward"] = _reward_model(configs["reward"], reward)
    pools = place_roles(placement, {role: config.pool for role, config in configs.items()}, world_size)
    plans = {role: _plan_role(role, known[role], config, pools[role]) for role, config in configs.items()}
    for role, role_class in roles.items():
        if issubclass(role_class, ArithmeticWorker):
            pool = plans[next(home for home in (*role_class.home, "actor") if home in plans)].pool
            plans[role] = RolePlan(role_class, RoleConfig(), pool, GroupShape(Layout(dp=len(pool.ranks))), None)
    _same_vocabulary(plans)
    return plans


def _reward_model(config: RoleConfig, reward: RewardConfig) -> RoleConfig:
    """The reward role with its model, which ``reward.model`` names as well as ``models.reward.path``."""
    if reward.model is not None and config.path not in (None, reward.model):
        raise ValueError(
            f"reward.model={reward.model!r} and models.reward.path={config.path!r} name different models; give one"
        )
    path = reward.model or config.path
    if path is None and reward.function is None:
        raise ValueError("there is no reward: give reward.function, or a reward model as reward.model")
    return replace(config, path=path)


def _plan_role(role: str, worker: type[ModelWorker], config: RoleConfig, pool: ResourcePool) -> RolePlan:
    where = f"models.{role}"
    layout = resolve_layout(config.layout, len(pool.ranks), f"{where}.layout on pool '{pool.name}'")
    if config.path is None:
        return RolePlan(worker, config, pool, GroupShape(layout), None)
    spec = read_spec(config.path)
    check_layout(spec, layout.pp, layout.tp, f"{where}.layout")
    if not config.random_init:
        check_pretrained(spec, config.path, worker.head, missing_head_ok=worker.new_head)
    if not issubclass(worker, ActorWorker):
        return RolePlan(worker, config, pool, GroupShape(layout), spec)
    try:
        generation = GenerationLayout(layout, config.generation.pp, config.generation.tp)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error
    check_layout(spec, generation.pp, generation.tp, f"{where}.generation")
    if generation.pp != layout.pp and spec.num_hidden_layers % layout.pp:
        raise ValueError(
            f"{where}.generation.pp={generation.pp} regroups stages, so layout.pp={layout.pp} must divide the model's "
            f"{spec.num_hidden_layers} layers"
        )
    return RolePlan(worker, config, pool, GroupShape(layout, generation), spec)


def _same_vocabulary(plans: Mapping[str, RolePlan]) -> None:
    actor = plans["actor"].spec
    assert actor is not None
    for role, plan in plans.items():
        if plan.spec is not None and plan.spec.vocab_size != actor.vocab_size:
            raise ValueError(
                f"models.{role}.path={plan.config.path!r} has a vocabulary of {plan.spec.vocab_size}, the actor's has "
                f"{actor.vocab_size}; all roles read the same token ids"
            )


def check_vocabulary(ids: PackedIds, plans: Mapping[str, RolePlan]) -> None:
    """Raises ValueError if the tokenizer gave ids that the actor's model has not."""
    spec = plans["actor"].spec
    assert spec is not None
    largest = int(ids.values.max(initial=0))
    if largest >= spec.vocab_size:
        raise ValueError(
            f"the data have token id {largest}, but the model in '{plans['actor'].config.path}' has a vocabulary of "
            f"{spec.vocab_size}: its tokenizer is larger than the model"
        )


def build_models(plans: Mapping[str, RolePlan], build: Build) -> SimpleNamespace:
    """The role objects by name, the same on every rank. Collective over the world: every rank of it must call."""
    return SimpleNamespace(**{role: _build_role(role, plan, build) for role, plan in plans.items()})


def _build_role(role: str, plan: RolePlan, build: Build) -> ModelWorker | ArithmeticWorker:
    if issubclass(plan.worker, ArithmeticWorker):
        return plan.worker(build, role, plan.pool)
    return plan.worker(build, role, plan.pool, plan.shape, plan.config, plan.spec)


def model_directory(plans: Mapping[str, RolePlan], role: str) -> Path:
    path = plans[role].config.path
    assert path is not None, f"role {role} has no model"
    return Path(path)


def pools_of(controller: Controller, plans: Mapping[str, RolePlan]) -> list[str]:
    """Names of the pools that this rank is in, for the timeline."""
    return sorted({plan.pool.name for plan in plans.values() if controller.rank in plan.pool.ranks})
