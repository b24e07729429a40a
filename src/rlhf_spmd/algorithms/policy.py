"""The policy's side of algorithms that clip its ratio: their knobs, and the loss that the actor's update takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_spmd.algorithms.base import RolloutConfig
from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.objectives.kl import check_kl_kind, kl_penalty
from rlhf_spmd.objectives.losses import aggregate, check_clip_ratios, check_loss_agg_mode, policy_loss
from rlhf_spmd.workers.objective import Objective, Rows, Totals


@dataclass(frozen=True)
class PolicyConfig(RolloutConfig):
    """``clip_ratio_low/high`` default to ``clip_ratio``."""

    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    entropy_coeff: float = 0.0
    loss_agg_mode: str = "token-mean"

    def check(self, where: str) -> None:
        super().check(where)
        check_kl_kind(self.kl_loss_type, f"{where}.kl_loss_type")
        check_loss_agg_mode(self.loss_agg_mode, f"{where}.loss_agg_mode")
        check_clip_ratios(*self.clip_range, self.clip_ratio_c, f"{where}.")
        check_bounds(self, where, "kl_loss_coef", least=0)
        check_bounds(self, where, "entropy_coeff")

    @property
    def clip_range(self) -> tuple[float, float]:
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return low, high


def clipped_policy(config: PolicyConfig, sampling: SamplingConfig) -> Objective:
    """Clipped policy loss, plus the KL loss and minus the entropy bonus if configured."""

    def loss(fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        def total(per_token: Tensor) -> Tensor:
            return aggregate(
                per_token, rows.lengths, config.loss_agg_mode, totals.tokens, totals.rows, sampling.max_response_length
            )

        def mean(per_token: Tensor) -> Tensor:
            return per_token.detach().double().sum() / totals.tokens

        log_probs = fields["log_probs"]
        per_token, stats = policy_loss(
            log_probs, fields["old_log_probs"], fields["advantages"], *config.clip_range, config.clip_ratio_c
        )
        pg_loss = result = total(per_token)
        report = {"actor/pg_loss": pg_loss.detach().double()}
        report |= {"actor/clip_frac": mean(stats["clipped"]), "actor/clip_frac_dual": mean(stats["dual_clipped"])}
        report |= {"actor/ppo_kl": mean(stats["ppo_kl"]), "actor/entropy": mean(fields["entropy"])}
        if config.entropy_coeff:
            result = result - config.entropy_coeff * total(fields["entropy"])
        if config.use_kl_loss:
            kl_loss = total(kl_penalty(log_probs, fields["ref_log_prob"], config.kl_loss_type))
            result = result + config.kl_loss_coef * kl_loss
            report["actor/kl_loss"] = kl_loss.detach().double()
        return result, report

    reads = ("old_log_probs", "advantages", *(("ref_log_prob",) if config.use_kl_loss else ()))
    return Objective(loss, reads, ("log_probs", "entropy"), sampling.log_prob_temperature)
