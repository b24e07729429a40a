"""Online DPO (Guo et al. 2024): of each prompt's responses the best against the worst, in one micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from outside.best_of_n import by_score
from rlhf_spmd.algorithms.base import RolloutConfig, sample, score
from rlhf_spmd.controller import Reference
from rlhf_spmd.workers.compute import RoleClass
from rlhf_spmd.workers.objective import Objective, Rows, Totals
from rlhf_spmd.workers.reference import ReferenceWorker


@dataclass(frozen=True)
class Config(RolloutConfig):
    beta: float = 0.1
    min_samples: ClassVar[int] = 2

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, "reference": ReferenceWorker}


def step(models: Any, data: Any, config: Config, number: int) -> list[Reference]:
    batch, rollout = sample(models, data, number)
    scores, scored = score(models, batch)
    pairs = batch.union(scores).take(np.concatenate(by_score(models.controller, scores)))
    pairs = pairs.union(models.reference.compute_ref_log_prob(pairs))
    return [rollout, *scored, models.actor.update(pairs, preference(config.beta), **config.schedule)]


def preference(beta: float) -> Objective:
    def loss(fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
        ratios = fields["log_probs"] - fields["ref_log_prob"]
        of_row = torch.repeat_interleave(torch.arange(len(rows)), rows.lengths)
        per_row = ratios.new_zeros(len(rows)).index_add(0, of_row, ratios)
        scores, groups = fields["scores"], rows.group_ids
        is_pair = (groups[:, None] == groups) & (scores[:, None] > scores)
        margins = beta * (per_row[:, None] - per_row)[is_pair]
        num_pairs = totals.rows / 2
        report = {"actor/margin": margins.detach().double().sum() / num_pairs, "actor/pairs": is_pair.double().sum()}
        return -logsigmoid(margins).sum() / num_pairs, report

    return Objective(loss, ("ref_log_prob", "scores"), keep_groups=True)
