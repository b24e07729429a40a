"""Supervised fine-tuning: the likelihood of given responses; validated by their loss, and by a reward of what the model answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from rlhf_spmd.algorithms.base import AlgorithmConfig, StreamSpec
from rlhf_spmd.algorithms.base import validate as validate_rewards
from rlhf_spmd.config.constraints import PositiveInt
from rlhf_spmd.controller import Reference
from rlhf_spmd.data.prompts import ValidationPromptsConfig
from rlhf_spmd.data.sft import SftConfig
from rlhf_spmd.objectives.losses import LossAggMode, aggregate
from rlhf_spmd.workers import BatchLimits, LikelihoodWorker, Objective, RoleClass, Rows, Totals


@dataclass(frozen=True)
class Config(AlgorithmConfig):
    """The likelihood of responses.

    - loss_agg_mode: `token-mean`, `seq-mean-token-sum` or `seq-mean-token-mean`
    - max_token_len_per_gpu: tokens of a micro-batch on one rank
    - stop_at_reward: end when `val/reward_mean` reaches this; needs `val_prompts`, a reward and `run.test_freq`
    """

    name: str = "sft"
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    max_token_len_per_gpu: PositiveInt = 16384
    stop_at_reward: float | None = None
    streams: ClassVar[Mapping[str, StreamSpec]] = {
        "responses": StreamSpec("data", SftConfig),
        "val_prompts": StreamSpec("val_prompts", ValidationPromptsConfig, optional=True),
    }

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, "actor": LikelihoodWorker}

    @property
    def limits(self) -> BatchLimits:
        return BatchLimits(self.max_token_len_per_gpu, where="algorithm.max_token_len_per_gpu")

    @property
    def goal(self) -> float | None:
        return self.stop_at_reward


def step(models: Any, data: Any, config: Config, global_step: int) -> list[Reference]:
    """Return the call of one optimizer step on the negative log-likelihood of the responses."""
    return [models.actor.update(data.responses.next(), likelihood(config.loss_agg_mode))]


def likelihood(loss_agg_mode: LossAggMode) -> Objective:
    """Return the negative log-likelihood of responses, nats per token."""

    def loss(fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        return aggregate(-fields["log_probs"], rows.lengths, loss_agg_mode, totals.tokens, totals.rows), {}

    return Objective(loss)


def validate(models: Any, data: Any, config: Config, global_step: int) -> dict[str, float]:
    """Return the loss of the validation responses, and the reward of answers to the validation prompts, whichever exist."""
    metrics: dict[str, float] = {}
    if "responses" in data.validation.rows:
        total, tokens = 0.0, 0
        for part in data.validation.evaluate_rows("responses", lambda rows: models.actor.compute_loss(rows)):
            total += part["sum"]
            tokens += part["tokens"]
        metrics["val/loss"] = total / tokens
    if "val_prompts" in data.validation.rows:
        metrics |= validate_rewards(models, data, config, global_step, "val_prompts")
    return metrics
