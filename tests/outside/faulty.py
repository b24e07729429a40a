"""PPO whose policy loss fails in step 2. ``fault``: "raise": it raises on rank 1; "nan": it is not a number on any rank."""

import os
from dataclasses import dataclass, replace
from typing import Any

from rlhf_spmd.algorithms import ppo
from rlhf_spmd.algorithms.base import sample
from rlhf_spmd.algorithms.policy import clipped_policy
from rlhf_spmd.algorithms.ppo import Config as PPOConfig
from rlhf_spmd.algorithms.values import gae_advantages


@dataclass(frozen=True)
class Config(PPOConfig):
    fault: str = "raise"


def step(models: Any, data: Any, config: Config, number: int) -> Any:
    if number < 2:
        return ppo.step(models, data, config, number)
    batch, _ = sample(models, data, number)
    batch = batch.union(models.reward.compute_reward(batch), models.critic.compute_values(batch))
    batch = batch.union(models.actor.compute_log_prob(batch), models.reference.compute_ref_log_prob(batch))
    reads = ("scores", "values", "old_log_probs", "ref_log_prob")
    batch = batch.union(models.compute.apply(batch, gae_advantages(config), reads, outputs=("advantages", "returns")))
    sound = clipped_policy(config, data.sampling)

    def loss(fields: Any, rows: Any, totals: Any) -> Any:
        if config.fault == "raise" and os.environ["RANK"] == "1":
            raise KeyError("no such field")
        value, report = sound.loss(fields, rows, totals)
        return value * (float("nan") if config.fault == "nan" else 1.0), report

    return [models.actor.update(batch, replace(sound, loss=loss))]
