"""DPO (Rafailov et al. 2023, arXiv 2305.18290) and its kin: pairs move the policy's log-probs apart, against those of a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.algorithms import preferences
from rlhf_spmd.config.schema import inline
from rlhf_spmd.controller import Reference
from rlhf_spmd.workers import ReferenceWorker, RoleClass


@dataclass(frozen=True)
class Config(preferences.PairLearningConfig):
    name: str = "dpo"
    loss: preferences.DirectLossConfig = inline(preferences.DirectLossConfig)

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, "reference": ReferenceWorker}


def step(models: Any, data: Any, config: Config, global_step: int) -> list[Reference]:
    """Do one optimizer step and return the update. The reference is asked about each pair once, in whatever epoch it first comes."""
    pairs = preferences.next_with_reference(models, data.pairs)
    return [models.actor.update(pairs, config.loss.objective())]


def validate(models: Any, data: Any, config: Config, global_step: int) -> dict[str, float]:
    """Return the objective's statistics; ``val/rewards/accuracies`` is the share of pairs that the implied rewards order."""
    objective = config.loss.objective()

    def evaluate(rows: Reference) -> Reference:
        return models.actor.evaluate(preferences.reference_log_probs(models, rows), objective)

    return preferences.validation_statistics(data, "pairs", evaluate)
