"""Expert iteration: the likelihood of the best response to each prompt, in mini-batches. One without a score is never the best."""

from typing import Any

import numpy as np

from rlhf_spmd.algorithms.base import RolloutConfig, sample, score
from rlhf_spmd.algorithms.sft import likelihood
from rlhf_spmd.controller import Reference

Config = RolloutConfig


def step(models: Any, data: Any, config: RolloutConfig, number: int) -> list[Reference]:
    batch, rollout = sample(models, data, number)
    scores, scored = score(models, batch)
    known = scores.take(~models.controller.get_field(scores, "scores").isnan())
    best = batch.take(by_score(models.controller, known)[0])
    return [rollout, *scored, models.actor.update(best, likelihood("token-mean"), **config.schedule)]


def by_score(controller: Any, scores: Reference) -> tuple[np.ndarray, np.ndarray]:
    """Row ids of the best and the worst row of each group, by group; of equal scores the first row is the best."""
    values, rows = controller.get_field(scores, "scores").numpy(), scores.rows
    order = np.lexsort((rows.row_ids, -values, rows.group_ids))
    ids, groups = rows.row_ids[order], rows.group_ids[order]
    is_first = np.append(True, np.diff(groups) != 0)
    return ids[is_first], ids[np.append(is_first[1:], True)]
