"""A cost model from safety preferences (Safe-RLHF, Dai et al. 2023, arXiv 2310.12773): the order of costs says which response is less
safe, their sign which is unsafe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rlhf_spmd.algorithms.base import StreamSpec
from rlhf_spmd.algorithms.preferences import ScoreModelConfig, pair_objective
from rlhf_spmd.algorithms.reward_model import step, validate
from rlhf_spmd.data.preferences import SafetyPreferencesConfig
from rlhf_spmd.objectives.preferences import cost_preference
from rlhf_spmd.workers.objective import Objective


@dataclass(frozen=True)
class Config(ScoreModelConfig):
    name: str = "cost_model"
    streams: ClassVar[Mapping[str, StreamSpec]] = {"pairs": StreamSpec("data", SafetyPreferencesConfig)}
    exported: ClassVar[str] = "cost"

    def objective(self) -> Objective:
        """Return the loss of order and signs of costs, with the shares of pairs in order and of responses with the right sign."""

        def loss(safer: dict[str, Tensor], riskier: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            low, high = safer["row_values"], riskier["row_values"]
            signs = [(side["row_values"] * side["safe"] < 0).double() for side in (safer, riskier)]
            report = {"accuracy": high > low, "accuracy_sign": (signs[0] + signs[1]) / 2}
            report |= {"costs/chosen": low, "costs/rejected": high}
            return cost_preference(low, high, safer["safe"], riskier["safe"]), report

        return pair_objective(loss, ("safe",), "row_values")
