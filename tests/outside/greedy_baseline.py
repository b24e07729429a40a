"""ReMax (Li et al. 2023): a sampled response is judged against the greedy one to the same prompt.

Two generations in one script, and a judge that sees the greedy responses only, or with ``together`` one reward call for both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.algorithms.policy import PolicyConfig, clipped_policy
from rlhf_spmd.controller import Reference
from rlhf_spmd.controller.reference import COPY_STRIDE
from rlhf_spmd.data.batch import Field
from rlhf_spmd.workers.compute import GlobalReduce, RoleClass
from rlhf_spmd.workers.objective import Rows
from rlhf_spmd.workers.reward import RewardWorker


@dataclass(frozen=True)
class Config(PolicyConfig):
    together: bool = False

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, **({} if self.together else {"judge": RewardWorker})}


def step(models: Any, data: Any, config: Config, number: int) -> list[Reference]:
    prompts = data.prompts.next()
    rollout = models.actor.generate_sequences(prompts, data.sampling, number)
    sampled, first = prompts.union(rollout), prompts.firsts().copy()
    greedy = first.union(models.actor.generate_sequences(first, replace(data.sampling, temperature=0.0, n=1), number))
    if config.together:
        both = sampled.concat(greedy)
        scored = [models.reward.compute_reward(both)]
        both = both.union(*scored)
    else:
        scored = [models.reward.compute_reward(sampled), models.judge.compute_reward(greedy)]
        both = sampled.union(scored[0]).concat(greedy.union(scored[1]))
    relative = models.compute.apply(both, minus_baseline, ("scores",), outputs=("advantages",), keep_groups=True)
    rows = both.union(relative).take(sampled)
    old = models.actor.compute_log_prob(rows)
    update = models.actor.update(rows.union(old), clipped_policy(config, data.sampling), **config.schedule)
    return [rollout, *scored, old, relative, update]


def minus_baseline(fields: dict[str, Tensor], rows: Rows, whole: GlobalReduce) -> tuple[dict[str, Field], dict[str, float]]:
    scores, greedy = fields["scores"].double(), rows.row_ids >= COPY_STRIDE
    at = torch.searchsorted(rows.group_ids[greedy], rows.group_ids)
    assert torch.equal(rows.group_ids[greedy][at], rows.group_ids), "every group has a greedy row here"
    advantages = scores - scores[greedy][at]
    total, count = whole.sum(torch.stack([advantages.sum(), (~greedy).sum().double()])).tolist()
    return {"advantages": rows.per_token(rows.spread(advantages))}, {"actor/advantage_mean": total / count}
