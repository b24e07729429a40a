"""The forward and backward passes of a training call's micro-batches, in the order that a pipeline schedule gives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.parallel.pipeline import Action
from rlhf_spmd.parallel.zero import zero_loss

if TYPE_CHECKING:
    from rlhf_spmd.workers.train_engine import Loss, Packed, TrainEngine


class Passes:
    """The passes of one :meth:`TrainEngine.forward_backward`: tensors between a forward pass and its backward pass, and sums so far."""

    def __init__(self, engine: TrainEngine, batches: Sequence[Packed], loss: Loss, row_weight: float) -> None:
        self._engine, self._batches, self._loss, self._row_weight = engine, batches, loss, row_weight
        self._alive: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.sums: dict[str, Tensor] = {}

    def forward(self, action: Action, received: Tensor | None) -> Tensor | None:
        chunk, batch = self._engine.chunks[action.chunk], self._batches[action.micro_batch]
        leaf = None if received is None else received.requires_grad_()
        routers = self._engine.balance.begin(batch.lengths, batch.places, self._row_weight)
        out = self._engine.pass_through(chunk, batch, leaf, partial(self._end, batch), routers)
        self._alive[action.micro_batch, action.chunk] = leaf, out
        return None if chunk.is_last else out.detach()

    def _end(self, batch: Packed, decoder: Decoder, hidden: Tensor) -> Tensor:
        """The loss of a micro-batch, after the last layer."""
        empty = not len(batch.lengths)
        with torch.set_grad_enabled(not empty):
            value, stats = self._loss(decoder, hidden[:0] if empty else hidden, batch)
        for key, part in {"loss": value, **stats}.items():
            part = part.detach().double()
            self.sums[key] = self.sums[key] + part if key in self.sums else part
        assert empty or value.requires_grad, "the loss does not depend on the model's output"
        return zero_loss(decoder, hidden) if empty else value

    def backward(self, action: Action, received: Tensor | None) -> Tensor | None:
        leaf, out = self._alive.pop((action.micro_batch, action.chunk))
        if self._engine.zeros:
            self._engine.zeros[action.chunk].before_backward(is_last=action.micro_batch == len(self._batches) - 1)
        torch.autograd.backward(out, received)
        return None if leaf is None else leaf.grad
