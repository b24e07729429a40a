"""Matrix products of all experts in one launch, by torch's grouped GEMM, which finds each expert's rows on the device.

Shape legend: N rows sorted by expert, E experts. Rows of expert e end at ``ends[e]``, int32 [E] on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf_spmd.kernels import triton_experts

ALIGNED = 8  # bf16 elements of 16 bytes, of which rows have a multiple


def fits(x: Tensor, weight: Tensor) -> bool:
    """True if torch has a kernel for x [N, in] and ``weight`` [E, blocks, out, in] that does not wait for the host."""
    if x.is_cuda and torch.cuda.get_device_capability(x.device)[0] not in (9, 10):
        return False
    whole = weight.shape[2] % ALIGNED == weight.shape[3] % ALIGNED == 0 and len(x) > 0
    return whole and x.dtype == weight.dtype == torch.bfloat16


def forward(ends: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """Returns the result of :meth:`~rlhf_spmd.kernels.Ops.per_expert`, and what the backward pass needs."""
    x = x.contiguous()
    parts = [torch._grouped_mm(x, matrix.transpose(1, 2), ends) for matrix in weight.unbind(1)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1), (x, weight)


def backward(ends: Tensor, _: object, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns gradients of x and of the weight.

    torch's product leaves gradients of experts without rows unwritten; they are set to 0.
    """
    parts = grad.contiguous().split(weight.shape[2], 1)
    grad_x, *others = (torch._grouped_mm(part, matrix, ends) for part, matrix in zip(parts, weight.unbind(1), strict=True))
    for other in others:
        grad_x += other
    of_blocks = [torch._grouped_mm(part.t(), x, ends) for part in parts]
    grad_weight = of_blocks[0][:, None] if len(of_blocks) == 1 else torch.stack(of_blocks, 1)
    triton_experts.clear_idle(ends, grad_weight)
    return grad_x, grad_weight
