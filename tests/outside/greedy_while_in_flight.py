"""ReMax (Li et al. 2024, arXiv 2310.10505) with rows in flight: greedy answers to the prompts whose samples have ended."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.algorithms.base import RolloutConfig, sample, score
from rlhf_spmd.controller import Reference
from rlhf_spmd.controller.reference import COPY_STRIDE
from rlhf_spmd.data.batch import Field
from rlhf_spmd.objectives.losses import aggregate
from rlhf_spmd.workers.compute import GlobalReduce
from rlhf_spmd.workers.objective import Objective, Rows, Totals


@dataclass(frozen=True)
class Config(RolloutConfig):
    pass


def step(models: Any, data: Any, config: Config, number: int) -> list[Reference]:
    batch, rollout = sample(models, data, number)
    prompts = batch.select("prompt_ids", "row").firsts().copy()
    greedy = prompts.union(models.actor.generate_sequences(prompts, replace(data.sampling, temperature=0.0), number))
    both = batch.concat(greedy)
    scores, scored = score(models, both)
    both = both.union(scores)
    advantages = models.compute.apply(both, less_greedy, ("scores",), outputs=("advantages",), keep_groups=True)
    batch = both.union(advantages).take(batch)
    update = models.actor.update(batch, Objective(reinforce, ("advantages",)), **config.schedule)
    return [rollout, *scored, advantages, update]


def less_greedy(fields: dict[str, Tensor], rows: Rows, whole: GlobalReduce) -> tuple[dict[str, Field], dict[str, float]]:
    scores, is_greedy = fields["scores"].double(), rows.row_ids >= COPY_STRIDE
    same = rows.group_ids[:, None] == rows.group_ids[None, is_greedy]
    baseline = (same * scores[is_greedy]).sum(1)
    totals = whole.sum(torch.stack([torch.stack([scores[at].sum(), at.sum()]) for at in (is_greedy, ~is_greedy)]))
    means = (totals[:, 0] / totals[:, 1]).tolist()
    metrics = dict(zip(("baseline/greedy_mean", "baseline/sampled_mean"), means, strict=True))
    return {"advantages": rows.per_token(rows.spread(scores - baseline))}, metrics


def reinforce(fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    loss = aggregate(-fields["advantages"] * fields["log_probs"], rows.lengths, "token-mean", totals.tokens, totals.rows)
    return loss, {"actor/pg_loss": loss.detach().double()}
