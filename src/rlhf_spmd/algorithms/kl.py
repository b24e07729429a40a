"""The KL to the reference: in the loss, in the reward, and the coefficient in the reward, which follows what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.config.constraints import NonNegativeFloat
from rlhf_spmd.objectives.advantages import row_means
from rlhf_spmd.objectives.kl import KLControlConfig, KLKind, kl_penalty
from rlhf_spmd.workers.objective import Rows


@dataclass(frozen=True)
class KLLossConfig:
    """The KL in the loss; the names are verl's.

    - use_kl_loss: add the KL to the reference to the policy loss
    - kl_loss_coef: coefficient of that KL
    - kl_loss_type: estimate of that KL, as `kl_penalty`; a final `+` (`k3+`) keeps the value and takes the gradient of k2
    """

    use_kl_loss: bool = False
    kl_loss_coef: NonNegativeFloat = 0.001
    kl_loss_type: KLKind = "low_var_kl"
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"use_kl_loss": ("kl_loss_coef", "kl_loss_type")}


@dataclass(frozen=True)
class KLConfig(KLLossConfig):
    """The KL in the loss and in the reward; the names are verl's.

    - use_kl_in_reward: subtract the KL to the reference from the reward of each token
    - kl_penalty: estimate in the reward: `kl` or `k1`, `abs`, `mse` or `k2`, `low_var_kl` or `k3`
    """

    use_kl_in_reward: bool = True
    kl_penalty: KLKind = "kl"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "use_kl_in_reward": ("kl_ctrl.kl_coef", "kl_ctrl.type"),
        "use_kl_in_reward or use_kl_loss": ("kl_penalty",),
    }

    @property
    def uses_reference(self) -> bool:
        return self.use_kl_in_reward or self.use_kl_loss

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the fields that :class:`MeasuredKL` computes from."""
        return ("old_log_probs", "ref_log_prob") if self.uses_reference else ()


class MeasuredKL:
    """A step's KL to the reference, and the coefficient by which the reward subtracts it.

    ``values``: the KL of each token [T]; 0 without a reference. ``state``: the role's, which keeps the coefficient. It follows the
    mean over rows of each row's mean KL per token (verl's meaning of ``target_kl``), and stays where KL is no part of the reward.
    """

    def __init__(self, config: KLConfig, fields: dict[str, Tensor], rows: Rows, state: dict[str, Any]) -> None:
        self.state, self.config, self.lengths = state, config, rows.lengths
        # A fixed coefficient is the configuration's, also in a resumed run: a user who changes it means it.
        last_step = state if config.kl_ctrl.moves else {}
        self.coefficient = float(last_step.get("kl_coef", config.kl_ctrl.kl_coef))
        self.values = torch.zeros(int(rows.lengths.sum()), dtype=fields["scores"].dtype)
        if config.use_kl_in_reward or "ref_log_prob" in fields:
            self.values = kl_penalty(fields["old_log_probs"], fields["ref_log_prob"], config.kl_penalty)

    def sums(self) -> Tensor:
        """Return float64 [4]: rows, tokens, the sum of KL, and the sum of the rows' means. Sum it over ranks."""
        kl = self.values.double()
        counts = kl.new_tensor([float(len(self.lengths)), float(len(kl))])
        return torch.cat([counts, torch.stack([kl.sum(), row_means(kl, self.lengths).sum()])])

    def settle(self, sums: Tensor) -> dict[str, float]:
        """Move the coefficient, once per step, by the :meth:`sums` of all ranks. Returns the metrics."""
        rows, tokens, total, row_total = sums.tolist()
        rows, tokens = max(rows, 1.0), max(tokens, 1.0)  # of a step in which every episode of agents failed
        control = self.config.kl_ctrl
        coefficient = self.coefficient
        if self.config.use_kl_in_reward:
            coefficient = control.moved(coefficient, row_total / rows, int(rows))
        if control.moves:
            self.state["kl_coef"] = coefficient
        return {"actor/kl": total / tokens, "actor/kl_per_row": row_total / rows, "actor/kl_coef": coefficient}
