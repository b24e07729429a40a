"""Two named rewards side by side: what each reports, without an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.algorithms.base import AlgorithmConfig
from rlhf_spmd.controller import Reference
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.workers.arithmetic import RoleClass
from rlhf_spmd.workers.reward import RewardWorker


@dataclass(frozen=True)
class Config(AlgorithmConfig):
    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, "cost": RewardWorker}


def step(models: Any, prompts: Reference, config: Config, sampling: SamplingConfig, number: int) -> list[Reference]:
    rollout = models.actor.generate_sequences(prompts, sampling, number)
    batch = prompts.union(rollout)
    return [rollout, models.reward.compute_reward(batch), models.cost.compute_reward(batch)]
