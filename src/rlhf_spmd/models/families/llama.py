"""Llama and dense families of its shape. Each function is named after its ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.keys import read_biases, read_positive, read_rotary_factor, read_size, reject_unless
from rlhf_spmd.models.spec import ModelSpec, Names, read_windows, standard_spec


def llama(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Llama (2, 3, 3.1, 3.2 and the many models of that shape).

    transformers' LlamaConfig; ``attention_bias`` covers q, k, v and the output projection.
    """
    reject_unless(config, source, "mlp_bias", False)
    return standard_spec(config, source, **read_biases(config))


def mistral(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Mistral: Llama's shape with a sliding window in every layer.

    transformers' MistralConfig: without ``sliding_window`` it is 4096, with null there is none.
    """
    config = {"sliding_window": 4096, "num_key_value_heads": 8, **config}
    return standard_spec(config, source, windows=read_windows(config, source))


_MINISTRAL3_DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def ministral3(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Ministral 3: Llama's shape with yarn; queries grow with the logarithm of their position behind the context of
    pretraining.

    transformers' Ministral3Config, with its defaults.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or _MINISTRAL3_ROPE
    config = {**_MINISTRAL3_DEFAULTS, **config, "rope_parameters": rope}
    beta = read_positive(rope.get("llama_4_scaling_beta"), source, "rope_parameters.llama_4_scaling_beta")
    growth = beta, read_size(rope, f"{source}: rope_parameters", "original_max_position_embeddings")
    return standard_spec(config, source, query_growth=growth, windows=read_windows(config, source))


_PHI3_QKV = "model.layers.{layer}.self_attn.qkv_proj"
_PHI3_GATE_UP = "model.layers.{layer}.mlp.gate_up_proj"
_PHI3_NAMES = replace(Names(), q=_PHI3_QKV, k=_PHI3_QKV, v=_PHI3_QKV, gate=_PHI3_GATE_UP, up=_PHI3_GATE_UP)
_PHI3_OLD = {"su": "longrope", "yarn": "longrope"}  # what early models call it


def phi3(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Phi-3 and Phi-4: Llama's shape with q, k and v in one stored tensor, gate and up in another, a sliding window in
    every layer, and in Phi-4-mini rotary embeddings of a part of each head.

    transformers' Phi3Config, with its defaults. Its dropouts are not applied. Rows of models with long-rope scaling end
    where transformers would change the frequencies, at ``original_max_position_embeddings``.
    """
    config = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, **config}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := config.get(key), Mapping):
            kind = rope.get("rope_type", rope.get("type"))
            config = {**config, key: {**rope, "rope_type": _PHI3_OLD.get(str(kind), kind or "default")}}
    flags = {"names": _PHI3_NAMES, "windows": read_windows(config, source)}
    return standard_spec(config, source, partial_rotary_factor=read_rotary_factor(config, source, 1.0), **flags)


def granite(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Granite: Llama's shape with factors of the embeddings, the attention scores, what each layer adds, and the
    logits.

    transformers' GraniteConfig, with its defaults.
    """
    reject_unless(config, source, "mlp_bias", False)
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    embed, attention, residual, logits = (read_positive(config.get(name, 1.0), source, name) for name in names)
    factors = {"embed_scale": embed, "attention_scale": attention, "residual_scale": residual, "logit_scale": 1 / logits}
    return standard_spec(config, source, **read_biases(config), **factors)


def smollm3(config: Mapping[str, Any], source: str) -> ModelSpec:
    """SmolLM 3: Llama's shape without rotary embeddings in every fourth layer.

    transformers' SmolLM3Config, with its defaults; ``no_rope_layers`` has a 0 where a layer has none.
    """
    for key in ("mlp_bias", "use_sliding_window"):
        reject_unless(config, source, key, False)
    layers = read_size(config, source, "num_hidden_layers")
    interval = read_size(config, source, "no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(rotated) < layers or not set(rotated) <= {0, 1}:
        raise ValueError(f"{source}: 'no_rope_layers' is {rotated!r}; it must have a 0 or 1 for each of {layers} layers")
    defaults = {"num_key_value_heads": 4, "rope_theta": 2e6, "max_position_embeddings": 32768, "tie_word_embeddings": True}
    config = {**defaults, **config}
    unrotated = tuple(layer for layer in range(layers) if not rotated[layer])
    return standard_spec(config, source, unrotated=unrotated, **read_biases(config))


def seed_oss(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Seed-OSS: Llama's shape with biases on q, k and v, and head_dim independent of hidden_size.

    transformers' SeedOssConfig, with its defaults. Its dropouts are not applied.
    """
    reject_unless(config, source, "mlp_bias", False)
    config = {"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True, "max_position_embeddings": 524288, **config}
    flags = {"attention_bias": bool(config["attention_bias"]), "attention_out_bias": bool(config.get("attention_out_bias"))}
    return standard_spec(config, source, **flags)


_NORMS_BEHIND = replace(
    Names(),
    input_norm=None,
    post_norm=None,
    attention_norm="model.layers.{layer}.post_attention_layernorm.weight",
    mlp_norm="model.layers.{layer}.post_feedforward_layernorm.weight",
)


def exaone4(config: Mapping[str, Any], source: str) -> ModelSpec:
    """EXAONE 4: norms behind attention and MLP only, q and k normed per head. Where some layers have a window, the
    others have no rotary embeddings.

    transformers' Exaone4Config, with its defaults. A pattern of letters needs ``layer_types``, as in transformers.
    """
    defaults = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}
    config = {**defaults, **config}
    is_listed = config["sliding_window"] is None or config.get("layer_types")
    windows = read_windows(config, source, 1 if is_listed else read_size(config, source, "sliding_window_pattern"))
    unrotated = () if config["sliding_window"] is None else tuple(i for i, window in enumerate(windows) if window is None)
    flags = {"qk_norm": True, "windows": windows, "unrotated": unrotated, "names": _NORMS_BEHIND}
    return standard_spec(config, source, **flags)


def olmo2(config: Mapping[str, Any], source: str, **flags: Any) -> ModelSpec:
    """Olmo 2: norms behind attention and MLP, none before them, and norms of q and k over all heads.

    transformers' Olmo2Config, with its defaults. ``flags``: what Olmo 3 has besides.
    """
    config = {"rms_norm_eps": 1e-5, **config}
    norms = {"names": _NORMS_BEHIND, "qk_norm": True, "qk_norm_over_all_heads": True}
    return standard_spec(config, source, **norms, **read_biases(config), **flags)


_OLMO3_THETA = 5e5


def olmo3(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Olmo 3: Olmo 2 with a window in three layers of four; the rotary embeddings of the fourth alone are scaled.

    transformers' Olmo3Config, with its defaults, in both notations of the rotary parameters. In the older one
    ``rope_theta`` is of the layers without a window, those with one have ``_OLMO3_THETA``.
    """
    per_kind = config.get("rope_parameters") or {}
    local = per_kind.get("sliding_attention") or {}
    reject_unless(local, source, "rope_type", "default")
    rope = {**(per_kind.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    config = {"sliding_window": 4096, "rope_theta": _OLMO3_THETA, **config, "rope_scaling": rope, "rope_parameters": None}
    theta = read_positive(local.get("rope_theta", _OLMO3_THETA), source, "rope_parameters.sliding_attention.rope_theta")
    windows = read_windows(config, source, pattern=4)
    return olmo2(config, source, windows=windows, local_rope_theta=theta)
