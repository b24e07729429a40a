"""From configuration to roles: each role's model, pool and layout resolved and checked (pure), then built on every rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlhf_spmd.algorithms.base import AlgorithmConfig
from rlhf_spmd.config.load import to_dict
from rlhf_spmd.config.rules import check_rules
from rlhf_spmd.config.schema import leaves, nearest
from rlhf_spmd.controller import GroupShape, ResourcePool
from rlhf_spmd.data.dataset import TokenDataset
from rlhf_spmd.data.encoding import read_template
from rlhf_spmd.data.prompts import PromptDataset, PromptsConfig
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.models.hub import local_directory
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.router_balance import BALANCE_RULES, BalanceLoss
from rlhf_spmd.models.sharding import check_lora
from rlhf_spmd.models.spec import ModelSpec, join_ends
from rlhf_spmd.models.stored import read_spec
from rlhf_spmd.models.weights import check_adapter, check_pretrained
from rlhf_spmd.parallel.layout import MOST_RANKS, GenerationLayout, Layout, LayoutConfig, resolve_layout
from rlhf_spmd.rewards.config import RewardConfig, reward_key
from rlhf_spmd.rewards.eval_metrics import repeated_means
from rlhf_spmd.workers import (
    ActorWorker,
    ComputeWorker,
    JudgeWorker,
    ModelWorker,
    ReferenceWorker,
    RewardWorker,
    RoleClass,
    WorkerContext,
)
from rlhf_spmd.workers.config import RoleConfig
from rlhf_spmd.workers.optim_config import with_usual_rates
from rlhf_spmd.workers.retokenize import Retokenizer, build_retokenizer
from rlhf_spmd.workers.router_replay import check_replay

COMPUTE = "compute"  # the role that every algorithm has
RENDERED_ROWS = 100  # that a reward model's template must take before the run
RESERVED = (COMPUTE, "rewards", "controller")  # names in ``models`` that no reward can have
# with which other metrics begin: a reward of such a name would write over them
METRICS = re.compile(
    "data|generation|group|logps|memory|perf|prompt_length|reshard|response_length|rollout|rollout_corr|timing_s|training|val"
)


@dataclass(frozen=True)
class CallPlan:
    """Where the calls of one method run."""

    pool: ResourcePool
    shape: GroupShape


@dataclass(frozen=True)
class RolePlan:
    """A role, decided.

    ``spec``: None for roles without a model. ``calls``: methods that run on other ranks, or in another layout, than the role.
    ``is_added``: the configuration names it, not the algorithm. ``reads_text``: it reads text through its own tokenizer, not the rows'
    tokens. ``serves``: roles of the algorithm that are this role's model as training began, and the same object.
    """

    worker: RoleClass
    config: RoleConfig
    pool: ResourcePool
    shape: GroupShape
    spec: ModelSpec | None
    calls: Mapping[str, CallPlan] = field(default_factory=dict)
    is_added: bool = False
    reads_text: bool = False
    serves: tuple[str, ...] = ()

    def at(self, method: str) -> CallPlan | RolePlan:
        """Return where a method runs."""
        return self.calls.get(method, self)

    @property
    def generation(self) -> GenerationLayout | None:
        """The layout of ``generate_sequences``; None for a role that does not generate."""
        return self.at("generate_sequences").shape.generation

    @property
    def trained(self) -> bool:
        return issubclass(self.worker, ModelWorker) and self.worker.trained

    @property
    def pools(self) -> list[ResourcePool]:
        """The role's pool, and those of its methods that run elsewhere."""
        return [self.pool, *(call.pool for call in self.calls.values())]


def generating(plans: Mapping[str, RolePlan]) -> dict[str, RolePlan]:
    """Return the roles that generate."""
    return {role: plan for role, plan in plans.items() if plan.generation is not None}


