"""``torchrun ... -m rlhf_spmd.train --config configs/X.yaml key=value ...``: reinforcement learning, from configuration to export."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from rlhf_spmd.algorithms.base import AlgorithmConfig
from rlhf_spmd.checkpoint.manifest import CheckpointError
from rlhf_spmd.config.load import check_tree, load
from rlhf_spmd.config.registry import find
from rlhf_spmd.controller import Controller
from rlhf_spmd.data.loader import Loader, build_loader
from rlhf_spmd.data.prompts import DataConfig, PromptDataset
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.generation.backends import choose_backend
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.models.attention import choose_attention, exact_in_threads
from rlhf_spmd.parallel.program import ProgramContext
from rlhf_spmd.parallel.world import World
from rlhf_spmd.planner.placement import PlacementConfig
from rlhf_spmd.reports import merge_values, validate_prompts
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.roles import RolePlan, build_models, check_prompts, check_sampling, model_directory, plan_roles, with_limit
from rlhf_spmd.rollouts import PromptQueue, build_queue
from rlhf_spmd.session import RunConfig, Session, run_session_program, start_controller
from rlhf_spmd.telemetry.logger import LoggerConfig
from rlhf_spmd.workers.arithmetic import ArithmeticWorker
from rlhf_spmd.workers.config import RoleConfig
from rlhf_spmd.workers.model_worker import Build, ModelWorker

VALIDATION_SEED = 1_000_003  # validation draws other numbers than training


@dataclass(frozen=True)
class TrainConfig:
    """The whole configuration of ``train``. ``algorithm`` is the Config of the module that ``algorithm.name`` names."""

    run: RunConfig = field(default_factory=RunConfig)
    algorithm: Any = None  # an AlgorithmConfig: the type of a field that is replaced must be Any
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    val_sampling: SamplingConfig = field(default_factory=SamplingConfig)
    models: dict[str, RoleConfig] = field(default_factory=dict)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


@dataclass(frozen=True)
class Prepared:
    """A run that was checked: everything that is known before a process group exists."""

    config: TrainConfig
    algorithm: ModuleType
    plans: dict[str, RolePlan]
    tokenizer: Any
    prompts: PromptDataset
    val_prompts: PromptDataset | None

    @property
    def sampling(self) -> SamplingConfig:
        return with_limit(self.config.sampling, self.config.data, self.config.run.seed)

    @property
    def val_sampling(self) -> SamplingConfig:
        return with_limit(self.config.val_sampling, self.config.data, self.config.run.seed + VALIDATION_SEED)


def read_config(path: str | None, overrides: Sequence[str]) -> tuple[TrainConfig, ModuleType]:
    """The checked configuration and the algorithm's module. Raises ConfigError, one line."""
    chosen: list[ModuleType] = []

    def sections(raw: Mapping[str, Any]) -> dict[str, type]:
        algorithm = raw.get("algorithm") or {}
        name = str(algorithm.get("name", "ppo")) if isinstance(algorithm, Mapping) else str(algorithm)
        module = find("algorithm", "rlhf_spmd.algorithms", name, exports="step")
        chosen.append(module)
        section = getattr(module, "Config", None)
        if not (isinstance(section, type) and issubclass(section, AlgorithmConfig) and is_dataclass(section)):
            raise ValueError(
                f"algorithm '{module.__name__}': its Config must be a dataclass that derives from rlhf_spmd.algorithms.base."
                f"AlgorithmConfig; it is {section!r}"
            )
        return {"algorithm": section}

    config = load(TrainConfig, path, overrides, sections)
    check_tree(config)
    return config, chosen[0]


def prepare(path: str | None, overrides: Sequence[str], world_size: int) -> Prepared:
    """Read and check configuration, models' configurations, tokenizer and data. Local: no communication.

    Raises ConfigError, ValueError or DataError, one line each.
    """
    config, algorithm = read_config(path, overrides)
    rewarded = config.environment.cls is not None
    plans = plan_roles(config.models, config.algorithm.roles, config.placement, config.reward, world_size, rewarded)
    config.environment.check_together(
        "environment",
        config.run.timeout_s,
        plans["actor"].config.generation.rebalance_steps,
        (config.data.gen_batch_size or 0) > config.data.train_batch_size,
    )
    check_batches(config, plans)
    check_lengths(config, plans)
    exact_rollouts(config, plans)  # raises if it is demanded and cannot be
    tokenizer = load_tokenizer(model_directory(plans, "actor"))
    prompts = PromptDataset(config.data.read(), config.data, tokenizer)
    validation = config.data.read(validation=True) if config.data.val_path else None
    val_prompts = None if validation is None else PromptDataset(validation, config.data, tokenizer)
    if config.run.test_freq and val_prompts is None:
        raise ValueError(f"run.test_freq={config.run.test_freq} needs data.val_path")
    build_loader(prompts, config.data, config.run.seed)  # raises if there are too few prompts
    check_prompts("sampling", config.sampling, prompts, tokenizer, plans)
    check_prompts("val_sampling", config.val_sampling, val_prompts, tokenizer, plans)
    return Prepared(config, algorithm, plans, tokenizer, prompts, val_prompts)


