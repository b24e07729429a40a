"""PPO with a mistake: in step 2 the script branches on what only one rank knows."""

import os
from dataclasses import replace
from typing import Any

from rlhf_spmd.algorithms import ppo
from rlhf_spmd.algorithms.ppo import PPOConfig as Config

__all__ = ["Config", "step"]


def step(models: Any, prompts: Any, config: Config, sampling: Any, number: int) -> Any:
    if number < 2:
        return ppo.step(models, prompts, config, sampling, number)
    rollout = models.actor.generate_sequences(prompts, sampling, number)
    batch = prompts.union(rollout)
    if os.environ["RANK"] == "1":
        valued = models.critic.compute_values(batch)
        scored = models.reward.compute_reward(batch)
    else:
        scored = models.reward.compute_reward(batch)
        valued = models.critic.compute_values(batch)
    batch = batch.union(scored).union(models.actor.compute_log_prob(batch)).union(valued)
    settings = replace(config.advantage, use_kl_in_reward=False)
    batch = batch.union(models.advantage.compute_advantage(batch, settings))
    return [models.critic.update_critic(batch, ppo.critic_objective(config), 1)]
