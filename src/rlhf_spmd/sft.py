"""``torchrun ... -m rlhf_spmd.sft --config configs/X.yaml key=value ...``: supervised fine-tuning, on the same engine as ``train``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.config.load import check_tree, load
from rlhf_spmd.data.files import Row, read_rows
from rlhf_spmd.data.loader import build_loader, validation_batches
from rlhf_spmd.data.prompts import PromptDataset, PromptsConfig
from rlhf_spmd.data.sft import ResponseDataset, SftConfig
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.environments.config import EnvironmentConfig
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.models.spec import local_directory
from rlhf_spmd.objectives.losses import check_loss_agg_mode
from rlhf_spmd.parallel.program import ProgramContext
from rlhf_spmd.planner.placement import PlacementConfig
from rlhf_spmd.reports import merge_values, validate_prompts
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.roles import (
    RolePlan,
    build_models,
    check_prompts,
    check_sampling,
    check_vocabulary,
    model_directory,
    plan_roles,
    with_limit,
)
from rlhf_spmd.session import RunConfig, Session, run_session_program, start_controller
from rlhf_spmd.telemetry.logger import LoggerConfig
from rlhf_spmd.workers.arithmetic import RoleClass
from rlhf_spmd.workers.config import BatchLimits, RoleConfig
from rlhf_spmd.workers.model_worker import Build
from rlhf_spmd.workers.reward import RewardWorker
from rlhf_spmd.workers.sft import SftWorker


@dataclass(frozen=True)
class SftSettings:
    """``algorithm`` of SFT. ``stop_at_reward``: end when ``val/reward_mean`` has reached this (needs ``val_prompts`` and a reward)."""

    loss_agg_mode: str = "token-mean"
    max_token_len_per_gpu: int = 16384
    stop_at_reward: float | None = None

    def check(self, where: str) -> None:
        check_loss_agg_mode(self.loss_agg_mode, f"{where}.loss_agg_mode")
        if self.loss_agg_mode == "seq-mean-token-sum-norm":
            raise ValueError(
                f"{where}.loss_agg_mode={self.loss_agg_mode!r} needs a response limit, which SFT has not; use another"
            )
        check_bounds(self, where, "max_token_len_per_gpu", least=1)


@dataclass(frozen=True)
class ValidationPromptsConfig(PromptsConfig):
    """``val_prompts``. ``max_samples``: only the first rows are read; ``batch_size``: null = all rows at once."""

    max_samples: int | None = None
    batch_size: int | None = None

    def read(self) -> list[Row]:
        return read_rows(self.path, self.split, self.subset, self.max_samples)


@dataclass(frozen=True)
class SftTrainConfig:
    """The whole configuration of ``sft``. ``val_prompts``: prompts that validation generates for and ``reward`` scores, with the
    ``environment`` if there is one."""

    run: RunConfig = field(default_factory=RunConfig)
    algorithm: SftSettings = field(default_factory=SftSettings)
    data: SftConfig = field(default_factory=SftConfig)
    model: RoleConfig = field(default_factory=RoleConfig)
    val_prompts: ValidationPromptsConfig | None = None
    val_sampling: SamplingConfig = field(default_factory=SamplingConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


@dataclass(frozen=True)
class Prepared:
    config: SftTrainConfig
    plans: dict[str, RolePlan]
    tokenizer: Any
    responses: ResponseDataset
    val_responses: ResponseDataset | None
    val_prompts: PromptDataset | None


def prepare(path: str | None, overrides: Sequence[str], world_size: int) -> Prepared:
    """Local: no communication. Raises ConfigError, ValueError or DataError, one line each."""
    config = load(SftTrainConfig, path, overrides)
    check_tree(config)
    if config.model.path is None:
        raise ValueError("model.path must be given: a Hugging Face model directory")
    if config.model.pool is not None:
        raise ValueError(f"model.pool={config.model.pool!r}: there is one model, on all ranks; leave it out")
    if config.val_prompts is None and (config.reward.function or config.reward.model):
        raise ValueError("reward scores responses to val_prompts; give val_prompts.path, or leave the reward out")
    roles: dict[str, RoleClass] = {"actor": SftWorker}
    if config.val_prompts is not None:
        roles["reward"] = RewardWorker
    model = replace(config.model, path=local_directory(config.model.path, "model.path"))
    plans = plan_roles(
        {"actor": model}, roles, PlacementConfig(), config.reward, world_size, config.environment.cls is not None
    )
    config.environment.check_together("environment", config.run.timeout_s, config.model.generation.rebalance_steps)
    check_validation(config, plans)
    tokenizer = load_tokenizer(model_directory(plans, "actor"))
    responses = ResponseDataset(config.data.read(), config.data, tokenizer)
    build_loader(responses, config.data, config.run.seed)  # raises if there are too few rows
    validation = config.data.read(validation=True) if config.data.val_path else None
    val_responses = None if validation is None else ResponseDataset(validation, config.data, tokenizer)
    prompts = config.val_prompts
    val_prompts = None if prompts is None else PromptDataset(prompts.read(), prompts, tokenizer)
    check_prompts("val_sampling", config.val_sampling, val_prompts, tokenizer, plans)
    check_vocabulary(responses, plans)
    check_sizes(config, plans["actor"], [responses, val_responses])
    return Prepared(config, plans, tokenizer, responses, val_responses, val_prompts)


def check_validation(config: SftTrainConfig, plans: Mapping[str, RolePlan]) -> None:
    """``run.test_freq`` against what there is to validate by, and that against the model. Raises ValueError."""
    freq = config.run.test_freq
    if config.algorithm.stop_at_reward is not None and (config.val_prompts is None or not freq):
        raise ValueError("algorithm.stop_at_reward needs val_prompts.path, a reward and run.test_freq above 0")
    if config.val_prompts is not None and not freq:
        raise ValueError(
            "val_prompts.path is given, but run.test_freq=0 never validates; set it above 0 or leave val_prompts out"
        )
    if freq and config.val_prompts is None and config.data.val_path is None:
        raise ValueError(f"run.test_freq={freq} needs data.val_path or val_prompts.path")
    if config.val_prompts is not None:
        rows = check_sampling("val_sampling", config.val_sampling, "val_prompts", config.val_prompts, plans)
        config.model.generation.check_row("model.generation", *rows)


def check_sizes(config: SftTrainConfig, plan: RolePlan, datasets: Sequence[ResponseDataset | None]) -> None:
    """The batch against the layout, the longest row against context and token budget. Raises ValueError with both sides."""
    assert plan.spec is not None
    if config.data.train_batch_size < plan.shape.layout.dp:
        raise ValueError(
            f"data.train_batch_size={config.data.train_batch_size} rows are fewer than model.layout.dp={plan.shape.layout.dp}; "
            f"use a larger batch or a smaller dp"
        )
    longest = max(int(data.lengths.max()) for data in datasets if data is not None)
    limits = {"the model's context": plan.spec.max_position_embeddings}
    limits["algorithm.max_token_len_per_gpu"] = config.algorithm.max_token_len_per_gpu
    for name, limit in limits.items():
        if longest > limit:
            raise ValueError(
                f"the longest row has {longest} tokens, more than {name} = {limit}; set data.max_length={limit} to drop such rows"
            )


def sft(context: ProgramContext[Prepared]) -> None:
    """Build the model, run all steps, export. Collective over the world: every rank of it must call."""
    ready, world = context.prepared, context.world
    config, plan = ready.config, ready.plans["actor"]
    controller = start_controller(context)
    build = Build(
        controller,
        world,
        BatchLimits(config.algorithm.max_token_len_per_gpu),
        config.run.seed,
        total_updates={"actor": config.run.steps},
        reward=config.reward,
        environment=config.environment,
        tokenizer=ready.tokenizer,
    )
    models = build_models(ready.plans, build)
    model = models.actor
    loader = build_loader(ready.responses, config.data, config.run.seed)
    session = Session(
        context,
        models,
        state=lambda: {"loader": loader.state_dict()},
        restore=lambda state: loader.load_state_dict(state["loader"]),
    )
    if session.is_first:
        print(
            f"{config.run.name}: SFT on {world.size} rank(s), {plan.shape.layout}, {ready.responses.summary()}", file=sys.stderr
        )

    def one_step(number: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        rows = loader.next_batch()
        source = controller.source(rows, "response_ids")
        call = controller.run(lambda: model.update_sft(source, config.algorithm.loss_agg_mode))
        metrics, _ = merge_values(controller.get(call))
        num_tokens = int(rows["prompt_ids"].lengths.sum() + rows["response_ids"].lengths.sum())
        return {**metrics, "data/epoch": loader.epochs, **session.work(num_tokens, len(rows))}, []

    def validate(number: int) -> dict[str, float]:
        found: dict[str, float] = {}
        if ready.val_responses is not None:
            total, tokens = 0.0, 0
            for batch in validation_batches(ready.val_responses, config.data.val_batch_size):
                rows = controller.source(batch, "response_ids")
                for part in controller.get(controller.run(lambda rows=rows: model.compute_loss(rows)))[0]:
                    total, tokens = total + part["sum"], tokens + part["tokens"]
            found["val/loss"] = total / tokens
        if ready.val_prompts is not None and config.val_prompts is not None:
            sampling = with_limit(config.val_sampling, config.val_prompts, config.run.seed)
            found |= validate_prompts(models, ready.val_prompts, config.val_prompts.batch_size, sampling, number)
        return found

    session.run(one_step, validate, goal=config.algorithm.stop_at_reward)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line: ``--config FILE`` and overrides such as ``model.optim.lr=1e-3``."""
    run_session_program("sft", __doc__, prepare, sft, argv)


if __name__ == "__main__":
    main()
