"""GRPO (Shao et al. 2024, arXiv 2402.03300): no critic; a response is judged against the other responses to its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.algorithms.base import sample, score, validate
from rlhf_spmd.algorithms.policy import PolicyConfig, clipped_policy
from rlhf_spmd.controller import Reference
from rlhf_spmd.data.batch import Field
from rlhf_spmd.objectives.advantages import group_advantages
from rlhf_spmd.workers.arithmetic import Function, RoleClass, Whole
from rlhf_spmd.workers.objective import Rows
from rlhf_spmd.workers.reference import ReferenceWorker

__all__ = ["Config", "GRPOConfig", "step", "validate"]


@dataclass(frozen=True)
class GRPOConfig(PolicyConfig):
    """``norm_adv_by_std_in_grpo``: divide by the standard deviation of the group's scores too (verl's name)."""

    name: str = "grpo"
    use_kl_loss: bool = True
    norm_adv_by_std_in_grpo: bool = True
    min_samples: ClassVar[int] = 2

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, **({"reference": ReferenceWorker} if self.use_kl_loss else {})}


def step(models: Any, data: Any, config: GRPOConfig, number: int) -> list[Reference]:
    """One GRPO step. Returns the calls whose values are the step's metrics."""
    batch, rollout = sample(models, data, number)
    scores, scored = score(models, batch)
    old = models.actor.compute_log_prob(batch)
    batch = batch.union(scores, old)
    if config.use_kl_loss:
        batch = batch.union(models.reference.compute_ref_log_prob(batch))
    advantages = models.arithmetic.apply(batch, in_group(config), ("scores",), gives=("advantages",), keep_groups=True)
    update = models.actor.update(batch.union(advantages), clipped_policy(config, data.sampling), **config.schedule)
    return [rollout, *scored, old, advantages, update]


def in_group(config: GRPOConfig) -> Function:
    def compute_advantage(fields: dict[str, Tensor], rows: Rows, whole: Whole) -> tuple[dict[str, Field], dict[str, float]]:
        advantages = group_advantages(fields["scores"], rows.group_ids, config.norm_adv_by_std_in_grpo)
        zeros, num_rows = whole.sum(torch.tensor([int((advantages == 0).sum()), len(rows)])).tolist()
        return {"advantages": rows.per_token(rows.spread(advantages))}, {"actor/zero_advantage_fraction": zeros / num_rows}

    return compute_advantage


Config = GRPOConfig
