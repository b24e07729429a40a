"""Rewards to advantages: arithmetic on rows, no model. It lives on the critic's ranks, where the values are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_spmd.controller import DP, ResourcePool, register
from rlhf_spmd.data.batch import Batch, Ragged
from rlhf_spmd.objectives.advantages import AdvantageEstimator, moments, token_level_rewards, whiten
from rlhf_spmd.objectives.kl import build_kl_controller, kl_penalty
from rlhf_spmd.objectives.losses import explained_variance, explained_variance_sums
from rlhf_spmd.workers.arithmetic import ArithmeticWorker
from rlhf_spmd.workers.model_worker import MASK, Build, drawn, model_tokens


@dataclass(frozen=True)
class AdvantageSettings:
    estimator: AdvantageEstimator
    gamma: float
    lam: float
    kl_penalty: str
    use_kl_in_reward: bool


class AdvantageWorker(ArithmeticWorker):
    """Every rank of the pool takes some rows; statistics are over the global batch, summed in float64."""

    home = ("critic", "actor")

    def __init__(self, build: Build, name: str, pool: ResourcePool) -> None:
        super().__init__(build, name, pool)
        self.kl_controller = build_kl_controller(build.kl_ctrl)

    def state_dict(self) -> dict[str, float]:
        return self.kl_controller.state_dict()

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.kl_controller.load_state_dict(state)

    @register(
        DP,
        inputs=("response_ids", "response_mask?", "scores", "values", "old_log_probs", "ref_log_prob?"),
        outputs=("advantages", "returns"),
        split_groups=True,
    )
    def compute_advantage(self, batch: Batch, settings: AdvantageSettings) -> tuple[Batch, dict[str, float]]:
        """``advantages`` (whitened over the global batch) and ``returns``: ragged [response tokens]; the step's KL statistics.

        The tokens of environments are left out as if they were not there: each token of the model is followed by its next one.
        Theirs are 0.
        The KL controller moves on the mean over rows of the row's mean KL per token (verl's meaning of ``target_kl``).
        Collective over the pool: every rank of it must call, in program order.
        """
        advantages, returns, sums = self._local(batch, settings)
        self.mesh.pool.all_reduce(sums, "control")
        statistics = self._statistics(sums)
        if settings.use_kl_in_reward:
            self.kl_controller.update(statistics["actor/kl_per_row"], int(sums[0]))
        if not len(batch):
            return batch, statistics
        lengths = model_tokens(batch)
        made = {"advantages": Ragged(whiten(advantages, sums[5:8]), lengths), "returns": Ragged(returns, lengths)}
        if MASK in batch:
            made = {name: field.spread(batch[MASK]) for name, field in made.items()}
        return batch.with_fields(**made), statistics

    def _local(self, batch: Batch, settings: AdvantageSettings) -> tuple[Tensor, Tensor, Tensor]:
        """Of this rank's rows: advantages and returns [tokens], and what is summed over the pool, float64 [13]."""
        if not len(batch):
            return torch.empty(0), torch.empty(0), torch.zeros(13, dtype=torch.float64)
        lengths, scores = model_tokens(batch), batch["scores"]
        values = drawn(batch, "values")
        kl = None
        if "ref_log_prob" in batch:
            kl = kl_penalty(drawn(batch, "old_log_probs"), drawn(batch, "ref_log_prob"), settings.kl_penalty)
        in_reward = kl if settings.use_kl_in_reward else None
        rewards = token_level_rewards(scores, in_reward, self.kl_controller.value, lengths)
        advantages, returns = settings.estimator(rewards, values, lengths, settings.gamma, settings.lam)
        kl64 = (torch.zeros_like(advantages) if kl is None else kl).double()
        row_kl = torch.stack([row.mean() for row in kl64.split(lengths.tolist())])
        totals = [float(x.double().sum()) for x in (lengths, kl64, row_kl, rewards)]
        head = torch.tensor([len(batch), *totals], dtype=torch.float64)
        return advantages, returns, torch.cat([head, moments(advantages), explained_variance_sums(values, returns)])

    def _statistics(self, sums: Tensor) -> dict[str, float]:
        rows, tokens, kl, row_kl, token_reward, count, advantage, *_ = sums.tolist()
        return {
            "reward/token_level_sum": token_reward / rows,
            "actor/kl": kl / tokens,
            "actor/kl_per_row": row_kl / rows,
            "actor/kl_coef": self.kl_controller.value,
            "critic/advantage_mean": advantage / count,
            "critic/explained_variance": explained_variance(sums[8:13]),
        }
