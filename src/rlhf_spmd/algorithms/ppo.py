"""PPO with a critic and a reference (Ziegler et al. 2019; Schulman et al. 2017): the dataflow of one step, and its losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.algorithms.base import sample, score, validate
from rlhf_spmd.algorithms.policy import PolicyConfig, clipped_policy
from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.controller import Reference
from rlhf_spmd.data.batch import Field
from rlhf_spmd.objectives.advantages import gae, moments, row_means, token_level_rewards, whiten
from rlhf_spmd.objectives.kl import KLControlConfig, build_kl_controller, check_kl_kind, kl_penalty
from rlhf_spmd.objectives.losses import aggregate, explained_variance, explained_variance_sums, value_loss
from rlhf_spmd.workers.actor import ActorWorker
from rlhf_spmd.workers.arithmetic import Function, RoleClass, Whole
from rlhf_spmd.workers.critic import CriticWorker
from rlhf_spmd.workers.objective import Objective, Rows, Totals
from rlhf_spmd.workers.reference import ReferenceWorker
from rlhf_spmd.workers.reward import RewardWorker

__all__ = ["Config", "PPOConfig", "step", "validate"]


@dataclass(frozen=True)
class PPOConfig(PolicyConfig):
    """``algorithm.*``; the names are verl's."""

    name: str = "ppo"
    adv_estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    use_kl_in_reward: bool = True
    kl_penalty: str = "kl"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    cliprange_value: float = 0.5
    critic_warmup: int = 0

    def check(self, where: str) -> None:
        super().check(where)
        if self.adv_estimator != "gae":
            raise ValueError(
                f"{where}.adv_estimator={self.adv_estimator!r}: ppo has gae; others are algorithms of their own, by name"
            )
        check_kl_kind(self.kl_penalty, f"{where}.kl_penalty")
        check_bounds(self, where, "gamma", "lam", least=0, most=1)
        check_bounds(self, where, "cliprange_value", "critic_warmup", least=0)

    def training_steps(self, role: str, steps: int) -> int:
        return max(steps - self.critic_warmup, 1) if role == "actor" else steps

    @property
    def uses_reference(self) -> bool:
        return self.use_kl_in_reward or self.use_kl_loss

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
        calls.append(models.actor.update(batch, clipped_policy(config, data.sampling), **config.schedule))
    return calls


def gae_advantages(config: PPOConfig) -> Function:
    """Generalized advantages, whitened over the whole batch, of the score on the last token minus KL on every token.

    The KL controller moves on the mean over rows of the row's mean KL per token (verl's meaning of ``target_kl``).
    """

    def compute_advantage(fields: dict[str, Tensor], rows: Rows, whole: Whole) -> tuple[dict[str, Field], dict[str, float]]:
        controller, values = build_kl_controller(config.kl_ctrl), fields["values"]
        controller.load_state_dict(whole.state)
        kl = values.new_zeros(len(values))
        if config.uses_reference:
            kl = kl_penalty(fields["old_log_probs"], fields["ref_log_prob"], config.kl_penalty)
        penalty = kl if config.use_kl_in_reward else None
        rewards = token_level_rewards(fields["scores"], penalty, controller.value, rows.lengths)
        advantages, returns = gae(rewards, values, rows.lengths, config.gamma, config.lam)
        row_kl = row_means(kl.double(), rows.lengths)
        mine = [len(rows), len(values), *(float(x.double().sum()) for x in (kl, row_kl, rewards))]
        counts = torch.tensor(mine, dtype=torch.float64)
        sums = whole.sum(torch.cat([counts, moments(advantages), explained_variance_sums(values, returns)]))
        num_rows, tokens, kl_total, row_kl_total, token_rewards, _, advantage_total, *_ = sums.tolist()
        if config.use_kl_in_reward:
            controller.update(row_kl_total / num_rows, int(num_rows))
        whole.state.update(controller.state_dict())
        return {"advantages": rows.per_token(whiten(advantages, sums[5:8])), "returns": rows.per_token(returns)}, {
            "reward/token_level_sum": token_rewards / num_rows,
            "actor/kl": kl_total / tokens,
            "actor/kl_per_row": row_kl_total / num_rows,
            "actor/kl_coef": controller.value,
            "critic/advantage_mean": advantage_total / tokens,
            "critic/explained_variance": explained_variance(sums[8:13]),
        }

    return compute_advantage


def clipped_value(config: PPOConfig) -> Objective:
    """Clipped value loss; its statistics."""

    def loss(fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        per_token, clipped = value_loss(fields["values"], fields["old_values"], fields["returns"], config.cliprange_value)
        result = aggregate(per_token, rows.lengths, "token-mean", totals.tokens, totals.rows)
        report = {"critic/vf_loss": result.detach().double(), "critic/clip_frac": clipped.double().sum() / totals.tokens}
        report["critic/values_mean"] = fields["values"].detach().double().sum() / totals.tokens
        return result, report

    return Objective(loss, ("old_values", "returns"), ("values",))


Config = PPOConfig
