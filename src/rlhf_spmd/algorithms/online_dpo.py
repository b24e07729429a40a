"""Online DPO (Guo et al. 2024, arXiv 2402.04792): DPO on pairs of the policy's own responses, which the rewards decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.algorithms.base import RolloutConfig, sample, score, validate
from rlhf_spmd.algorithms.preferences import DirectConfig, reference_log_probs
from rlhf_spmd.controller import Reference
from rlhf_spmd.objectives.preferences import best_and_worst
from rlhf_spmd.workers import Computed, GlobalReduce, Rows


@dataclass(frozen=True)
class Config(DirectConfig, RolloutConfig):
    """Of more than two responses to a prompt the best and the worst are the pair."""

    name: str = "online_dpo"
    min_samples: ClassVar[int] = 2


def step(models: Any, data: Any, config: Config, number: int) -> list[Reference]:
    """One step. Prompts whose responses all score alike teach nothing and are left out; a step may have no others."""
    batch, rollout = sample(models, data, number)
    scores, scored = score(models, batch)
    decided = models.compute.apply(batch.union(scores), decide, ("scores",), outputs=("chosen",), keep_groups=True)
    pairs = batch.union(decided).take(models.controller.get_field(decided, "chosen") >= 0)
    calls = [rollout, *scored, decided]
    if len(pairs) == 0:
        models.controller.tell(f"step {number}: the responses to each prompt score alike, so nothing was learnt")
        return calls
    pairs, objective = reference_log_probs(models, pairs), config.objective(data.sampling.log_prob_temperature)
    return [*calls, models.actor.update(pairs, objective, **config.schedule)]


def decide(fields: dict[str, Tensor], rows: Rows, whole: GlobalReduce) -> Computed:
    chosen = best_and_worst(fields["scores"], rows.group_ids)
    groups = len(torch.unique(rows.group_ids))
    pairs, num_groups = whole.sum(torch.tensor([int((chosen == 1).sum()), groups])).tolist()
    return {"chosen": chosen}, {"online_dpo/pairs": float(pairs), "online_dpo/ties": float(num_groups - pairs)}
