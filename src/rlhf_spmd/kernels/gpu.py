"""The arithmetic of models on GPUs: torch's products, and Triton where torch would need many launches.

A class of its own rather than branches in :class:`~rlhf_spmd.kernels.ops.Ops`, which stays what any device can compute and what these
kernels are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_spmd.kernels import triton_head
from rlhf_spmd.kernels.flash import PackedFlash
from rlhf_spmd.kernels.ops import GPU_CHUNK_LOGITS, LogitShape, Ops
from rlhf_spmd.kernels.packing import AttentionRule, Packing


class GpuOps(Ops):
    """float32, bfloat16 and float16 on CUDA devices that Triton compiles for; in Triton's interpreter also on CPUs.

    ``packed``: the flash attention over packed sequences, after which the attention is named; None: torch's own for padded ones.
    """

    chunk_logits, keeps_logits = GPU_CHUNK_LOGITS, True

    def __init__(self, packed: PackedFlash | None = None) -> None:
        self._packed = packed
        self.name = self.name if packed is None else packed.name

    # -- packed sequences

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
        if self._packed is None or not len(q) or not self._packed.fits(q, rule):
            return super().attend_packed(q, k, v, packing, rule)
        return self._packed.attend(q, k, v, packing, rule)

    # -- the head

    def shape_logits(self, logits: Tensor, shape: LogitShape) -> Tensor:
        return logits

    def head_statistics(self, logits: Tensor, labels: Tensor, first: int, entropy: bool, shape: LogitShape) -> Tensor:
        return triton_head.logit_statistics(logits, labels, first, entropy, shape)

    def logit_statistics(self, logits: Tensor, labels: Tensor, first: int, entropy: bool) -> Tensor:
        return triton_head.logit_statistics(logits, labels, first, entropy, LogitShape())

    def head_gradients(
        self,
        logits: Tensor,
        labels: Tensor,
        first: int,
        log_z: Tensor,
        grads: Tensor,
        entropy: Sequence[Tensor] | None,
        shape: LogitShape,
        dtype: torch.dtype,
    ) -> Tensor:
        return triton_head.logit_gradients(logits, labels, first, log_z, grads, entropy, shape, dtype)

    def logit_gradients(
        self, logits: Tensor, labels: Tensor, first: int, log_z: Tensor, grads: Tensor, entropy: Sequence[Tensor] | None = None
    ) -> Tensor:
        return triton_head.logit_gradients(logits, labels, first, log_z, grads, entropy, LogitShape(), logits.dtype)

    def sum_product(self, total: Tensor, a: Tensor, b: Tensor, begins: bool) -> None:
        """By the product itself, which adds in fp32: no product of its own in memory."""
        if total.dtype == a.dtype:
            torch.addmm(total, a, b, beta=0 if begins else 1, out=total)
        elif begins:
            torch.mm(a, b, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
