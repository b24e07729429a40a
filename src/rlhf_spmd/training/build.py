"""From a ``RunPlan`` to what an algorithm's step takes: its models, its data, its script."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from rlhf_spmd.agents.dialect import Dialect
from rlhf_spmd.algorithms.base import move_reference
from rlhf_spmd.config.registry import noting_user_line
from rlhf_spmd.controller import MICRO_DP, Controller, RankSpeeds, Reference
from rlhf_spmd.controller.protocols import ProtocolRanks
from rlhf_spmd.data.dataset import DatasetConfig, TokenDataset
from rlhf_spmd.data.loader import build_loader
from rlhf_spmd.data.prompts import DataConfig, PromptDataset
from rlhf_spmd.kernels import wait
from rlhf_spmd.parallel.world import World
from rlhf_spmd.process.program import ProgramContext
from rlhf_spmd.rewards.eval_metrics import repeated_means
from rlhf_spmd.telemetry.trace import Timeline, max_events_per_rank
from rlhf_spmd.training.agent_rows import AgentRows
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.training.streams import Data, InFlightStream, RowStream
from rlhf_spmd.training.validation import Validation, ValidationRows
from rlhf_spmd.workers import ComputeWorker, ModelWorker, WorkerContext
from rlhf_spmd.workers.role_plan import RolePlan, RolePlans


def start_controller(context: ProgramContext[RunPlan]) -> Controller:
    """Return a controller whose timeline has the pools that this rank is in.

    On GPUs a timed span ends when the work that it started on the current stream is done. It does not wait for other streams, on
    which weights are sent to replicas while the script goes on.
    """
    world = context.world
    run_plan = context.prepared
    names = sorted({pool.name for role in run_plan.roles.values() for pool in role.pools if world.rank in pool.ranks})
    timeline = Timeline(world.rank, names, max_events_per_rank(world.size), partial(wait, world.device))
    placement = run_plan.config.placement
    limits = run_plan.config.algorithm.limits
    return Controller(
        world.all,
        context.board,
        timeline,
        run_plan.config.run.seed,
        ahead=run_plan.config.steps_ahead,
        speeds=RankSpeeds(placement.speeds, placement.generation_speeds),
        num_chunks=run_plan.config.rollout.chunks,
        limits=(limits.max_tokens, limits.rows or 0),
    )


def build_context(run_plan: RunPlan, controller: Controller, world: World) -> WorkerContext:
    """Return the settings that every role is built from."""
    config = run_plan.config
    algorithm = config.algorithm
    return WorkerContext(
        controller,
        world,
        algorithm.limits,
        config.run.seed,
        total_updates={
            role: algorithm.updates(role, run_plan.num_steps, config.data.train_batch_size) for role in run_plan.roles
        },
        temperature=run_plan.sampling().log_prob_temperature,
        rewards=run_plan.rewards,
        max_prompt_length=max((getattr(data, "max_prompt_length", 0) for data in run_plan.streams.values()), default=0),
        max_response_length=run_plan.sampling().max_response_length or 0,
        environments=run_plan.environments,
        agent=config.agent,
        run_dir=Path(config.run.dir),
        encoding=config.data,
        tokenizer=run_plan.tokenizer,
        num_samples=config.run.log_samples,
        exact_rollouts=run_plan.exact_rollouts,
        partial_rollouts=config.prompts_in_flight is not None,
        max_staleness=config.learnt_staleness,
        rollout_log_probs=algorithm.bypasses_log_probs,
        checkpointing=run_plan.checkpointing,
    )


def build_models(role_plans: RolePlans, context: WorkerContext) -> SimpleNamespace:
    """Return the role objects by name, the same on every rank, with the ``controller``.

    ``rewards`` lists the roles whose scores are added up. Collective over the world: every rank of it must call.
    """
    added = added_rewards(context.rewards, role_plans)
    context = replace(context, added_rewards=added)
    workers = {role: _build_role(role, role_plan, context) for role, role_plan in role_plans.items()}
    workers |= {name: workers[role] for role, role_plan in role_plans.items() for name in role_plan.serves}
    return SimpleNamespace(**workers, rewards=[workers[role] for role in added], controller=context.controller)


def added_rewards(rewards: Iterable[str], role_plans: RolePlans) -> tuple[str, ...]:
    """Return the names of the rewards whose scores are added up."""
    return tuple(role for role in rewards if role == "reward" or role_plans[role].is_added)


def _build_role(role: str, role_plan: RolePlan, context: WorkerContext) -> ModelWorker | ComputeWorker:
    if issubclass(role_plan.worker, ComputeWorker):
        return role_plan.worker(context, role, role_plan.pool)
    worker = role_plan.worker(context, role, role_plan.pool, role_plan.shape, role_plan.config, role_plan.spec)
    for method, call_plan in role_plan.calls.items():
        worker.add_replica(method, call_plan.pool, call_plan.shape)
    return worker


def build_data(run_plan: RunPlan, controller: Controller) -> Data:
    """Return ``data`` of the algorithm's step."""
    config = run_plan.config
    streams: dict[str, RowStream] = {}
    agent_rows = None
    if config.agent.is_on:
        agent_rows = AgentRows(config.agent.max_rows, Dialect(run_plan.tokenizer, config.data, ()).first_ids)
    for name, dataset in run_plan.training.items():
        section = run_plan.streams[name]
        assert isinstance(section, DatasetConfig), "a stream that is trained on"
        loader = build_loader(dataset, section, config.run.seed)
        if config.prompts_in_flight is not None and config.algorithm.streams[name].key == "data":
            generation = next(iter(run_plan.generating.values())).placement_of("generate_sequences")
            replicas = ProtocolRanks(MICRO_DP, generation.shape, generation.pool, controller.speeds)
            streams[name] = InFlightStream(
                loader, config.sampling.n, config.prompts_in_flight, replicas.num_parts, replicas.speeds, agent_rows
            )
        else:
            n = config.sampling.n if isinstance(section, DataConfig) else 1
            streams[name] = RowStream(loader, n, len(streams), agent_rows)
    rows: dict[str, ValidationRows] = {}
    for name, dataset in run_plan.validation.items():
        stream = run_plan.streams[name]
        duplicate_metrics = _duplicate_metrics(run_plan, dataset)
        rows[name] = ValidationRows(dataset, stream.val_batch_size, list(stream.val_sets), duplicate_metrics)
    sampling = run_plan.sampling(validates=True)
    validation = Validation(controller, rows, sampling, config.run.log_samples, agent_rows)
    return Data(controller, streams, validation, run_plan.sampling())


