"""Each role with its model, before it has ranks: what the configuration says of it, checked against ``config.json`` and weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf_spmd.algorithms.base import AlgorithmConfig
from rlhf_spmd.config.load import to_dict
from rlhf_spmd.config.rules import Rule, Rules, as_setting, check_rules
from rlhf_spmd.config.schema import leaves
from rlhf_spmd.config.words import nearest
from rlhf_spmd.controller import GroupShape, ResourcePool
from rlhf_spmd.data.prompts import PromptsConfig
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.models.hub import local_directory
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.router_balance import BALANCE_RULES, BalanceLoss
from rlhf_spmd.models.sharding import check_lora
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import check_adapter, check_pretrained
from rlhf_spmd.parallel.layout import MOST_RANKS, GenerationLayout, Layout, LayoutConfig, resolve_layout
from rlhf_spmd.rewards.config import RewardConfig, reward_key
from rlhf_spmd.training.run_plan import StreamConfig
from rlhf_spmd.workers import ActorWorker, ComputeWorker, JudgeWorker, ModelWorker, ReferenceWorker, RewardWorker, RoleClass
from rlhf_spmd.workers.config import RoleConfig
from rlhf_spmd.workers.optim_config import with_role_rates
from rlhf_spmd.workers.role_plan import RolePlan, RolePlans
from rlhf_spmd.workers.router_replay import check_replay

COMPUTE = "compute"  # the role that every algorithm has
RESERVED = (COMPUTE, "rewards", "controller")  # names in ``models`` that no reward can have
# beginnings of the names of other metrics: a reward of such a name would overwrite them
METRICS = re.compile(
    "data|generation|group|logps|memory|perf|prompt_length|reshard|response_length|rollout|rollout_corr|timing_s|training|val"
)


def rewarded_roles(
    algorithm: AlgorithmConfig, streams: Mapping[str, StreamConfig], rewards: Mapping[str, RewardConfig], is_rewarded: bool
) -> dict[str, RoleClass]:
    """Return the algorithm's roles.

    Roles that score responses are left out if there are no prompts, or if the run has no reward and needs none. Raises ValueError.
    """
    if any(isinstance(data, PromptsConfig) for data in streams.values()) and (algorithm.needs_reward or is_rewarded):
        return dict(algorithm.roles)
    if rewards:
        keys = [stream.key for stream in algorithm.streams.values() if issubclass(stream.config, PromptsConfig)]
        remedy = f"give {keys[0]}.path, or leave the reward out" if keys else "leave it out"
        raise ValueError(f"{reward_key(next(iter(rewards)))} scores responses to prompts, and there are none: {remedy}")
    exported = algorithm.exported
    return {role: kind for role, kind in algorithm.roles.items() if role == exported or not issubclass(kind, RewardWorker)}


def with_templates(
    role_plans: RolePlans, rewards: Mapping[str, RewardConfig], streams: Mapping[str, StreamConfig]
) -> dict[str, RewardConfig]:
    """Return the settings of every reward role.

    If the actor gets text prompts through a template, so do reward models whose ``apply_chat_template`` is ``auto``.
    """
    settings = {
        role: rewards.get(role, RewardConfig())
        for role, role_plan in role_plans.items()
        if issubclass(role_plan.worker, RewardWorker)
    }
    if any(isinstance(data, PromptsConfig) and data.apply_chat_template is True for data in streams.values()):
        for role, reward in settings.items():
            if reward.apply_chat_template == "auto" and reward.judge is None:
                settings[role] = replace(reward, apply_chat_template=True)
    return settings


def refuse_unused_settings(section: Any, default: Any, where: str, reason: str) -> None:
    """Raise ValueError for a setting of ``section`` that differs from ``default``.

    ``reason``: why no code reads the setting, for the message.
    """
    defaults = dict(leaves(to_dict(default), where))
    for key, value in leaves(to_dict(section), where):
        if key not in defaults or value != defaults[key]:
            raise ValueError(f"{key}={as_setting(value)}: {reason}; leave it out")


@dataclass(frozen=True)
class RewardSettings:
    """The subject of rules about a reward.

    - environment_rewards: an environment gives this reward, too
    - is_only: the run has no other reward
    """

    role: str
    reward: RewardConfig
    config: RoleConfig
    environment_rewards: bool
    is_only: bool

    @property
    def key(self) -> str:
        return reward_key(self.role)

    @property
    def rewards(self) -> dict[str, RewardConfig]:
        return {self.role: self.reward}

    @property
    def models(self) -> dict[str, RoleConfig]:
        return {self.role: self.config}

    @property
    def path(self) -> str | None:
        """The model's directory."""
        return self.reward.model or self.config.path


