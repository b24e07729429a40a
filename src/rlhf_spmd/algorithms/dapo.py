"""DAPO (Yu et al. 2025, arXiv 2503.14476): GRPO's advantages without a reference, a wider upper clip, a penalty for over-long
responses, and further prompts in place of those whose responses all score alike. The settings' names are verl's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.algorithms.base import sample, score, validate
from rlhf_spmd.algorithms.overlong import OverlongConfig, overlong_penalty
from rlhf_spmd.algorithms.policy import PolicyConfig, PolicyLossConfig, clipped_policy
from rlhf_spmd.config.constraints import PositiveInt
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.config.schema import inline
from rlhf_spmd.controller import Reference
from rlhf_spmd.objectives.advantages import group_advantages
from rlhf_spmd.rewards.results import RewardError
from rlhf_spmd.workers import Computed, Function, GlobalReduce, Rows


@dataclass(frozen=True)
class FilterGroupsConfig:
    """``filter_groups``.

    - enable: replace groups that teach nothing by further prompts
    - metric: a group is kept if this differs among its rows: `score`, or with the penalty `seq_reward`
    - max_num_gen_batches: batches of prompts that one step may take
    """

    enable: bool = True
    metric: Literal["score", "seq_reward"] = "score"
    max_num_gen_batches: PositiveInt = 10
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"enable": ("metric", "max_num_gen_batches")}


@dataclass(frozen=True)
class Config(PolicyConfig):
    name: str = "dapo"
    policy: PolicyLossConfig = inline(PolicyLossConfig, clip_ratio_low=0.2, clip_ratio_high=0.28)
    overlong_buffer: OverlongConfig = field(default_factory=OverlongConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    min_samples: ClassVar[int] = 2
    rows_in_flight: ClassVar[bool] = False

    rules: ClassVar[Rules] = (
        Rule(("use_kl_loss",), lambda s: s.kl.use_kl_loss, "dapo has no reference", "use name=grpo, or leave use_kl_loss out"),
    )

    def check_together(self, config: Any, plans: Any, tokenizer: Any) -> None:
        super().check_together(config, plans, tokenizer)
        limit = config.sampling.max_response_length or config.data.max_response_length
        room = self.overlong_buffer.len
        if self.overlong_buffer.enable and (room or 1) > limit:
            raise ValueError(f"algorithm.overlong_buffer.len={room} must be at most data.max_response_length={limit}")


def step(models: Any, data: Any, config: Config, global_step: int) -> list[Reference]:
    """Return the calls of one DAPO step. The reward's metrics are of all batches of prompts, the generator's of the first."""
    calls, batches, num_wanted_rows = collect_groups(models, data, config, global_step)
    batch = batches[0].concat(*batches[1:])
    kept_groups = len(batch) // data.sampling.n
    batch = batch.take(np.arange(len(batch)) < num_wanted_rows)
    estimate = dapo_advantages({"dapo/num_gen_batches": float(len(batches)), "dapo/kept_groups": float(kept_groups)})
    advantages = models.compute.apply(batch, estimate, ("seq_rewards",), outputs=("advantages",), keep_groups=True)
    old = models.actor.compute_log_prob(batch)
    policy = clipped_policy(config, data.sampling, global_step)
    update = models.actor.update(batch.union(old, advantages), policy, **config.schedule)
    return [*calls, old, advantages, update]


def collect_groups(models: Any, data: Any, config: Config, global_step: int) -> tuple[list[Reference], list[Reference], int]:
    """Return calls, batches of rows, and the number of rows that the step wants, which is that of one batch of prompts.

    Prompts are sampled until so many rows belong to groups whose responses score differently; only these groups are kept.
    """
    filtering = config.filter_groups
    judge = shaped_rewards(config, data.sampling.max_response_length)
    calls, batches = list[Reference](), list[Reference]()
    num_wanted_rows = num_kept_rows = 0
    is_scored = False
    for _ in range(filtering.max_num_gen_batches if filtering.enable else 1):
        batch, rollout = sample(models, data, global_step)
        scores, scored = score(models, batch)
        shaped = models.compute.apply(batch.union(scores), judge, ("scores",), ("seq_rewards", "spread"), keep_groups=True)
        calls = [*(calls or [rollout]), *scored, shaped]
        num_wanted_rows = num_wanted_rows or len(batch)
        batch = batch.union(scores, shaped)
        if filtering.enable:
            spread = models.controller.get_field(shaped, "spread")
            batch = batch.take(spread > 0)
            is_scored = is_scored or bool((spread >= 0).any())
        batches.append(batch)
        num_kept_rows += len(batch)
        if num_kept_rows >= num_wanted_rows:
            return calls, batches, num_wanted_rows
    kept_groups, wanted_groups = (number // data.sampling.n for number in (num_kept_rows, num_wanted_rows))
    report_too_few_groups(models.controller, global_step, kept_groups, wanted_groups, len(batches), is_scored)
    return calls, batches, num_wanted_rows


def report_too_few_groups(controller: Any, global_step: int, kept: int, wanted: int, tried: int, is_scored: bool) -> None:
    """Print that a step has fewer groups than wanted. Raises ValueError if it has none, RewardError if no response has a score."""
    line = f"step {global_step}: of {tried * wanted} prompts in {tried} batches {kept} have responses whose scores differ"
    remedy = "give other prompts, more samples (sampling.n), or a larger algorithm.filter_groups.max_num_gen_batches"
    if not kept:
        failure = ValueError if is_scored else RewardError
        raise failure(f"{line}, so there is nothing to train on; {remedy}, or set algorithm.filter_groups.enable=false")
    controller.log(f"{line}, where {wanted} were wanted; it trains on these; {remedy}")


def shaped_rewards(config: Config, limit: int) -> Function:
    """Return a function that computes scores with the over-long penalty.

    It also gives each row its group's ``spread`` of the metric: 0 only if all rows have the same, below 0 if no row has a score.
    """

    def judge(fields: dict[str, Tensor], rows: Rows, reduce: GlobalReduce) -> Computed:
        scores = fields["scores"].double()
        lengths = (rows.lengths if rows.mask is None else rows.mask.lengths).double()
        penalty = overlong_penalty(config.overlong_buffer, lengths, limit)
        metric = scores if config.filter_groups.metric == "score" else scores + penalty
        distances = group_advantages(metric, rows.group_ids, by_std=False).abs().where(~scores.isnan(), -1.0)  # from the mean
        index = rows.group_ids.unique(return_inverse=True)[1]
        spread = distances.new_full((len(rows),), -1.0).scatter_reduce_(0, index, distances, "amax")[index]
        sums = reduce.sum(torch.stack([penalty.sum(), (spread == 0).sum().double(), penalty.new_tensor(len(rows))]))
        total, equal, count = sums.tolist()
        report = {"dapo/overlong_penalty_mean": [total, count], "dapo/equal_group_fraction": [equal, count]}
        return {"seq_rewards": scores + penalty, "spread": spread}, report

    return judge


def dapo_advantages(report: dict[str, float]) -> Function:
    """Return a function for advantages by mean and deviation of the group (equation 9). ``report``: counts that all ranks know."""

    def compute_advantage(fields: dict[str, Tensor], rows: Rows, reduce: GlobalReduce) -> Computed:
        advantages = group_advantages(fields["seq_rewards"], rows.group_ids, by_std=True)
        return {"advantages": rows.per_token(rows.spread(advantages))}, report

    return compute_advantage
