"""The elementwise pieces of a block, each one autograd node: norm, rotary embedding, gated activation, and the plain
holders of parameters.

Exactness: a row's bits do not depend on the other rows. Contiguous ``silu`` breaks that on CPU (its last elements take a scalar
path with other rounding), a strided view does not, since every row then ends in the same way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf_spmd.models.spec import ModelSpec


class Linear(nn.Module):
    """``weight`` [out_local, in_local] and an optional ``bias`` [out_local], not initialised."""

    def __init__(self, shape: tuple[int, ...], bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=dtype, device=device)) if bias else None


class RMSNorm(nn.Module):
    """``weight`` [n]; normalises the last dim of n elements, in fp32 for bf16 input, as transformers does."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """``weight`` stands in for the module's own (a copy with another backward)."""
        return rms_norm(x, self.weight if weight is None else weight, self.eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (wide * scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normal = x.to(scale.dtype) * scale
        grad = grad.to(scale.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normal).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        grad_normal = grad * weight
        along = (grad_normal * normal).mean(-1, keepdim=True)
        grad_x = grad_normal.addcmul_(normal, along, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dim."""
    return _RMSNorm.apply(x, weight, eps)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        ctx.save_for_backward(gate_up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        grads = torch.empty_like(gate_up)
        grad_gate, grad_up = grads.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return grads


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2n] = [gate; up] -> silu(gate) * up [T, n]."""
    return _SwiGLU.apply(gate_up)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    # no addcmul: it may fuse the rounding on some elements and not on others
    torch.sub(a * cos, b * sin, out=out[..., :half])
    torch.add(b * cos, a * sin, out=out[..., half:])
    return out


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad.contiguous(), cos, -sin), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, D] in half-split form; cos and sin [T, 1, D / 2]."""
    return _Rotate.apply(x, cos, sin)


def rope_frequencies(spec: ModelSpec) -> Tensor:
    """Radians per position [D / 2], fp32 on CPU, after the spec's scaling (transformers' modeling_rope_utils)."""
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequency = 1.0 / (spec.rope_theta**exponent)
    scaling = spec.rope_scaling
    if scaling is None:
        return frequency
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return frequency / factor
    assert scaling["rope_type"] == "llama3", f"rope type {scaling['rope_type']!r} passed read_spec"
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * frequency / factor + smooth * frequency
    scaled = torch.where(wavelength > original / low, frequency / factor, frequency)
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, between, scaled)


def rope_tables(frequency: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, D / 2] of positions [T], computed in fp32."""
    angles = positions.to(frequency.dtype)[:, None, None] * frequency
    return angles.cos().to(dtype), angles.sin().to(dtype)