def rewarded_roles(
    algorithm: AlgorithmConfig, sections: Mapping[str, Any], rewards: Mapping[str, RewardConfig], given: bool
) -> dict[str, RoleClass]:
    """Return the algorithm's roles. Roles that score responses are left out if there are no prompts, or if no reward is given
    or needed.

    Raises ValueError.
    """
    if any(isinstance(data, PromptsConfig) for data in sections.values()) and (algorithm.needs_reward or given):
        return dict(algorithm.roles)
    if rewards:
        missing = next(iter(s.key for s in algorithm.streams.values() if issubclass(s.config, PromptsConfig)), None)
        remedy = f"give {missing}.path, or leave the reward out" if missing else "leave it out"
        raise ValueError(f"{reward_key(next(iter(rewards)))} scores responses to prompts, and there are none: {remedy}")
    exported = algorithm.exported
    return {role: kind for role, kind in algorithm.roles.items() if role == exported or not issubclass(kind, RewardWorker)}


def with_templates(
    plans: Mapping[str, RolePlan], rewards: Mapping[str, RewardConfig], sections: Mapping[str, Any]
) -> dict[str, RewardConfig]:
    """Return the settings of every reward role. If the actor gets text prompts through a template, so do reward models whose
    ``apply_chat_template`` is ``auto``.
    """
    found = {role: rewards.get(role, RewardConfig()) for role, plan in plans.items() if issubclass(plan.worker, RewardWorker)}
    if any(isinstance(data, PromptsConfig) and data.apply_chat_template is True for data in sections.values()):
        found = {
            role: replace(one, apply_chat_template=True) if one.apply_chat_template == "auto" and one.judge is None else one
            for role, one in found.items()
        }
    return found


def describe_roles(
    models: Mapping[str, RoleConfig],
    roles: Mapping[str, RoleClass],
    exported: str,
    rewards: Mapping[str, RewardConfig],
    rewarded: bool = False,
    weights: bool = True,
) -> dict[str, RolePlan]:
    """Return every role with its model, on as many ranks as its layout needs at least: what is known before :func:`place`.

    ``roles``: name -> class. ``exported``: the role whose model other roles take if they name none. ``rewards``: role ->
    settings; a name that is no role of ``roles`` becomes a reward, and its scores add to those of the role "reward", which may then be
    left out. ``rewarded``: an environment gives rewards too, in the first reward role. ``weights``: they are needed, and checked.
    Reads config.json files and the headers of weights. Raises ValueError that names the role, the value and what is allowed.
    """
    declared = [role for role, worker in roles.items() if issubclass(worker, RewardWorker)]
    for name in rewards:
        taken = METRICS.fullmatch(name) and name not in declared
        if taken or "/" in name:
            why = f"metrics of the run begin with {name}/" if taken else "a name has no '/', its metrics begin with it"
            raise ValueError(f"{reward_key(name)}: {why}; give the reward another name")
        hint = nearest(name, [role for role in declared if role != "reward"])
        if name not in declared and ("reward" not in declared or name in (*roles, *RESERVED) or hint):
            listed = ", ".join(declared) or "none"
            raise ValueError(f"{reward_key(name)}: this algorithm has no such reward{hint or ';'} its rewards are {listed}")
    known = {role: worker for role, worker in roles.items() if issubclass(worker, ModelWorker)}
    known |= {name: RewardWorker for name in rewards if name not in known}
    if not (rewarded or rewards.keys() <= {*declared} or "reward" in (*rewards, *models)):
        del known["reward"]  # the scores of the others are all that is added up
    known |= {name: JudgeWorker for name, reward in rewards.items() if reward.judge is not None and name != exported}
    for role in models:
        if role not in known:
            meant = next((name for name in known if name.startswith(role)), exported)  # ref
            hint = nearest(role, list(known)) or f"; did you mean '{meant}'?"
            raise ValueError(f"models.{role}: this algorithm has no such role{hint} its roles are {', '.join(known)}")
    configs = {role: models.get(role, RoleConfig()) for role in known}
    own = configs[exported]
    if own.path is None:
        raise ValueError(f"models.{exported}.path must be given: a Hugging Face model directory")
    served = tuple(
        role for role, worker in known.items() if issubclass(worker, ReferenceWorker) and _is_served(configs[role], own)
    )
    for role in served:
        del known[role], configs[role]
    for role, worker in known.items():
        if issubclass(worker, RewardWorker) and role != exported:
            given = rewarded and role == next(iter(declared), role)
            reward = rewards.get(role, RewardConfig())
            configs[role] = _reward_model(role, configs[role], reward, given)
            if configs[role].path is None:
                reward.check_no_model(reward_key(role))
                if reward.weight == 0 and len(rewards) == 1 and not given:
                    raise ValueError(f"{reward_key(role)}.weight=0: nothing else is rewarded; leave it out")
        elif configs[role].path is None:
            configs[role] = replace(configs[role], path=own.path, random_init=configs[role].random_init or own.random_init)
            if issubclass(worker, ReferenceWorker) and own.lora.path is not None and configs[role].lora == LoraConfig():
                configs[role] = replace(configs[role], lora=own.lora)  # the policy that training begins with
    plans = {
        role: replace(_describe_role(role, known[role], config, weights), is_added=role not in roles)
        for role, config in configs.items()
    }
    plans[exported] = replace(plans[exported], serves=served)
    for role, role_class in {**roles, COMPUTE: ComputeWorker}.items():
        if issubclass(role_class, ComputeWorker):
            plans[role] = RolePlan(role_class, RoleConfig(), ResourcePool("unplaced", (0,)), GroupShape(Layout()), None)
    return plans


