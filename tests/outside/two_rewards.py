"""Two named rewards side by side: what each reports, without an update."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.algorithms.base import RolloutConfig, sample
from rlhf_spmd.controller import Reference
from rlhf_spmd.workers.compute import RoleClass
from rlhf_spmd.workers.reward import RewardWorker


@dataclass(frozen=True)
class Config(RolloutConfig):
    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, "cost": RewardWorker}


def step(models: Any, data: Any, config: Config, number: int) -> list[Reference]:
    batch, rollout = sample(models, data, number)
    return [rollout, models.reward.compute_reward(batch), models.cost.compute_reward(batch)]
