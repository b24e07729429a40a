"""Rules between sections of the configuration, applied once the roles have ranks."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rlhf_spmd.agents.config import CALL_SHARE, read_address
from rlhf_spmd.agents.dialect import Dialect
from rlhf_spmd.agents.http import is_loopback
from rlhf_spmd.config.rules import Rule, Rules, check_rules
from rlhf_spmd.data.dataset import DatasetConfig
from rlhf_spmd.data.prompts import DataConfig, PromptsConfig
from rlhf_spmd.environments.config import environment_key
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.parallel.layout import LayoutConfig
from rlhf_spmd.preflight.roles import refuse_unused_settings
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.training.train_config import TrainConfig
from rlhf_spmd.workers import ReferenceWorker
from rlhf_spmd.workers.config import RoleConfig
from rlhf_spmd.workers.role_plan import RolePlan, RolePlans


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The subject of rules about a run: sections of the configuration, and values computed from them.

    - can_validate: the algorithm has a function ``validate``
    - num_hosts: of the run
    """

    config: TrainConfig
    can_validate: bool = True
    num_hosts: int = 1
    run = property(attrgetter("config.run"))
    algorithm = property(attrgetter("config.algorithm"))
    data = property(attrgetter("config.data"))
    sampling = property(attrgetter("config.sampling"))
    rollout = property(attrgetter("config.rollout"))
    agent = property(attrgetter("config.agent"))
    prompts_in_flight = property(attrgetter("config.prompts_in_flight"))

    @property
    def has_other_rewards(self) -> bool:
        """True if functions or models score rows, too."""
        return self.config.reward != RewardConfig() or bool(self.config.rewards) or "reward" in self.config.models

    call_share = CALL_SHARE

    @property
    def compares_episodes(self) -> bool:
        """True if advantages compare the rewards of a prompt's episodes."""
        return self.agent.is_on and self.algorithm.takes_agents and not self.algorithm.advantages_by_token

    @property
    def listens_on_loopback(self) -> bool:
        """True if programs outside ask where only their own host can."""
        return self.agent.external is not None and is_loopback(read_address(self.agent.external, "agent.external")[0])

    agent_key = property(attrgetter("agent.key"))

    @property
    def samples(self) -> bool:
        """True if training draws responses to prompts."""
        return isinstance(self.data, DataConfig)

    @property
    def mini_batch_size(self) -> int:
        """Number of groups in a mini-batch: prompts, or rows of other data."""
        return min(self.algorithm.mini_batch_size or self.data.train_batch_size, self.data.train_batch_size)

    @property
    def streams(self) -> dict[str, Any]:
        """The sections of data by key; None for a section that is left out."""
        return {section.key: getattr(self.config, section.key) for section in self.algorithm.streams.values()}

    @property
    def validation_keys(self) -> str:
        keys = (f"{key}.{'val_path' if isinstance(data, DatasetConfig) else 'path'}" for key, data in self.streams.items())
        return " or ".join(keys)

    @property
    def has_validation_rows(self) -> bool:
        return any(data is not None and getattr(data, "val_path", True) for data in self.streams.values())

    @property
    def only_validates(self) -> str:
        """The key of a section whose rows only validate, if there is one."""
        keys = (section.key for section in self.algorithm.streams.values() if section.only_validates)
        return next((key for key in keys if self.streams[key] is not None), "")


