"""From a configuration to a checked run, in stages: read, describe, place, check, read the data, check what fits.

Each stage takes what the stages before have found and returns what it adds. None communicates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_spmd.algorithms.base import AlgorithmConfig
from rlhf_spmd.controller import Graph
from rlhf_spmd.data.dataset import DatasetConfig, TokenDataset
from rlhf_spmd.data.loader import build_loader, load_dataset
from rlhf_spmd.data.prompts import PromptDataset, PromptsConfig
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.environments.config import EnvironmentConfig, check_rows, environment_key, named_environments
from rlhf_spmd.kernels import model_device
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.planner.placement import AUTO
from rlhf_spmd.planner.plan_file import PlanFile, check_ranks
from rlhf_spmd.preflight import checks, data_checks, plan_stand_ins, roles
from rlhf_spmd.preflight.memory_check import check_launch
from rlhf_spmd.preflight.memory_estimate import step_facts
from rlhf_spmd.preflight.placing import place
from rlhf_spmd.preflight.plan_roles import plan_run
from rlhf_spmd.rewards.config import RewardConfig, named_rewards, reward_key
from rlhf_spmd.training.job import TrainJob, trace
from rlhf_spmd.training.train_config import TrainConfig, read_config
from rlhf_spmd.workers import RoleConfig

DataSets = dict[str, TokenDataset]  # by stream


@dataclass(frozen=True)
class UnplacedRun:
    """A run whose roles have models, and no ranks yet. ``epochs``: its length, if ``data.epochs`` gives it. ``sections``: the
    configuration of each stream of data. ``found``: the data, if they are read already."""

    config: TrainConfig
    epochs: float | None
    algorithm: ModuleType
    sections: dict[str, Any]
    rewards: dict[str, RewardConfig]
    environments: Mapping[str, EnvironmentConfig]
    plans: dict[str, roles.RolePlan]
    tokenizer: Any
    found: tuple[DataSets, DataSets] | None = None

    @cached_property
    def data(self) -> tuple[DataSets, DataSets]:
        """The training and the validation data. Raises ValueError, DataError."""
        return self.found or read_data(self)

    @cached_property
    def graph(self) -> Graph:
        """The calls of a step, whatever ranks they run on."""
        return trace(self.job(self.plans))

    def job(self, plans: dict[str, roles.RolePlan]) -> TrainJob:
        return TrainJob(self.config, self.algorithm, plans, self.rewards, self.tokenizer, *self.data)


def prepare(
    path: str | Mapping[str, Any] | None,
    overrides: Sequence[str],
    world_size: int,
    default: str = "ppo",
    local_size: int | None = None,
    launch: Launch | None = None,
) -> TrainJob:
    """Read and check configuration, models' configurations, tokenizer and data.

    ``local_size``: ranks of a host, by default all. ``launch``: this rank's, on whose device the run has to fit; None leaves memory and
    disk unchecked. Local: no communication. Raises ConfigError, ValueError or DataError, one line each.
    """
    local_size, here = local_size or world_size, Path.cwd()  # before the user's code is imported, which may change it
    run = describe(*read_config(path, overrides, default, here=here), world_size)
    if run.config.placement.strategy == AUTO:
        planned = plan_itself(run, world_size, local_size)
        config, algorithm = read_config(path, overrides, default, planned=planned, here=here)
        run = replace(describe(config, algorithm, world_size), found=run.data)
    plans = place(run.plans, run.config.placement, world_size, local_size, lambda: run.graph)
    check_settings(run, plans)
    run = with_length(run, plans)
    check_data(run, plans)
    job = run.job(plans)
    return job if launch is None else check_fit(job, run.graph, launch)


def describe(config: TrainConfig, algorithm: ModuleType, world_size: int) -> UnplacedRun:
    """Return the run with its roles, their models, rewards and environments. Raises ValueError."""
    check_ranks(config.plan, world_size)
    config, epochs = checks.check_duration(config)
    for role, model in config.models.items():
        model.generation.check_device(f"models.{role}.generation")
    sections, rewards, plans = describe_run(config, config.models)
    exported = config.algorithm.exported
    tokenizer = load_tokenizer(roles.model_directory(plans, exported))
    config = data_checks.with_dates(config, tokenizer)
    sections = {name: getattr(config, config.algorithm.streams[name].key) for name in sections}
    environments = named_environments(config.environment, config.environments)
    sections = data_checks.with_tools(sections, environments)
    plans = roles.find_text_readers(plans, rewards, exported, tokenizer, config.data)
    return UnplacedRun(config, epochs, algorithm, sections, rewards, environments, plans, tokenizer)


def describe_run(
    config: TrainConfig, models: Mapping[str, RoleConfig], weights: bool = True
) -> tuple[dict[str, Any], dict[str, RewardConfig], dict[str, roles.RolePlan]]:
    """Return sections of data by stream, rewards by role, and the roles of ``models`` before they are placed.

    ``weights``: see :func:`~rlhf_spmd.preflight.roles.describe_roles`. Raises ValueError.
    """
    algorithm: AlgorithmConfig = config.algorithm
    sections = {name: getattr(config, section.key) for name, section in algorithm.streams.items()}
    sections = {name: data for name, data in sections.items() if data is not None}
    algorithm.check_streams(sections, "algorithm")
    rewards = named_rewards(config.reward, config.rewards)
    has_environment = any(one.gives_reward for one in named_environments(config.environment, config.environments).values())
    classes = roles.rewarded_roles(algorithm, sections, rewards, bool(rewards) or has_environment or "reward" in models)
    described = roles.describe_roles(models, classes, algorithm.exported, rewards, has_environment, weights)
    return sections, roles.with_templates(described, rewards, sections), described


def plan_itself(run: UnplacedRun, world_size: int, local_size: int) -> PlanFile:
    """Return the best plan for this run on its own ranks (``placement.strategy=auto``). Raises ValueError."""
    work = plan_stand_ins.usual_rows(next(iter(run.sections.values())), run.config.sampling.n, run.data[0])
    step = step_facts(run.job(run.plans), run.graph, model_device())
    return plan_run(run.config, run.plans, step, work, world_size, local_size)


def check_settings(run: UnplacedRun, plans: Mapping[str, roles.RolePlan]) -> None:
    """Raises ValueError where sections of the configuration contradict each other, before any data are read."""
    config, algorithm = run.config, run.config.algorithm
    for plan in roles.generating(plans).values():
        every, in_flight = plan.config.generation.rebalance_steps, checks.in_flight(config) is not None
        for name, environment in run.environments.items():
            environment.check_together(environment_key(name), config.run.timeout_s, every, in_flight)
    checks.check_validation(config, algorithm, hasattr(run.algorithm, "validate"))
    checks.check_batches(config, plans)
    checks.check_idle(config, algorithm)
    checks.check_staleness(config, plans, lambda: run.graph)
    checks.check_replays(config, plans, lambda: run.graph)
    data_checks.check_lengths(config, algorithm, plans)
    checks.exact_rollouts(config, plans)  # raises if it is demanded and cannot be
    algorithm.check_together(config, plans, run.tokenizer)


def read_data(run: UnplacedRun) -> tuple[DataSets, DataSets]:
    """Return the training and the validation data of each stream, checked against models and token budget. Raises ValueError,
    DataError."""
    config, plans = run.config, run.plans
    algorithm: AlgorithmConfig = config.algorithm
    training: DataSets = {}
    validation: DataSets = {}
    for name, data in run.sections.items():
        if isinstance(data, DatasetConfig):
            training[name] = load_dataset(data, run.tokenizer)
            build_loader(training[name], data, config.run.seed)  # raises if there are too few rows
        if not isinstance(data, DatasetConfig) or data.val_path:
            validation[name] = load_dataset(data, run.tokenizer, validation=True)
        for use, dataset in (("sampling", training.get(name)), ("val_sampling", validation.get(name))):
            if dataset is not None:
                data_checks.check_vocabulary(dataset, plans[algorithm.exported])
            if isinstance(data, PromptsConfig) and (dataset is not None or use == "val_sampling"):
                assert dataset is None or isinstance(dataset, PromptDataset)
                data_checks.check_prompts(use, getattr(config, use), dataset, run.tokenizer, plans)
            elif dataset is not None:
                data_checks.check_rows(algorithm.streams[name].key, data, dataset, algorithm, plans)
    return training, validation


def with_length(run: UnplacedRun, plans: Mapping[str, roles.RolePlan]) -> UnplacedRun:
    """Return the run with ``run.steps`` in place of ``data.epochs``. Raises ValueError for settings that do not fit this length."""
    if run.epochs is None:
        return run
    training, _ = run.data
    rows = next(len(training[name]) for name, section in run.config.algorithm.streams.items() if section.key == "data")
    steps = math.ceil(run.epochs * rows / run.config.data.train_batch_size)
    run = replace(run, config=checks.with_steps(run.config, steps), found=run.data)
    checks.check_batches(run.config, plans)
    run.config.algorithm.check_together(run.config, plans, run.tokenizer)
    return run


def check_data(run: UnplacedRun, plans: Mapping[str, roles.RolePlan]) -> None:
    """Raises ValueError or DataError where rewards, environments and templates do not fit the rows."""
    config, rewards = run.config, run.rewards
    places, rows = data_checks.scored_rows(config.algorithm, run.sections, *run.data)
    for name, reward in rewards.items():
        reward.check_together(reward_key(name), config.run.timeout_s)
        reward.check_rows(reward_key(name), rows, places)
    unscored = [name for name, reward in rewards.items() if reward.function is None and run.plans[name].spec is None]
    check_rows(run.environments, rows, places, not rewards or len(unscored) < len(rewards))
    roles.check_templates(plans, rewards, run.tokenizer, rows)


def check_fit(job: TrainJob, graph: Graph, launch: Launch) -> TrainJob:
    """Return the job with its activation checkpointing, memory and warnings. Raises ValueError where it does not fit this rank."""
    checkpointing, memory, *warnings = check_launch(job, graph, launch)
    for idle in (checks.idle_updates, checks.idle_stream, checks.idle_calls):
        warnings += idle(job.config, job.plans, graph)
    return replace(job, checkpointing=checkpointing, memory=memory, warnings=tuple(filter(None, warnings)))
