"""Advantages without a critic: ``adv_estimator``, how each is computed, and the metrics of scores and groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from rlhf_spmd.algorithms.kl import KLConfig, MeasuredKL
from rlhf_spmd.algorithms.user_functions import Estimator, is_user_function, user_estimator
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
    - turn_discount: of a conversation's turns. The advantage of a turn is multiplied by it for each turn behind, so that the last
      ones have the most credit
    """

    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    gamma: Fraction = 1.0
    turn_discount: Fraction = 1.0
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "adv_estimator=grpo": ("norm_adv_by_std_in_grpo",),
        f"adv_estimator={BY_TOKEN}": ("gamma",),
    }

    def check(self, where: str) -> None:
        known = (*ESTIMATORS, BY_TOKEN)
        if is_user_function(self.adv_estimator):
            user_estimator(f"{where}.adv_estimator", self.adv_estimator)  # raises if it is not there
        elif self.adv_estimator not in known:
            raise ValueError(
                f"unknown {where}.adv_estimator {self.adv_estimator!r}; available: {', '.join(known)}, or a function of your own, "
                "file.py:function; gae is algorithm.name=ppo"
            )

    @property
    def by_token(self) -> bool:
        """Return True if each token has an advantage of its own, without groups."""
        return self.adv_estimator == BY_TOKEN


def check_groups(group_ids: Tensor, num_samples: int | None) -> None:
    """Raise ValueError for a group that is not whole: it has one row, or another number than ``num_samples``."""
    groups, counts = torch.unique(group_ids, return_counts=True)
    for group, count in zip(groups.tolist(), counts.tolist(), strict=True):
        if count < 2 or count != (num_samples or count):
            expected = "at least 2 are needed" if num_samples is None or num_samples < 2 else f"{num_samples} are sampled"
            raise ValueError(
                f"advantages compare responses to one prompt; group {group} has {count} where {expected}; take or drop whole groups"
            )


class GroupConfig(Protocol):
    """The pieces of an algorithm's configuration that :func:`estimated_advantages` reads."""

    @property
    def advantage(self) -> GroupAdvantageConfig: ...
    @property
    def kl(self) -> KLConfig: ...


def estimated_advantages(config: GroupConfig, num_samples: int | None = None, rows_per_episode: int = 1) -> Function:
    """Return a function that computes advantages [tokens] by ``adv_estimator`` from the scores, minus KL with
    ``use_kl_in_reward``.

    reinforce_plus_plus: REINFORCE++ (arXiv 2501.03262), a token's discounted rewards to come, whitened over all tokens; with
    ``_baseline`` the row's reward minus its group's mean, whitened likewise.
    - num_samples: rows of every group, if it is known; with agents, episodes
    - rows_per_episode: row ids of each episode. All its rows have its score, and groups compare episodes

    Rows without a score (nan) count nowhere and get 0. An estimator of the user's own sees the groups of one rank. The function raises
    ValueError for groups that are not whole.
    """
    kl = config.kl
    name = config.advantage.adv_estimator
    estimate = user_estimator("algorithm.adv_estimator", name) if is_user_function(name) else ESTIMATORS.get(name)

    def compute_advantage(fields: dict[str, Tensor], rows: Rows, reduce: GlobalReduce) -> Computed:
        scores = fields["scores"]
        measured = MeasuredKL(kl, fields, rows, reduce.state)
        is_first = rows.row_ids % rows_per_episode == 0
        has_score = ~scores.isnan()
        learnt_tokens = rows.spread(has_score)
        if estimate is None:
            rewards, advantages = _token_advantages(config, scores, measured, rows)
        else:
            rewards, advantages = _row_advantages(config, estimate, scores, measured, rows, num_samples, rows_per_episode)
        if config.advantage.turn_discount < 1.0:
            advantages = advantages * config.advantage.turn_discount**rows.turns_behind
        has_zero_advantage = row_means(advantages.abs(), rows.lengths) == 0
        sums = reduce.sums(
            kl=measured.sums(),
            advantages=moments(advantages[learnt_tokens]),
            zeros=(has_zero_advantage | ~has_score).sum(),
            rewards=rewards[learnt_tokens if estimate is None else has_score].double().sum(),
            scored=has_score.sum(),
            groups=group_statistics(scores[is_first], rows.group_ids[is_first]),
        )
        if name in WHITENED:
            advantages = whiten(advantages, sums["advantages"])
        advantages = advantages.masked_fill(~learnt_tokens, 0.0)
        count, total, _ = sums["advantages"].tolist()
        metrics = {"reward/token_level_sum": float(sums["rewards"]) / max(float(sums["scored"]), 1.0)}
        metrics |= {"actor/zero_advantage_fraction": float(sums["zeros"]) / float(sums["kl"][0])}
        metrics |= {"critic/advantage_mean": total / max(count, 1.0)}
        if num_samples != 1:
            metrics |= _group_metrics(sums["groups"])
        if kl.use_kl_in_reward or "ref_log_prob" in fields:
            metrics |= measured.settle(sums["kl"])
        return {"advantages": rows.per_token(advantages)}, metrics | reduce.ranges(**{"critic/advantages": advantages})

    return compute_advantage


def _token_advantages(config: GroupConfig, scores: Tensor, measured: MeasuredKL, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return the rewards of tokens, and the advantages by their discounted sums from each token on, [tokens] each."""
    kl = measured.values if config.kl.use_kl_in_reward else None
    rewards = token_level_rewards(scores, kl, measured.coefficient, rows.lengths)
    return rewards, gae(rewards, torch.zeros_like(rewards), rows.lengths, config.advantage.gamma, 1.0)[0]


def _row_advantages(
    config: GroupConfig,
    estimate: Estimator,
    scores: Tensor,
    measured: MeasuredKL,
    rows: Rows,
    num_samples: int | None,
    rows_per_episode: int,
) -> tuple[Tensor, Tensor]:
    """Return the rewards of rows [rows], and the advantages by ``estimate`` [tokens]."""
    rewards = scores
    if config.kl.use_kl_in_reward:
        rewards = scores - measured.coefficient * row_sums(measured.values, rows.lengths)
    episodes = rows.row_ids // rows_per_episode
    is_first = rows.row_ids % rows_per_episode == 0
    check_groups(rows.group_ids[is_first], num_samples)
    if rows_per_episode == 1:
        advantages = estimate(config.advantage, rewards, rows.group_ids, rows.lengths)
    else:
        firsts, order = episodes[is_first].sort()
        episode_of_row = order[torch.searchsorted(firsts, episodes)]
        lengths = torch.zeros_like(order).index_add_(0, episode_of_row, rows.lengths)
        advantages = estimate(config.advantage, rewards[is_first], rows.group_ids[is_first], lengths)
        if len(advantages) != len(order):
            raise ValueError(
                f"algorithm.adv_estimator={config.advantage.adv_estimator} returned {len(advantages)} numbers for {len(order)} "
                "episodes; with agents it must return one for each"
            )
        advantages = advantages[episode_of_row]
    return rewards, rows.spread(advantages) if len(advantages) == len(rows) else advantages


def _group_metrics(statistics: Tensor) -> dict[str, float]:
    """Return the metrics of :func:`group_statistics`, summed over ranks."""
    num_groups, equal, right, wrong, score_std_sum = statistics.tolist()
    sums = {"equal_fraction": equal, "right_fraction": right, "wrong_fraction": wrong, "score_std_mean": score_std_sum}
    return {f"group/{name}": total / max(num_groups, 1.0) for name, total in sums.items()}
