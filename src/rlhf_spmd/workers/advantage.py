"""Rewards to advantages: arithmetic on rows, no model. It lives on the critic's ranks, where the values are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_spmd.controller import DP, RANK_ZERO, Controller, GroupShape, ResourcePool, Worker, register
from rlhf_spmd.data.batch import Batch, Ragged
from rlhf_spmd.objectives.advantages import AdvantageEstimator, moments, token_level_rewards, whiten
from rlhf_spmd.objectives.kl import KLController, kl_penalty
from rlhf_spmd.objectives.losses import explained_variance, explained_variance_sums
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World


@dataclass(frozen=True)
class AdvantageSettings:
    estimator: AdvantageEstimator
    gamma: float
    lam: float
    kl_penalty: str
    use_kl_in_reward: bool


@dataclass(frozen=True)
class _Local:
    """This rank's rows: token tensors [T], and what is summed (float64 [15]) and maximised ([4]) over the pool."""

    advantages: Tensor
    returns: Tensor
    sums: Tensor
    maxima: Tensor


class AdvantageWorker(Worker):
    """Every rank of the pool takes some rows; statistics are over the global batch, summed in float64."""

    def __init__(self, controller: Controller, world: World, pool: ResourcePool, kl_controller: KLController) -> None:
        layout = Layout(dp=len(pool.ranks))
        super().__init__(controller, "advantage", pool, GroupShape(layout))
        self.mesh = build_mesh(world, pool.ranks, layout)
        self.kl_controller = kl_controller

    @register(
        DP,
        inputs=("response_ids", "scores", "values", "old_log_probs", "ref_log_prob?"),
        outputs=("advantages", "returns"),
        split_groups=True,
    )
    def compute_advantage(self, batch: Batch, settings: AdvantageSettings) -> tuple[Batch, dict[str, float]]:
        """``advantages`` (whitened over the global batch) and ``returns``: ragged [response tokens]; the step's reward statistics.

        The KL controller moves on the mean over rows of the row's mean KL per token (verl's meaning of ``target_kl``).
        Collective over the pool: every rank of it must call, in program order.
        """
        local = self._local(batch, settings) if len(batch) else _NO_ROWS
        sums = self.mesh.pool.all_reduce(local.sums.clone(), "control")
        maxima = self.mesh.pool.all_reduce(local.maxima.to(torch.float64), "control", "max").tolist()
        statistics = self._statistics(sums, maxima)
        if settings.use_kl_in_reward:
            self.kl_controller.update(statistics["actor/kl_per_row"], int(sums[0]))
        if not len(batch):
            return batch, statistics
        lengths = batch["response_ids"].lengths
        advantages = whiten(local.advantages, sums[7:10])
        return batch.with_fields(advantages=Ragged(advantages, lengths), returns=Ragged(local.returns, lengths)), statistics

    @register(RANK_ZERO)
    def progress(self) -> dict[str, float]:
        """The KL controller's state, for checkpoints."""
        return self.kl_controller.state_dict()

    def _local(self, batch: Batch, settings: AdvantageSettings) -> _Local:
        lengths = batch["response_ids"].lengths
        scores, values = batch["scores"], batch["values"].values
        kl = None
        if "ref_log_prob" in batch:
            kl = kl_penalty(batch["old_log_probs"].values, batch["ref_log_prob"].values, settings.kl_penalty)
        in_reward = kl if settings.use_kl_in_reward else None
        rewards = token_level_rewards(scores, in_reward, self.kl_controller.value, lengths)
        advantages, returns = settings.estimator(rewards, values, lengths, settings.gamma, settings.lam)
        kl64 = (torch.zeros_like(advantages) if kl is None else kl).double()
        row_kl = torch.stack([row.mean() for row in kl64.split(lengths.tolist())])
        scores64 = scores.double()
        head = torch.stack(
            [
                torch.tensor(float(len(batch)), dtype=torch.float64),
                lengths.sum().double(),
                kl64.sum(),
                row_kl.sum(),
                scores64.sum(),
                scores64.square().sum(),
                rewards.double().sum(),
            ]
        )
        sums = torch.cat([head, moments(advantages), explained_variance_sums(values, returns)])
        maxima = torch.stack([scores64.max(), -scores64.min(), lengths.max().double(), -lengths.min().double()])
        return _Local(advantages, returns, sums, maxima)

    def _statistics(self, sums: Tensor, maxima: list[float]) -> dict[str, float]:
        rows, tokens, kl, row_kl, score, squares, token_reward, count, advantage, *_ = sums.tolist()
        mean = score / rows
        return {
            "reward/mean": mean,
            "reward/std": max(squares / rows - mean * mean, 0.0) ** 0.5,
            "reward/max": maxima[0],
            "reward/min": -maxima[1],
            "reward/token_level_sum": token_reward / rows,
            "response_length/mean": tokens / rows,
            "response_length/max": maxima[2],
            "response_length/min": -maxima[3],
            "actor/kl": kl / tokens,
            "actor/kl_per_row": row_kl / rows,
            "actor/kl_coef": self.kl_controller.value,
            "critic/advantage_mean": advantage / count,
            "critic/explained_variance": explained_variance(sums[10:15]),
        }


_NO_ROWS = _Local(torch.empty(0), torch.empty(0), torch.zeros(15, dtype=torch.float64), torch.full((4,), -torch.inf))
