"""The arithmetic of models on GPUs: torch's products, and Triton where torch would need many launches.

A class of its own rather than branches in :class:`~rlhf_spmd.kernels.ops.Ops`, which stays what any device can compute and what these
kernels are compared with.
"""

from __future__ import annotations

from rlhf_spmd.kernels.ops import Ops


class GpuOps(Ops):
    """float32, bfloat16 and float16 on CUDA devices that Triton compiles for; in Triton's interpreter also on CPUs."""
