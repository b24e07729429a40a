"""The critic's side of algorithms that have one: their knobs, advantages and returns by its values, and its loss."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlhf_spmd.algorithms.policy import PolicyConfig
from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.data.batch import Field
from rlhf_spmd.objectives.advantages import gae, moments, row_means, token_level_rewards, whiten
from rlhf_spmd.objectives.kl import KLControlConfig, build_kl_controller, check_kl_kind, kl_penalty
from rlhf_spmd.objectives.losses import aggregate, explained_variance, explained_variance_sums, value_loss
from rlhf_spmd.workers.arithmetic import Function, Whole
from rlhf_spmd.workers.objective import Objective, Rows, Totals


@dataclass(frozen=True)
class CriticConfig(PolicyConfig):
    """The names are verl's."""

    gamma: float = 1.0
    lam: float = 1.0
    use_kl_in_reward: bool = True
    kl_penalty: str = "kl"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    cliprange_value: float = 0.5

    def check(self, where: str) -> None:
        super().check(where)
        check_kl_kind(self.kl_penalty, f"{where}.kl_penalty")
        check_bounds(self, where, "gamma", "lam", least=0, most=1)
        check_bounds(self, where, "cliprange_value", least=0)

    @property
    def uses_reference(self) -> bool:
        return self.use_kl_in_reward or self.use_kl_loss


def gae_advantages(config: CriticConfig) -> Function:
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
        mine = [float(len(rows)), float(len(values)), *(float(x.double().sum()) for x in (kl, row_kl, rewards))]
        sums = whole.sum(
            torch.cat([torch.tensor(mine, dtype=torch.float64), moments(advantages), explained_variance_sums(values, returns)])
        )
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


def clipped_value(config: CriticConfig) -> Objective:
    """Clipped value loss; its statistics."""

    def loss(fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        per_token, clipped = value_loss(fields["values"], fields["old_values"], fields["returns"], config.cliprange_value)
        result = aggregate(per_token, rows.lengths, "token-mean", totals.tokens, totals.rows)
        report = {"critic/vf_loss": result.detach().double(), "critic/clip_frac": clipped.double().sum() / totals.tokens}
        report["critic/values_mean"] = fields["values"].detach().double().sum() / totals.tokens
        return result, report

    return Objective(loss, ("old_values", "returns"), ("values",))
