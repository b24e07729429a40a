"""Safe-RLHF (Dai et al. 2023, arXiv 2310.12773), PPO-Lagrangian: the reward is to rise while the mean cost stays below a threshold."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.algorithms.base import StreamSpec, sample, score, validate
from rlhf_spmd.algorithms.policy import clipped_policy
from rlhf_spmd.algorithms.ppo import Config as PPOConfig
from rlhf_spmd.algorithms.sft import likelihood
from rlhf_spmd.algorithms.values import clipped_value
from rlhf_spmd.config.constraints import FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveFloat
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.controller import Reference
from rlhf_spmd.data.prompts import DataConfig
from rlhf_spmd.data.sft import SftConfig
from rlhf_spmd.objectives.advantages import gae, moments, token_level_rewards, whiten
from rlhf_spmd.objectives.kl import kl_penalty
from rlhf_spmd.workers import Computed, ComputeWorker, CriticWorker, Function, GlobalReduce, RewardWorker, RoleClass, Rows

LEAST_LOGARITHM = -20.0  # bound of the multiplier, which scales its own step: from far below it would not come back


@dataclass(frozen=True)
class Config(PPOConfig):
    """PPO's settings, and the multiplier's.

    - lambda_init: the multiplier at the start
    - lambda_lr: step of the multiplier's logarithm, times the multiplier and the cost's excess
    - lambda_max: bound of the multiplier
    - lambda_update_delay_steps: steps before the multiplier moves
    - threshold: the mean cost that responses may have
    - ptx_coeff: weight of the likelihood of the texts in section `ptx`, which has the keys of `sft`'s `data`; give both or neither
    """

    name: str = "safe_rlhf"
    lambda_init: PositiveFloat = 1.0
    lambda_lr: NonNegativeFloat = 0.1
    lambda_max: PositiveFloat = 5.0
    lambda_update_delay_steps: NonNegativeInt = 0
    threshold: FiniteFloat = 0.0
    ptx_coeff: NonNegativeFloat = 0.0
    streams: ClassVar[Mapping[str, StreamSpec]] = {
        "prompts": StreamSpec("data", DataConfig),
        "texts": StreamSpec("ptx", SftConfig, optional=True),
    }

    rules: ClassVar[Rules] = (
        Rule(
            ("lambda_init", "lambda_max"),
            lambda s: s.lambda_init > s.lambda_max,
            "the multiplier starts within its bound",
            "lower lambda_init",
        ),
        Rule(
            ("share_actor_critic", "norm_reward", "norm_value"),
            lambda s: s.share_actor_critic or s.values.norm_reward != "none" or s.values.norm_value,
            "safe_rlhf has two critics, whose values and scores are as they come",
            "leave these out",
        ),
        Rule(
            ("use_kl_in_reward", "kl_ctrl.type"),
            lambda s: not s.kl.use_kl_in_reward or s.kl.kl_ctrl.type != "fixed",
            "safe_rlhf has the KL in the rewards, with a fixed coefficient",
            "leave these out; use_kl_loss may be added",
        ),
    )

    def check_streams(self, configured_streams: Collection[str], where: str) -> None:
        if ("texts" in configured_streams) != (self.ptx_coeff > 0):
            raise ValueError(f"{where}.ptx_coeff={self.ptx_coeff}: it and the section ptx go together; give both or none")

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, "cost_critic": CriticWorker, "cost": RewardWorker, "lagrange": ComputeWorker}


def step(models: Any, data: Any, config: Config, global_step: int) -> list[Reference]:
    """Return the calls of one step: as PPO's, with a cost beside the reward and advantages that weigh both by the multiplier."""
    # 1. the rollout, and what each model computes for it
    batch, rollout = sample(models, data, global_step)
    scores, scored = score(models, batch)
    costs = models.cost.compute_reward(batch)
    old, reference = models.actor.compute_log_prob(batch), models.reference.compute_ref_log_prob(batch)
    values = models.critic.compute_values(batch).rename(values="old_values")
    cost_values = models.cost_critic.compute_values(batch).rename(values="old_cost_values")

    # 2. the multiplier and the advantages
    batch = batch.union(old, reference)
    inputs = ("scores", "costs", "old_values", "old_cost_values", "old_log_probs", "ref_log_prob")
    scored_batch = batch.union(scores, costs.select("scores").rename(scores="costs"), values, cost_values)
    outputs = ("advantages", "returns", "cost_returns")
    advantages = models.lagrange.apply(scored_batch, lagrangian(config, global_step), inputs, outputs)

    # 3. updates
    cost_returns = advantages.select("cost_returns").rename(cost_returns="returns")
    cost_batch = batch.union(cost_values.rename(old_cost_values="old_values"), cost_returns)
    calls = [rollout, *scored, costs, old, advantages]
    calls.append(models.critic.update(batch.union(values, advantages), clipped_value(config), **config.schedule))
    calls.append(models.cost_critic.update(cost_batch, clipped_value(config, "cost_critic"), **config.schedule))
    if global_step > config.critic_warmup:
        rows, objectives = [batch.union(advantages)], [clipped_policy(config, data.sampling, global_step)]
        if config.ptx_coeff:
            rows.append(data.texts.next())
            objectives.append(replace(likelihood("token-mean"), weight=config.ptx_coeff))
        calls.append(models.actor.update(rows, objectives, **config.schedule))
    return calls


