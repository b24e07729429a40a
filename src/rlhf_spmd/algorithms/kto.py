"""KTO (Ethayarajh et al. 2024, arXiv 2402.01306): responses that are each desirable or not, against a baseline of their batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.algorithms.base import StreamSpec
from rlhf_spmd.algorithms.preferences import PairLearningConfig, next_with_reference, reference_log_probs, validation_statistics
from rlhf_spmd.config.constraints import NonNegativeFloat, PositiveFloat
from rlhf_spmd.controller import Reference
from rlhf_spmd.data.preferences import UnpairedConfig
from rlhf_spmd.objectives.advantages import row_sums
from rlhf_spmd.objectives.preferences import kto
from rlhf_spmd.workers import Computed, GlobalReduce, Objective, ReferenceWorker, RoleClass, Rows, Totals


@dataclass(frozen=True)
class Config(PairLearningConfig):
    """The names are TRL's.

    - beta: how far the policy may go from the reference
    - desirable_weight: weight of desirable responses; the paper uses it to make up for unequal numbers of the two kinds
    - undesirable_weight: weight of undesirable responses
    """

    name: str = "kto"
    beta: PositiveFloat = 0.1
    desirable_weight: NonNegativeFloat = 1.0
    undesirable_weight: NonNegativeFloat = 1.0
    streams: ClassVar[Mapping[str, StreamSpec]] = {"responses": StreamSpec("data", UnpairedConfig)}

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, "reference": ReferenceWorker}


def step(models: Any, data: Any, config: Config, global_step: int) -> list[Reference]:
    """Return the calls of one optimizer step on labelled rows. Their prompts with completions of other prompts give the baseline."""
    rows = next_with_reference(models, data.responses)
    estimate, baseline, desirable = estimate_kl(models, rows)
    return [estimate, models.actor.update(rows.firsts(), objective(config, baseline, desirable))]


def estimate_kl(models: Any, rows: Reference) -> tuple[Reference, float, float]:
    """Return the call that estimates the KL, the baseline and the share of desirable rows.

    The baseline is the mean log-ratio of the groups' second rows, at least 0.
    """
    mismatched = rows.take(np.arange(len(rows)) % 2 == 1)
    mismatched = mismatched.union(models.actor.compute_log_prob(mismatched))
    call = models.compute.apply(mismatched, mean_log_ratio, ("old_log_probs", "ref_logps", "desirable"))
    values = models.controller.get(call)[0] or [{"kto/kl": 0.0, "kto/desirable_fraction": 0.5}]  # empty while tracing
    return call, max(values[0]["kto/kl"], 0.0), values[0]["kto/desirable_fraction"]


def mean_log_ratio(fields: dict[str, Tensor], rows: Rows, reduce: GlobalReduce) -> Computed:
    ratios = row_sums(fields["old_log_probs"].double(), rows.lengths) - fields["ref_logps"]
    local_sums = [float(ratios.sum()), float(fields["desirable"].sum()), len(rows)]
    total, desirable, count = reduce.sum(torch.tensor(local_sums, dtype=torch.float64)).tolist()
    return {}, {"kto/kl": total / count, "kto/desirable_fraction": desirable / count}


def objective(config: Config, baseline: float, desirable: float) -> Objective:
    """Return KTO's objective. ``desirable``: the share of such rows, by which their mean reward is reported; in validation over all
    batches together.
    """

    def loss(fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        is_good = fields["desirable"] > 0
        ratios = row_sums(fields["log_probs"].double(), rows.lengths) - fields["ref_logps"]
        losses = kto(ratios, is_good, baseline, config.beta, (config.desirable_weight, config.undesirable_weight))
        report = {"accuracy": ((ratios > baseline) == is_good).double().sum() / totals.rows}
        for name, side, share in (("chosen", is_good, desirable), ("rejected", ~is_good, 1 - desirable)):
            report[f"rewards/{name}"] = (config.beta * ratios.detach() * side).sum() / (totals.rows * share or 1.0)
        return losses.sum() / totals.rows, report

    return Objective(loss, ("desirable", "ref_logps"))


def validate(models: Any, data: Any, config: Config, global_step: int) -> dict[str, float]:
    """Return the objective's statistics; ``val/accuracy`` is the share of log-ratios on their label's side of the batch's baseline."""
    desirable = float(data.validation.rows["responses"].dataset.numbers["desirable"].mean())

    def evaluate(rows: Reference) -> Reference:
        rows = reference_log_probs(models, rows)
        _, baseline, _ = estimate_kl(models, rows)
        return models.actor.evaluate(rows.firsts(), objective(config, baseline, desirable))

    return validation_statistics(data, "responses", evaluate)
