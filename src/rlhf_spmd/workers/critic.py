"""The critic: values of every response position, and their update."""

from __future__ import annotations

from torch import Tensor

from rlhf_spmd.controller import THREE_D, register
from rlhf_spmd.data.batch import Batch
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import values
from rlhf_spmd.workers.engine import Packed
from rlhf_spmd.workers.model_worker import ModelWorker, Objective, Totals, drawn, model_tokens, response_positions


def response_values(decoder: Decoder, hidden: Tensor, micro: Packed) -> Tensor:
    """Value of the state before each response token of the model, [response tokens]."""
    return values(decoder, hidden[response_positions(micro)])


class CriticWorker(ModelWorker):
    head = "value"
    trained = True
    new_head = True

    @register(THREE_D, inputs=("prompt_ids", "response_ids", "response_mask?"), outputs=("values",), split_groups=True)
    def compute_values(self, batch: Batch) -> Batch | None:
        """``values``: ragged [response tokens], the value before each token is emitted."""
        result = self.infer(batch, response_values)
        return batch.with_fields(values=result) if result is not None else None

    @register(
        THREE_D,
        inputs=("prompt_ids", "response_ids", "response_mask?", "values", "returns"),
        split_groups=True,
        mini_batches=lambda self: self.build.num_mini_batches,
    )
    def update_critic(self, batches: list[Batch], objective: Objective, epochs: int) -> dict[str, float]:
        """One optimizer step for each mini-batch and epoch; returns the mean statistics over them."""

        def loss(decoder: Decoder, hidden: Tensor, micro: Packed, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
            old, returns = (drawn(micro.extra, name).to(hidden.device) for name in ("values", "returns"))
            fields = {"values": response_values(decoder, hidden, micro), "old_values": old, "returns": returns}
            return objective(fields, model_tokens(micro.extra), totals)

        return self.summarise([self.train(batch, loss) for _ in range(epochs) for batch in batches])
