"""Advantages without a critic: ``adv_estimator``, how each is computed, and the metrics of scores and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from rlhf_spmd.algorithms.kl import KLConfig, MeasuredKL
from rlhf_spmd.algorithms.user_functions import Estimator, is_own, own_estimator
from rlhf_spmd.config.constraints import Fraction
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
from rlhf_spmd.workers import Computed, Function, GlobalReduce, Rows

ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": lambda config, rewards, groups, lengths: group_advantages(rewards, groups, config.norm_adv_by_std_in_grpo),
    "rloo": lambda config, rewards, groups, lengths: leave_one_out(rewards, groups),
    "opo": lambda config, rewards, groups, lengths: length_weighted_advantages(rewards, groups, lengths),
    "reinforce_plus_plus_baseline": lambda config, rewards, groups, lengths: group_advantages(rewards, groups, by_std=False),
}
BY_TOKEN = "reinforce_plus_plus"  # returns of tokens, without groups
WHITENED = (BY_TOKEN, "reinforce_plus_plus_baseline")


@dataclass(frozen=True)
class GroupAdvantageConfig:
    """Advantages without a critic; the names are verl's.

    - adv_estimator: the advantages: `grpo`, `rloo`, `opo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, or a function
      of your own, `file.py:function`; of `ppo` `gae`: see [algorithms.md](algorithms.md#estimators)
    - norm_adv_by_std_in_grpo: for the estimator `grpo`: divide a response's advantage by the standard deviation of its prompt's
      scores; `false`: only subtract their mean (Dr. GRPO)
    - gamma: discount per token
    """

    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    gamma: Fraction = 1.0
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "adv_estimator=grpo": ("norm_adv_by_std_in_grpo",),
        f"adv_estimator={BY_TOKEN}": ("gamma",),
    }

    def check(self, where: str) -> None:
        known = (*ESTIMATORS, BY_TOKEN)
        if is_own(self.adv_estimator):
            own_estimator(f"{where}.adv_estimator", self.adv_estimator)  # raises if it is not there
        elif self.adv_estimator not in known:
            raise ValueError(
                f"unknown {where}.adv_estimator {self.adv_estimator!r}; available: {', '.join(known)}, or a function of your own, "
                "file.py:function; gae is algorithm.name=ppo"
            )

    @property
    def by_token(self) -> bool:
        """True if each token has an advantage of its own, without groups."""
        return self.adv_estimator == BY_TOKEN


def check_groups(group_ids: Tensor, num_samples: int | None) -> None:
    """Raises ValueError for a group that is not whole: it has one row, or another number than ``num_samples``."""
    groups, counts = torch.unique(group_ids, return_counts=True)
    for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
        if count < 2 or count != (num_samples or count):
            wanted = "at least 2 are needed" if num_samples is None or num_samples < 2 else f"{num_samples} are sampled"
            raise ValueError(
                f"advantages compare responses to one prompt; group {group} has {count} where {wanted}; take or drop whole groups"
            )


class GroupConfig(Protocol):
    """The pieces of an algorithm's configuration that :func:`estimated_advantages` reads."""

    @property
    def advantage(self) -> GroupAdvantageConfig: ...
    @property
    def kl(self) -> KLConfig: ...


def estimated_advantages(config: GroupConfig, num_samples: int | None = None) -> Function:
    """Return a function that computes advantages [tokens] by ``adv_estimator`` from the scores, minus KL with
    ``use_kl_in_reward``.

    reinforce_plus_plus: REINFORCE++ (arXiv 2501.03262), a token's discounted rewards to come, whitened over all tokens; with
    ``_baseline`` the row's reward minus its group's mean, whitened likewise.
    ``num_samples``: rows of every group, if it is known. Rows without a score (nan) count nowhere and get 0. An estimator of the
    user's own sees the groups of one rank. The function raises ValueError for groups that are not whole.
    """
    advantage, kl = config.advantage, config.kl
    name, by_token = advantage.adv_estimator, advantage.by_token
    estimate = own_estimator("algorithm.adv_estimator", name) if is_own(name) else ESTIMATORS.get(name)

    def compute_advantage(fields: dict[str, Tensor], rows: Rows, reduce: GlobalReduce) -> Computed:
        if not by_token:
            check_groups(rows.group_ids, num_samples)
        measured, scores = MeasuredKL(kl, fields, rows, reduce.state), fields["scores"]
        scored = ~scores.isnan()
        learnt = rows.spread(scored)
        if estimate is None:
            rewards = token_level_rewards(
                scores, measured.values if kl.use_kl_in_reward else None, measured.coefficient, rows.lengths
            )
            advantages, _ = gae(rewards, torch.zeros_like(rewards), rows.lengths, advantage.gamma, 1.0)
        else:
            rewards = scores
            if kl.use_kl_in_reward:
                rewards = scores - measured.coefficient * row_sums(measured.values, rows.lengths)
            advantages = estimate(advantage, rewards, rows.group_ids, rows.lengths)
            advantages = rows.spread(advantages) if len(advantages) == len(rows) else advantages
        zeros = row_means(advantages.abs(), rows.lengths) == 0
        sums = reduce.sums(
            kl=measured.sums(),
            advantages=moments(advantages[learnt]),
            zeros=(zeros | ~scored).sum(),
            rewards=rewards[learnt if by_token else scored].double().sum(),
            scored=scored.sum(),
            groups=group_statistics(scores, rows.group_ids),
        )
        if name in WHITENED:
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
        if kl.use_kl_in_reward or "ref_log_prob" in fields:
            metrics |= measured.settle(sums["kl"])
        return {"advantages": rows.per_token(advantages)}, metrics | reduce.ranges(**{"critic/advantages": advantages})

    return compute_advantage