def _is_served(config: RoleConfig, own: RoleConfig) -> bool:
    """Return True if a reference is just the policy with which ``own`` begins to train adapters."""
    usual = type(config)()
    alike = replace(config, path=usual.path, dtype=usual.dtype) == usual and config.dtype in (usual.dtype, own.dtype)
    return own.lora.rank > 0 and alike and (config.path is None or (config.path == own.path and own.lora.path is None))


def _check_lora(where: str, worker: type[ModelWorker], config: RoleConfig, spec: ModelSpec, weights: bool) -> None:
    """Raises ValueError. ``weights``: they are needed."""
    lora, key = config.lora, f"{where}.lora"
    if weights and config.random_init:
        raise ValueError(
            f"{where}.random_init=true: {key}.rank={lora.rank} trains beside weights that are read again; leave it out"
        )
    if not worker.trained and not (issubclass(worker, ReferenceWorker) and lora.path is not None):
        needed = f"give {key}.path, or leave it out" if issubclass(worker, ReferenceWorker) else "leave it out"
        raise ValueError(f"{key}.rank={lora.rank}: this role is not trained; {needed}")
    check_lora(spec, lora, key)
    if config.optim.name == "muon":
        raise ValueError(f"{where}.optim.name=muon is for whole matrices, and {key}.rank={lora.rank} trains none; use adamw")
    if config.optim.head_lr is not None and worker.head == "lm":
        raise ValueError(f"{where}.optim.head_lr={config.optim.head_lr}: with {key} no head is trained; leave it out")
    if lora.path is not None:
        check_adapter(spec, lora, worker.head, key)


def _reward_model(role: str, config: RoleConfig, reward: RewardConfig, rewarded: bool) -> RoleConfig:
    """Return a reward role with its model, which ``rewards.<role>.model`` or ``models.<role>.path`` names."""
    key = reward_key(role)
    if reward.model is not None and config.path not in (None, reward.model):
        raise ValueError(f"{key}.model={reward.model!r} and models.{role}.path={config.path!r} name different models; give one")
    path = reward.model or config.path
    if path is None and reward.judge is not None:
        raise ValueError(f"{key}.judge needs a model that generates: give {key}.model or models.{role}.path")
    if path is None and reward.function is None and not rewarded:
        named = ", rewards of other names as rewards.<name>.function" if role == "reward" else ""
        raise ValueError(
            f"there is no {role}: give {key}.function{named}, a reward model as {key}.model, or an environment that gives rewards"
        )
    return replace(config, path=path)


def _least_copies(config: LayoutConfig) -> int:
    """The fewest ranks that a stage and slice of the model can have."""
    return config.dp * config.cp if config.dp is not None else math.lcm(config.zero_size or 1, config.cp, config.ep)


