"""ORPO (Hong et al. 2024, arXiv 2403.07691): supervised fine-tuning on the chosen responses, and the odds ratio of the pair. No
reference."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_spmd.algorithms.preferences import PairLearningConfig, implied_rewards, pair_objective
from rlhf_spmd.algorithms.reward_model import step, validate
from rlhf_spmd.config.constraints import PositiveFloat
from rlhf_spmd.objectives.preferences import odds_ratio
from rlhf_spmd.workers.objective import Objective


@dataclass(frozen=True)
class Config(PairLearningConfig):
    """The name is TRL's.

    - beta: weight of the odds ratio's loss, the paper's lambda
    """

    name: str = "orpo"
    beta: PositiveFloat = 0.1

    def objective(self) -> Objective:
        def loss(chosen: dict[str, Tensor], rejected: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            means = [side["logps"] / side["tokens"] for side in (chosen, rejected)]
            ratio = odds_ratio(*means)
            report = implied_rewards(self.beta * means[0], self.beta * means[1], (chosen["logps"], rejected["logps"]))
            return -means[0] + self.beta * ratio, report | {"nll_loss": -means[0], "odds_ratio_loss": ratio}

        return pair_objective(loss, (), "log_probs")
