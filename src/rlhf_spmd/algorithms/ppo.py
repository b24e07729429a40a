"""PPO with a critic and a reference (Ziegler et al. 2019; Schulman et al. 2017): the dataflow of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.algorithms.base import sample, score, validate
from rlhf_spmd.algorithms.policy import clipped_policy
from rlhf_spmd.algorithms.values import CriticConfig, clipped_value, gae_advantages
from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.controller import Reference
from rlhf_spmd.workers.actor import ActorWorker
from rlhf_spmd.workers.arithmetic import RoleClass
from rlhf_spmd.workers.critic import CriticWorker
from rlhf_spmd.workers.reference import ReferenceWorker
from rlhf_spmd.workers.reward import RewardWorker

__all__ = ["Config", "PPOConfig", "step", "validate"]


@dataclass(frozen=True)
class PPOConfig(CriticConfig):
    """``algorithm.*``; the names are verl's."""

    name: str = "ppo"
    adv_estimator: str = "gae"
    critic_warmup: int = 0

    def check(self, where: str) -> None:
        super().check(where)
        if self.adv_estimator != "gae":
            raise ValueError(
                f"{where}.adv_estimator={self.adv_estimator!r}: ppo has gae; others are algorithms of their own, by name"
            )
        check_bounds(self, where, "critic_warmup", least=0)

    def training_steps(self, role: str, steps: int) -> int:
        return steps - self.critic_warmup if role == "actor" else steps

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        roles: dict[str, RoleClass] = {"actor": ActorWorker, "critic": CriticWorker}
        if self.uses_reference:
            roles["reference"] = ReferenceWorker
        return roles | {"reward": RewardWorker}


def step(models: Any, data: Any, config: PPOConfig, number: int) -> list[Reference]:
    """One PPO step. Returns the calls whose values are the step's metrics.

    The script is the same for every placement; what may run at the same time does.
    """
    # 1. the rollout, and what each model says of it
    batch, rollout = sample(models, data, number)
    scores, scored = score(models, batch)
    old = models.actor.compute_log_prob(batch)
    values = models.critic.compute_values(batch)
    batch = batch.union(scores, old, values)
    if config.uses_reference:
        batch = batch.union(models.reference.compute_ref_log_prob(batch))

    # 2. advantages
    reads = ("scores", "values", "old_log_probs", *(("ref_log_prob",) if config.uses_reference else ()))
    advantages = models.arithmetic.apply(batch, gae_advantages(config), reads, gives=("advantages", "returns"))
    batch = batch.union(advantages).rename(values="old_values")

    # 3. updates
    calls = [rollout, *scored, old, advantages, models.critic.update(batch, clipped_value(config), **config.schedule)]
    if number > config.critic_warmup:
        calls.append(models.actor.update(batch, clipped_policy(config, data.sampling, number), **config.schedule))
    return calls


Config = PPOConfig
