"""DPO (Rafailov et al. 2023, arXiv 2305.18290) and its kin: pairs move the policy's log-probs apart, against those of a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.algorithms.preferences import (
    PairsConfig,
    check_loss_type,
    direct_preference,
    next_with_reference,
    reference_log_probs,
    validate_by,
)
from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.controller import Reference
from rlhf_spmd.workers.arithmetic import RoleClass
from rlhf_spmd.workers.objective import Objective
from rlhf_spmd.workers.reference import ReferenceWorker


@dataclass(frozen=True)
class DPOConfig(PairsConfig):
    """``loss_type``: sigmoid, ipo, hinge or robust; ``label_smoothing``: the share of pairs that are taken to be the wrong way round;
    ``length_normalized``: means of log-probs per token in place of sums."""

    name: str = "dpo"
    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    length_normalized: bool = False

    def check(self, where: str) -> None:
        super().check(where)
        check_bounds(self, where, "beta", above=0)
        check_loss_type(self.loss_type, self.label_smoothing, where)

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, "reference": ReferenceWorker}


def step(models: Any, data: Any, config: DPOConfig, number: int) -> list[Reference]:
    """One optimizer step. The reference is asked once about each pair, whatever the number of epochs."""
    pairs = next_with_reference(models, data.pairs)
    return [models.actor.update(pairs, objective(data, config))]


def objective(data: Any, config: DPOConfig) -> Objective:
    return direct_preference(config, data.sampling.log_prob_temperature)


def validate(models: Any, data: Any, config: DPOConfig, number: int) -> dict[str, float]:
    """``val/rewards/accuracies``: the share of pairs that the implied rewards order."""

    def evaluate(rows: Reference) -> Reference:
        return models.actor.evaluate(reference_log_probs(models, rows), objective(data, config))

    return validate_by(data, "pairs", evaluate)


Config = DPOConfig