REWARD_RULES: Rules = (
    Rule(
        ("{s.key}.model", "models.{s.role}.path"),
        lambda s: s.reward.model is not None and s.config.path not in (None, s.reward.model),
        "they name different models",
        "give one",
    ),
    Rule(
        ("{s.key}.model",),
        lambda s: s.path is None and s.reward.judge is not None,
        "{s.key}.judge needs a model that generates",
        "give it, or models.{s.role}.path",
    ),
    Rule(
        ("{s.key}.function",),
        lambda s: s.path is None and s.reward.function is None and not s.environment_rewards,
        "there is no {s.role}",
        "give {s.key}.function, a reward model as {s.key}.model, an environment that gives rewards, an agent as agent.run, or rewards "
        "of other names as rewards.<name>.function",
    ),
    Rule(
        ("{s.key}.weight",),
        lambda s: s.path is None and s.reward.weight == 0 and s.is_only and not s.environment_rewards,
        "nothing else is rewarded",
        "leave it out",
    ),
)


def describe_roles(
    models: Mapping[str, RoleConfig],
    classes: Mapping[str, RoleClass],
    exported: str,
    rewards: Mapping[str, RewardConfig],
    environment_rewards: bool = False,
    weights: bool = True,
) -> dict[str, RolePlan]:
    """Return every role with its model, on the fewest ranks that its layout allows. These are the facts before ``place_roles``.

    - classes: the classes of the algorithm's roles
    - exported: the role whose model other roles take if they name none
    - rewards: settings by role. A name that is no role of ``classes`` becomes a reward, and its scores add to those of the role
      "reward", which may then be left out
    - environment_rewards: an environment gives rewards too, in the first reward role
    - weights: the run needs the weights, so they are checked

    Reads config.json files and the headers of weights. Raises ValueError that names the role, the value and what is allowed.
    """
    algorithm_rewards = [role for role, worker in classes.items() if issubclass(worker, RewardWorker)]
    for name in rewards:
        _check_reward_name(name, classes, algorithm_rewards)
    is_added_up = environment_rewards or rewards.keys() <= {*algorithm_rewards} or "reward" in (*rewards, *models)
    role_classes = _model_classes(classes, exported, rewards, is_added_up)
    _check_role_names(models, role_classes, exported)
    configs = {role: models.get(role, RoleConfig()) for role in role_classes}
    base = configs[exported]
    if base.path is None:
        raise ValueError(f"models.{exported}.path must be given: a Hugging Face model directory")
    references = [role for role, worker in role_classes.items() if issubclass(worker, ReferenceWorker)]
    served = tuple(role for role in references if _is_served(configs[role], base))
    for role, worker in role_classes.items():
        if issubclass(worker, RewardWorker) and role != exported:
            from_environment = environment_rewards and role == next(iter(algorithm_rewards), role)
            configs[role] = _reward_model_config(role, configs[role], rewards, from_environment)
        elif configs[role].path is None:
            configs[role] = _with_model_of(base, configs[role], worker)
    role_plans: dict[str, RolePlan] = {}
    for role, config in configs.items():
        if role not in served:
            role_plan = _describe_role(role, role_classes[role], config, weights)
            role_plans[role] = replace(role_plan, is_added=role not in classes, serves=served if role == exported else ())
    for role, role_class in {**classes, COMPUTE: ComputeWorker}.items():
        if issubclass(role_class, ComputeWorker):
            role_plans[role] = RolePlan(role_class, RoleConfig(), ResourcePool("unplaced", (0,)), GroupShape(Layout()), None)
    return role_plans


