"""Micro-batches, and their forward and backward passes in the order that a pipeline schedule gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.data.batch import Batch
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.models.router_balance import RouterBalance
from rlhf_spmd.parallel.pipeline import Action
from rlhf_spmd.parallel.zero import FSDPModel, zero_loss

ROUTED_EXPERTS = "routed_experts"  # a field of rows, see ``router_replay``


@dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch of whole sequences: ``tokens`` int64 [T] on the device, ``lengths`` int64 [rows] on the CPU, summing to T.

    ``extra``: the fields of these rows that heads and losses use. A micro-batch may have no rows. ``token_index``: given if sequences
    share tokens, so that lengths sum to more than T; see :class:`~rlhf_spmd.models.attention.PackedAttention`.
    """

    tokens: Tensor
    lengths: Tensor
    extra: Batch = field(
        default_factory=lambda: Batch(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), {})
    )
    token_index: Tensor | None = None

    @property
    def experts(self) -> Tensor | None:
        """The experts that each token of the rows has to take, see ``router_replay``; None: they choose for themselves."""
        return self.extra[ROUTED_EXPERTS].values if ROUTED_EXPERTS in self.extra else None


Head = Callable[[Decoder, Tensor, Packed], Any]
Loss = Callable[[Decoder, Tensor, Packed], tuple[Tensor, Mapping[str, Tensor]]]


class Passes:
    """The passes of one ``TrainEngine.forward_backward``: tensors between a forward pass and its backward pass, and sums so far.

    ``chunks``, ``zeros``, ``balance`` and ``pass_through`` are the engine's.
    """

    def __init__(
        self,
        chunks: Sequence[Decoder],
        zeros: Sequence[FSDPModel],
        balance: RouterBalance,
        pass_through: Callable[..., Any],
        batches: Sequence[Packed],
        loss: Loss,
        row_weight: float,
    ) -> None:
        self._chunks, self._zeros, self._balance, self._pass_through = chunks, zeros, balance, pass_through
        self._batches, self._loss, self._row_weight = batches, loss, row_weight
        self._alive: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.sums: dict[str, Tensor] = {}

    def forward(self, action: Action, received: Tensor | None) -> Tensor | None:
        chunk, batch = self._chunks[action.chunk], self._batches[action.micro_batch]
        leaf = None if received is None else received.requires_grad_()
        routers = self._balance.begin(batch.lengths, batch.token_index, self._row_weight, batch.experts)
        out = self._pass_through(chunk, batch, leaf, partial(self._end, batch), routers)
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
        if self._zeros:
            self._zeros[action.chunk].before_backward(is_last=action.micro_batch == len(self._batches) - 1)
        torch.autograd.backward(out, received)
        return None if leaf is None else leaf.grad
