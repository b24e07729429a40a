"""Rotary embeddings: what a config.json says of them, the frequencies, and the tables of a forward pass (transformers'
modeling_rope_utils).

A row's frequencies must not change as the row grows: tokens that have been generated would then have had other log-probs than the
same tokens have in training. ``dynamic`` and ``longrope`` change them at a length; here rows end there (``longest_row``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhf_spmd.models.keys import read_positive, read_size, reject_unless

if TYPE_CHECKING:
    from rlhf_spmd.models.spec import ModelSpec

PART = "partial_rotary_factor"
# the numbers that each kind needs; a kind's optional ones are read by name
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),
    "longrope": (),
}


def read_rotary_factor(config: Mapping[str, Any], source: str, default: float) -> float:
    """``ModelSpec.partial_rotary_factor``, where the older or the newer key gives it. Raises ValueError unless it gives an even number
    of dims, at most all."""
    inner = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = read_positive(inner.get(PART, config.get(PART, default)), source, PART)
    heads = read_size(config, source, "num_attention_heads")
    head_dim = read_size(config, source, "head_dim", read_size(config, source, "hidden_size") // heads)
    if factor > 1 or int(head_dim * factor) % 2 or int(head_dim * factor) == 0:
        raise ValueError(
            f"{source}: '{PART}' is {factor}; of head_dim={head_dim} it must rotate an even number of dims, at most all"
        )
    return factor


def read_rope(config: Mapping[str, Any], source: str, partly: bool = False) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from transformers 5's ``rope_parameters`` or from the older ``rope_theta`` and ``rope_scaling``. ``partly``:
    heads may be rotated in part. ``attention_factor`` of the scaling multiplies cos and sin."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    scaling = config.get(key)
    if scaling is None:
        scaling = {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"{source}: '{key}' is {scaling!r}; it must be an object")
    for place in () if partly else (config, scaling):
        reject_unless(place, source, PART, 1, 1.0)
    theta = read_positive(scaling.get("rope_theta", config.get("rope_theta", 10000.0)), source, "rope_theta")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _KEYS:
        raise ValueError(f"{source}: '{key}.rope_type' is {kind!r}, which is not supported; allowed: {', '.join(_KEYS)}")
    numbers: dict[str, Any] = {name: read_positive(scaling.get(name), source, f"{key}.{name}") for name in _KEYS[kind]}
    if kind in ("yarn", "longrope"):
        numbers = _stretched(kind, scaling, config, source, key)
    return theta, {"rope_type": kind, **numbers} if kind != "default" else None


def _stretched(kind: str, scaling: Mapping[str, Any], config: Mapping[str, Any], source: str, key: str) -> dict[str, Any]:
    """The numbers of yarn and longrope, which both know the context of pretraining."""

    def optional(name: str, otherwise: float) -> float:
        return read_positive(scaling[name], source, f"{key}.{name}") if scaling.get(name) else otherwise

    name = "original_max_position_embeddings"
    longest = read_size(config, source, "max_position_embeddings", 2048)
    original = read_size(config, source, name, read_size(scaling, f"{source}: {key}", name, longest))
    factor = optional("factor", longest / original)
    found: dict[str, Any] = {"factor": factor, name: original}
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            listed = scaling.get(name)
            if not isinstance(listed, Sequence) or isinstance(listed, str):
                raise ValueError(f"{source}: '{key}.{name}' is {listed!r}; it must be a list of numbers")
            found[name] = tuple(read_positive(one, source, f"{key}.{name}") for one in listed)
        usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    else:
        of_all = optional("mscale_all_dim", 0.0)
        mscale = optional("mscale", 0.0) if of_all else 0.0
        usual = _mscale(factor, mscale) / _mscale(factor, of_all) if mscale else _mscale(factor, 1.0)
        found |= {"beta_fast": optional("beta_fast", 32.0), "beta_slow": optional("beta_slow", 1.0)}
        found["truncate"] = bool(scaling.get("truncate", True))
    return {**found, "attention_factor": optional("attention_factor", usual)}


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longest_row(scaling: Mapping[str, Any] | None, context: int) -> int:
    """Tokens of the longest row whose frequencies are those of its beginning. Where they are ``dynamic``, transformers changes them
    behind ``context``."""
    return min(context, scaling["original_max_position_embeddings"]) if scaling and "short_factor" in scaling else context


def check_factors(spec: ModelSpec, source: str) -> None:
    """Raises ValueError unless longrope has a factor for each pair that is rotated."""
    pairs = int(spec.head_dim * spec.partial_rotary_factor) // 2
    for name in ("short_factor", "long_factor"):
        count = len((spec.rope_scaling or {}).get(name, (1,) * pairs))
        if count != pairs:
            raise ValueError(f"{source}: '{name}' of the rotary scaling has {count} numbers; a head rotates {pairs} pairs")


def rope_frequencies(spec: ModelSpec, local: bool | None = False) -> Tensor:
    """Radians per position, fp32 on CPU, for each pair of the dims that are rotated, after the spec's scaling. ``local``: what
    :meth:`ModelSpec.local_rope` says of a layer; those with ``local_rope_theta`` are not scaled, and None has no pair."""
    if local is None:
        return torch.empty(0)
    theta, scaling = (spec.local_rope_theta, None) if local else (spec.rope_theta, spec.rope_scaling)
    assert theta is not None, "no layer of this model has a rotary theta of its own"
    dim = int(spec.head_dim * spec.partial_rotary_factor)
    kind = "default" if scaling is None else scaling["rope_type"]
    if scaling is not None and kind == "dynamic":  # 1 up to the context, but for rounding
        factor, context = scaling["factor"], spec.max_position_embeddings
        theta *= ((factor * context / context) - (factor - 1)) ** (dim / (dim - 2)) if dim > 2 else 1
    power: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    frequency = 1.0 / power
    if scaling is None or kind == "dynamic":
        return frequency
    if kind == "longrope":
        return 1.0 / (torch.tensor(scaling["short_factor"], dtype=torch.float32) * power)
    factor = float(scaling["factor"])
    if kind == "linear":
        return frequency / factor
    if kind == "yarn":
        return _yarn(scaling, theta, dim, frequency, 1.0 / (factor * power))
    assert kind == "llama3", f"rope type {kind!r} passed read_rope"
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    wavelength = 2 * math.pi / frequency
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * frequency / factor + smooth * frequency
    scaled = torch.where(wavelength > original / low, frequency / factor, frequency)
    medium = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(medium, between, scaled)


def _yarn(scaling: Mapping[str, Any], theta: float, dim: int, kept: Tensor, slowed: Tensor) -> Tensor:
    """Pairs that turn often in the context of pretraining are ``kept``, those that turn rarely ``slowed``, those between mixed
    (https://arxiv.org/abs/2309.00071)."""

    def pair_of(turns: float) -> float:
        turned = scaling["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return dim * math.log(turned) / (2 * math.log(theta))

    first, last = pair_of(scaling["beta_fast"]), pair_of(scaling["beta_slow"])
    if scaling["truncate"]:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    share = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return slowed * (1 - share) + kept * share


def rope_tables(frequency: Tensor, positions: Tensor, dtype: torch.dtype, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, pairs] of positions [T], times ``factor``, computed in fp32."""
    angles = positions.to(frequency.dtype)[:, None, None] * frequency
    cos, sin = angles.cos(), angles.sin()
    return (cos.to(dtype), sin.to(dtype)) if factor == 1 else ((cos * factor).to(dtype), (sin * factor).to(dtype))


def query_growth(beta: float, context: int, positions: Tensor) -> Tensor:
    """What rotated queries at positions [T] are multiplied by [T, 1, 1], in fp32, see :class:`ModelSpec` (Llama 4's)."""
    return 1 + beta * torch.log(1 + torch.floor(positions / context))[:, None, None]
