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
from rlhf_spmd.algorithms.kl import KLConfig, MeasuredKL
from rlhf_spmd.algorithms.policy import PolicyConfig, clipped_policy
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.config.schema import inline
from rlhf_spmd.controller import Reference
from rlhf_spmd.objectives.advantages import gae, row_sums, token_level_rewards
from rlhf_spmd.rewards.config import named_rewards, reward_key
from rlhf_spmd.workers import Computed, Function, GlobalReduce, ReferenceWorker, RoleClass, Rows


@dataclass(frozen=True)
class Config(PolicyConfig):
    name: str = "remax"
    kl: KLConfig = inline(KLConfig, use_kl_in_reward=False)
    rows_in_flight: ClassVar[bool] = False

    rules: ClassVar[Rules] = (
        Rule(
            ("loss_mode", "use_kl_in_reward"),
            lambda s: s.policy.loss_mode == "geo_mean" and s.kl.use_kl_in_reward,
            "the loss needs one advantage per response, and the KL in the reward gives each token its own",
            "leave use_kl_in_reward out and use use_kl_loss",
        ),
    )

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
        return {**super().roles, **({"reference": ReferenceWorker} if self.kl.uses_reference else {})}


def step(models: Any, data: Any, config: Config, global_step: int) -> list[Reference]:
    """Return the calls of one ReMax step whose values are its metrics."""
    prompts = data.prompts.next()
    greedy = prompts.firsts().copy()
    samples_and_greedy = prompts.concat(greedy)
    overrides = [(greedy, replace(data.sampling, temperature=0.0))]
    rollout = models.actor.generate_sequences(samples_and_greedy, data.sampling, global_step, sampling_overrides=overrides)
    samples_and_greedy = samples_and_greedy.union(rollout)
    scores, scored = score(models, samples_and_greedy.take(prompts))
    # by themselves, so that the metrics of rewards are those of samples
    baseline, _ = score(models, samples_and_greedy.take(greedy))
    samples_and_greedy = samples_and_greedy.union(scores.concat(baseline))
    baselines = models.compute.apply(samples_and_greedy, greedy_scores, ("scores",), outputs=("baselines",), keep_groups=True)
    batch = samples_and_greedy.union(baselines).take(prompts)
    old = models.actor.compute_log_prob(batch)
    batch = batch.union(old)
    if config.kl.uses_reference:
        batch = batch.union(models.reference.compute_ref_log_prob(batch))
    reads = ("scores", "baselines", *config.kl.inputs)
    advantages = models.compute.apply(batch, remax_advantages(config), reads, outputs=("advantages",))
    policy = clipped_policy(config, data.sampling, global_step)
    update = models.actor.update(batch.union(advantages), policy, **config.schedule)
    return [rollout, *scored, old, baselines, advantages, update]


def greedy_scores(fields: dict[str, Tensor], rows: Rows, reduce: GlobalReduce) -> Computed:
    """Give each row the score of its group's greedy row, the one with the highest id; nan where that has none."""
    scores = fields["scores"].double()
    groups, index = rows.group_ids.unique(return_inverse=True)
    greedy = torch.zeros_like(groups).scatter_reduce_(0, index, rows.row_ids, "amax", include_self=False)[index] == rows.row_ids
    baseline = scores.new_zeros(len(groups)).index_copy_(0, index[greedy], scores[greedy])
    has_score = ~baseline.isnan()
    total, count = reduce.sum(torch.stack([baseline[has_score].sum(), has_score.sum().double()])).tolist()
    return {"baselines": baseline[index]}, {"actor/baseline_mean": total / max(count, 1.0)}


def remax_advantages(config: Config) -> Function:
    """Return a function that computes advantages [tokens]: the row's score minus the greedy one's (section 3.1, algorithm 1).

    With ``use_kl_in_reward`` minus the coefficient times the KL of the token and of those after it; the greedy score has none, as in
    verl. A row gets 0 if it, or the greedy row, has no score (nan).
    """
    kl = config.kl

    def compute_advantage(fields: dict[str, Tensor], rows: Rows, reduce: GlobalReduce) -> Computed:
        scores, baselines = fields["scores"].double(), fields["baselines"]
        measured = MeasuredKL(kl, fields, rows, reduce.state)
        learnt = ~(scores - baselines).isnan()
        rewards = token_level_rewards(
            scores, measured.values.double() if kl.use_kl_in_reward else None, measured.coefficient, rows.lengths
        )
        returns, _ = gae(rewards, torch.zeros_like(rewards), rows.lengths, 1.0, 1.0)
        advantages = (returns - rows.spread(baselines)).masked_fill(~rows.spread(learnt), 0.0)
        totals = (row_sums(rewards, rows.lengths) - baselines)[learnt]
        sums = reduce.sums(kl=measured.sums(), advantages=totals.sum(), rows=learnt.sum())
        metrics = {"actor/advantage_mean": float(sums["advantages"]) / max(float(sums["rows"]), 1.0)}
        if kl.uses_reference:
            metrics |= measured.settle(sums["kl"])
        return {"advantages": rows.per_token(advantages)}, metrics

    return compute_advantage
