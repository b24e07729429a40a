"""PPO whose policy loss fails in step 2: ``raise`` on rank 1 only, or ``nan`` on all."""

import os
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.algorithms import ppo
from rlhf_spmd.algorithms.ppo import PPOConfig


@dataclass(frozen=True)
class Config(PPOConfig):
    fault: str = "raise"


def step(models: Any, prompts: Any, config: Config, sampling: Any, number: int) -> Any:
    calls = ppo.step(models, prompts, config, sampling, number) if number < 2 else None
    if calls is not None:
        return calls
    batch = prompts.union(models.actor.generate_sequences(prompts, sampling, number))
    for call in (models.reward.compute_reward, models.actor.compute_log_prob, models.critic.compute_values):
        batch = batch.union(call(batch))
    batch = batch.union(models.reference.compute_ref_log_prob(batch))
    batch = batch.union(models.advantage.compute_advantage(batch, config.advantage))
    sound = ppo.actor_objective(config, sampling)

    def objective(fields: Any, lengths: Any, totals: Any) -> Any:
        if config.fault == "raise" and os.environ["RANK"] == "1":
            raise KeyError("no such field")
        loss, report = sound(fields, lengths, totals)
        return loss * (float("nan") if config.fault == "nan" else 1.0), report

    return [models.actor.update_actor(batch, objective, 1)]
