"""SimPO (Meng et al. 2024, arXiv 2405.14734): the reward of a response is its mean log-prob per token. No reference."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlhf_spmd.algorithms.preferences import PairLearningConfig, implied_rewards, pair_objective
from rlhf_spmd.algorithms.reward_model import step, validate
from rlhf_spmd.config.constraints import NonNegativeFloat, PositiveFloat
from rlhf_spmd.objectives.preferences import simpo
from rlhf_spmd.workers.objective import Objective


@dataclass(frozen=True)
class Config(PairLearningConfig):
    """The names are TRL's.

    - beta: scale of rewards
    - simpo_gamma: the margin by which the chosen response's reward shall be above the other's, in units of the reward
    """

    name: str = "simpo"
    beta: PositiveFloat = 2.0
    simpo_gamma: NonNegativeFloat = 1.0

    def objective(self) -> Objective:
        def loss(chosen: dict[str, Tensor], rejected: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            means = [side["logps"] / side["tokens"] for side in (chosen, rejected)]
            report = implied_rewards(self.beta * means[0], self.beta * means[1], (chosen["logps"], rejected["logps"]))
            return simpo(means[0], means[1], self.beta, self.simpo_gamma), report

        return pair_objective(loss, (), "log_probs")
