"""DPO (Rafailov et al. 2023, arXiv 2305.18290) and its kin: pairs move the policy's log-probs apart, against those of a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_spmd.algorithms import preferences
from rlhf_spmd.controller import Reference


@dataclass(frozen=True)
class Config(preferences.DirectConfig, preferences.PairsConfig):
    name: str = "dpo"


def step(models: Any, data: Any, config: Config, global_step: int) -> list[Reference]:
    """One optimizer step. The reference is asked once about each pair, whatever the number of epochs."""
    pairs = preferences.next_with_reference(models, data.pairs)
    return [models.actor.update(pairs, config.objective(data.sampling.log_prob_temperature))]


def validate(models: Any, data: Any, config: Config, global_step: int) -> dict[str, float]:
    """``val/rewards/accuracies``: the share of pairs that the implied rewards order."""

    objective = config.objective(data.sampling.log_prob_temperature)

    def evaluate(rows: Reference) -> Reference:
        return models.actor.evaluate(preferences.reference_log_probs(models, rows), objective)

    return preferences.validate_by(data, "pairs", evaluate)
