"""PPO with a mistake: in step 2 the script branches on what only one rank knows."""

import os
from dataclasses import replace
from typing import Any

from rlhf_spmd.algorithms import ppo
from rlhf_spmd.algorithms.base import sample
from rlhf_spmd.algorithms.ppo import Config
from rlhf_spmd.algorithms.values import clipped_value, gae_advantages

__all__ = ["Config", "step"]


def step(models: Any, data: Any, config: Config, number: int) -> Any:
    if number < 2:
        return ppo.step(models, data, config, number)
    batch, _ = sample(models, data, number)
    if os.environ["RANK"] == "1":
        valued = models.critic.compute_values(batch)
        scored = models.reward.compute_reward(batch)
    else:
        scored = models.reward.compute_reward(batch)
        valued = models.critic.compute_values(batch)
    batch = batch.union(scored, models.actor.compute_log_prob(batch), valued)
    plain = replace(config, kl=replace(config.kl, use_kl_in_reward=False, use_kl_loss=False))
    reads = ("scores", "values", "old_log_probs")
    advantages = models.compute.apply(batch, gae_advantages(plain), reads, outputs=("advantages", "returns"))
    batch = batch.union(advantages).rename(values="old_values")
    return [models.critic.update(batch, clipped_value(config))]
