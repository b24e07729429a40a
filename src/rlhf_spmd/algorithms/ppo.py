"""PPO with a critic and a reference (Ziegler et al. 2019; Schulman et al. 2017): the dataflow of one step, and its losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rlhf_spmd.algorithms.base import AlgorithmConfig
from rlhf_spmd.controller import Reference
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.objectives.advantages import advantage_estimator
from rlhf_spmd.objectives.kl import check_kl_kind, kl_penalty
from rlhf_spmd.objectives.losses import aggregate, check_clip_ratios, check_loss_agg_mode, policy_loss, value_loss
from rlhf_spmd.workers.actor import ActorWorker
from rlhf_spmd.workers.advantage import AdvantageSettings, AdvantageWorker
from rlhf_spmd.workers.arithmetic import RoleClass
from rlhf_spmd.workers.critic import CriticWorker
from rlhf_spmd.workers.model_worker import Totals
from rlhf_spmd.workers.reference import ReferenceWorker
from rlhf_spmd.workers.reward import RewardWorker


@dataclass(frozen=True)
class PPOConfig(AlgorithmConfig):
    """``algorithm.*``; the names are verl's. ``clip_ratio_low/high`` default to ``clip_ratio``."""

    name: str = "ppo"
    adv_estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    use_kl_in_reward: bool = True
    kl_penalty: str = "kl"
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    cliprange_value: float = 0.5
    entropy_coeff: float = 0.0
    loss_agg_mode: str = "token-mean"
    critic_warmup: int = 0

    def check(self, where: str) -> None:
        super().check(where)
        advantage_estimator(self.adv_estimator, f"{where}.adv_estimator")
        check_kl_kind(self.kl_penalty, f"{where}.kl_penalty")
        check_kl_kind(self.kl_loss_type, f"{where}.kl_loss_type")
        check_loss_agg_mode(self.loss_agg_mode, f"{where}.loss_agg_mode")
        check_clip_ratios(*self.clip_range, self.clip_ratio_c, f"{where}.")
        for key in ("gamma", "lam"):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"{where}.{key}={getattr(self, key)} must be between 0 and 1")
        for key in ("cliprange_value", "kl_loss_coef", "critic_warmup"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"{where}.{key}={getattr(self, key)} must be a finite number, at least 0")
        if not math.isfinite(self.entropy_coeff):
            raise ValueError(f"{where}.entropy_coeff={self.entropy_coeff} must be a finite number")

    def training_steps(self, role: str, steps: int) -> int:
        return max(steps - self.critic_warmup, 1) if role == "actor" else steps

    @property
    def clip_range(self) -> tuple[float, float]:
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return low, high

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


Objective = Callable[[dict[str, Tensor], Tensor, Totals], tuple[Tensor, dict[str, Tensor]]]


def actor_objective(config: PPOConfig, sampling: SamplingConfig) -> Objective:
    """Clipped policy loss, plus the KL loss and minus the entropy bonus if configured."""

    def objective(fields: dict[str, Tensor], lengths: Tensor, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        def total(per_token: Tensor) -> Tensor:
            return aggregate(per_token, lengths, config.loss_agg_mode, totals.tokens, totals.rows, sampling.max_response_length)

        def mean(per_token: Tensor) -> Tensor:
            return per_token.detach().double().sum() / totals.tokens

        log_probs = fields["log_probs"]
        per_token, stats = policy_loss(
            log_probs, fields["old_log_probs"], fields["advantages"], *config.clip_range, config.clip_ratio_c
        )
        pg_loss = loss = total(per_token)
        report = {"actor/pg_loss": pg_loss.detach().double()}
        report |= {"actor/clip_frac": mean(stats["clipped"]), "actor/clip_frac_dual": mean(stats["dual_clipped"])}
        report |= {"actor/ppo_kl": mean(stats["ppo_kl"]), "actor/entropy": mean(fields["entropy"])}
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * total(fields["entropy"])
        if config.use_kl_loss:
            kl_loss = total(kl_penalty(log_probs, fields["ref_log_prob"], config.kl_loss_type))
            loss = loss + config.kl_loss_coef * kl_loss
            report["actor/kl_loss"] = kl_loss.detach().double()
        return loss, report

    return objective


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
