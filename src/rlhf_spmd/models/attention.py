"""What a forward pass has to know about its tokens; causal attention for packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rlhf_spmd.kernels import AttentionRule, Ops, Packing, choose_ops


class Attention(Protocol):
    """What a forward pass needs to know about its tokens. One whose ``attend`` the kernel of a whole layer can take over also has a
    ``kernel_context(layer_index)``, see :meth:`~rlhf_spmd.kernels.Ops.layer`."""

    positions: Tensor  # [T]

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D], rotated -> [T, Hq, D]. ``layer_index`` counts from 0 within the stage."""


class PackedAttention:
    """Causal attention within each of several packed sequences (training and scoring).

    ``lengths``: tokens per sequence, in the order in which they are packed. ``positions`` [T] count from 0 in each.
    Sequences are sorted and padded to a common length only inside the attention, among sequences of similar length.
    ``ops``: what computes it; None: the best for the queries.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu", ops: Ops | None = None) -> None:
        assert all(n >= 0 for n in lengths), f"negative sequence length in {lengths}"
        self.packing, self._ops = Packing([int(n) for n in lengths], torch.device(device)), ops
        positions = torch.cat([torch.arange(n) for n in self.packing.lengths] or [torch.arange(0)])
        self.positions = positions.to(self.packing.device)
        self.kernel_context = self.packing.context if ops is None or ops.joins_layers else None

    def attend(self, layer_index: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
        """q [T, H * G, D], k and v [T, H, D] -> [T, H * G, D]. Nothing is kept between layers: ``layer_index`` is not used."""
        assert len(q) == len(self.positions), f"{len(q)} tokens for sequences of {len(self.positions)} in all"
        ops = self._ops or choose_ops(q.dtype, q.device)
        return ops.attend_packed(q, k, v, self.packing, rule)