def _describe_role(role: str, worker: type[ModelWorker], config: RoleConfig, weights: bool) -> RolePlan:
    where = f"models.{role}"
    least = max(config.layout.pp * config.layout.tp * _least_copies(config.layout), 1)
    if least > MOST_RANKS:
        raise ValueError(f"{where}.layout: it needs {least} ranks; at most {MOST_RANKS} are allowed")
    layout, pool = resolve_layout(config.layout, least, f"{where}.layout"), ResourcePool("unplaced", tuple(range(least)))
    if config.path is None:
        usual = type(config)()  # the dtype may be said of all roles alike
        rest = replace(config, pool=None, layout=LayoutConfig(), calls={}, dtype=usual.dtype)
        _refuse_unusual(rest, usual, where, "this role has no model")
        return RolePlan(worker, config, pool, GroupShape(layout), None)
    path = local_directory(config.path, f"{where}.path", weights and not config.random_init)
    try:
        config, spec = replace(config, path=path), read_spec(path)
        if weights and not config.random_init:
            check_pretrained(spec, path, worker.head, missing_head_ok=worker.new_head)
    except ValueError as error:
        drawn = worker.trained and (Path(path) / "config.json").is_file() and not any(Path(path).glob("*.safetensors"))
        raise ValueError(f"{where}.path: {error}{f'; {where}.random_init=true draws them' if drawn else ''}") from error
    if not worker.trained:
        _refuse_unusual(config.optim, type(config)().optim, f"{where}.optim", "this role is not trained")
    else:
        config = replace(config, optim=with_usual_rates(config.optim, worker.lr, worker.head_lr))
    if config.router_replay != "disabled":
        check_replay(spec, issubclass(worker, ActorWorker), f"{where}.router_replay={config.router_replay}")
    check_rules(BALANCE_RULES, BalanceLoss(config.router_aux_loss_coef, spec, worker.trained), where)
    if config.optim.head_lr is not None and worker.head == "lm" and spec.tie_word_embeddings:
        raise ValueError(
            f"{where}.optim.head_lr={config.optim.head_lr}: the model's output matrix is its embedding (tie_word_embeddings); "
            "leave it out"
        )
    if config.lora.rank:
        _check_lora(where, worker, config, spec, weights)
    if issubclass(worker, JudgeWorker):
        _check_judge(where, config, layout)
    if not issubclass(worker, ActorWorker):
        if not issubclass(worker, JudgeWorker):
            _refuse_unusual(config.generation, GenerationConfig(), f"{where}.generation", "this role does not generate")
        return RolePlan(worker, config, pool, GroupShape(layout), spec)
    return RolePlan(worker, config, pool, GroupShape(layout, GenerationLayout(layout, layout.pp, layout.tp)), spec)


def _refuse_unusual(config: Any, usual: Any, where: str, why: str) -> None:
    """Raises ValueError for a setting that differs from the ``usual`` one."""
    for (key, value), (_, default) in zip(leaves(to_dict(config), where), leaves(to_dict(usual), where), strict=True):
        if value != default:
            raise ValueError(f"{key}={value}: {why}; leave it out")


def _check_judge(where: str, config: RoleConfig, layout: Layout) -> None:
    """Raises ValueError for settings that a judge cannot have: it generates with its weights where they are."""
    own, usual = config.generation, GenerationConfig()
    judged = ("pp", "tp", "ep", "reshard_method", "buffers", "reuse_rollout_log_probs")
    rest = replace(usual, **{key: getattr(own, key) for key in judged})
    _refuse_unusual(rest, usual, f"{where}.generation", f"a judge generates in {where}.layout")
    for axis in ("vpp", "cp", "ep"):
        if getattr(layout, axis) > 1:
            value = getattr(layout, axis)
            raise ValueError(
                f"{where}.layout.{axis}={value}: a judge generates in this layout, and generation has no {axis}; leave it out"
            )


