"""Supervised fine-tuning: the actor's model, learning from given responses instead of its own."""

from __future__ import annotations

from torch import Tensor

from rlhf_spmd.controller import THREE_D, register
from rlhf_spmd.data.batch import Batch
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.objectives.losses import aggregate
from rlhf_spmd.workers.actor import ActorWorker
from rlhf_spmd.workers.engine import Packed
from rlhf_spmd.workers.model_worker import Totals, response_log_probs


class SftWorker(ActorWorker):
    """An actor, so that it can be validated by what it generates."""

    @register(THREE_D, inputs=("prompt_ids", "response_ids"), split_groups=True)
    def update_sft(self, batch: Batch, loss_agg_mode: str) -> dict[str, float]:
        """One optimizer step on the negative log-likelihood of the responses."""

        def loss(decoder: Decoder, hidden: Tensor, micro: Packed, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, _ = response_log_probs(decoder, hidden, micro, 1.0)
            lengths = micro.extra["response_ids"].lengths
            return aggregate(-log_probs, lengths, loss_agg_mode, totals.tokens, totals.rows), {}

        return self.summarise([self.train(batch, loss)])

    @register(THREE_D, inputs=("prompt_ids", "response_ids"), split_groups=True)
    def compute_loss(self, batch: Batch) -> dict[str, float]:
        """Sum of the negative log-likelihood over this replica's response tokens (nats), and their number."""
        log_probs = self.log_probs(batch, 1.0)
        if log_probs is None:
            return {"sum": 0.0, "tokens": 0}
        return {"sum": -float(log_probs.values.double().sum()), "tokens": len(log_probs.values)}
