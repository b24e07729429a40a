"""From a configuration to a checked ``RunPlan``: the stages of ``preflight``, in order.

Each stage takes the plan and returns it with more, or raises an error of one line. No stage communicates.
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
from rlhf_spmd.preflight.memory_check import check_fit
from rlhf_spmd.preflight.memory_estimate import step_facts
from rlhf_spmd.preflight.placing import place_run
from rlhf_spmd.preflight.plan_roles import plan_run
from rlhf_spmd.preflight.plan_stand_ins import typical_workload
from rlhf_spmd.preflight.roles import describe_roles, rewarded_roles, with_templates
from rlhf_spmd.preflight.step_graph import check_step, trace_early, trace_step
from rlhf_spmd.rewards.config import named_rewards
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.training.train_config import ConfigSource
from rlhf_spmd.workers import RoleConfig

UNKNOWN_STEPS = sys.maxsize  # of a run whose length is in epochs, until the data are known


def prepare(
    path: str | Mapping[str, Any] | None,
    overrides: Sequence[str],
    world_size: int,
    default: str = "ppo",
    local_size: int | None = None,
    launch: Launch | None = None,
) -> RunPlan:
    """Return the checked plan of a run.

    - default: the algorithm where none is named
    - local_size: ranks of a host; by default all
    - launch: this rank's place, on whose device the run has to fit; None leaves memory and disk unchecked

    Local: no communication. Raises ConfigError, ValueError or DataError, one line each.
    """
    source = ConfigSource(path, overrides, default)  # before the user's code is imported
    config, algorithm = source.read()
    run_plan = RunPlan(config, algorithm, source, world_size, local_size or world_size, launch)
    for stage in STAGES:
        run_plan = stage(run_plan)
    return run_plan


def add_roles(run_plan: RunPlan) -> RunPlan:
    """Return the plan with its roles and their models, rewards, environments and streams of data. Raises ValueError."""
    check_ranks(run_plan.config.plan, run_plan.num_ranks)
    for role, model in run_plan.config.models.items():
        model.generation.check_device(f"models.{role}.generation")
    return add_unplaced_roles(run_plan, run_plan.config.models)


def add_unplaced_roles(run_plan: RunPlan, models: Mapping[str, RoleConfig], weights: bool = True) -> RunPlan:
    """Return the plan with the roles of ``models`` before they are placed.

    While ``data.epochs`` says the length, ``run.steps`` is more than any run has. ``weights``: as of
    :func:`~rlhf_spmd.preflight.roles.describe_roles`. Raises ValueError.
    """
    epochs = run_plan.config.epochs
    config = run_plan.config if epochs is None else with_steps(run_plan.config, UNKNOWN_STEPS)
    algorithm: AlgorithmConfig = config.algorithm
    sections = {name: getattr(config, section.key) for name, section in algorithm.streams.items()}
    streams = {name: data for name, data in sections.items() if data is not None}
    algorithm.check_streams(streams, "algorithm")
    rewards = named_rewards(config.reward, config.rewards)
    environments = named_environments(config.environment, config.environments)
    environment_rewards = config.agent.is_on or any(environment.gives_reward for environment in environments.values())
    is_rewarded = bool(rewards) or environment_rewards or "reward" in models
    classes = rewarded_roles(algorithm, streams, rewards, is_rewarded)
    role_plans = describe_roles(models, classes, algorithm.exported, rewards, environment_rewards, weights)
    rewards = with_templates(role_plans, rewards, streams)
    run_plan = replace(run_plan, config=config, epochs=epochs, streams=streams)
    return replace(run_plan, roles=role_plans, rewards=rewards, environments=environments)


def plan_automatically(run_plan: RunPlan) -> RunPlan:
    """With ``placement.strategy=auto`` return the plan with the placement and the layouts that the planner found best.

    Raises ValueError.
    """
    if run_plan.config.placement.strategy != AUTO:
        return run_plan
    run_plan = trace_early(run_plan)
    workload = typical_workload(next(iter(run_plan.streams.values())), run_plan.config.sampling.n, run_plan.training)
    step = step_facts(run_plan, run_plan.graph, model_device())
    best = plan_run(run_plan.config, run_plan.roles, step, workload, run_plan.num_ranks, run_plan.ranks_per_host)
    config, algorithm = run_plan.source.read(planned=best)
    return read_tokenizer(add_roles(replace(run_plan, config=config, algorithm=algorithm)))


STAGES: tuple[Callable[[RunPlan], RunPlan], ...] = (
    add_roles,  # roles with their models, rewards, environments
    read_tokenizer,  # tokenizer, templates, roles with tokenizers of their own
    plan_automatically,  # placement.strategy=auto; reads the data and traces a step first
    place_run,  # ranks and layouts; reads the data and traces a step first if the strategy needs the calls
    check_settings,  # settings against each other and the layouts
    check_lengths,  # rows that can be sampled against contexts, caches, micro-batches
    decide_exactness,  # whether generation's log-probs serve training
    read_data,  # rows, unless placement needed them
    set_length,  # steps of data.epochs
    check_rewards,  # rewards, environments and templates against the rows
    trace_step,  # the calls of a step
    check_step,  # settings against the calls
    check_fit,  # memory and disk
)
