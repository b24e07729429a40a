"""Advantages without a critic: ``adv_estimator``, what each is computed from, and what is told of scores and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rlhf_spmd.algorithms.kl_reward import KLRewardConfig, MeasuredKL
from rlhf_spmd.algorithms.own import Estimator, is_own, own_estimator
from rlhf_spmd.objectives.advantages import (
    gae,
    group_advantages,
    group_statistics,
    leave_one_out,
    length_weighted_advantages,
    moments,
    row_means,
    row_sums,
    token_level_rewards,
    whiten,
)
from rlhf_spmd.workers import Computed, Function, GlobalReduce, ReferenceWorker, RoleClass, Rows

ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": lambda config, rewards, groups, lengths: group_advantages(rewards, groups, config.norm_adv_by_std_in_grpo),
    "rloo": lambda config, rewards, groups, lengths: leave_one_out(rewards, groups),
    "opo": lambda config, rewards, groups, lengths: length_weighted_advantages(rewards, groups, lengths),
    "reinforce_plus_plus_baseline": lambda config, rewards, groups, lengths: group_advantages(rewards, groups, by_std=False),
}
BY_TOKEN = "reinforce_plus_plus"  # returns of tokens, without groups
WHITENED = (BY_TOKEN, "reinforce_plus_plus_baseline")


@dataclass(frozen=True)
class CriticFreeConfig(KLRewardConfig):
    """The names are verl's.

    - adv_estimator: the advantages: `grpo`, `rloo`, `opo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, or a function
      of your own, `file.py:function`; of `ppo` `gae`: see [algorithms.md](algorithms.md#estimators)
    - norm_adv_by_std_in_grpo: of the estimator `grpo`: divide a response's advantage by the standard deviation of its prompt's
      scores; `false`: only subtract their mean (Dr. GRPO)
    """

    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    min_samples: ClassVar[int] = 2

    def check(self, where: str) -> None:
        super().check(where)
        known = (*ESTIMATORS, BY_TOKEN)
        if is_own(self.adv_estimator):
            own_estimator(f"{where}.adv_estimator", self.adv_estimator)  # raises if it is not there
        elif self.adv_estimator not in known:
            raise ValueError(
                f"unknown {where}.adv_estimator {self.adv_estimator!r}; available: {', '.join(known)}, or a function of your own, "
                "file.py:function; gae is algorithm.name=ppo"
            )
        if self.min_samples < 2 and self.adv_estimator != BY_TOKEN:
            raise ValueError(f"{where}.adv_estimator={self.adv_estimator}: {self.name} is {BY_TOKEN}; use {where}.name=grpo")
        using = f"does nothing with {where}.adv_estimator={self.adv_estimator}; leave it out"
        if self.gamma != 1 and self.adv_estimator != BY_TOKEN:
            raise ValueError(f"{where}.gamma={self.gamma} {using}: only {BY_TOKEN} has a discount per token")
        if not self.norm_adv_by_std_in_grpo and self.adv_estimator != "grpo":
            raise ValueError(f"{where}.norm_adv_by_std_in_grpo=false {using}")
        if self.loss_mode == "geo_mean" and self.adv_estimator == BY_TOKEN:
            raise ValueError(
                f"{where}.loss_mode=geo_mean needs one advantage per response, and {BY_TOKEN} gives each token its own"
            )

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, **({"reference": ReferenceWorker} if self.uses_reference else {})}

    @property
    def reads(self) -> tuple[str, ...]:
        """What :func:`in_group` computes from; ``scores`` is enough where KL is not in the reward."""
        return ("scores", *(("old_log_probs", "ref_log_prob") if self.uses_reference else ()))


def check_groups(group_ids: Tensor, num_samples: int | None) -> None:
    """Raises ValueError for a group that is not whole: of one row, or of another number than ``num_samples``."""
    groups, counts = torch.unique(group_ids, return_counts=True)
    for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
        if count < 2 or count != (num_samples or count):
            wanted = "at least 2 are needed" if num_samples is None or num_samples < 2 else f"{num_samples} are sampled"
            raise ValueError(
                f"advantages compare responses to one prompt; group {group} has {count} where {wanted}; take or drop whole groups"
            )


def in_group(config: CriticFreeConfig, num_samples: int | None = None) -> Function:
    """Advantages [tokens] by ``config.adv_estimator``, of the score, minus KL with ``use_kl_in_reward``.

    ``num_samples``: rows of every group, if it is known. Rows without a score (nan) count nowhere and get 0. A function of
    the user's own sees the groups of one rank.
    reinforce_plus_plus: REINFORCE++ (arXiv 2501.03262), a token's discounted rewards to come, whitened over all tokens; with
    ``_baseline`` the row's reward minus its group's mean, whitened likewise.
    The function raises ValueError for groups that are not whole.
    """
    name = config.adv_estimator
    by_token, whitened = name == BY_TOKEN, name in WHITENED
    estimate = own_estimator("algorithm.adv_estimator", name) if is_own(name) else ESTIMATORS.get(name)

    def compute_advantage(fields: dict[str, Tensor], rows: Rows, whole: GlobalReduce) -> Computed:
        if not by_token:
            check_groups(rows.group_ids, num_samples)
        kl, scores = MeasuredKL(config, fields, rows, whole.state), fields["scores"]
        scored = ~scores.isnan()
        learnt = rows.spread(scored)
        if estimate is None:
            rewards = token_level_rewards(scores, kl.values if config.use_kl_in_reward else None, kl.coefficient, rows.lengths)
            advantages, _ = gae(rewards, torch.zeros_like(rewards), rows.lengths, config.gamma, 1.0)
        else:
            rewards = scores - kl.coefficient * row_sums(kl.values, rows.lengths) if config.use_kl_in_reward else scores
            advantages = estimate(config, rewards, rows.group_ids, rows.lengths)
            advantages = rows.spread(advantages) if len(advantages) == len(rows) else advantages
        zeros = row_means(advantages.abs(), rows.lengths) == 0
        sums = whole.sums(
            kl=kl.sums(),
            advantages=moments(advantages[learnt]),
            zeros=(zeros | ~scored).sum(),
            rewards=rewards[learnt if by_token else scored].double().sum(),
            scored=scored.sum(),
            groups=group_statistics(scores, rows.group_ids),
        )
        if whitened:
            advantages = whiten(advantages, sums["advantages"])
        advantages = advantages.masked_fill(~learnt, 0.0)
        count, total, _ = sums["advantages"].tolist()
        metrics = {"reward/token_level_sum": float(sums["rewards"]) / max(float(sums["scored"]), 1.0)}
        metrics |= {"actor/zero_advantage_fraction": float(sums["zeros"]) / float(sums["kl"][0])}
        metrics |= {"critic/advantage_mean": total / max(count, 1.0)}
        if num_samples != 1:
            num_groups, equal, right, wrong, spread = sums["groups"].tolist()
            shares = {"equal": equal, "right": right, "wrong": wrong}
            metrics |= {f"group/{name}_fraction": share / max(num_groups, 1.0) for name, share in shares.items()}
            metrics |= {"group/score_std_mean": spread / max(num_groups, 1.0)}
        if config.use_kl_in_reward or "ref_log_prob" in fields:
            metrics |= kl.settle(sums["kl"])
        return {"advantages": rows.per_token(advantages)}, metrics | whole.ranges(**{"critic/advantages": advantages})

    return compute_advantage
