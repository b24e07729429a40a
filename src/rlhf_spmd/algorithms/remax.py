"""ReMax (Li et al. 2023, arXiv 2310.10505): no critic; a response is judged against the greedy one to the same prompt.

The greedy responses come from the same continuous batch as the sampled ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rlhf_spmd.algorithms.base import score, validate
from rlhf_spmd.algorithms.policy import PolicyConfig, clipped_policy
from rlhf_spmd.controller import Reference
from rlhf_spmd.rewards.config import named_rewards, reward_key
from rlhf_spmd.workers import Computed, GlobalReduce, ReferenceWorker, RoleClass, Rows


@dataclass(frozen=True)
class Config(PolicyConfig):
    name: str = "remax"
    rows_in_flight: ClassVar[bool] = False

    def check_together(self, config: Any, plans: Mapping[str, Any], tokenizer: Any) -> None:
        super().check_together(config, plans, tokenizer)
        for name, reward in named_rewards(config.reward, config.rewards).items():
            if reward.by_group:
                raise ValueError(
                    f"{reward_key(name)}.by_group=true: remax scores the greedy response to a prompt by itself, so a reward that "
                    "compares the responses to a prompt gives no baseline; leave by_group out, or use grpo"
                )

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, **({"reference": ReferenceWorker} if self.kl.use_kl_loss else {})}


def step(models: Any, data: Any, config: Config, global_step: int) -> list[Reference]:
    """One ReMax step. Returns the calls whose values are the step's metrics."""
    prompts = data.prompts.next()
    greedy = prompts.firsts().copy()
    both, best = prompts.concat(greedy), replace(data.sampling, temperature=0.0)
    rollout = models.actor.generate_sequences(both, data.sampling, global_step, own=[(greedy, best)])
    both = both.union(rollout)
    scores, scored = score(models, both.take(prompts))
    baseline, _ = score(models, both.take(greedy))  # by itself, so that the metrics of rewards are those of samples
    judged = both.union(scores.concat(baseline))
    advantages = models.compute.apply(judged, minus_greedy, ("scores",), outputs=("advantages",), keep_groups=True)
    batch = both.union(advantages).take(prompts)
    old = models.actor.compute_log_prob(batch)
    batch = batch.union(old)
    if config.kl.use_kl_loss:
        batch = batch.union(models.reference.compute_ref_log_prob(batch))
    policy = clipped_policy(config, data.sampling, global_step)
    update = models.actor.update(batch, policy, **config.schedule)
    return [rollout, *scored, old, advantages, update]


def minus_greedy(fields: dict[str, Tensor], rows: Rows, whole: GlobalReduce) -> Computed:
    """A row's score minus that of its group's greedy row, on every token of the row (section 3.1, algorithm 1).

    The greedy row is the one with the highest id. A row gets 0 if it, or the greedy row, has no score (nan).
    """
    scores = fields["scores"].double()
    groups, at = rows.group_ids.unique(return_inverse=True)
    greedy = torch.zeros_like(groups).scatter_reduce_(0, at, rows.row_ids, "amax", include_self=False)[at] == rows.row_ids
    baseline = scores.new_zeros(len(groups)).index_copy_(0, at[greedy], scores[greedy])
    advantages = scores - baseline[at]
    learnt, known = ~advantages.isnan(), ~baseline.isnan()
    advantages = advantages.masked_fill(~learnt, 0.0)
    counts = torch.stack([known.sum(), (learnt & ~greedy).sum()])
    sums = whole.sum(torch.cat([torch.stack([baseline[known].sum(), advantages.sum()]), counts.double()]))
    means = (sums[:2] / sums[2:].clamp(min=1)).tolist()
    report = {"actor/baseline_mean": means[0], "actor/advantage_mean": means[1]}
    return {"advantages": rows.per_token(rows.spread(advantages))}, report
