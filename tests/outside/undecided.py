"""Learns from the likelihood of responses if each of them scored 1, which a trace supposes and the task's rewards never give."""

from dataclasses import dataclass
from typing import Any

from rlhf_spmd.algorithms.base import RolloutConfig, sample
from rlhf_spmd.algorithms.sft import likelihood
from rlhf_spmd.controller import Reference


@dataclass(frozen=True)
class Config(RolloutConfig):
    learns: bool = False  # all the same


def step(models: Any, data: Any, config: Config, number: int) -> list[Reference]:
    batch, rollout = sample(models, data, number)
    scored = models.reward.compute_reward(batch)
    if config.learns or bool((models.controller.get_field(scored, "scores") == 1).all()):
        return [rollout, scored, models.actor.update(batch, likelihood("token-mean"), **config.schedule)]
    return [rollout, scored]
