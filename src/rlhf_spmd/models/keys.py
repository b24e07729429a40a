"""The values of a config.json, checked: each reader names the file, the key and the value in its messages.

A row's rotary frequencies must not change as the row grows: tokens that have been generated would then have had other log-probs than
the same tokens have in training. ``dynamic`` and ``longrope`` change them at a length; here rows end there (``longest_row``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

FP8_BLOCK = 128  # rows and columns of an FP8 matrix that share a scale
# limits of sizes that multiply the number of tensors, of which lists are made: several times the largest published
MAX_SIZES = {"num_hidden_layers": 1000, "num_experts": 10_000, "num_local_experts": 10_000}


def reject_unless(config: Mapping[str, Any], source: str, key: str, *allowed: Any) -> None:
    """Raise ValueError if ``key`` is set to something other than ``allowed``; a missing key or null passes."""
    value = config.get(key)
    if value is not None and value not in allowed:
        listed = ", ".join(repr(a) for a in allowed if a is not None) or "nothing (leave it out)"
        raise ValueError(f"{source}: '{key}' is {value!r}, which is not supported; allowed: {listed}")


def read_size(config: Mapping[str, Any], source: str, key: str, default: int | None = None) -> int:
    """Return a positive integer, within ``MAX_SIZES`` if the key is there; ``default`` where the key is missing or null. Raises
    ValueError naming the key and the value."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{source}: '{key}' is {value!r}; it must be a positive integer")
    if value > MAX_SIZES.get(key, value):
        raise ValueError(f"{source}: '{key}' is {value}; it must be at most {MAX_SIZES[key]}")
    return value


