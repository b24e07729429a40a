"""REINFORCE with the mean score of the prompt's other responses as baseline (RLOO, Ahmadian et al. 2024): an algorithm in one file.

It has no critic and no reference, a knob and a role of its own, and that role's call goes by a protocol of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outside.protocol import LAST_FIRST
from rlhf_spmd.algorithms.base import AlgorithmConfig
from rlhf_spmd.controller import Reference, register
from rlhf_spmd.data.batch import Batch, Ragged
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.objectives.losses import aggregate
from rlhf_spmd.workers.arithmetic import ArithmeticWorker, RoleClass
from rlhf_spmd.workers.model_worker import Build, Totals


@dataclass(frozen=True)
class Config(AlgorithmConfig):
    scale: float = 1.0

    def check(self, where: str) -> None:
        super().check(where)
        if self.scale <= 0:
            raise ValueError(f"{where}.scale={self.scale} must be above 0")

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, "baseline": BaselineWorker}


class BaselineWorker(ArithmeticWorker):
    """``seen``: rows so far, part of the checkpoint."""

    def __init__(self, build: Build, name: str, pool: Any) -> None:
        super().__init__(build, name, pool)
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    @register(LAST_FIRST, inputs=("scores", "response_ids"), outputs=("advantages",))
    def leave_one_out(self, batch: Batch, scale: float) -> tuple[Batch, dict[str, float]]:
        """``advantages``: ragged [response tokens], the same number for all tokens of a response."""
        rows = self.mesh.pool.all_reduce(torch.tensor([len(batch)]), "control")
        self.seen += int(rows)
        scores, groups = batch["scores"], batch.group_ids
        same = (groups[:, None] == groups[None, :]).to(scores.dtype)
        others = (same @ scores - scores) / (same.sum(1) - 1)
        lengths = batch["response_ids"].lengths
        advantages = Ragged(torch.repeat_interleave(scale * (scores - others), lengths), lengths)
        first = {f"baseline/first_row_of_rank_{self.controller.rank}": float(batch.row_ids[0])}
        return batch.with_fields(advantages=advantages), {"baseline/seen": float(self.seen), **first}


def step(models: Any, prompts: Reference, config: Config, sampling: SamplingConfig, number: int) -> list[Reference]:
    rollout = models.actor.generate_sequences(prompts, sampling, number)
    batch = prompts.union(rollout)
    scored = models.reward.compute_reward(batch)
    batch = batch.union(scored).union(models.actor.compute_log_prob(batch))
    baseline = models.baseline.leave_one_out(batch, config.scale)
    update = models.actor.update_actor(batch.union(baseline), objective, config.ppo_epochs)
    return [rollout, scored, baseline, update]


def objective(fields: dict[str, Tensor], lengths: Tensor, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    loss = aggregate(-fields["advantages"] * fields["log_probs"], lengths, "seq-mean-token-sum", totals.tokens, totals.rows)
    return loss, {"actor/pg_loss": loss.detach().double()}
