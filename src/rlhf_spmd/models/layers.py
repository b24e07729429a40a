"""The holders of a block's parameters, and rotary tables."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rlhf_spmd.kernels import Ops
from rlhf_spmd.models.adapters import Adapter
from rlhf_spmd.models.spec import ModelSpec


class Linear(nn.Module):
    """``weight`` [out_local, in_local] and an optional ``bias`` [out_local], not initialised; ``lora``: an adapter of the weight, which
    may have it in fewer bits: ``weight`` is None then."""

    def __init__(
        self, shape: tuple[int, ...], bias: bool, dtype: torch.dtype, device: torch.device, lora: Adapter | None = None
    ) -> None:
        super().__init__()
        self.weight: nn.Parameter
        quantized = lora is not None and lora.base is not None
        self.register_parameter("weight", None if quantized else nn.Parameter(torch.empty(shape, dtype=dtype, device=device)))
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=dtype, device=device)) if bias else None
        self.lora = lora

    def product(self, ops: Ops, x: Tensor, recomputed: bool, bias: Tensor | None = None) -> Tensor:
        """x [R, in_local] -> [R, out_local], plus ``bias``. ``recomputed``: see :meth:`Ops.linear`."""
        if self.lora is not None and (self.lora.enabled or self.lora.base is not None):
            out: Tensor = self.lora(x, self.weight, bias, recomputed)
            return out
        return ops.linear(x, self.weight, bias, recomputed)


class RMSNorm(nn.Module):
    """``weight`` [n]; normalises the last dim of n elements, in fp32 for bf16 input, as transformers does.

    ``plus_one``: the factor is 1 + weight, applied before the result is rounded (Gemma).
    """

    def __init__(self, ops: Ops, size: int, eps: float, plus_one: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._rms_norm, self._add_norm = ops.rms_norm, ops.add_norm
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.eps, self.plus_one = eps, plus_one

    def forward(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self.eps, self.plus_one)

    def add(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, and its norm."""
        return self._add_norm(x, y, self.weight, self.eps, self.plus_one)


def rope_frequencies(spec: ModelSpec, local: bool = False) -> Tensor:
    """Radians per position of each pair of rotated dims, fp32 on CPU, after the spec's scaling (transformers' modeling_rope_utils).

    ``local``: of the layers that have ``local_rope_theta``, which are not scaled.
    """
    theta = spec.local_rope_theta if local else spec.rope_theta
    assert theta is not None, "no layer of this model has a rotary theta of its own"
    dim = int(spec.head_dim * spec.partial_rotary_factor)
    exponent = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
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
