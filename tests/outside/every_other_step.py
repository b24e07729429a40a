"""GRPO that samples in odd steps only, and in even steps trains once more on the rows that it has kept."""

from typing import Any

from rlhf_spmd.algorithms.base import sample, score
from rlhf_spmd.algorithms.grpo import Config as GRPOConfig
from rlhf_spmd.algorithms.grpo import estimated_advantages
from rlhf_spmd.algorithms.policy import clipped_policy
from rlhf_spmd.controller import Reference

Config = GRPOConfig


def step(models: Any, data: Any, config: GRPOConfig, number: int) -> list[Reference]:
    calls: list[Reference] = []
    if number % 2:
        batch, rollout = sample(models, data, number)
        scores, scored = score(models, batch)
        batch = batch.union(scores, models.actor.compute_log_prob(batch))
        batch = batch.union(models.reference.compute_ref_log_prob(batch))
        advantages = models.compute.apply(
            batch, estimated_advantages(config), ("scores",), outputs=("advantages",), keep_groups=True
        )
        data.kept["rows"] = batch.union(advantages)
        calls = [rollout, *scored]
    return [*calls, models.actor.update(data.kept["rows"], clipped_policy(config, data.sampling), **config.schedule)]