def lagrangian(config: Config, global_step: int) -> Function:
    """Return a function that moves the multiplier and computes advantages (section 3.3, appendix B).

    The multiplier moves on the mean cost, d log(lambda) = lr * lambda * (cost - threshold). The advantages are
    (A_r - lambda A_c) / (1 + lambda); each side is GAE over a score at the last token and half of the KL penalty, whitened over the
    batch. A row without a cost (nan) counts nowhere on the cost's side: A_c is 0, and the cost critic's return is its value. Rows
    without a score are treated alike on the other side. In a step without any cost the multiplier stays.
    """

    def compute_advantage(fields: dict[str, Tensor], rows: Rows, reduce: GlobalReduce) -> Computed:
        kl = kl_penalty(fields["old_log_probs"], fields["ref_log_prob"], config.kl.kl_penalty)
        costs = fields["costs"][~fields["costs"].isnan()]
        multiplier = reduce.state.get("lambda", config.lambda_init)
        local_sums = [float(len(costs)), float(costs.double().sum()), float(len(kl)), float(kl.double().sum())]
        count, cost, tokens, kl_sum = reduce.sum(torch.tensor(local_sums, dtype=torch.float64)).tolist()
        excess = cost / count - config.threshold if count else 0.0
        if global_step > config.lambda_update_delay_steps:
            logarithm = math.log(multiplier) + config.lambda_lr * multiplier * excess
            multiplier = math.exp(max(min(logarithm, math.log(config.lambda_max)), LEAST_LOGARITHM))
        reduce.state["lambda"] = multiplier
        sides, returns = [], []
        for name, coef, values in (("scores", 0.5, "old_values"), ("costs", -0.5, "old_cost_values")):
            rewards = token_level_rewards(fields[name], kl, coef * config.kl.kl_ctrl.kl_coef, rows.lengths)
            advantage, value = gae(rewards, fields[values], rows.lengths, config.values.gamma, config.values.lam)
            learnt = rows.spread(~fields[name].isnan())
            sides.append(whiten(advantage, reduce.sum(moments(advantage[learnt]))).masked_fill(~learnt, 0.0))
            returns.append(rows.per_token(value.where(learnt, fields[values])))
        advantages = rows.per_token((sides[0] - multiplier * sides[1]) / (1 + multiplier))
        cost_excess = {"safe_rlhf/cost_excess": excess} if count else {}
        report = {"safe_rlhf/lambda": multiplier, "actor/kl": kl_sum / tokens, **cost_excess}
        return {"advantages": advantages, "returns": returns[0], "cost_returns": returns[1]}, report

    return compute_advantage