def read_positive(value: Any, source: str, key: str) -> float:
    """Return ``value`` of ``key`` as a float. Raises ValueError naming both unless it is a positive number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{source}: '{key}' is {value!r}; it must be a positive number")
    return float(value)


def read_text_config(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return the language model of a model that sees. Raises ValueError if it is not there."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"{source}: 'text_config' is {text!r}; model_type {config['model_type']!r} must have one")
    return text


def read_biases(config: Mapping[str, Any], default: bool = False) -> dict[str, bool]:
    """Return ``attention_bias`` and ``attention_out_bias`` of ModelSpec, where one key gives both."""
    return dict.fromkeys(("attention_bias", "attention_out_bias"), bool(config.get("attention_bias", default)))


ROTARY_FACTOR = "partial_rotary_factor"
# the numbers that each kind needs; a kind's optional ones are read by name
_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (),
    "longrope": (),
    "proportional": (ROTARY_FACTOR,),
}


def read_rotary_factor(config: Mapping[str, Any], source: str, default: float) -> float:
    """Return ``ModelSpec.partial_rotary_factor``, where the older or the newer key gives it. Raises ValueError unless it gives an
    even number of dims, at most all."""
    inner = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = read_positive(inner.get(ROTARY_FACTOR, config.get(ROTARY_FACTOR, default)), source, ROTARY_FACTOR)
    heads = read_size(config, source, "num_attention_heads")
    head_dim = read_size(config, source, "head_dim", read_size(config, source, "hidden_size") // heads)
    if factor > 1 or int(head_dim * factor) % 2 or int(head_dim * factor) == 0:
        raise ValueError(
            f"{source}: '{ROTARY_FACTOR}' is {factor}; of head_dim={head_dim} it must rotate an even number of dims, at most all"
        )
    return factor


def read_rope(config: Mapping[str, Any], source: str, partly: bool = False) -> tuple[float, dict[str, Any] | None]:
    """Return (theta, scaling) from transformers 5's ``rope_parameters`` or from the older ``rope_theta`` and ``rope_scaling``.
    ``partly``: heads may be rotated in part. ``attention_factor`` of the scaling multiplies cos and sin."""
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    scaling = config.get(key)
    if scaling is None:
        scaling = {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"{source}: '{key}' is {scaling!r}; it must be an object")
    for place in () if partly else (config, scaling):
        reject_unless(place, source, ROTARY_FACTOR, 1, 1.0)
    theta = read_positive(scaling.get("rope_theta", config.get("rope_theta", 10000.0)), source, "rope_theta")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _KEYS:
        raise ValueError(f"{source}: '{key}.rope_type' is {kind!r}, which is not supported; allowed: {', '.join(_KEYS)}")
    numbers: dict[str, Any] = {name: read_positive(scaling.get(name), source, f"{key}.{name}") for name in _KEYS[kind]}
    if kind == "proportional":
        numbers["factor"] = read_positive(scaling.get("factor", 1.0), source, f"{key}.factor")
    if kind in ("yarn", "longrope"):
        numbers = _stretched(kind, scaling, config, source, key)
    return theta, {"rope_type": kind, **numbers} if kind != "default" else None


def _stretched(kind: str, scaling: Mapping[str, Any], config: Mapping[str, Any], source: str, key: str) -> dict[str, Any]:
    """Return the numbers of yarn and longrope, which both know the context of pretraining."""

    def optional(name: str, otherwise: float) -> float:
        return read_positive(scaling[name], source, f"{key}.{name}") if scaling.get(name) else otherwise

    name = "original_max_position_embeddings"
    longest = read_size(config, source, "max_position_embeddings", 2048)
    original = read_size(config, source, name, read_size(scaling, f"{source}: {key}", name, longest))
    factor = optional("factor", longest / original)
    numbers: dict[str, Any] = {"factor": factor, name: original}
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            listed = scaling.get(name)
            if not isinstance(listed, Sequence) or isinstance(listed, str):
                raise ValueError(f"{source}: '{key}.{name}' is {listed!r}; it must be a list of numbers")
            numbers[name] = tuple(read_positive(factor_of_pair, source, f"{key}.{name}") for factor_of_pair in listed)
        default_attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    else:
        mscale_all_dim = optional("mscale_all_dim", 0.0)
        mscale = optional("mscale", 0.0) if mscale_all_dim else 0.0
        default_attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim) if mscale else _mscale(factor, 1.0)
        numbers |= {"beta_fast": optional("beta_fast", 32.0), "beta_slow": optional("beta_slow", 1.0)}
        numbers["truncate"] = bool(scaling.get("truncate", True))
    return {**numbers, "attention_factor": optional("attention_factor", default_attention_factor)}


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longest_row(scaling: Mapping[str, Any] | None, context: int) -> int:
    """Return the tokens of the longest row whose frequencies are those of its beginning. Where they are ``dynamic``, transformers
    changes them behind ``context``."""
    return min(context, scaling["original_max_position_embeddings"]) if scaling and "short_factor" in scaling else context


def check_factors(scaling: Mapping[str, Any] | None, pairs: int, source: str) -> None:
    """Raise ValueError unless longrope has a factor for each of the ``pairs`` of dims that are rotated."""
    for name in ("short_factor", "long_factor"):
        count = len((scaling or {}).get(name, (1,) * pairs))
        if count != pairs:
            raise ValueError(f"{source}: '{name}' of the rotary scaling has {count} numbers; a head rotates {pairs} pairs")


def check_fp8(config: Mapping[str, Any], source: str) -> None:
    """Raise ValueError if ``quantization_config`` is there and says something other than FP8 as it is read here."""
    if config.get("quantization_config") is None:
        return
    quantization = config["quantization_config"]
    where = f"{source}: quantization_config"
    if not isinstance(quantization, Mapping):
        raise ValueError(f"{source}: 'quantization_config' is {quantization!r}; it must be an object")
    reject_unless({"quant_method": "none", **quantization}, where, "quant_method", "fp8")
    reject_unless(quantization, where, "fmt", "e4m3")
    reject_unless(quantization, where, "weight_block_size", [FP8_BLOCK, FP8_BLOCK])
