"""KL in the reward, for algorithms that subtract it: their knobs, and its coefficient, which moves with what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.algorithms.policy import PolicyConfig
from rlhf_spmd.config.constraints import Fraction
from rlhf_spmd.objectives.advantages import row_means
from rlhf_spmd.objectives.kl import KLControlConfig, check_kl_kind, kl_penalty
from rlhf_spmd.workers.objective import Rows


@dataclass(frozen=True)
class KLRewardConfig(PolicyConfig):
    """The names are verl's.

    - gamma: discount per token
    - use_kl_in_reward: subtract the KL to the reference from the reward of each token
    - kl_penalty: estimate in the reward: `kl` or `k1`, `abs`, `mse` or `k2`, `low_var_kl` or `k3`
    """

    gamma: Fraction = 1.0
    use_kl_in_reward: bool = True
    kl_penalty: str = "kl"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "use_kl_in_reward": ("kl_ctrl.kl_coef", "kl_ctrl.type"),
        "use_kl_in_reward or use_kl_loss": ("kl_penalty",),
    }

    def check(self, where: str) -> None:
        super().check(where)
        check_kl_kind(self.kl_penalty, f"{where}.kl_penalty")

    @property
    def uses_reference(self) -> bool:
        return self.use_kl_in_reward or self.use_kl_loss


class MeasuredKL:
    """A step's KL to the reference, and the coefficient that it is subtracted by. ``values``: per token [T]; 0 without a reference.

    ``state``: of the role, where the coefficient is kept. It moves on the mean over rows of the row's mean KL per token (verl's
    meaning of ``target_kl``), and not where KL is no part of the reward.
    """

    def __init__(self, config: KLRewardConfig, fields: dict[str, Tensor], rows: Rows, state: dict[str, Any]) -> None:
        self.state, self.config, self.lengths = state, config, rows.lengths
        # of this step; one that does not move is the configuration's, also of a resumed run: a user who changes it means it
        kept = state if config.kl_ctrl.moves else {}
        self.coefficient = float(kept.get("kl_coef", config.kl_ctrl.kl_coef))
        self.values = torch.zeros(int(rows.lengths.sum()), dtype=fields["scores"].dtype)
        if config.use_kl_in_reward or "ref_log_prob" in fields:
            self.values = kl_penalty(fields["old_log_probs"], fields["ref_log_prob"], config.kl_penalty)

    def sums(self) -> Tensor:
        """float64 [4]: rows, tokens, KL, and the rows' means of it. Sum it over ranks."""
        kl = self.values.double()
        counts = kl.new_tensor([float(len(self.lengths)), float(len(kl))])
        return torch.cat([counts, torch.stack([kl.sum(), row_means(kl, self.lengths).sum()])])

    def settle(self, sums: Tensor) -> dict[str, float]:
        """Move the coefficient, once per step, by :meth:`sums` of all ranks. Returns the metrics."""
        rows, tokens, total, row_total = sums.tolist()
        control, coefficient = self.config.kl_ctrl, self.coefficient
        if self.config.use_kl_in_reward:
            coefficient = control.moved(coefficient, row_total / rows, int(rows))
        if control.moves:
            self.state["kl_coef"] = coefficient
        return {"actor/kl": total / tokens, "actor/kl_per_row": row_total / rows, "actor/kl_coef": coefficient}
