"""A checked run, and what it is built from: the settings of its roles, the streams of its data, its script."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch

from rlhf_spmd.algorithms.base import move_reference
from rlhf_spmd.config.registry import located
from rlhf_spmd.controller import MICRO_DP, Controller, Graph, Reference
from rlhf_spmd.controller.protocols import ProtocolRanks
from rlhf_spmd.data.dataset import TokenDataset
from rlhf_spmd.data.loader import build_loader
from rlhf_spmd.data.prompts import DataConfig, PromptsConfig
from rlhf_spmd.environments.config import named_environments
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.parallel.launch import Launch, lone_store
from rlhf_spmd.parallel.world import World
from rlhf_spmd.preflight import checks, roles
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.training.streams import Data, InFlightStream, RowStream
from rlhf_spmd.training.train_config import TrainConfig
from rlhf_spmd.training.validation import Validation, ValidationRows
from rlhf_spmd.workers import WorkerContext

VALIDATION_SEED = 1_000_003  # validation draws other numbers than training


@dataclass(frozen=True)
class TrainJob:
    """All that is known of a run before a process group exists.

    ``training``, ``validation``: data sets by stream. ``checkpointing``: see :class:`WorkerContext`. ``memory``: the memory that the
    fullest rank needs, in words. ``warnings``: lines that the run prints first.
    """

    config: TrainConfig
    algorithm: ModuleType
    plans: dict[str, roles.RolePlan]
    rewards: dict[str, RewardConfig]
    tokenizer: Any
    training: dict[str, TokenDataset]
    validation: dict[str, TokenDataset]
    checkpointing: str = "none"
    memory: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def sections(self) -> list[Any]:
        """The configuration's section of each stream of data; None for a stream that is left out."""
        return [getattr(self.config, section.key) for section in self.config.algorithm.streams.values()]

    def sampling(self, validates: bool = False) -> SamplingConfig:
        """The run's sampling: the data's response limit where it has none of its own, and a seed made of ``run.seed``."""
        config = self.config
        chosen, seed = (config.val_sampling, VALIDATION_SEED) if validates else (config.sampling, 0)
        limit = next((data.max_response_length for data in self.sections if isinstance(data, PromptsConfig)), None)
        return replace(chosen, max_response_length=chosen.max_response_length or limit, seed=config.run.seed + seed)


def build_context(job: TrainJob, controller: Controller, world: World) -> WorkerContext:
    """Return the settings that every role is built from."""
    config, algorithm = job.config, job.config.algorithm
    max_prompt_length = max((getattr(section, "max_prompt_length", 0) for section in job.sections), default=0)
    return WorkerContext(
        controller,
        world,
        algorithm.limits,
        config.run.seed,
        total_updates={role: algorithm.updates(role, config.run.steps, config.data.train_batch_size) for role in job.plans},
        temperature=job.sampling().log_prob_temperature,
        rewards=job.rewards,
        max_prompt_length=max_prompt_length,
        max_response_length=job.sampling().max_response_length or 0,
        environments=named_environments(config.environment, config.environments),
        encoding=config.data,
        tokenizer=job.tokenizer,
        num_samples=config.run.log_samples,
        exact_rollouts=checks.exact_rollouts(config, job.plans),
        partial_rollouts=checks.in_flight(config) is not None,
        rollout_log_probs=algorithm.bypasses_log_probs,
        checkpointing=job.checkpointing,
    )


def build_data(job: TrainJob, controller: Controller) -> Data:
    """Return what the algorithm's step finds in ``data``."""
    config = job.config
    sections = {name: getattr(config, section.key) for name, section in config.algorithm.streams.items()}
    generate_calls = [plan.at("generate_sequences") for plan in roles.generating(job.plans).values()]
    streams: dict[str, RowStream] = {}
    for name, dataset in job.training.items():
        section = sections[name]
        loader = build_loader(dataset, section, config.run.seed)
        num_in_flight = checks.in_flight(config) if section is config.data else None
        if num_in_flight is not None:
            replicas = ProtocolRanks(MICRO_DP, generate_calls[0].shape, generate_calls[0].pool, controller.speeds)
            streams[name] = InFlightStream(loader, config.sampling.n, num_in_flight, replicas.num_parts, replicas.speeds)
        else:
            streams[name] = RowStream(loader, config.sampling.n if isinstance(section, DataConfig) else 1, len(streams))
    rows = {
        name: ValidationRows(
            dataset,
            sections[name].val_batch_size,
            list(sections[name].val_sets),
            roles.repeated_metrics(dataset, job.rewards, job.plans),
        )
        for name, dataset in job.validation.items()
    }
    validation = Validation(controller, rows, job.sampling(validates=True), config.run.log_samples)
    return Data(controller, streams, validation, job.sampling())


def run_script(job: TrainJob, models: Any, data: Data, global_step: int) -> list[Reference]:
    """Run the algorithm's step and what follows every step. Returns the calls that are reported."""
    with located("algorithm", job.config.algorithm.name, job.algorithm):
        calls = job.algorithm.step(models, data, job.config.algorithm, global_step)
    is_list = isinstance(calls, list)
    bad = [(at, type(one).__name__) for at, one in enumerate(calls if is_list else ()) if not isinstance(one, Reference)]
    if bad or not is_list:
        entry = ", whose entry {} is of type {}".format(*bad[0]) if bad else ""
        what = "one call; return [it]" if isinstance(calls, Reference) else f"{calls!r:.80}{entry}"
        raise ValueError(
            f"{job.algorithm.__name__}.step returned {what}; it must return the list of the calls that it reports: what "
            "models.actor.update(...) and other calls of roles return"
        )
    return [*calls, *move_reference(models, job.config.algorithm, global_step)]


def trace(job: TrainJob) -> Graph:
    """Return the calls of one step: the last step of the run, by which every role is trained, or the step before if that makes more
    different calls.

    The trace uses descriptions of the roles and streams of its own, so the run's streams do not move. The step before is traced
    first, because a script may keep rows for the next step. Local: no communication, no weights, no device.
    """
    last = job.config.run.steps
    assert last is not None, "checks.check_duration has seen to it"
    size = 1 + max(pool.ranks[-1] for plan in job.plans.values() for pool in plan.pools)
    world = World(Launch(rank=size, size=size + 1), torch.device("cpu"), lone_store(), timeout_s=1.0)
    controller = Controller(world.all)
    models, data = roles.build_models(job.plans, build_context(job, controller, world)), build_data(job, controller)
    try:
        graphs = [data.trace(partial(run_script, job, models, data, step)) for step in (max(last - 1, 1), last)]
    except AttributeError as error:
        refused = checks.absent(error, job.plans)
        if refused is None:
            raise
        raise refused from error
    return max(reversed(graphs), key=lambda graph: len({call.name for call in graph.nodes}))
