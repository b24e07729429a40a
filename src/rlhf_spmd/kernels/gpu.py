"""The arithmetic of models on GPUs: torch's products, and Triton where torch would need many launches.

A class of its own rather than branches in :class:`~rlhf_spmd.kernels.ops.Ops`, which stays what any device can compute and what these
kernels are compared with.
"""

from __future__ import annotations

from torch import Tensor

from rlhf_spmd.kernels.flash import PackedFlash
from rlhf_spmd.kernels.ops import Ops
from rlhf_spmd.kernels.packing import AttentionRule, Packing


class GpuOps(Ops):
    """float32, bfloat16 and float16 on CUDA devices that Triton compiles for; in Triton's interpreter also on CPUs.

    ``packed``: the flash attention over packed sequences, after which the attention is named; None: torch's own for padded ones.
    """

    def __init__(self, packed: PackedFlash | None = None) -> None:
        self._packed = packed
        self.name = self.name if packed is None else packed.name

    # -- packed sequences

    def attend_packed(self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, rule: AttentionRule) -> Tensor:
        if self._packed is None or not len(q) or not self._packed.fits(q, rule):
            return super().attend_packed(q, k, v, packing, rule)
        return self._packed.attend(q, k, v, packing, rule)
