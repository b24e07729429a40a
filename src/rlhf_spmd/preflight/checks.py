"""Rules between sections of the configuration, applied once the roles have ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlhf_spmd.config.rules import Rule, Rules, check_rules
from rlhf_spmd.data.dataset import DatasetConfig
from rlhf_spmd.data.prompts import DataConfig, PromptsConfig
from rlhf_spmd.environments.config import environment_key
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.preflight.roles import refuse_changes
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.training.train_config import TrainConfig
from rlhf_spmd.workers.config import RoleConfig
from rlhf_spmd.workers.role_plan import RolePlan


@dataclass(frozen=True)
class RunSettings:
    """What the rules of a run read: its sections, by their names, and what follows from them."""

    config: TrainConfig

    def __getattr__(self, section: str) -> Any:
        return getattr(self.config, section)

    @property
    def samples(self) -> bool:
        """Training draws responses to prompts."""
        return isinstance(self.data, DataConfig)

    @property
    def mini_batch_size(self) -> int:
        """Groups of a mini-batch: prompts, or the rows of other data."""
        return min(self.algorithm.mini_batch_size or self.data.train_batch_size, self.data.train_batch_size)


RUN_RULES: Rules = (
    Rule(
        ("algorithm.ppo_mini_batch_size", "data.train_batch_size"),
        lambda s: s.data.train_batch_size % s.mini_batch_size != 0,
        "the first must divide the second, both count prompts",
        "change one of them",
    ),
    Rule(
        ("sampling.temperature",),
        lambda s: s.samples and s.sampling.greedy,
        "training needs samples",
        "use a temperature above 0",
    ),
    Rule(
        ("sampling.top_k",),
        lambda s: s.samples and s.sampling.top_k == 1,
        "training needs samples",
        "use more, or 0 for no limit",
    ),
    Rule(
        ("data.gen_batch_size", "algorithm.name"),
        lambda s: s.prompts_in_flight is not None and not s.algorithm.rows_in_flight,
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


@dataclass(frozen=True)
class RoleInRun(RunSettings):
    """What the rules of a role in a run read."""

    role: str
    plan: RolePlan

    @property
    def models(self) -> dict[str, RoleConfig]:
        return {self.role: self.plan.config}

    @property
    def replicas(self) -> int:
        """Replicas of the role that generate."""
        return 0 if self.plan.generation is None else self.plan.generation.dp

    @property
    def mini_batch_key(self) -> str:
        is_cut = self.mini_batch_size < self.data.train_batch_size
        return "algorithm.ppo_mini_batch_size" if is_cut else "data.train_batch_size"

    @property
    def mini_batch_rows(self) -> int:
        return self.mini_batch_size * (self.sampling.n if isinstance(self.data, PromptsConfig) else 1)

    @property
    def updates(self) -> int:
        return int(self.algorithm.updates(self.role, self.run.steps, self.data.train_batch_size))


ROLE_RULES: Rules = (
    Rule(
        ("run.steps",),
        lambda s: s.plan.trained and s.updates < 1,
        "models.{s.role} would never be trained",
        "use more steps, or let it learn earlier (algorithm.critic_warmup?)",
    ),
    Rule(
        ("{s.mini_batch_key}",),
        lambda s: s.plan.trained and s.mini_batch_rows < s.plan.shape.layout.dp,
        "a mini-batch has {s.mini_batch_rows} rows, fewer than models.{s.role}.layout.dp={s.plan.shape.layout.dp}",
        "use a larger one, more samples of each prompt, or a smaller dp",
    ),
    Rule(
        ("models.{s.role}.generation.kv_cache", "data.gen_batch_size"),
        lambda s: s.samples and s.replicas and s.plan.config.generation.kv_cache != "free" and s.prompts_in_flight is None,
        "all responses end in their step and no pages are left to keep",
        "set data.gen_batch_size above data.train_batch_size={s.data.train_batch_size}, or leave the first out",
    ),
    Rule(
        ("models.{s.role}.generation.rebalance_steps", "data.gen_batch_size"),
        lambda s: s.replicas and s.plan.config.generation.rebalance_steps and s.prompts_in_flight is not None,
        "rows in flight stay on their replica",
        "leave one of them out",
    ),
    Rule(
        ("data.train_batch_size",),
        lambda s: s.samples and s.replicas and s.data.train_batch_size % s.replicas,
        "{s.replicas} generation replicas of models.{s.role} cannot have the same number of prompts",
        "use a multiple of {s.replicas}",
    ),
    Rule(
        ("data.gen_batch_size",),
        lambda s: s.replicas and (s.prompts_in_flight or 0) % s.replicas,
        "{s.replicas} generation replicas of models.{s.role} cannot have the same number of prompts",
        "use a multiple of {s.replicas}",
    ),
    Rule(
        ("models.{s.role}.router_replay", "algorithm.name"),
        lambda s: s.plan.config.router_replay == "R2" and s.algorithm.bypasses_log_probs,
        "with bypass_mode no forward pass computes the old log-probs",
        "take R3, or leave it out",
    ),
)


@dataclass(frozen=True)
class ValidationSettings(RunSettings):
    """What the rules of validation read. ``can_validate``: the algorithm has a function ``validate``."""

    can_validate: bool

    @cached_property
    def sections(self) -> dict[str, Any]:
        """The configuration of each stream of data, by its key; None for a stream that is left out."""
        return {section.key: getattr(self.config, section.key) for section in self.algorithm.streams.values()}

    @property
    def paths(self) -> str:
        """The keys that name validation data."""
        keys = (f"{key}.{'val_path' if isinstance(data, DatasetConfig) else 'path'}" for key, data in self.sections.items())
        return " or ".join(keys)

    @property
    def has_rows(self) -> bool:
        return any(data is not None and getattr(data, "val_path", True) for data in self.sections.values())

    @property
    def has_prompts(self) -> bool:
        return any(isinstance(data, PromptsConfig) for data in self.sections.values())

    @property
    def idle_section(self) -> str:
        """The key of a section that only validates, if it is given and nothing validates."""
        only = (section.key for section in self.algorithm.streams.values() if section.only_validates)
        return "" if self.run.test_freq else next((key for key in only if self.sections[key] is not None), "")


VALIDATION_RULES: Rules = (
    Rule(
        ("run.test_freq", "algorithm.name"),
        lambda s: s.run.test_freq and not s.can_validate,
        "this algorithm has no validation",
        "set run.test_freq=0",
    ),
    Rule(
        ("run.test_freq",),
        lambda s: s.run.test_freq and not s.has_rows,
        "there are no rows to validate by",
        "give {s.paths}, or set run.test_freq=0",
    ),
    Rule(
        ("run.test_freq",),
        lambda s: bool(s.idle_section),
        "{s.idle_section}.path is given, and nothing validates",
        "set run.test_freq above 0, or leave {s.idle_section} out",
    ),
    Rule(
        ("algorithm.stop_at_reward", "run.test_freq"),
        lambda s: s.algorithm.goal is not None and not (s.run.test_freq and s.has_prompts),
        "no validation has a mean reward",
        "give val_prompts.path, a reward and run.test_freq above 0",
    ),
)


def check_settings(plan: RunPlan) -> RunPlan:
    """Raises ValueError where sections of the configuration contradict each other; returns ``plan``."""
    config, algorithm = plan.config, plan.config.algorithm
    for role in plan.generating.values():
        for name, environment in plan.environments.items():
            rebalance_steps, in_flight = role.config.generation.rebalance_steps, config.prompts_in_flight is not None
            environment.check_together(environment_key(name), config.run.timeout_s, rebalance_steps, in_flight)
    check_rules(VALIDATION_RULES, ValidationSettings(config, hasattr(plan.algorithm, "validate")))
    check_batches(config, plan.roles)
    _check_idle_sampling(config)
    algorithm.check_together(config, plan.roles, plan.tokenizer)
    return plan


def check_batches(config: TrainConfig, roles: Mapping[str, RolePlan]) -> None:
    """Check batch sizes against each other and against the layouts. Raises ValueError."""
    check_rules(RUN_RULES, RunSettings(config))
    for role, plan in roles.items():
        check_rules(ROLE_RULES, RoleInRun(config, role, plan))


def _check_idle_sampling(config: TrainConfig) -> None:
    """Raises ValueError for sampling settings that the algorithm never uses."""
    kinds = [section.config for section in config.algorithm.streams.values() if issubclass(section.config, PromptsConfig)]
    uses = {"sampling": any(issubclass(kind, DatasetConfig) for kind in kinds), "val_sampling": bool(kinds)}
    for where, is_used in uses.items():
        if not is_used:
            use = "validation" if where == "val_sampling" else "training"
            reason = f"{config.algorithm.name} draws no samples in {use}"
            refuse_changes(getattr(config, where), SamplingConfig(), where, reason)
