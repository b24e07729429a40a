"""What a model is, in our words: read from a Hugging Face ``config.json``, without the network and without running its code.

A family is one file of this package that exports ``build_spec(config, source) -> ModelSpec``; ``model_type`` names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_spmd.config import registry


@dataclass(frozen=True)
class Names:
    """Hugging Face tensor names. ``{layer}`` is the global layer index; linear names lack ``.weight`` and ``.bias``."""

    embed: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    value_head: str = "score.weight"
    input_norm: str = "model.layers.{layer}.input_layernorm.weight"
    post_norm: str = "model.layers.{layer}.post_attention_layernorm.weight"
    q: str = "model.layers.{layer}.self_attn.q_proj"
    k: str = "model.layers.{layer}.self_attn.k_proj"
    v: str = "model.layers.{layer}.self_attn.v_proj"
    out: str = "model.layers.{layer}.self_attn.o_proj"
    q_norm: str = "model.layers.{layer}.self_attn.q_norm.weight"
    k_norm: str = "model.layers.{layer}.self_attn.k_norm.weight"
    gate: str = "model.layers.{layer}.mlp.gate_proj"
    up: str = "model.layers.{layer}.mlp.up_proj"
    down: str = "model.layers.{layer}.mlp.down_proj"


@dataclass(frozen=True)
class ModelSpec:
    """A normalised decoder architecture. Sizes count elements; ``rope_scaling`` is None for plain rotary embeddings.

    ``hf_config`` is the raw config.json, kept for export.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    attention_bias: bool = False
    attention_out_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    eos_token_ids: tuple[int, ...] = ()
    hf_config: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    names: Names = Names()


def read_spec(path: str | Path) -> ModelSpec:
    """The architecture of a Hugging Face directory. Raises ValueError naming the file, the key and the value."""
    source = Path(path) / "config.json"
    return spec_from_config(read_json(source), str(source), read_eos_ids(path))


def spec_from_config(config: Mapping[str, Any], source: str, eos_token_ids: tuple[int, ...] | None = None) -> ModelSpec:
    """The same from the contents of a config.json; ``source`` names it in messages."""
    family = config.get("model_type")
    if not isinstance(family, str):
        raise ValueError(f"{source}: 'model_type' is {family!r}; it must name a model family")
    try:
        module = registry.find("model family", __package__, family, exports="build_spec")
    except ValueError as error:
        raise ValueError(f"{source}: model_type: {error}") from None
    for key in ("quantization_config", "auto_map"):
        reject_unless(config, source, key, None)
    spec: ModelSpec = module.build_spec(config, source)
    if eos_token_ids is not None:
        spec = ModelSpec(**{**vars(spec), "eos_token_ids": eos_token_ids})
    return spec


def standard_spec(config: Mapping[str, Any], source: str, **flags: Any) -> ModelSpec:
    """The keys that all families share, checked; ``flags`` are the family's own ModelSpec fields and override them."""
    heads = _size(config, source, "num_attention_heads")
    hidden = _size(config, source, "hidden_size")
    if "head_dim" not in flags and config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"{source}: hidden_size={hidden} is not divisible by num_attention_heads={heads}; set 'head_dim'")
    rope_theta, rope_scaling = _rope(config, source)
    fields: dict[str, Any] = {
        "family": config["model_type"],
        "vocab_size": _size(config, source, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _size(config, source, "intermediate_size"),
        "num_hidden_layers": _size(config, source, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": _size(config, source, "num_key_value_heads", heads),
        "head_dim": _size(config, source, "head_dim", hidden // heads),
        "rms_norm_eps": _positive(config.get("rms_norm_eps", 1e-6), source, "rms_norm_eps"),
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "max_position_embeddings": _size(config, source, "max_position_embeddings", 2048),
        "eos_token_ids": _eos_ids(config.get("eos_token_id"), source) or (),
        "hf_config": dict(config),
    }
    spec = ModelSpec(**{**fields, **flags})
    if spec.num_attention_heads % spec.num_key_value_heads:
        raise ValueError(
            f"{source}: num_attention_heads={spec.num_attention_heads} is not divisible by "
            f"num_key_value_heads={spec.num_key_value_heads}"
        )
    if spec.head_dim % 2:
        raise ValueError(f"{source}: head_dim={spec.head_dim} must be even for rotary embeddings")
    reject_unless(config, source, "hidden_act", "silu")
    return spec


def reject_unless(config: Mapping[str, Any], source: str, key: str, *allowed: Any) -> None:
    """ValueError if ``key`` is set to something other than ``allowed`` (a missing key or null passes)."""
    value = config.get(key)
    if value is not None and value not in allowed:
        listed = ", ".join(repr(a) for a in allowed if a is not None) or "nothing (leave it out)"
        raise ValueError(f"{source}: '{key}' is {value!r}, which is not supported; allowed: {listed}")


def read_eos_ids(path: str | Path) -> tuple[int, ...]:
    """End-of-sequence token ids: generation_config.json if it names any, else config.json; () where neither does.

    Raises ValueError naming the file and the value.
    """
    for name in ("generation_config.json", "config.json"):
        source = Path(path) / name
        if source.is_file():
            ids = _eos_ids(read_json(source).get("eos_token_id"), str(source))
            if ids is not None:
                return ids
    return ()


def read_json(source: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ValueError naming the file."""
    if not source.is_file():
        raise ValueError(f"{source}: no such file; a Hugging Face model directory must contain {source.name}")
    try:
        value = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{source}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{source}: holds a JSON {type(value).__name__}, not an object")
    return value


def _eos_ids(value: Any, source: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"{source}: 'eos_token_id' is {value!r}; it must be a token id or a list of them")
    return tuple(ids)


def _size(config: Mapping[str, Any], source: str, key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{source}: '{key}' is {value!r}; it must be a positive integer")
    return value


def _positive(value: Any, source: str, key: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{source}: '{key}' is {value!r}; it must be a positive number")
    return float(value)


_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from transformers 5's ``rope_parameters`` or from the older ``rope_theta`` and ``rope_scaling``."""
    reject_unless(config, source, "partial_rotary_factor", 1, 1.0)
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    scaling = config.get(key)
    if scaling is None:
        scaling = {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"{source}: '{key}' is {scaling!r}; it must be an object")
    theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPE_KEYS:
        raise ValueError(f"{source}: '{key}.rope_type' is {kind!r}, which is not supported; allowed: {', '.join(_ROPE_KEYS)}")
    reject_unless(scaling, source, "partial_rotary_factor", 1, 1.0)
    numbers = {name: _positive(scaling.get(name), source, f"{key}.{name}") for name in _ROPE_KEYS[kind]}
    return _positive(theta, source, "rope_theta"), {"rope_type": kind, **numbers} if kind != "default" else None
