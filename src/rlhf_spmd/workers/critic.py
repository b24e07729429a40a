"""The critic: values of every response position, and their update."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rlhf_spmd.controller import THREE_D, register
from rlhf_spmd.data.batch import Batch
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.heads import values
from rlhf_spmd.workers.engine import Packed
from rlhf_spmd.workers.model_worker import ModelWorker, Totals, field_on, model_tokens, response_positions

ValueObjective = Callable[[dict[str, Tensor], Tensor, Totals], tuple[Tensor, dict[str, Tensor]]]


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
    def update_critic(self, batches: list[Batch], objective: ValueObjective, epochs: int) -> dict[str, float]:
        """One optimizer step for each mini-batch and epoch; returns the mean statistics over them."""

        def loss(decoder: Decoder, hidden: Tensor, micro: Packed, totals: Totals) -> tuple[Tensor, dict[str, Tensor]]:
            old, returns = field_on(micro, "values", hidden.device), field_on(micro, "returns", hidden.device)
            fields = {"values": response_values(decoder, hidden, micro), "old_values": old, "returns": returns}
            return objective(fields, model_tokens(micro.extra), totals)

        return self.summarise([self.train(batch, loss) for _ in range(epochs) for batch in batches])
