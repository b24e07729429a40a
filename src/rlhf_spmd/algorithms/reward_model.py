"""A reward model from preferences (Bradley-Terry; Ouyang et al. 2022, arXiv 2203.02155): a score at the last token of a response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from rlhf_spmd.algorithms.preferences import ScoreModelConfig, pair_objective, validation_statistics
from rlhf_spmd.config.constraints import NonNegativeFloat
from rlhf_spmd.controller import Reference
from rlhf_spmd.objectives.preferences import bradley_terry
from rlhf_spmd.workers.objective import Objective


@dataclass(frozen=True)
class Config(ScoreModelConfig):
    """The name is TRL's.

    - center_rewards_coefficient: weight of the square of the sum of a pair's scores, which keeps scores near 0
    """

    name: str = "reward_model"
    center_rewards_coefficient: NonNegativeFloat = 0.0

    def objective(self) -> Objective:
        """Return the Bradley-Terry loss with the rows' margins, with the share of pairs in order. The penalty of the sum is that of
        Eisenstein et al. 2023 (arXiv 2312.09244).
        """

        def loss(chosen: dict[str, Tensor], rejected: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            better, worse = chosen["row_values"], rejected["row_values"]
            report = {"rewards/chosen": better, "rewards/rejected": worse, "rewards/margins": better - worse}
            report["accuracy"] = better > worse
            penalty = self.center_rewards_coefficient * (better + worse).square()
            return bradley_terry(better, worse, chosen["margin"]) + penalty, report

        return pair_objective(loss, ("margin",), "row_values")


class LearnsPairs(Protocol):
    """``objective``: the loss of a step and of a validation."""

    exported: ClassVar[str]

    def objective(self) -> Objective: ...


def step(models: Any, data: Any, config: LearnsPairs, global_step: int) -> list[Reference]:
    """Return the call of one optimizer step on pairs, for all algorithms that need nothing else: they differ in their objective."""
    role = getattr(models, config.exported)
    return [role.update(data.pairs.next(), config.objective())]


def validate(models: Any, data: Any, config: LearnsPairs, global_step: int) -> dict[str, float]:
    role = getattr(models, config.exported)
    objective = config.objective()
    return validation_statistics(data, "pairs", lambda rows: role.evaluate(rows, objective))
