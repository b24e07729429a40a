"""The elementwise pieces of a block, each one autograd node: norm, rotary embedding, gated activation, and the plain
holders of parameters.

Exactness: a row's bits do not depend on the other rows. The C++ kernels have that from their construction, and serve wherever
they are ready, in training and generation alike. In torch contiguous ``silu`` breaks that on CPU (its last elements take a scalar
path with other rounding), a strided view does not, since every row then ends in the same way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlhf_spmd import kernels
from rlhf_spmd.models.spec import ModelSpec


class Linear(nn.Module):
    """``weight`` [out_local, in_local] and an optional ``bias`` [out_local], not initialised."""

    def __init__(self, shape: tuple[int, ...], bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=dtype, device=device)) if bias else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, found: kernels.Kernels | None, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.new_empty(x.shape[0], weight.shape[0]) if found is None else found.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = torch.mm(grad, weight) if ctx.needs_input_grad[1] else None
        grad_weight = torch.mm(grad.t(), x) if ctx.needs_input_grad[2] else None
        return None, grad_x, grad_weight, grad.sum(0) if ctx.needs_input_grad[3] else None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, recomputed: bool = False) -> Tensor:
    """x [T, in] times the transpose of ``weight`` [out, in], plus ``bias``: with at least ``attention.exact_rows`` rows a row's
    bits do not depend on the others. ``recomputed``: only what the backward pass needs is wanted, the result need not be there.
    """
    found = kernels.ready(x)
    if found is None or not found.multiplies(x, weight):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        return found.linear(x, weight, bias)
    return _Linear.apply(None if recomputed else found, x, weight, bias)


class RMSNorm(nn.Module):
    """``weight`` [n]; normalises the last dim of n elements, in fp32 for bf16 input, as transformers does.

    ``plus_one``: the factor is 1 + weight, applied before the result is rounded (Gemma).
    """

    def __init__(self, size: int, eps: float, plus_one: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps, self.plus_one = eps, plus_one

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """``weight`` stands in for the module's own (a copy with another backward)."""
        return rms_norm(x, self.weight if weight is None else weight, self.eps, self.plus_one)


def _normed(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """The norm and its scales [..., 1], in fp32 for bf16."""
    found = kernels.ready(x)
    if found is not None:
        return found.rms_norm(x, weight, eps, plus_one)
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one:
        return (wide * scale * (1 + weight.to(wide.dtype))).to(x.dtype), scale
    return weight * (wide * scale).to(x.dtype), scale


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
        out, scale = _normed(x, weight, eps, plus_one)
        ctx.save_for_backward(x, weight, scale)
        ctx.plus_one = plus_one
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        found = kernels.ready(x)
        if found is not None:
            grad_x, wide = found.rms_norm_backward(x, scale, weight, ctx.plus_one, grad)
            return grad_x, wide.to(weight.dtype), None, None
        normal = x.to(scale.dtype) * scale
        grad = grad.to(scale.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normal).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        grad_normal = grad * (1 + weight.to(grad.dtype) if ctx.plus_one else weight)
        along = (grad_normal * normal).mean(-1, keepdim=True)
        grad_x = grad_normal.addcmul_(normal, along, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dim; ``plus_one``: (1 + weight) * ..."""
    if not torch.is_grad_enabled():
        return _normed(x, weight, eps, plus_one)[0]
    return _RMSNorm.apply(x, weight, eps, plus_one)


def _gated(gate_up: Tensor, gelu: bool) -> Tensor:
    found = kernels.ready(gate_up)
    if found is not None:
        return found.gated_linear(gate_up, gelu)
    gate, up = gate_up.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)).mul_(up)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, gelu: bool) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.gelu = gelu
        return _gated(gate_up, gelu)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        found = kernels.ready(gate_up)
        if found is not None:
            return found.gated_linear_backward(gate_up, grad, ctx.gelu), None
        gate, up = gate_up.chunk(2, -1)
        grads = torch.empty_like(gate_up)
        grad_gate, grad_up = grads.chunk(2, -1)
        torch.mul(grad, up, out=grad_gate)
        aten = torch.ops.aten  # with their results in place: copies of such matrices cost as much as the arithmetic
        if ctx.gelu:
            aten.gelu.out(gate, approximate="tanh", out=grad_up)
            aten.gelu_backward.grad_input(grad_gate, gate, approximate="tanh", grad_input=grad_gate)
        else:
            aten.silu.out(gate, out=grad_up)
            aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        grad_up.mul_(grad)
        return grads, None


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2n] = [gate; up] -> silu(gate) * up [T, n]."""
    return _GatedLinear.apply(gate_up, False) if torch.is_grad_enabled() else _gated(gate_up, False)


def geglu(gate_up: Tensor) -> Tensor:
    """[T, 2n] = [gate; up] -> gelu(gate) * up [T, n], gelu in its tanh form."""
    return _GatedLinear.apply(gate_up, True) if torch.is_grad_enabled() else _gated(gate_up, True)


GATED = {"silu": swiglu, "gelu_tanh": geglu}  # by ModelSpec.hidden_act


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    found = kernels.ready(x)
    if found is not None:
        return found.rotate(x, cos, sin)
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
    return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else _rotated(x, cos, sin)


def rope_frequencies(spec: ModelSpec, local: bool = False) -> Tensor:
    """Radians per position [D / 2], fp32 on CPU, after the spec's scaling (transformers' modeling_rope_utils).

    ``local``: of the layers that have ``local_rope_theta``, which are not scaled.
    """
    theta = spec.local_rope_theta if local else spec.rope_theta
    assert theta is not None, "no layer of this model has a rotary theta of its own"
    exponent = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    frequency = 1.0 / (theta**exponent)
    scaling = spec.rope_scaling
    if scaling is None or local:
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
