"""The critic's side of algorithms that have one: their knobs, advantages and returns by its values, and its loss."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_spmd.algorithms.kl_reward import KLRewardConfig, MeasuredKL
from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.objectives.advantages import gae, moments, token_level_rewards, whiten
from rlhf_spmd.objectives.losses import aggregate, explained_variance, explained_variance_sums, value_loss
from rlhf_spmd.objectives.running import RunningMoments
from rlhf_spmd.workers import Computed, Function, GlobalReduce, Objective, Rows, Totals

REWARD_NORMS = ("none", "mean_std", "std")


@dataclass(frozen=True)
class CriticConfig(KLRewardConfig):
    """The names are verl's where it has them.

    - lam: lambda of generalized advantage estimation
    - cliprange_value: values are clipped to this distance from the old ones
    - norm_reward: scores by mean and standard deviation of all scores of the run so far: `mean_std`, or `std` alone
    - norm_value: the critic learns returns in units of all returns of the run so far, and its values are translated back for
      the advantages
    """

    lam: float = 1.0
    cliprange_value: float = 0.5
    norm_reward: str = "none"
    norm_value: bool = False

    def check(self, where: str) -> None:
        super().check(where)
        check_bounds(self, where, "lam", least=0, most=1)
        check_bounds(self, where, "cliprange_value", least=0)
        if self.norm_reward not in REWARD_NORMS:
            raise ValueError(f"unknown {where}.norm_reward {self.norm_reward!r}; available: {', '.join(REWARD_NORMS)}")
        if self.loss_mode == "geo_mean":
            raise ValueError(f"{where}.loss_mode=geo_mean: needs one advantage per response, and gae gives each token its own")


def gae_advantages(config: CriticConfig) -> Function:
    """Generalized advantages, whitened over the whole batch, of the score on the last token minus KL on every token.

    Rows without a score (nan) count nowhere: their advantages are 0, and their returns what the critic says already.
    """

    def compute_advantage(fields: dict[str, Tensor], rows: Rows, whole: GlobalReduce) -> Computed:
        kl, known = MeasuredKL(config, fields, rows, whole.state), RunningMoments("value_norm", whole.state)
        scores = normalised_scores(config, fields["scores"], whole)
        scored = ~scores.isnan()
        learnt = rows.spread(scored)
        values = known.restore(fields["values"]) if config.norm_value else fields["values"]
        rewards = token_level_rewards(scores, kl.values if config.use_kl_in_reward else None, kl.coefficient, rows.lengths)
        advantages, returns = gae(rewards, values, rows.lengths, config.gamma, config.lam)
        sums = whole.sums(
            kl=kl.sums(),
            scored=scored.sum(),
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
            **kl.settle(sums["kl"]),
            "critic/advantage_mean": advantages_mean,
            "critic/returns/mean": returns_mean,
            "critic/explained_variance": explained_variance(sums["variance"]),
            **whole.ranges(**{"critic/advantages": advantages, "critic/returns": returns}),
        }
        if config.norm_value:
            known.add(sums["returns"])
            returns = known.normalise(returns).where(learnt, fields["values"])
            metrics |= {"critic/value_norm_mean": known.mean, "critic/value_norm_std": known.std}
        return {"advantages": rows.per_token(advantages), "returns": rows.per_token(returns)}, metrics

    return compute_advantage


def normalised_scores(config: CriticConfig, scores: Tensor, whole: GlobalReduce) -> Tensor:
    """``scores`` [rows] by ``config.norm_reward``; those of this step count, nan stays. Every rank must call."""
    if config.norm_reward == "none":
        return scores
    known = RunningMoments("reward_norm", whole.state)
    known.add(whole.sum(moments(scores[~scores.isnan()])))
    return known.normalise(scores, center=config.norm_reward == "mean_std")


def clipped_value(config: CriticConfig) -> Objective:
    """Clipped value loss; its statistics. With ``norm_value`` all of it is in units of the returns' standard deviation."""

    def loss(fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        per_token, clipped = value_loss(fields["values"], fields["old_values"], fields["returns"], config.cliprange_value)
        result = aggregate(per_token, rows.lengths, "token-mean", totals.tokens, totals.rows)
        report = {"critic/vf_loss": result.detach().double(), "critic/clip_frac": clipped.double().sum() / totals.tokens}
        report["critic/values_mean"] = fields["values"].detach().double().sum() / totals.tokens
        return result, report

    return Objective(loss, ("old_values", "returns"), ("values",), names_loss=True, only=config.learns_only)