def _duplicate_metrics(run_plan: RunPlan, dataset: TokenDataset) -> frozenset[str]:
    """Return the metrics that a validation with ``dataset`` would report twice. With several rewards there are none."""
    added = added_rewards(run_plan.rewards, run_plan.roles)
    if len(added) != 1 or not isinstance(dataset, PromptDataset):
        return frozenset()
    return repeated_means({name: run_plan.rewards[name] for name in added}, dataset.examples_by_path())


def run_script(run_plan: RunPlan, models: SimpleNamespace, data: Data, global_step: int) -> list[Reference]:
    """Run the algorithm's step and what follows every step. Return the calls that are reported."""
    with noting_user_line("algorithm", run_plan.config.algorithm.name, run_plan.algorithm):
        calls = run_plan.algorithm.step(models, data, run_plan.config.algorithm, global_step)
    if not isinstance(calls, list) or any(not isinstance(call, Reference) for call in calls):
        result = "one call; return [it]" if isinstance(calls, Reference) else f"{calls!r:.80}"
        raise ValueError(
            f"{run_plan.algorithm.__name__}.step returned {result}; it must return the list of the calls that it reports: what "
            "models.actor.update(...) and other calls of roles return"
        )
    return [*calls, *move_reference(models, run_plan.config.algorithm, global_step)]


def validate(run_plan: RunPlan, models: SimpleNamespace, data: Data, global_step: int) -> dict[str, float]:
    """Run the algorithm's validation. Return its metrics, the same on every rank."""
    with noting_user_line("algorithm", run_plan.config.algorithm.name, run_plan.algorithm):
        metrics: dict[str, float] = run_plan.algorithm.validate(models, data, run_plan.config.algorithm, global_step)
    return metrics
