"""The critic's side of an algorithm: its settings, advantages and returns by its values, and its loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from rlhf_spmd.algorithms.kl import KLConfig, MeasuredKL
from rlhf_spmd.algorithms.policy import PolicyLossConfig
from rlhf_spmd.config.constraints import Fraction, NonNegativeFloat
from rlhf_spmd.objectives.advantages import gae, moments, token_level_rewards, whiten
from rlhf_spmd.objectives.losses import aggregate, explained_variance, explained_variance_sums, value_loss
from rlhf_spmd.objectives.running import RunningMoments
from rlhf_spmd.workers import Computed, Function, GlobalReduce, Objective, Rows, Totals


@dataclass(frozen=True)
class ValueConfig:
    """Advantages by a critic's values, and its loss; the names are verl's where it has them.

    - gamma: discount per token
    - lam: lambda of generalized advantage estimation
    - cliprange_value: values are clipped to this distance from the old ones
    - norm_reward: normalise scores by mean and standard deviation of all scores of the run so far: `mean_std`, or `std` alone
    - norm_value: the critic learns returns normalised by all returns of the run so far; its values are translated back for the
      advantages
    """

    gamma: Fraction = 1.0
    lam: Fraction = 1.0
    cliprange_value: NonNegativeFloat = 0.5
    norm_reward: Literal["none", "mean_std", "std"] = "none"
    norm_value: bool = False


class ActorCriticConfig(Protocol):
    """The pieces of an algorithm's configuration that :func:`gae_advantages` and :func:`clipped_value` read."""

    @property
    def policy(self) -> PolicyLossConfig: ...
    @property
    def kl(self) -> KLConfig: ...
    @property
    def values(self) -> ValueConfig: ...


def gae_advantages(config: ActorCriticConfig) -> Function:
    """Return a function that computes generalized advantages, whitened over the whole batch, from the score on the last token minus
    KL on every token.

    Rows without a score (nan) count nowhere: their advantages are 0, and their returns are the critic's values.
    """

    critic, kl = config.values, config.kl

    def compute_advantage(fields: dict[str, Tensor], rows: Rows, reduce: GlobalReduce) -> Computed:
        measured = MeasuredKL(kl, fields, rows, reduce.state)
        value_moments = RunningMoments("value_norm", reduce.state)
        scores = normalised_scores(critic, fields["scores"], reduce)
        has_score = ~scores.isnan()
        learnt = rows.spread(has_score)
        values = value_moments.restore(fields["values"]) if critic.norm_value else fields["values"]
        rewards = token_level_rewards(
            scores, measured.values if kl.use_kl_in_reward else None, measured.coefficient, rows.lengths
        )
        advantages, returns = gae(rewards, values, rows.lengths, critic.gamma, critic.lam)
        sums = reduce.sums(
            kl=measured.sums(),
            scored=has_score.sum(),
            rewards=rewards[learnt].double().sum(),
            advantages=moments(advantages[learnt]),
            returns=moments(returns[learnt]),
            variance=explained_variance_sums(values[learnt], returns[learnt]),
        )
        tokens = max(float(sums["returns"][0]), 1.0)
        advantages_mean, returns_mean = (float(sums[name][1]) / tokens for name in ("advantages", "returns"))
        advantages = whiten(advantages, sums["advantages"]).masked_fill(~learnt, 0.0)
        returns = returns.where(learnt, values)
        metrics = {
            "reward/token_level_sum": float(sums["rewards"]) / max(float(sums["scored"]), 1.0),
            **measured.settle(sums["kl"]),
            "critic/advantage_mean": advantages_mean,
            "critic/returns/mean": returns_mean,
            "critic/explained_variance": explained_variance(sums["variance"]),
            **reduce.ranges(**{"critic/advantages": advantages, "critic/returns": returns}),
        }
        if critic.norm_value:
            value_moments.add(sums["returns"])
            returns = value_moments.normalise(returns).where(learnt, fields["values"])
            metrics |= {"critic/value_norm_mean": value_moments.mean, "critic/value_norm_std": value_moments.std}
        return {"advantages": rows.per_token(advantages), "returns": rows.per_token(returns)}, metrics

    return compute_advantage


def normalised_scores(config: ValueConfig, scores: Tensor, reduce: GlobalReduce) -> Tensor:
    """Return ``scores`` [rows] normalised as ``config.norm_reward`` says, this step's scores included; nan stays. Every rank must
    call."""
    if config.norm_reward == "none":
        return scores
    score_moments = RunningMoments("reward_norm", reduce.state)
    score_moments.add(reduce.sum(moments(scores[~scores.isnan()])))
    return score_moments.normalise(scores, center=config.norm_reward == "mean_std")


def clipped_value(config: ActorCriticConfig, critic: str = "critic") -> Objective:
    """Return the clipped value loss. With ``norm_value`` it is in units of the returns' standard deviation. ``critic``: what
    its statistics' names begin with."""

    def loss(fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        per_token, clipped = value_loss(
            fields["values"], fields["old_values"], fields["returns"], config.values.cliprange_value
        )
        result = aggregate(per_token, rows.lengths, "token-mean", totals.tokens, totals.rows)
        report = {f"{critic}/vf_loss": result.detach().double(), f"{critic}/clip_frac": clipped.double().sum() / totals.tokens}
        report[f"{critic}/values_mean"] = fields["values"].detach().double().sum() / totals.tokens
        return result, report

    return Objective(loss, ("old_values", "returns"), ("values",), reports_loss_itself=True, learn_if=config.policy.learns_only)