def _model_classes(
    classes: Mapping[str, RoleClass], exported: str, rewards: Mapping[str, RewardConfig], is_added_up: bool
) -> dict[str, type[ModelWorker]]:
    """Return the classes of roles that may have a model: the algorithm's, then the rewards that the configuration adds.

    ``is_added_up``: the scores of the role "reward" count; else it is left out.
    """
    role_classes = {role: worker for role, worker in classes.items() if issubclass(worker, ModelWorker)}
    role_classes |= {name: RewardWorker for name in rewards if name not in role_classes}
    if not is_added_up:
        del role_classes["reward"]
    return role_classes | {
        name: JudgeWorker for name, reward in rewards.items() if reward.judge is not None and name != exported
    }


def _check_role_names(models: Mapping[str, RoleConfig], role_classes: Mapping[str, RoleClass], exported: str) -> None:
    """Raise ValueError if the configuration names a role that the run does not have."""
    for role in models:
        if role not in role_classes:
            similar = next((name for name in role_classes if name.startswith(role)), exported)  # "ref" for "reference"
            hint = nearest(role, list(role_classes)) or f"; did you mean '{similar}'?"
            raise ValueError(f"models.{role}: this algorithm has no such role{hint} its roles are {', '.join(role_classes)}")


def _reward_model_config(
    role: str, config: RoleConfig, rewards: Mapping[str, RewardConfig], from_environment: bool
) -> RoleConfig:
    """Return ``models.<role>`` of a reward with the directory of its model, if it has one. Raises ValueError.

    ``from_environment``: an environment gives this reward, too.
    """
    reward = rewards.get(role, RewardConfig())
    settings = RewardSettings(role, reward, config, from_environment, len(rewards) == 1)
    check_rules(REWARD_RULES, settings)
    if settings.path is None:
        reward.check_no_model(reward_key(role))
    return replace(config, path=settings.path)


def _check_reward_name(name: str, classes: Mapping[str, RoleClass], algorithm_rewards: list[str]) -> None:
    """Raise ValueError for a reward that the algorithm cannot have. ``algorithm_rewards``: the algorithm's reward roles."""
    is_metric = METRICS.fullmatch(name) and name not in algorithm_rewards
    if is_metric or "/" in name:
        reason = f"metrics of the run begin with {name}/" if is_metric else "a name has no '/', its metrics begin with it"
        raise ValueError(f"{reward_key(name)}: {reason}; give the reward another name")
    hint = nearest(name, [role for role in algorithm_rewards if role != "reward"])
    if name not in algorithm_rewards and ("reward" not in algorithm_rewards or name in (*classes, *RESERVED) or hint):
        listed = ", ".join(algorithm_rewards) or "none"
        raise ValueError(f"{reward_key(name)}: this algorithm has no such reward{hint or ';'} its rewards are {listed}")


def _with_model_of(base: RoleConfig, config: RoleConfig, worker: type[ModelWorker]) -> RoleConfig:
    """Return a role that names no model, with the model ``base`` of the exported role."""
    config = replace(config, path=base.path, random_init=config.random_init or base.random_init)
    if issubclass(worker, ReferenceWorker) and base.lora.path is not None and config.lora == LoraConfig():
        config = replace(config, lora=base.lora)  # the policy that training begins with
    return config


def _is_served(config: RoleConfig, base: RoleConfig) -> bool:
    """Return True if a reference is the policy with which ``base`` begins to train adapters."""
    default = type(config)()
    unchanged = replace(config, path=default.path, dtype=default.dtype) == default
    same_dtype = config.dtype in (default.dtype, base.dtype)
    same_model = config.path is None or (config.path == base.path and base.lora.path is None)
    return base.lora.rank > 0 and unchanged and same_dtype and same_model


