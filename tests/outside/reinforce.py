"""REINFORCE with the mean score of the prompt's other responses as baseline (RLOO, Ahmadian et al. 2024): an algorithm in one file.

It has no critic and no reference, a knob and a role of its own, and that role's call goes by a protocol of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from outside.protocol import LAST_FIRST
from rlhf_spmd.algorithms.base import RolloutConfig, sample, validate
from rlhf_spmd.controller import Reference, register
from rlhf_spmd.data.batch import Batch, Ragged
from rlhf_spmd.objectives.losses import aggregate
from rlhf_spmd.workers.compute import ComputeWorker, GlobalReduce, RoleClass
from rlhf_spmd.workers.objective import Objective, Rows, Totals

__all__ = ["Config", "step", "validate"]


@dataclass(frozen=True)
class Config(RolloutConfig):
    scale: float = 1.0
    min_samples: ClassVar[int] = 2

    def check(self, where: str) -> None:
        super().check(where)
        if self.scale <= 0:
            raise ValueError(f"{where}.scale={self.scale} must be above 0")

    @property
    def roles(self) -> Mapping[str, RoleClass]:
        return {**super().roles, "baseline": BaselineWorker}


class BaselineWorker(ComputeWorker):
    """``seen``: rows so far, part of the checkpoint."""

    @register(LAST_FIRST, inputs=("scores", "response_ids"), outputs=("advantages",), kind="compute")
    def leave_one_out(self, batch: Batch, scale: float) -> tuple[Batch, dict[str, float]]:
        """``advantages``: ragged [response tokens], the same number for all tokens of a response."""
        rows = self.mesh.pool.all_reduce(torch.tensor([len(batch)]), "control")
        self.state["seen"] = self.state.get("seen", 0) + int(rows)
        scores, groups = batch["scores"], batch.group_ids
        same = (groups[:, None] == groups[None, :]).to(scores.dtype)
        others = (same @ scores - scores) / (same.sum(1) - 1)
        lengths = batch["response_ids"].lengths
        advantages = Ragged(torch.repeat_interleave(scale * (scores - others), lengths), lengths)
        first = {f"baseline/first_row_of_rank_{self.controller.rank}": float(batch.row_ids[0])}
        return batch.with_fields(advantages=advantages), {"baseline/seen": float(self.state["seen"]), **first}


def step(models: Any, data: Any, config: Config, number: int) -> list[Reference]:
    batch, rollout = sample(models, data, number)
    scored = models.reward.compute_reward(batch)
    batch = batch.union(scored)
    baseline = models.baseline.leave_one_out(batch, config.scale)
    best = models.compute.apply(batch, best_of_step, inputs=("scores",))
    update = models.actor.update(batch.union(baseline), Objective(weighted_likelihood, ("advantages",)), **config.schedule)
    return [rollout, scored, baseline, best, update]


def best_of_step(fields: dict[str, Tensor], rows: Rows, whole: GlobalReduce) -> tuple[dict[str, Any], dict[str, float]]:
    """The largest score of the step and of all steps so far; a function needs no role of its own."""
    scores = fields["scores"]
    least = torch.tensor([-torch.inf], dtype=torch.float64)
    best = float(whole.max(torch.cat([least, scores.double()]).max().view(1)))
    whole.state["best"] = max(best, whole.state.get("best", best))
    return {}, {"baseline/best": best, "baseline/best_so_far": whole.state["best"]}


def weighted_likelihood(fields: dict[str, Tensor], rows: Rows, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
    loss = aggregate(
        -fields["advantages"] * fields["log_probs"], rows.lengths, "seq-mean-token-sum", totals.tokens, totals.rows
    )
    return loss, {"actor/pg_loss": loss.detach().double()}