def check_batches(config: TrainConfig, plans: Mapping[str, RolePlan]) -> None:
    """Batch sizes against each other and against the layouts. Raises ValueError with both sides and the remedy."""
    prompts, mini = config.data.train_batch_size, config.algorithm.ppo_mini_batch_size
    if prompts % min(mini, prompts):
        raise ValueError(
            f"algorithm.ppo_mini_batch_size={mini} must divide data.train_batch_size={prompts} (both count prompts)"
        )
    generation, kv_cache = plans["actor"].generation, plans["actor"].config.generation.kv_cache
    if kv_cache != "free" and (config.data.gen_batch_size or 0) <= prompts:
        raise ValueError(
            f"models.actor.generation.kv_cache={kv_cache}: all responses end in their step and no pages are left to keep; set "
            f"data.gen_batch_size above data.train_batch_size={prompts}, or leave it out"
        )
    if generation is not None and prompts % generation.dp:
        raise ValueError(
            f"rollout has {prompts} prompts in groups of sampling.n={config.sampling.n}; {generation.dp} generation replicas "
            f"would split a group: use a data.train_batch_size divisible by {generation.dp}"
        )
    if generation is not None and (config.data.gen_batch_size or prompts) % generation.dp:
        raise ValueError(
            f"data.gen_batch_size={config.data.gen_batch_size} prompts in flight must be divisible by the {generation.dp} "
            f"generation replicas"
        )
    rows = min(mini, prompts) * config.sampling.n
    for role, plan in plans.items():
        if issubclass(plan.worker, ModelWorker) and plan.worker.trained and rows < plan.shape.layout.dp:
            raise ValueError(
                f"a mini-batch has {min(mini, prompts)} prompts * sampling.n={config.sampling.n} = {rows} rows, fewer than "
                f"models.{role}.layout.dp={plan.shape.layout.dp}; use a larger algorithm.ppo_mini_batch_size or a smaller dp"
            )
    if config.sampling.greedy:
        raise ValueError("sampling.temperature=0: training needs samples; use a temperature above 0")


def check_lengths(config: TrainConfig, plans: Mapping[str, RolePlan]) -> None:
    """What is sampled against the models and the token budget. Raises ValueError as :func:`check_batches`."""
    budget = config.algorithm.limits
    for section, sampling in {"sampling": config.sampling, "val_sampling": config.val_sampling}.items():
        longest, lengths = check_sampling(section, sampling, "data", config.data, plans)
        plans["actor"].config.generation.check_row("models.actor.generation", longest, lengths)
        # validation's rows are cut into micro-batches by a reward model only
        is_cut = section == "sampling" or (config.data.val_path is not None and "reward" in plans and plans["reward"].spec)
        if is_cut and budget.rows is None and longest > budget.max_tokens:
            raise ValueError(
                f"{lengths}, more than algorithm.ppo_max_token_len_per_gpu={budget.max_tokens}: a micro-batch must hold a row; "
                f"raise it, or lower the lengths"
            )


def exact_rollouts(config: TrainConfig, plans: Mapping[str, RolePlan]) -> bool:
    """Whether the rollout's log-probs are a training forward's, bit for bit, so that no such forward is needed.

    Raises ValueError where ``models.actor.generation.exact`` demands it and something stands against it.
    """
    actor, generation = plans["actor"], plans["actor"].generation
    wanted = actor.config.generation.exact
    if wanted is False or generation is None:
        return False
    against = None
    device = torch.device("cpu")
    if torch.cuda.is_available():
        against = "only the kernels for CPUs do not depend on the batch"
    elif actor.config.dtype == "float64":
        against = "in float64 generation's products are other ones than training's"
    elif generation.tp != actor.shape.layout.tp:
        against = f"generation has tp={generation.tp} and training tp={actor.shape.layout.tp}, and they add in another order"
    elif actor.config.generation.attention not in ("auto", actor.config.attention):
        against = f"models.actor.generation.attention={actor.config.generation.attention} is not models.actor.attention"
    elif config.run.threads > 1 and not exact_in_threads(actor.config.attention, actor.config.torch_dtype(device), device):
        against = f"with run.threads={config.run.threads} only the C++ kernels are exact, and torch computes some of it here"
    elif (config.data.gen_batch_size or 0) > config.data.train_batch_size:
        against = f"with data.gen_batch_size={config.data.gen_batch_size} tokens may come from weights of earlier steps"
    if wanted and against:
        raise ValueError(f"models.actor.generation.exact=true, but {against}; leave it out")
    return against is None


