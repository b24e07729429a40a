"""GRPO (Shao et al. 2024, arXiv 2402.03300): no critic; a response is judged against the other responses to its prompt.

The step serves all algorithms without a critic; they differ in :class:`CriticFreeConfig`: how advantages come about, and the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_spmd.algorithms.base import sample, score, validate
from rlhf_spmd.algorithms.estimators import CriticFreeConfig, in_group
from rlhf_spmd.algorithms.policy import clipped_policy
from rlhf_spmd.controller import Reference


@dataclass(frozen=True)
class Config(CriticFreeConfig):
    name: str = "grpo"
    use_kl_loss: bool = True


def step(models: Any, data: Any, config: CriticFreeConfig, number: int) -> list[Reference]:
    """One step. Returns the calls whose values are the step's metrics."""
    batch, rollout = sample(models, data, number)
    scores, scored = score(models, batch)
    old = models.actor.compute_log_prob(batch)
    batch = batch.union(scores, old)
    if config.uses_reference:
        batch = batch.union(models.reference.compute_ref_log_prob(batch))
    estimate = in_group(config, data.sampling.n)
    advantages = models.compute.apply(batch, estimate, config.reads, outputs=("advantages",), keep_groups=True)
    batch = batch.union(advantages)
    update = models.actor.update(batch, clipped_policy(config, data.sampling, number), **config.schedule)
    return [rollout, *scored, old, advantages, update]
