"""Online DPO (Guo et al. 2024, arXiv 2402.04792): DPO on pairs of the policy's own responses, which the rewards decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.algorithms.base import RolloutConfig, sample, score, validate
from rlhf_spmd.algorithms.preferences import DirectLossConfig, reference_log_probs
from rlhf_spmd.config.schema import inline
from rlhf_spmd.controller import Reference
from rlhf_spmd.objectives.preferences import best_and_worst
from rlhf_spmd.workers import Computed, GlobalReduce, ReferenceWorker, RoleClass, Rows


@dataclass(frozen=True)
class Config(RolloutConfig):
    """The best and the worst of a prompt's responses are its pair."""

    name: str = "online_dpo"
    loss: DirectLossConfig = inline(DirectLossConfig)
    min_samples: ClassVar[int] = 2

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, "reference": ReferenceWorker}


def step(models: Any, data: Any, config: Config, global_step: int) -> list[Reference]:
    """Return the calls of one step. Prompts whose responses all score alike teach nothing and are left out, perhaps all."""
    batch, rollout = sample(models, data, global_step)
    scores, scored = score(models, batch)
    decided = models.compute.apply(batch.union(scores), decide, ("scores",), outputs=("chosen",), keep_groups=True)
    pairs = batch.union(decided).take(models.controller.get_field(decided, "chosen") >= 0)
    calls = [rollout, *scored, decided]
    if len(pairs) == 0:
        models.controller.log(f"step {global_step}: the responses to each prompt score alike, so nothing was learnt")
        return calls
    pairs = reference_log_probs(models, pairs)
    objective = config.loss.objective(data.sampling.log_prob_temperature)
    return [*calls, models.actor.update(pairs, objective, **config.schedule)]


def decide(fields: dict[str, Tensor], rows: Rows, reduce: GlobalReduce) -> Computed:
    chosen = best_and_worst(fields["scores"], rows.group_ids)
    groups = len(torch.unique(rows.group_ids))
    pairs, num_groups = reduce.sum(torch.tensor([int((chosen == 1).sum()), groups])).tolist()
    return {"chosen": chosen}, {"online_dpo/pairs": float(pairs), "online_dpo/ties": float(num_groups - pairs)}