def train(context: ProgramContext[Prepared]) -> None:
    """Build the models, run all steps, export. Collective over the world: every rank of it must call."""
    ready, world = context.prepared, context.world
    config = ready.config
    controller = start_controller(context)
    mini_batches = max(config.data.train_batch_size // config.algorithm.ppo_mini_batch_size, 1)
    build = Build(
        controller,
        world,
        config.algorithm.limits,
        config.run.seed,
        num_mini_batches=mini_batches,
        total_updates={
            role: config.algorithm.training_steps(role, config.run.steps) * mini_batches * config.algorithm.ppo_epochs
            for role in ready.plans
        },
        temperature=ready.sampling.log_prob_temperature,
        kl_ctrl=config.algorithm.kl_ctrl,
        reward=config.reward,
        environment=config.environment,
        tokenizer=ready.tokenizer,
        num_samples=config.run.log_samples,
        exact_rollouts=exact_rollouts(config, ready.plans),
        partial_rollouts=(config.data.gen_batch_size or 0) > config.data.train_batch_size,
    )
    models = build_models(ready.plans, build)
    loader = build_loader(ready.prompts, config.data, config.run.seed)
    queue = build_queue(models.actor, loader, ready.sampling, config.data.gen_batch_size)
    session = Session(
        context,
        models,
        state=lambda: {"loader": loader.state_dict(), "roles": role_states(controller, models), "rollouts": queue.state_dict()},
        restore=lambda state: restore(state, loader, models, queue),
    )
    if session.is_first:
        print(describe(ready, world), file=sys.stderr)

    def one_step(number: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        rows, prompts, generated = queue.next_batch(number)
        calls = controller.run(ready.algorithm.step, models, prompts, config.algorithm, ready.sampling, number)
        metrics, samples = merge_values(controller.get(*calls))
        metrics |= generated
        if metrics.get("generation/seconds_max"):
            idle = metrics["generation/idle_fraction"] = 1 - metrics["generation/seconds"] / metrics["generation/seconds_max"]
            controller.timeline.instant("generation", idle_fraction=round(idle, 4))
        metrics["data/epoch"] = loader.epochs
        if "response_length/mean" in metrics:  # what compute_reward reports; an algorithm need not return that call
            responses = metrics["response_length/mean"] + metrics.get("rollout/environment_tokens_mean", 0.0)
            num_tokens = int(rows["prompt_ids"].lengths.sum()) + responses * len(rows)
            metrics |= session.work(num_tokens, len(rows), config.algorithm.ppo_epochs)
        return metrics, samples

    def validate(number: int) -> dict[str, float]:
        assert ready.val_prompts is not None, "run.test_freq was given without data.val_path"
        return validate_prompts(models, ready.val_prompts, config.data.val_batch_size, ready.val_sampling, number)

    session.run(one_step, validate)


def role_states(controller: Controller, models: SimpleNamespace) -> dict[str, Any]:
    """The states of roles without a model. Collective over the world: every rank of it must call, in program order."""
    workers = {role: worker for role, worker in vars(models).items() if isinstance(worker, ArithmeticWorker)}
    found = controller.get(*(worker.progress() for worker in workers.values()))
    return {role: values[0] for role, values in zip(workers, found, strict=True)}


def restore(state: dict[str, Any], loader: Loader, models: SimpleNamespace, queue: PromptQueue) -> None:
    """What :class:`Session` saved as ``state``, back into place. Raises CheckpointError for a state that this run cannot take."""
    loader.load_state_dict(state["loader"])
    queue.load_state_dict(state.get("rollouts") or {})
    for role, saved in state["roles"].items():
        if not hasattr(models, role):
            raise CheckpointError(f"the checkpoint has a state of role '{role}', which this algorithm has not")
        getattr(models, role).load_state_dict(saved)


def describe(ready: Prepared, world: World) -> str:
    """What is about to run, for people."""
    on_cpu = f", float32 products '{torch.get_float32_matmul_precision()}', {torch.get_num_threads()} thread(s) per rank"
    actor = ready.plans["actor"].config
    dtype, device = actor.torch_dtype(world.device), world.device
    attention = choose_attention(actor.attention, dtype, device, "models.actor.attention")
    paged = choose_backend(actor.generation.attention, attention, dtype, device, "models.actor.generation.attention")
    lines = [
        f"{ready.config.run.name}: {ready.config.algorithm.name} on {world.size} rank(s), {ready.prompts.summary()}",
        f"  device {world.device.type}, attention {attention}, of generation {paged}{on_cpu if device.type == 'cpu' else ''}",
    ]
    for role, plan in ready.plans.items():
        where = f"  {role:<10} pool {plan.pool.name} {list(plan.pool.ranks)}, {plan.shape.layout}"
        if plan.shape.generation is not None:
            g = plan.shape.generation
            where += f", generation pp({g.pp}) * tp({g.tp}) * micro_dp({g.micro_dp}) * dp({g.train.dp})"
        lines.append(where)
        for method, call in plan.calls.items():
            lines.append(f"    {method} on pool {call.pool.name} {list(call.pool.ranks)}, {call.shape.layout}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: ``--config FILE`` and overrides such as ``sampling.n=4``."""
    run_session_program("train", __doc__, prepare, train, argv)


if __name__ == "__main__":
    main()
