"""Corrections where the rollout's log-probs differ from training's: weights, masks, and measures of the difference.

The generator's policy draws the tokens (``rollout_log_prob``); the update's ratio starts from training's forward pass
(``old_log_prob``). r = exp(old - rollout) is their ratio. Truncated importance sampling: Yao et al. 2025
(https://fengyao.notion.site/off-policy-rl); sequences and masks: Liu et al. 2025 (https://richardli.xyz/rl-collapse).
All tensors are [T] packed, nats, ``lengths`` int64 [rows]; nothing takes gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from rlhf_spmd.config.constraints import PositiveFloat, PositiveFraction
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.objectives.advantages import of_tokens, row_maxima, row_means, row_sums
from rlhf_spmd.objectives.kl import low_var_kl
from rlhf_spmd.objectives.losses import LOG_RATIO_LIMIT

RejectionKind = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
CORRECTIONS = ("rollout_is", "rollout_rs", "rollout_token_veto_threshold")  # keys that each correct by themselves


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """``rollout_correction``; the names are verl's.

    - rollout_is: weight the loss by the ratio r of training's to the rollout's probability: by `token`, or by `sequence` (product
      over the response); see [algorithms.md](algorithms.md#off-policy-corrections)
    - rollout_is_threshold: the largest weight
    - rollout_rs: give outliers weight 0: `token_k1`, `seq_sum_k1`, `seq_mean_k1` (by the ratio of the token, of the row, or its
      geometric mean), or with `_k2`, `_k3` (by an estimate of the KL); also `seq_max_k2`, `seq_max_k3`, by the row's largest
    - rollout_rs_threshold: the largest ratio, or KL in nats, that is kept
    - rollout_rs_threshold_lower: the smallest ratio that is kept; null: 1 / the largest
    - rollout_token_veto_threshold: give all of a response weight 0 if a token's ratio is below this, such as `1e-4`; null: none
    - bypass_mode: take the rollout's log-probs as the old ones: the loss's ratio is against the weights that drew the tokens, and no
      forward pass computes others
    """

    rollout_is: Literal["token", "sequence"] | None = None
    rollout_is_threshold: PositiveFloat = 2.0
    rollout_rs: RejectionKind | None = None
    rollout_rs_threshold: PositiveFloat | None = None
    rollout_rs_threshold_lower: PositiveFloat | None = None
    rollout_token_veto_threshold: PositiveFraction | None = None
    bypass_mode: bool = False
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "rollout_is": ("rollout_is_threshold",),
        "rollout_rs": ("rollout_rs_threshold",),
    }

    rules: ClassVar[Rules] = (
        Rule(
            ("bypass_mode", *CORRECTIONS),
            lambda s: s.bypass_mode and s.active,
            "the rollout's log-probs are taken for training's, so a correction finds no difference",
            "leave bypass_mode or the corrections out",
        ),
        Rule(
            ("rollout_rs", "rollout_rs_threshold"),
            lambda s: s.rollout_rs is not None and s.rollout_rs_threshold is None,
            "a rejection needs a bound",
            "set rollout_rs_threshold",
        ),
        Rule(
            ("rollout_rs_threshold_lower", "rollout_rs"),
            lambda s: s.rollout_rs_threshold_lower is not None and not s.by_ratio,
            "only a ratio, with _k1, has a lower bound",
            "leave rollout_rs_threshold_lower out",
        ),
        Rule(
            ("rollout_rs_threshold_lower", "rollout_rs_threshold"),
            lambda s: s.by_ratio and not s.bounds[0] <= 1 <= s.bounds[1],
            "a row that is right has the ratio 1, which these bounds reject",
            "let the bounds include 1",
        ),
    )

    @property
    def by_ratio(self) -> bool:
        return self.rollout_rs is not None and self.rollout_rs.endswith("_k1")

    @property
    def by_token(self) -> bool:
        """Return True if a correction looks at single tokens."""
        return self.rollout_is == "token" or (self.rollout_rs or "").startswith("token")

    @property
    def active(self) -> bool:
        return any(getattr(self, key) is not None for key in CORRECTIONS)

    @property
    def bounds(self) -> tuple[float, float]:
        upper = self.rollout_rs_threshold or math.inf
        return (1 / upper if self.rollout_rs_threshold_lower is None else self.rollout_rs_threshold_lower), upper


@torch.no_grad()
def correction_weights(
    config: RolloutCorrectionConfig, old_log_prob: Tensor, rollout_log_prob: Tensor, lengths: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the factor of each token's loss [T], and statistics [T].

    They are ``rollout_is_mean`` (the weights without rejection), ``rollout_is_ratio_fraction_high`` (bool: truncated) and
    ``rollout_rs_masked_fraction`` (bool: rejected); ``rollout_is_veto_fraction`` (bool: of vetoed responses) and
    ``rollout_is_catastrophic_token_fraction`` (bool: below the veto's threshold). The factor is 1 to the bit where both log-probs are
    the same numbers.
    """

    def reduced_to(level: str, values: Tensor) -> Tensor:
        """Return each token's value, or for all tokens of a row the mean, largest or sum of its values."""
        if level == "token":
            return values
        reduce_rows = {"seq_mean": row_means, "seq_max": row_maxima}.get(level, row_sums)
        return of_tokens(reduce_rows(values, lengths), lengths)

    weights = torch.ones_like(old_log_prob)
    stats: dict[str, Tensor] = {}
    log_ratio = old_log_prob - rollout_log_prob
    if config.rollout_is is not None:
        ratio = reduced_to(config.rollout_is, log_ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        weights = ratio.clamp(max=config.rollout_is_threshold)
        stats = {"rollout_is_mean": weights, "rollout_is_ratio_fraction_high": ratio > config.rollout_is_threshold}
    if config.rollout_rs is not None:
        level, _, kind = config.rollout_rs.rpartition("_")
        lower, upper = config.bounds
        if kind == "k1":
            ratio = reduced_to(level, log_ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            rejected = (ratio < lower) | (ratio > upper)
        else:
            kl = 0.5 * log_ratio.square() if kind == "k2" else low_var_kl(log_ratio)
            rejected = reduced_to(level, kl) > upper
        weights = weights.masked_fill(rejected, 0.0)
        stats["rollout_rs_masked_fraction"] = rejected
    if config.rollout_token_veto_threshold is not None:
        below = log_ratio < math.log(config.rollout_token_veto_threshold)
        vetoed = of_tokens(row_maxima(below.to(log_ratio), lengths), lengths) > 0
        weights = weights.masked_fill(vetoed, 0.0)
        stats |= {"rollout_is_veto_fraction": vetoed, "rollout_is_catastrophic_token_fraction": below}
    return weights, stats


@torch.no_grad()
def mismatch_sums(old_log_prob: Tensor, rollout_log_prob: Tensor, lengths: Tensor) -> dict[str, Any]:
    """Return how far the two policies are apart: [total, count], which add over ranks, and under ``..._max`` this rank's largest.

    ``rollout_corr/kl`` and ``rollout_corr/k3_kl``: of the rollout's policy from training's, nats per token, by k1 and k3.
    ``rollout_corr/ppl_ratio``: training's perplexity of a response over the rollout's.
    ``training/rollout_probs_diff_mean`` and ``_max``: |difference| of the tokens' probabilities.
    """
    old, rollout = old_log_prob.double(), rollout_log_prob.double()
    difference = (old.exp() - rollout.exp()).abs()
    terms = {
        "rollout_corr/kl": rollout - old,
        "rollout_corr/k3_kl": low_var_kl(old - rollout),
        "rollout_corr/ppl_ratio": row_means(rollout - old, lengths).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(),
        "training/rollout_probs_diff_mean": difference,
    }
    sums: dict[str, Any] = {name: [float(x.sum()), len(x)] for name, x in terms.items()}
    return sums | ({"training/rollout_probs_diff_max": float(difference.max())} if len(difference) else {})