BATCH_RULES: Rules = (
    Rule(
        ("algorithm.ppo_mini_batch_size", "data.train_batch_size"),
        lambda s: s.data.train_batch_size % s.mini_batch_size != 0,
        "the first must divide the second, both count prompts",
        "change one of them",
    ),
    Rule(
        ("sampling.temperature", "sampling.top_k"),
        lambda s: s.samples and (s.sampling.greedy or s.sampling.top_k == 1),
        "training needs samples, and all would be the likeliest tokens",
        "use a temperature above 0, and top_k above 1 or 0",
    ),
    Rule(
        ("rollout.in_flight", "algorithm.name"),
        lambda s: s.rollout.in_flight is not None and not (s.samples and s.algorithm.rows_in_flight),
        "this algorithm takes no prompts in flight",
        "leave the first out",
    ),
    Rule(
        ("sampling.n", "algorithm.name"),
        lambda s: s.samples and s.sampling.n < s.algorithm.min_samples,
        "the algorithm compares the responses to a prompt",
        "use at least {s.algorithm.min_samples}",
    ),
)
AGENT_RULES: Rules = (
    Rule(
        ("agent.{s.agent_key}", "algorithm.name"),
        lambda s: s.agent.is_on and not s.algorithm.takes_agents,
        "this algorithm learns one row of each sample",
        "take ppo or grpo, or one of their variants",
    ),
    Rule(
        ("agent.{s.agent_key}", "algorithm.loss_agg_mode"),
        lambda s: s.agent.is_on and s.algorithm.takes_agents and s.algorithm.policy.loss_agg_mode != "token-mean",
        "an episode with several conversations would count for more",
        "take token-mean",
    ),
    Rule(
        ("agent.{s.agent_key}", "algorithm.mask_truncated_completions"),
        lambda s: s.agent.is_on and s.algorithm.takes_agents and s.algorithm.policy.mask_truncated_completions,
        "agents limit answers themselves, and turns that branches have in common would be lost with one of them",
        "leave the second out",
    ),
    Rule(
        ("agent.{s.agent_key}", "algorithm.use_kl_in_reward"),
        lambda s: s.compares_episodes and s.algorithm.kl.use_kl_in_reward,
        "the rows of an episode have one score",
        "set use_kl_loss in place of the second",
    ),
    Rule(
        ("agent.{s.agent_key}",),
        lambda s: s.agent.is_on and s.has_other_rewards,
        "the agent gives the reward, and the conversations of an episode would have different ones from reward or rewards",
        "leave those out",
    ),
    Rule(
        ("agent.{s.agent_key}",),
        lambda s: s.agent.is_on and (s.config.environment.cls is not None or s.config.environments),
        "the agent has its own tools",
        "leave environment and environments out",
    ),
    Rule(
        ("agent.{s.agent_key}",),
        lambda s: s.agent.is_on and any(model.router_replay == "R3" for model in s.config.models.values()),
        "episodes do not record experts",
        "take another models.actor.router_replay than R3",
    ),
    Rule(
        ("agent.external", "rollout.in_flight", "run.test_freq"),
        lambda s: s.agent.external is not None and s.prompts_in_flight is not None and s.run.test_freq,
        "programs that wait for answers of training would fetch no episode of a validation",
        "leave one of them out",
    ),
    Rule(
        ("agent.external",),
        lambda s: s.num_hosts > 1 and s.listens_on_loopback,
        "programs of the other hosts cannot ask there, nor those of this one the replicas of others",
        "take 0.0.0.0:PORT",
    ),
    Rule(
        ("agent.timeout_s", "run.timeout_s"),
        lambda s: s.agent.is_on and s.agent.timeout_s >= CALL_SHARE * s.run.timeout_s,
        "other ranks wait for the episodes of a step, which end within {s.call_share:.0%} of the second",
        "lower the first or raise the second",
    ),
)
VALIDATION_RULES: Rules = (
    Rule(
        ("run.test_freq", "algorithm.name"),
        lambda s: s.run.test_freq and not s.can_validate,
        "this algorithm has no validation",
        "set run.test_freq=0",
    ),
    Rule(
        ("run.test_freq",),
        lambda s: s.run.test_freq and not s.has_validation_rows,
        "there are no rows to validate by",
        "give {s.validation_keys}, or set run.test_freq=0",
    ),
    Rule(
        ("run.test_freq",),
        lambda s: not s.run.test_freq and s.only_validates,
        "{s.only_validates}.path is given, and nothing validates",
        "set run.test_freq above 0, or leave {s.only_validates} out",
    ),
    Rule(
        ("algorithm.stop_at_reward", "run.test_freq"),
        lambda s: (
            s.algorithm.goal is not None
            and not (s.run.test_freq and any(isinstance(data, PromptsConfig) for data in s.streams.values()))
        ),
        "no validation has a mean reward",
        "give val_prompts.path, a reward and run.test_freq above 0",
    ),
)


