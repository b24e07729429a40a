"""The arithmetic of models on GPUs: torch's products, and Triton where torch would need many launches.

A class of its own rather than branches in :class:`~rlhf_spmd.kernels.ops.Ops`, which stays what any device can compute and what these
kernels are compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rlhf_spmd.kernels import triton_heads, triton_layers
from rlhf_spmd.kernels.gradients import differentiable_several
from rlhf_spmd.kernels.ops import Ops
from rlhf_spmd.kernels.packing import HeadShape, Norms, PageTarget


class GpuOps(Ops):
    """float32, bfloat16 and float16 on CUDA devices that Triton compiles for; in Triton's interpreter also on CPUs."""

    writes_pages = True

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> tuple[Tensor, Tensor]:
        def forward(x: Tensor, y: Tensor, weight: Tensor) -> tuple[tuple[Tensor, ...], Sequence[Tensor]]:
            total, out, scales = triton_layers.norm(x, y, weight, eps, plus_one)
            return (total, out), (total, weight, scales)

        def backward(
            _: object, grad_total: Tensor, grad: Tensor, total: Tensor, weight: Tensor, scales: Tensor
        ) -> tuple[Tensor, ...]:
            of_total, of_weight = triton_layers.norm_backward(grad, grad_total, total, weight, scales, plus_one)
            return of_total, of_total, of_weight

        total, out = differentiable_several(forward, backward, x, y, weight)
        return total, out

    def heads(self, qkv: Tensor, norms: Norms, cos: Tensor, sin: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
        def forward(qkv: Tensor, *norms: Tensor | None) -> tuple[tuple[Tensor, ...], Sequence[Tensor | None]]:
            of_q, of_k = norms
            return triton_heads.heads(qkv, (of_q, of_k), cos, sin, shape), (qkv, cos, sin, *norms)

        def backward(_: object, *given: Any) -> tuple[Tensor | None, ...]:
            q, k, v, qkv, cos, sin, of_q, of_k = given
            return triton_heads.heads_backward((q, k, v), qkv, (of_q, of_k), cos, sin, shape)

        q, k, v = differentiable_several(forward, backward, qkv, *norms)
        return q, k, v

    def heads_to_pages(
        self,
        qkv: Tensor,
        norms: Norms,
        cos: Tensor,
        sin: Tensor,
        shape: HeadShape,
        pages: PageTarget,
    ) -> Tensor:
        return triton_heads.heads(qkv, norms, cos, sin, shape, pages)[0]

    def norm(self, x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
        return triton_layers.norm(x, None, weight, eps, plus_one)[1:]

    def norm_backward(
        self, plus_one: bool, _: object, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        return triton_layers.norm_backward(grad, None, x, weight, scale, plus_one)

    def gate(self, gate_up: Tensor, gelu: bool) -> Tensor:
        return triton_layers.gate(gate_up, gelu)

    def gate_backward(self, gelu: bool, _: object, grad: Tensor, gate_up: Tensor) -> tuple[Tensor]:
        return (triton_layers.gate_backward(grad, gate_up, gelu),)