def _least_ranks(config: LayoutConfig) -> int:
    """Return the fewest ranks that a layout can have."""
    copies = config.dp * config.cp if config.dp is not None else math.lcm(config.zero_size or 1, config.cp, config.ep)
    return max(config.pp * config.tp * copies, 1)


def _describe_role(role: str, worker: type[ModelWorker], config: RoleConfig, weights: bool) -> RolePlan:
    where = f"models.{role}"
    num_ranks = _least_ranks(config.layout)
    if num_ranks > MOST_RANKS:
        raise ValueError(f"{where}.layout: it needs {num_ranks} ranks; at most {MOST_RANKS} are allowed")
    layout = resolve_layout(config.layout, num_ranks, f"{where}.layout")
    pool = ResourcePool("unplaced", tuple(range(num_ranks)))
    shape = GroupShape(layout)
    default = type(config)()
    if config.path is None:
        # these settings may be given for all roles at once
        settings = replace(config, pool=None, layout=LayoutConfig(), calls={}, dtype=default.dtype)
        refuse_unused_settings(settings, default, where, "this role has no model")
        return RolePlan(worker, config, pool, shape, None)
    config, spec = _read_model(where, worker, config, weights)
    if not worker.trained:
        refuse_unused_settings(config.optim, default.optim, f"{where}.optim", "this role is not trained")
    else:
        config = replace(config, optim=with_role_rates(config.optim, worker.lr, worker.head_lr))
    if config.router_replay != "disabled":
        check_replay(spec, issubclass(worker, ActorWorker), f"{where}.router_replay={config.router_replay}")
    check_rules(BALANCE_RULES, BalanceLoss(config.router_aux_loss_coef, spec, worker.trained), where)
    if config.lora.rank:
        check_lora(spec, config.lora, f"{where}.lora")
        if config.lora.path is not None:
            check_adapter(spec, config.lora, worker.head, f"{where}.lora")
    if issubclass(worker, JudgeWorker):
        _check_judge(where, config, layout)
    elif not issubclass(worker, ActorWorker):
        refuse_unused_settings(config.generation, GenerationConfig(), f"{where}.generation", "this role does not generate")
    if issubclass(worker, ActorWorker):
        shape = GroupShape(layout, GenerationLayout(layout, layout.pp, layout.tp))
    return RolePlan(worker, config, pool, shape, spec)


def _read_model(where: str, worker: type[ModelWorker], config: RoleConfig, weights: bool) -> tuple[RoleConfig, ModelSpec]:
    """Return the role's settings with the directory of its model, and the model. Raises ValueError."""
    assert config.path is not None, "a role with a model"
    path = local_directory(config.path, f"{where}.path", weights and not config.random_init)
    try:
        spec = read_spec(path)
        if weights and not config.random_init:
            check_pretrained(spec, path, worker.head, missing_head_ok=worker.new_head)
    except ValueError as error:
        lacks_weights = (Path(path) / "config.json").is_file() and not any(Path(path).glob("*.safetensors"))
        remedy = f"; {where}.random_init=true draws them" if worker.trained and lacks_weights else ""
        raise ValueError(f"{where}.path: {error}{remedy}") from error
    return replace(config, path=path), spec


def _check_judge(where: str, config: RoleConfig, layout: Layout) -> None:
    """Raise ValueError for settings that a judge cannot have. It generates in the layout of its weights."""
    default = GenerationConfig()
    keys = ("pp", "tp", "ep", "reshard_method", "buffers", "reuse_rollout_log_probs")
    settings = replace(default, **{key: getattr(config.generation, key) for key in keys})
    refuse_unused_settings(settings, default, f"{where}.generation", f"a judge generates in {where}.layout")
    for axis in ("vpp", "cp", "ep"):
        if (size := getattr(layout, axis)) > 1:
            raise ValueError(
                f"{where}.layout.{axis}={size}: a judge generates in this layout, and generation has no {axis}; leave it out"
            )
