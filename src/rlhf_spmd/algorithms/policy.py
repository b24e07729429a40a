"""The policy's side of algorithms that bound its ratio: their settings, and the loss that the actor's update takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

from torch import Tensor

from rlhf_spmd.algorithms.base import RolloutConfig
from rlhf_spmd.algorithms.kl import KLLossConfig
from rlhf_spmd.algorithms.user_functions import is_user_function, user_loss
from rlhf_spmd.config.constraints import FiniteFloat, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Range
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.config.schema import inline
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.objectives.kl import kl_penalty
from rlhf_spmd.objectives.losses import LossAggMode, aggregate, policy_loss
from rlhf_spmd.objectives.ratio_losses import cispo_loss, geo_mean_loss, gspo_loss, sapo_loss
from rlhf_spmd.objectives.rollout_correction import RolloutCorrectionConfig, correction_weights
from rlhf_spmd.workers.objective import Objective, Rows, Totals


@dataclass(frozen=True)
class PolicyLossConfig:
    """A policy gradient whose ratio is bounded; the names are verl's.

    - loss_mode: how the policy ratio is bounded: `vanilla` (PPO's clip), `gspo`, `geo_mean`, `cispo`, `sapo`, or a function of your
      own, `file.py:function`: see [algorithms.md](algorithms.md#losses)
    - clip_ratio: the policy ratio is clipped to 1 - this and 1 + this
    - clip_ratio_low: the ratio's lower bound is 1 - this; null: `clip_ratio`
    - clip_ratio_high: the ratio's upper bound is 1 + this; null: `clip_ratio`
    - clip_ratio_c: dual clip: bound of the ratio for negative advantages, above 1
    - tau_pos: `sapo` only: temperature of the gate for advantages above 0
    - tau_neg: `sapo` only: temperature of the gate for the other advantages
    - entropy_coeff: entropy bonus
    - entropy_coeff_end: the bonus moves to this value on a line, within `entropy_coeff_steps`
    - entropy_coeff_steps: steps until the bonus has that value, such as `${run.steps}`; later it stays
    - mask_truncated_completions: learn nothing from a response that was cut at its limit: its tokens count neither in losses nor in
      means over tokens; its score counts in its prompt's advantages
    - loss_agg_mode: how the policy loss of tokens becomes one number
    """

    loss_mode: str = "vanilla"
    clip_ratio: Fraction = 0.2
    clip_ratio_low: Fraction | None = None
    clip_ratio_high: NonNegativeFloat | None = None
    clip_ratio_c: Annotated[float, Range(above=1)] = 3.0
    tau_pos: PositiveFloat = 1.0
    tau_neg: PositiveFloat = 1.05
    entropy_coeff: FiniteFloat = 0.0
    entropy_coeff_end: FiniteFloat | None = None
    entropy_coeff_steps: PositiveInt | None = None
    mask_truncated_completions: bool = False
    loss_agg_mode: LossAggMode = "token-mean"
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    rules: ClassVar[Rules] = (
        Rule(
            ("entropy_coeff_end", "entropy_coeff_steps"),
            lambda s: (s.entropy_coeff_end is None) != (s.entropy_coeff_steps is None),
            "a schedule has an end and a number of steps",
            "give both, or leave both out",
        ),
        Rule(
            ("loss_agg_mode", "loss_mode"),
            lambda s: s.loss_mode in ("gspo", "geo_mean") and s.loss_agg_mode != "seq-mean-token-mean",
            "the loss is one of whole responses",
            "set loss_agg_mode=seq-mean-token-mean",
        ),
        Rule(
            ("clip_ratio", "clip_ratio_low", "clip_ratio_high"),
            lambda s: s.clip_ratio != 0.2 and None not in (s.clip_ratio_low, s.clip_ratio_high),
            "beside both bounds clip_ratio does nothing",
            "leave clip_ratio out",
        ),
        Rule(
            ("rollout_correction.rollout_is", "rollout_correction.rollout_rs", "loss_mode"),
            lambda s: s.loss_mode == "geo_mean" and s.rollout_correction.by_token,
            "the loss has one ratio per response",
            "correct by sequence, or reject by seq_*",
        ),
    )

    def check(self, where: str) -> None:
        mode = loss_mode(self.loss_mode, f"{where}.loss_mode")
        for key in sorted({*LOSS_KEYS} - {*mode.keys}):
            value = getattr(self, key)
            if value != self.__dataclass_fields__[key].default:
                raise ValueError(f"{where}.{key}={value} does nothing with {where}.loss_mode={self.loss_mode}; leave it out")

    @property
    def learns_only(self) -> str | None:
        """Return the field of the rows that are learnt; None: all are."""
        return "stopped" if self.mask_truncated_completions else None

    @property
    def clip_range(self) -> tuple[float, float]:
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return low, high

    def entropy_coefficient(self, global_step: int | None) -> float:
        """Return the coefficient of step ``global_step``, which counts from 1. Raises ValueError where it has a schedule and
        ``global_step`` is None."""
        if self.entropy_coeff_end is None or self.entropy_coeff_steps is None:
            return self.entropy_coeff
        if global_step is None:
            raise ValueError(
                "algorithm.entropy_coeff_end: this algorithm's step does not tell clipped_policy its global_step; leave it out"
            )
        share = min((global_step - 1) / max(self.entropy_coeff_steps - 1, 1), 1.0)
        return self.entropy_coeff + share * (self.entropy_coeff_end - self.entropy_coeff)


@dataclass(frozen=True)
class PolicyConfig(RolloutConfig):
    """What all algorithms with a clipped policy gradient have. The keys of ``policy`` and ``kl`` are keys of ``algorithm``."""

    policy: PolicyLossConfig = inline(PolicyLossConfig)
    kl: KLLossConfig = inline(KLLossConfig)

    @property
    def bypasses_log_probs(self) -> bool:
        return self.policy.rollout_correction.bypass_mode


class LossMode(NamedTuple):
    """``loss``: takes (config, log_prob, old_log_prob, advantages, lengths). ``keys``: the keys of the configuration that it reads."""

    loss: Callable[[PolicyLossConfig, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]]
    keys: tuple[str, ...]


CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
LOSS_MODES = {
    "vanilla": LossMode(
        lambda config, new, old, advantages, lengths: policy_loss(
            new, old, advantages, *config.clip_range, config.clip_ratio_c
        ),
        (*CLIP, "clip_ratio_c"),
    ),
    "gspo": LossMode(
        lambda config, new, old, advantages, lengths: gspo_loss(new, old, advantages, lengths, *config.clip_range), CLIP
    ),
    "geo_mean": LossMode(
        lambda config, new, old, advantages, lengths: geo_mean_loss(new, old, advantages, lengths, *config.clip_range), CLIP
    ),
    "cispo": LossMode(lambda config, new, old, advantages, lengths: cispo_loss(new, old, advantages, *config.clip_range), CLIP),
    "sapo": LossMode(
        lambda config, new, old, advantages, lengths: sapo_loss(new, old, advantages, config.tau_pos, config.tau_neg),
        ("tau_pos", "tau_neg"),
    ),
}
LOSS_KEYS = (*CLIP, "clip_ratio_c", "tau_pos", "tau_neg")  # a loss of the user's own may read them all
METRICS = {"clipped": "actor/clip_frac", "dual_clipped": "actor/clip_frac_dual", "ppo_kl": "actor/ppo_kl"}


def loss_mode(name: str, where: str) -> LossMode:
    """Return the loss of this name, or the user's own. Raises ValueError."""
    if is_user_function(name):
        return LossMode(user_loss(where, name), LOSS_KEYS)
    if name not in LOSS_MODES:
        known = ", ".join(LOSS_MODES)
        raise ValueError(f"unknown {where} {name!r}; available: {known}, or a function of your own, file.py:function")
    return LOSS_MODES[name]


def clipped_policy(config: PolicyConfig, sampling: SamplingConfig, global_step: int | None = None) -> Objective:
    """Return the policy loss of ``loss_mode``, plus the KL loss and minus the entropy bonus if configured.

    ``global_step``: for an entropy coefficient with a schedule.
    """
    policy, kl = config.policy, config.kl
    bounded_loss = loss_mode(policy.loss_mode, "algorithm.loss_mode").loss
    correction = policy.rollout_correction
    entropy_coeff = policy.entropy_coefficient(global_step)

    def loss(fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        def total(per_token: Tensor) -> Tensor:
            return aggregate(
                per_token, rows.lengths, policy.loss_agg_mode, totals.tokens, totals.rows, sampling.max_response_length
            )

        def mean(per_token: Tensor) -> Tensor:
            return per_token.detach().double().sum() / totals.tokens

        log_probs, old = fields["log_probs"], fields["old_log_probs"]
        per_token, stats = bounded_loss(policy, log_probs, old, fields["advantages"], rows.lengths)
        report = {METRICS.get(name, name): mean(value) for name, value in stats.items()}
        if correction.active:
            weights, statistics = correction_weights(correction, old, fields["rollout_log_probs"], rows.lengths)
            per_token = per_token * weights
            report |= {f"rollout_corr/{name}": mean(value) for name, value in statistics.items()}
        pg_loss = result = total(per_token)
        report |= {"actor/pg_loss": pg_loss.detach().double(), "actor/entropy": mean(fields["entropy"])}
        if entropy_coeff:
            result = result - entropy_coeff * total(fields["entropy"])
        if kl.use_kl_loss:
            kl_loss = total(kl_penalty(log_probs, fields["ref_log_prob"], kl.kl_loss_type))
            result = result + kl.kl_loss_coef * kl_loss
            report["actor/kl_loss"] = kl_loss.detach().double()
        return result, report

    reads = ("old_log_probs", "advantages", *(("ref_log_prob",) if kl.use_kl_loss else ()))
    reads += ("rollout_log_probs",) if correction.active else ()
    return Objective(loss, reads, ("log_probs", "entropy"), sampling.log_prob_temperature, learn_if=policy.learns_only)
