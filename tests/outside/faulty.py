"""PPO that goes wrong in step 2. ``fault``: "raise": the policy's loss raises on rank 1; "nan": it is not a number on any rank;
"swapped": rank 1 makes two calls in the other order; "shorter": it leaves out an update, and goes on to other collectives."""

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
    is_odd = os.environ["RANK"] == "1"
    if number < 2 or config.fault == "shorter":
        return ppo.step(models, data, replace(config, critic_warmup=2) if number == 2 and is_odd else config, number)
    batch, _ = sample(models, data, number)
    calls = [models.reward.compute_reward, models.critic.compute_values]
    for call in reversed(calls) if config.fault == "swapped" and is_odd else calls:
        batch = batch.union(call(batch))
    batch = batch.union(models.actor.compute_log_prob(batch), models.reference.compute_ref_log_prob(batch))
    reads = ("scores", "values", "old_log_probs", "ref_log_prob")
    batch = batch.union(models.compute.apply(batch, gae_advantages(config), reads, outputs=("advantages", "returns")))
    sound = clipped_policy(config, data.sampling)

    def loss(fields: Any, rows: Any, totals: Any) -> Any:
        if config.fault == "raise" and is_odd:
            raise KeyError("no such field")
        value, report = sound.loss(fields, rows, totals)
        return value * (float("nan") if config.fault == "nan" else 1.0), report

    return [models.actor.update(batch, replace(sound, loss=loss))]
