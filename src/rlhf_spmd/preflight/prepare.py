"""From a configuration to a checked ``RunPlan``: the stages of ``preflight``, in order.

Each stage is a function from plan to plan. It adds what it finds, or raises one line. None communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_spmd.algorithms.base import AlgorithmConfig
from rlhf_spmd.environments.config import named_environments
from rlhf_spmd.kernels import model_device
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.planner.placement import AUTO
from rlhf_spmd.planner.plan_file import check_ranks
from rlhf_spmd.preflight.checks import check_settings
from rlhf_spmd.preflight.data import check_lengths, check_rewards, read_data, read_tokenizer, set_length, with_steps
from rlhf_spmd.preflight.exactness import decide_exactness
from rlhf_spmd.preflight.memory_check import check_launch
from rlhf_spmd.preflight.memory_estimate import step_facts
from rlhf_spmd.preflight.placing import place_run
from rlhf_spmd.preflight.plan_roles import plan_run
from rlhf_spmd.preflight.plan_stand_ins import typical_rows
from rlhf_spmd.preflight.roles import describe_roles, rewarded_roles, with_templates
from rlhf_spmd.preflight.step_graph import check_step, trace_step
from rlhf_spmd.rewards.config import named_rewards
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.training.train_config import ConfigSource
from rlhf_spmd.workers import RoleConfig

UNKNOWN_STEPS = sys.maxsize  # of a run whose length is in epochs, until the data are known
Stage = Callable[[RunPlan], RunPlan]


def prepare(
    path: str | Mapping[str, Any] | None,
    overrides: Sequence[str],
    world_size: int,
    default: str = "ppo",
    local_size: int | None = None,
    launch: Launch | None = None,
) -> RunPlan:
    """Return the checked plan of a run.

    ``default``: the algorithm where none is named. ``local_size``: ranks of a host, by default all. ``launch``: this rank's, on whose
    device the run has to fit; None leaves memory and disk unchecked. Local: no communication. Raises ConfigError, ValueError or
    DataError, one line each.
    """
    source = ConfigSource(path, overrides, default)  # before the user's code is imported
    config, algorithm = source.read()
    plan = RunPlan(config, algorithm, source, world_size, local_size or world_size, launch)
    for stage in STAGES:
        plan = stage(plan)
    return plan


def describe_run(plan: RunPlan) -> RunPlan:
    """Return the plan with its roles and their models, rewards, environments and streams of data. Raises ValueError."""
    check_ranks(plan.config.plan, plan.num_ranks)
    for role, model in plan.config.models.items():
        model.generation.check_device(f"models.{role}.generation")
    return describe_roles_without_ranks(plan, plan.config.models)


def describe_roles_without_ranks(plan: RunPlan, models: Mapping[str, RoleConfig], weights: bool = True) -> RunPlan:
    """Return the plan with the roles of ``models`` before they are placed. While ``data.epochs`` says the length, ``run.steps`` is more
    than any run has.

    ``weights``: see :func:`~rlhf_spmd.preflight.roles.describe_roles`. Raises ValueError.
    """
    epochs = plan.config.epochs
    config = plan.config if epochs is None else with_steps(plan.config, UNKNOWN_STEPS)
    algorithm: AlgorithmConfig = config.algorithm
    sections = {name: getattr(config, section.key) for name, section in algorithm.streams.items()}
    streams = {name: data for name, data in sections.items() if data is not None}
    algorithm.check_streams(streams, "algorithm")
    rewards = named_rewards(config.reward, config.rewards)
    environments = named_environments(config.environment, config.environments)
    environment_rewards = any(environment.gives_reward for environment in environments.values())
    is_rewarded = bool(rewards) or environment_rewards or "reward" in models
    classes = rewarded_roles(algorithm, streams, rewards, is_rewarded)
    roles = describe_roles(models, classes, algorithm.exported, rewards, environment_rewards, weights)
    rewards = with_templates(roles, rewards, streams)
    return replace(plan, config=config, epochs=epochs, streams=streams, rewards=rewards, roles=roles, environments=environments)


def plan_automatically(plan: RunPlan) -> RunPlan:
    """Return the run as the best plan for its own ranks has it (``placement.strategy=auto``). Raises ValueError."""
    if plan.config.placement.strategy != AUTO:
        return plan
    plan = trace_step(decide_exactness(read_data(plan)))
    work = typical_rows(next(iter(plan.streams.values())), plan.config.sampling.n, plan.training)
    step = step_facts(plan, plan.graph, model_device())
    best = plan_run(plan.config, plan.roles, step, work, plan.num_ranks, plan.ranks_per_host)
    config, algorithm = plan.source.read(planned=best)
    return read_tokenizer(describe_run(replace(plan, config=config, algorithm=algorithm)))


def check_fit(plan: RunPlan) -> RunPlan:
    """Return the plan with its activation checkpointing and memory. Raises ValueError where it does not fit this rank."""
    if plan.launch is None:
        return plan
    fit = check_launch(plan, plan.graph, plan.launch)
    warnings = (*plan.warnings, *fit.warnings)
    return replace(plan, checkpointing=fit.checkpointing, memory=fit.memory, warnings=warnings)


STAGES: tuple[Stage, ...] = (
    describe_run,  # roles with their models, rewards, environments
    read_tokenizer,  # tokenizer, templates, roles with tokenizers of their own
    plan_automatically,  # placement.strategy=auto
    place_run,  # ranks and layouts
    check_settings,  # settings against each other and the layouts
    check_lengths,  # rows that can be sampled against contexts, caches, micro-batches
    decide_exactness,  # whether generation's log-probs serve training
    read_data,  # rows
    set_length,  # steps of data.epochs
    check_rewards,  # rewards, environments and templates against the rows
    trace_step,  # the calls of a step
    check_step,  # settings against the calls
    check_fit,  # memory and disk
)