def find_text_readers(
    plans: Mapping[str, RolePlan], rewards: Mapping[str, RewardConfig], exported: str, tokenizer: Any, data: Any
) -> dict[str, RolePlan]:
    """Return ``plans`` with the reward models marked that read text through their own tokenizers; all others must read the tokens of
    ``exported``. Models that generate learn the end tokens of their tokenizers and of the template of ``data`` (the section).

    Raises ValueError, DataError.
    """
    found, template = dict(plans), read_template(getattr(data, "chat_template", None), "data.chat_template")
    for role, plan in generating(plans).items():
        assert plan.spec is not None, "a role that generates has a model"
        found[role] = replace(plan, spec=join_ends(plan.spec, tokenizer, template))
    own = plans[exported].spec
    assert own is not None
    for role, plan in plans.items():
        if plan.spec is None:
            continue
        remedy = "all roles read the same token ids"
        if role in rewards and role != exported:
            read = _retokenizer(role, plan, rewards, tokenizer)
            if read is not None:
                found[role] = replace(plan, reads_text=True, spec=join_ends(plan.spec, read.tokenizer, read.encoder.template))
                continue
            setting = f"{reward_key(role)}.retokenize={rewards[role].retokenize}"
            remedy = f"with {setting} and the tokenizer there it reads the same token ids"
        if plan.spec.vocab_size != own.vocab_size:
            raise ValueError(
                f"models.{role}.path={plan.config.path!r} has a vocabulary of {plan.spec.vocab_size}, that of {exported} has "
                f"{own.vocab_size}; {remedy}"
            )
    return found


def check_templates(
    plans: Mapping[str, RolePlan], rewards: Mapping[str, RewardConfig], tokenizer: Any, rows: Sequence[Mapping[str, Any]]
) -> None:
    """Render the first ``rows``, the prompts' columns, for reward models that read text. Raises DataError, one line."""
    for role, plan in plans.items():
        own = _retokenizer(role, plan, rewards, tokenizer) if plan.reads_text else None
        if own is not None:
            for row in rows[:RENDERED_ROWS]:
                own.encode(row, "", ended=True)


def _retokenizer(role: str, plan: RolePlan, rewards: Mapping[str, RewardConfig], tokenizer: Any) -> Retokenizer | None:
    assert plan.spec is not None and plan.config.path is not None
    limits = plan.spec.max_position_embeddings, plan.spec.vocab_size
    return build_retokenizer(rewards[role], plan.config.path, tokenizer, *limits, reward_key(role))


def repeated_metrics(
    dataset: TokenDataset, rewards: Mapping[str, RewardConfig], plans: Mapping[str, RolePlan]
) -> frozenset[str]:
    """Return the metrics that a validation by ``dataset`` would report twice. With several rewards there are none."""
    added = added_rewards(rewards, plans)
    if len(added) != 1 or not isinstance(dataset, PromptDataset):
        return frozenset()
    return repeated_means({name: rewards[name] for name in added}, dataset.examples_by_path())


def build_models(plans: Mapping[str, RolePlan], build: WorkerContext) -> SimpleNamespace:
    """Return the role objects by name, the same on every rank, with ``rewards``, those whose scores add up, and the ``controller``.

    Collective over the world: every rank of it must call.
    """
    added = added_rewards(build.rewards, plans)
    roles = {role: _build_role(role, plan, replace(build, added_rewards=added)) for role, plan in plans.items()}
    roles |= {name: roles[role] for role, plan in plans.items() for name in plan.serves}
    return SimpleNamespace(**roles, rewards=[roles[role] for role in added], controller=build.controller)


def added_rewards(rewards: Iterable[str], plans: Mapping[str, RolePlan]) -> tuple[str, ...]:
    """Return the names of the rewards whose scores are added up."""
    return tuple(role for role in rewards if role == "reward" or plans[role].is_added)


def _build_role(role: str, plan: RolePlan, build: WorkerContext) -> ModelWorker | ComputeWorker:
    if issubclass(plan.worker, ComputeWorker):
        return plan.worker(build, role, plan.pool)
    worker = plan.worker(build, role, plan.pool, plan.shape, plan.config, plan.spec)
    for method, call in plan.calls.items():
        worker.add_replica(method, call.pool, call.shape)
    return worker


def model_directory(plans: Mapping[str, RolePlan], role: str) -> Path:
    path = plans[role].config.path
    assert path is not None, f"role {role} has no model"
    return Path(path)
