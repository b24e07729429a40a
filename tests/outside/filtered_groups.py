"""Dynamic sampling's filter (DAPO, Yu et al. 2025): what is trained on is decided by what the rewards say.

How many groups are left changes from step to step: five, which two mini-batches do not divide; one, which leaves replicas
without rows; none, although the trace foresaw an update.
"""

from typing import Any

import numpy as np

from rlhf_spmd.algorithms.base import sample, score
from rlhf_spmd.algorithms.grpo import Config as GRPOConfig
from rlhf_spmd.algorithms.grpo import estimated_advantages
from rlhf_spmd.algorithms.policy import clipped_policy
from rlhf_spmd.controller import Reference

Config = GRPOConfig
NUM_LEFT = (5, 1, 0)


def step(models: Any, data: Any, config: GRPOConfig, number: int) -> list[Reference]:
    batch, rollout = sample(models, data, number)
    scores, scored = score(models, batch)
    batch = batch.union(scores).take(of_best_groups(models.controller, scores, NUM_LEFT[(number - 1) % len(NUM_LEFT)]))
    if not len(batch):
        return [rollout, *scored]
    old = models.actor.compute_log_prob(batch)
    batch = batch.union(old, models.reference.compute_ref_log_prob(batch))
    advantages = models.compute.apply(
        batch, estimated_advantages(config), ("scores",), outputs=("advantages",), keep_groups=True
    )
    update = models.actor.update(batch.union(advantages), clipped_policy(config, data.sampling), **config.schedule)
    return [rollout, *scored, old, advantages, update]


def of_best_groups(controller: Any, scores: Reference, num_groups: int) -> np.ndarray:
    """Bool [rows]: of the groups with the highest means; with 0 those of which every answer is right, with a score of 1."""
    values, groups = controller.get_field(scores, "scores").numpy(), scores.rows.group_ids
    _, group_of, counts = np.unique(groups, return_inverse=True, return_counts=True)
    means = np.bincount(group_of, values) / counts
    chosen = means >= np.sort(means)[-num_groups] if num_groups else means == 1.0
    return chosen[group_of]
