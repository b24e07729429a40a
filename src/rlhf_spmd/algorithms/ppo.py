"""PPO with a critic and a reference (Ziegler et al. 2019; Schulman et al. 2017): the dataflow of one step, and its losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlhf_spmd.algorithms.policy import PolicyConfig, actor_objective
from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.controller import Reference
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.objectives.advantages import advantage_estimator
from rlhf_spmd.objectives.kl import check_kl_kind
from rlhf_spmd.objectives.losses import aggregate, value_loss
from rlhf_spmd.workers.actor import ActorWorker
from rlhf_spmd.workers.advantage import AdvantageSettings, AdvantageWorker
from rlhf_spmd.workers.arithmetic import RoleClass
from rlhf_spmd.workers.critic import CriticWorker
from rlhf_spmd.workers.model_worker import Objective, Totals
from rlhf_spmd.workers.reference import ReferenceWorker
from rlhf_spmd.workers.reward import RewardWorker


@dataclass(frozen=True)
class PPOConfig(PolicyConfig):
    """``algorithm.*``; the names are verl's."""

    name: str = "ppo"
    adv_estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    use_kl_in_reward: bool = True
    kl_penalty: str = "kl"
    cliprange_value: float = 0.5
    critic_warmup: int = 0

    def check(self, where: str) -> None:
        super().check(where)
        advantage_estimator(self.adv_estimator, f"{where}.adv_estimator")
        check_kl_kind(self.kl_penalty, f"{where}.kl_penalty")
        check_bounds(self, where, "gamma", "lam", least=0, most=1)
        check_bounds(self, where, "cliprange_value", "critic_warmup", least=0)

    def training_steps(self, role: str, steps: int) -> int:
        return max(steps - self.critic_warmup, 1) if role == "actor" else steps

    @property
    def uses_reference(self) -> bool:
        return self.use_kl_in_reward or self.use_kl_loss

    @property
    def advantage(self) -> AdvantageSettings:
        estimator = advantage_estimator(self.adv_estimator)
        return AdvantageSettings(estimator, self.gamma, self.lam, self.kl_penalty, self.use_kl_in_reward)

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        roles: dict[str, RoleClass] = {"actor": ActorWorker, "critic": CriticWorker}
        if self.uses_reference:
            roles["reference"] = ReferenceWorker
        return roles | {"reward": RewardWorker, "advantage": AdvantageWorker}


def step(models: Any, prompts: Reference, config: PPOConfig, sampling: SamplingConfig, number: int) -> list[Reference]:
    """One PPO step on the prompts' rows (n per prompt). Returns the calls whose values are the step's metrics.

    The script is the same for every placement; what may run at the same time does.
    """
    # 1. the rollout, and what each model says of it
    rollout = models.actor.generate_sequences(prompts, sampling, number)
    batch = prompts.union(rollout)
    scored = models.reward.compute_reward(batch)
    # where generation's log-probs are a training forward's, bit for bit, update_actor reports the difference
    known = models.actor.exact_rollouts and number > config.critic_warmup
    old = rollout.rename(rollout_log_probs="old_log_probs") if known else models.actor.compute_log_prob(batch)
    valued = models.critic.compute_values(batch)
    batch = batch.union(scored).union(old).union(valued)
    if config.uses_reference:
        batch = batch.union(models.reference.compute_ref_log_prob(batch))

    # 2. advantages
    advantages = models.advantage.compute_advantage(batch, config.advantage)
    batch = batch.union(advantages)

    # 3. updates
    calls = [rollout, scored, advantages, *([] if known else [old])]
    calls.append(models.critic.update_critic(batch, critic_objective(config), config.ppo_epochs))
    if number > config.critic_warmup:
        calls.append(models.actor.update_actor(batch, actor_objective(config, sampling), config.ppo_epochs))
    return calls


def critic_objective(config: PPOConfig) -> Objective:
    """Clipped value loss; its statistics."""

    def objective(fields: dict[str, Tensor], lengths: Tensor, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        per_token, clipped = value_loss(fields["values"], fields["old_values"], fields["returns"], config.cliprange_value)
        loss = aggregate(per_token, lengths, "token-mean", totals.tokens, totals.rows)
        report = {"critic/vf_loss": loss.detach().double(), "critic/clip_frac": clipped.double().sum() / totals.tokens}
        report["critic/values_mean"] = fields["values"].detach().double().sum() / totals.tokens
        return loss, report

    return objective


Config = PPOConfig