@dataclass(frozen=True, kw_only=True)
class RoleInRun(RunSettings):
    """The subject of rules about a role in a run."""

    role: str
    role_plan: RolePlan

    @property
    def models(self) -> dict[str, RoleConfig]:
        return {self.role: self.role_plan.config}

    @property
    def replicas(self) -> int:
        """Number of replicas of the role that generate."""
        return 0 if self.role_plan.generation is None else self.role_plan.generation.dp

    @property
    def mini_batch_rows(self) -> int:
        return self.mini_batch_size * (self.sampling.n if isinstance(self.data, PromptsConfig) else 1)

    @property
    def updates(self) -> int:
        return int(self.algorithm.updates(self.role, self.run.steps, self.data.train_batch_size))

    @property
    def adapts(self) -> bool:
        return self.role_plan.config.lora.rank > 0

    @property
    def head_rate(self) -> float | None:
        """``optim.head_lr`` of a role with the head of a language model; None for other heads."""
        return self.role_plan.config.optim.head_lr if getattr(self.role_plan.worker, "head", "") == "lm" else None

    @property
    def has_two_layouts(self) -> bool:
        """True if ``calls.generate_sequences`` has a layout and ``generation`` has pp or tp, too."""
        generation = self.role_plan.config.generation
        call = self.config.models.get(self.role, RoleConfig()).calls.get("generate_sequences")
        return call is not None and call.layout != LayoutConfig() and (generation.pp, generation.tp) != (1, 1)


ROLE_BATCH_RULES: Rules = (
    Rule(
        ("run.steps",),
        lambda s: s.role_plan.trained and s.updates < 1,
        "models.{s.role} would never be trained",
        "use more steps, or let it learn earlier (algorithm.critic_warmup?)",
    ),
    Rule(
        ("data.train_batch_size", "sampling.n"),
        lambda s: s.role_plan.trained and s.mini_batch_rows < s.role_plan.shape.layout.dp,
        "a mini-batch has {s.mini_batch_rows} rows, fewer than models.{s.role}.layout.dp={s.role_plan.shape.layout.dp}",
        "use larger batches (algorithm.ppo_mini_batch_size?), more samples of each prompt, or a smaller dp",
    ),
    Rule(
        ("models.{s.role}.generation.kv_cache", "rollout.in_flight"),
        lambda s: s.samples and s.replicas and s.role_plan.config.generation.kv_cache != "free" and s.prompts_in_flight is None,
        "all responses end in their step and no pages are left to keep",
        "set rollout.in_flight above data.train_batch_size={s.data.train_batch_size}, or leave the first out",
    ),
    Rule(
        ("models.{s.role}.generation.kv_cache", "agent.{s.agent_key}"),
        lambda s: s.replicas and s.agent.is_on and s.role_plan.config.generation.kv_cache == "keep",
        "pages that are kept would leave no room for conversations of the next call",
        "take offload or free",
    ),
    Rule(
        ("data.train_batch_size", "rollout.in_flight"),
        lambda s: (
            s.samples and s.replicas and (s.data.train_batch_size % s.replicas or (s.prompts_in_flight or 0) % s.replicas)
        ),
        "models.{s.role} has {s.replicas} generation replicas, which cannot have equally many prompts",
        "use multiples of {s.replicas}",
    ),
)
ROLE_RULES: Rules = (
    Rule(
        ("models.{s.role}.router_replay", "algorithm.name"),
        lambda s: s.role_plan.config.router_replay == "R2" and s.algorithm.bypasses_log_probs,
        "with bypass_mode no forward pass computes the old log-probs",
        "take R3, or leave it out",
    ),
    Rule(
        ("models.{s.role}.optim.head_lr",),
        lambda s: s.head_rate is not None and s.role_plan.spec.tie_word_embeddings,
        "the model's output matrix is its embedding (tie_word_embeddings)",
        "leave it out",
    ),
    Rule(
        ("models.{s.role}.optim.head_lr", "models.{s.role}.lora.rank"),
        lambda s: s.adapts and s.head_rate is not None,
        "with adapters no head is trained",
        "leave the first out",
    ),
    Rule(
        ("models.{s.role}.optim.name", "models.{s.role}.lora.rank"),
        lambda s: s.adapts and s.role_plan.config.optim.name == "muon",
        "muon is for whole matrices, and with adapters none is trained",
        "use adamw",
    ),
    Rule(
        ("models.{s.role}.random_init", "models.{s.role}.lora.rank"),
        lambda s: s.adapts and s.role_plan.config.random_init,
        "adapters train beside weights that are read again",
        "leave the first out",
    ),
    Rule(
        ("models.{s.role}.lora.rank", "models.{s.role}.lora.path"),
        lambda s: (
            s.adapts
            and not s.role_plan.trained
            and not (issubclass(s.role_plan.worker, ReferenceWorker) and s.role_plan.config.lora.path is not None)
        ),
        "this role is not trained",
        "leave the first out, or give a reference the adapter of the second",
    ),
    Rule(
        ("models.{s.role}.lora.bits",),
        lambda s: s.role_plan.config.lora.bits is not None and s.role_plan.calls,
        "weights in few bits cannot be sent to other ranks, and models.{s.role}.calls runs there",
        "leave it out, or let the role's own ranks run all calls (placement.strategy=colocate)",
    ),
    Rule(
        ("models.{s.role}.generation.pp", "models.{s.role}.generation.tp"),
        lambda s: s.has_two_layouts,
        "models.{s.role}.calls.generate_sequences.layout says as well how it generates there",
        "leave one of them out",
    ),
)


