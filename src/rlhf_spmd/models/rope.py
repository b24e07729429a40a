"""Rotary embeddings: their frequencies, and the tables of a forward pass (transformers' modeling_rope_utils)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_spmd.models.spec import ModelSpec, RopeKind


def rope_frequencies(spec: ModelSpec, kind: RopeKind = "global") -> Tensor:
    """Return radians per position, fp32 on CPU, for each pair of the dims that are rotated, after the spec's scaling. ``kind``:
    :meth:`ModelSpec.rope_kind` of a layer; "local" is not scaled, and None has no pair."""
    if kind is None:
        return torch.empty(0)
    local = kind == "local"
    theta, scaling = (spec.local_rope_theta, None) if local else (spec.rope_theta, spec.rope_scaling)
    assert theta is not None, "the model sets no local_rope_theta"
    dim = spec.rotated_dims if local or spec.global_heads is None else spec.global_heads[1]
    scaling_type = "default" if scaling is None else scaling["rope_type"]
    if scaling is not None and scaling_type == "dynamic":  # 1 up to the context, but for rounding
        factor = scaling["factor"]
        context = spec.max_position_embeddings
        theta *= ((factor * context / context) - (factor - 1)) ** (dim / (dim - 2)) if dim > 2 else 1
    power: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    frequency = 1.0 / power
    if scaling is None or scaling_type == "dynamic":
        return frequency
    if scaling_type == "proportional":  # the other pairs of the head do not turn
        rotated = torch.arange(dim // 2) < int(scaling["partial_rotary_factor"] * dim // 2)
        return torch.where(rotated, frequency / scaling["factor"], 0)
    if scaling_type == "longrope":
        return 1.0 / (torch.tensor(scaling["short_factor"], dtype=torch.float32) * power)
    factor = float(scaling["factor"])
    if scaling_type == "linear":
        return frequency / factor
    if scaling_type == "yarn":
        return _yarn(scaling, theta, dim, frequency, 1.0 / (factor * power))
    assert scaling_type == "llama3", f"rope type {scaling_type!r} passed read_rope"
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - low) / (high - low)
    interpolated = (1 - smooth) * frequency / factor + smooth * frequency
    scaled = torch.where(wavelength > original / low, frequency / factor, frequency)
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, interpolated, scaled)


def _yarn(scaling: Mapping[str, Any], theta: float, dim: int, unscaled: Tensor, slowed: Tensor) -> Tensor:
    """Return the frequencies of yarn (https://arxiv.org/abs/2309.00071): ``unscaled`` for pairs that turn often in the context of
    pretraining, ``slowed`` for pairs that turn rarely, a mix between."""

    def pair_of(turns: float) -> float:
        positions_per_radian = scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return dim * math.log(positions_per_radian) / (2 * math.log(theta))

    first, last = pair_of(scaling["beta_fast"]), pair_of(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    share = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return slowed * (1 - share) + unscaled * share


class Rope(NamedTuple):
    """cos and sin [T, 1, pairs] of the tokens' positions, and ``growth`` [T, 1, 1], which multiplies rotated queries."""

    cos: Tensor
    sin: Tensor
    growth: Tensor | None = None


def rope_tables(spec: ModelSpec, frequency: Tensor, positions: Tensor, dtype: torch.dtype, kind: RopeKind = "global") -> Rope:
    """Return the tables of ``positions`` [T] in ``dtype``, computed in fp32. ``kind``: see :func:`rope_frequencies`."""
    angles = positions.to(frequency.dtype)[:, None, None] * frequency
    cos, sin = angles.cos(), angles.sin()
    growth = None
    factor = 1 if kind == "local" or spec.rope_scaling is None else spec.rope_scaling.get("attention_factor", 1)
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    if spec.query_growth is not None:
        beta, context = spec.query_growth
        growth = (1 + beta * torch.log(1 + torch.floor(positions / context)))[:, None, None].to(dtype)
    return Rope(cos.to(dtype), sin.to(dtype), growth)
