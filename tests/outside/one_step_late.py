"""GRPO on the rollout of the step before, which the script keeps: its old log-probs are of the weights that are to be updated."""

from typing import Any

from rlhf_spmd.algorithms.base import sample, score
from rlhf_spmd.algorithms.grpo import Config as GRPOConfig
from rlhf_spmd.algorithms.grpo import estimated_advantages
from rlhf_spmd.algorithms.policy import clipped_policy
from rlhf_spmd.controller import Reference

Config = GRPOConfig


def step(models: Any, data: Any, config: GRPOConfig, number: int) -> list[Reference]:
    batch, rollout = sample(models, data, number)
    scores, scored = score(models, batch)
    late = data.kept.get("rollout")
    data.kept["rollout"] = batch.union(scores)
    if late is None:
        return [rollout, *scored]
    old = models.actor.compute_log_prob(late)
    late = late.union(old, models.reference.compute_ref_log_prob(late))
    advantages = models.compute.apply(
        late, estimated_advantages(config), ("scores",), outputs=("advantages",), keep_groups=True
    )
    update = models.actor.update(late.union(advantages), clipped_policy(config, data.sampling), **config.schedule)
    return [rollout, *scored, old, advantages, update]