def check_settings(run_plan: RunPlan) -> RunPlan:
    """Raise ValueError where sections of the configuration contradict each other; returns ``run_plan``."""
    config = run_plan.config
    for name, environment in run_plan.environments.items() if run_plan.generating else ():
        environment.check_together(environment_key(name), config.run.timeout_s, config.prompts_in_flight is not None)
    num_hosts = -(-run_plan.num_ranks // run_plan.ranks_per_host)
    check_rules(AGENT_RULES, RunSettings(config=config, num_hosts=num_hosts))
    if config.agent.is_on:
        Dialect(run_plan.tokenizer, config.data, ())  # raises for a tokenizer without a chat template
    check_rules(VALIDATION_RULES, RunSettings(config=config, can_validate=hasattr(run_plan.algorithm, "validate")))
    check_batches(config, run_plan.roles)
    for role, role_plan in run_plan.roles.items():
        check_rules(ROLE_RULES, RoleInRun(config=config, role=role, role_plan=role_plan))
    _check_idle_sampling(config)
    config.algorithm.check_together(config, run_plan.roles, run_plan.tokenizer)
    return run_plan


def check_batches(config: TrainConfig, role_plans: RolePlans) -> None:
    """Check batch sizes against each other and against the layouts. Raises ValueError."""
    check_rules(BATCH_RULES, RunSettings(config=config))
    for role, role_plan in role_plans.items():
        check_rules(ROLE_BATCH_RULES, RoleInRun(config=config, role=role, role_plan=role_plan))


def _check_idle_sampling(config: TrainConfig) -> None:
    """Raise ValueError for sampling settings that the algorithm never uses."""
    kinds = [section.config for section in config.algorithm.streams.values() if issubclass(section.config, PromptsConfig)]
    if not any(issubclass(kind, DatasetConfig) for kind in kinds):
        reason = f"{config.algorithm.name} draws no samples in training"
        refuse_unused_settings(config.sampling, SamplingConfig(), "sampling", reason)
    if not kinds:
        reason = f"{config.algorithm.name} draws no samples in validation"
        refuse_unused_settings(config.val_sampling, SamplingConfig(), "val_sampling", reason)
