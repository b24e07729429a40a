"""Gemma 2 to 4. Each function is named after its ``model_type``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.keys import read_biases, read_positive, read_size, reject_unless
from rlhf_spmd.models.spec import ModelSpec, Names, read_windows, standard_spec

_GEMMA2_NAMES = replace(
    Names(),
    attention_norm="model.layers.{layer}.post_attention_layernorm.weight",
    post_norm="model.layers.{layer}.pre_feedforward_layernorm.weight",
    mlp_norm="model.layers.{layer}.post_feedforward_layernorm.weight",
)
_GEMMA2_DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096}


def gemma2(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Gemma 2: norms around attention and MLP that multiply by 1 + weight, scaled embeddings, GeGLU, capped attention
    scores and logits, and a sliding window in every other layer.

    transformers' Gemma2Config, with its defaults; layers 0, 2, ... have the window unless ``layer_types`` says
    otherwise.
    """
    config = {**_GEMMA2_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}
    return gemma_spec(
        config,
        source,
        windows=read_windows(config, source, pattern=2),
        attention_softcap=read_cap(config, source, "attn_logit_softcapping"),
    )


def gemma_spec(config: Mapping[str, Any], source: str, **flags: Any) -> ModelSpec:
    """Return what Gemma 2 and 3 have in common. ``config``: config.json with the family's defaults."""
    reject_unless(config, source, "hidden_activation", "gelu_pytorch_tanh")
    reject_unless(config, source, "use_bidirectional_attention", False)
    common = {
        **read_biases(config),
        "attention_scale": read_positive(config.get("query_pre_attn_scalar"), source, "query_pre_attn_scalar") ** -0.5,
        "logit_softcap": read_cap(config, source, "final_logit_softcapping"),
        "norm_unit_offset": True,
        "embed_scale": math.sqrt(read_size(config, source, "hidden_size")),
        "hidden_act": "gelu_tanh",
        "names": _GEMMA2_NAMES,
    }
    return standard_spec({"tie_word_embeddings": True, **config}, source, **common, **flags)


def read_cap(config: Mapping[str, Any], source: str, key: str) -> float | None:
    """Return a softcap; None where it is null."""
    return None if config.get(key) is None else read_positive(config[key], source, key)


def gemma3_text(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Gemma 3 (text): Gemma 2 with a norm per head on q and k instead of capped scores, five layers with a window to
    one without, and another rotary theta for those with.

    transformers' Gemma3TextConfig, with its defaults, in both notations of the rotary parameters: one object per kind
    of layer, or ``rope_theta``, ``rope_scaling`` (of the layers without a window) and ``rope_local_base_freq``.
    """
    reject_unless(config, source, "attn_logit_softcapping", None)
    per_kind = config.get("rope_parameters") or {}
    rope = per_kind.get("full_attention") or config.get("rope_scaling") or {}
    local = per_kind.get("sliding_attention") or {}
    reject_unless(local, source, "rope_type", "default")
    theta = local.get("rope_theta", config.get("rope_local_base_freq", 1e4))
    config = {**_GEMMA2_DEFAULTS, "rope_theta": 1e6, **config, "rope_scaling": rope, "rope_parameters": None}
    return gemma_spec(
        config,
        source,
        qk_norm=True,
        windows=read_windows(config, source, read_size(config, source, "sliding_window_pattern", 6)),
        local_rope_theta=read_positive(theta, source, "rope_local_base_freq"),
    )


_GEMMA4_NAMES = replace(_GEMMA2_NAMES, scalar="model.layers.{layer}.layer_scalar")
_GEMMA4_SIZES = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
}
_GEMMA4_DEFAULTS = {
    **_GEMMA4_SIZES,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 131072,
}
_GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def gemma4_text(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Gemma 4, dense (31B): Gemma 3's layers where those without a window have heads of another size, turn a part of
    each, and take the keys as values, too. Norms multiply by their weights, values have one without, and a number
    multiplies each layer's output.

    transformers' Gemma4TextConfig, with its defaults. Refused: inputs of each layer (E2B, E4B), keys and values of
    other layers, and experts (26B-A4B).
    """
    config = {"tie_word_embeddings": True, "hidden_size_per_layer_input": 256, **_GEMMA4_DEFAULTS, **config}
    reject_unless(config, source, "hidden_size_per_layer_input", 0)
    reject_unless(config, source, "num_kv_shared_layers", 0)
    reject_unless(config, source, "enable_moe_block", False)
    reject_unless(config, source, "hidden_activation", "gelu_pytorch_tanh")
    reject_unless(config, source, "use_bidirectional_attention", "vision")  # of images
    windows = read_windows(config, source, pattern=6)
    windows = (*windows[:-1], None)  # transformers makes the last layer one without a window
    rope = {**_GEMMA4_ROPE, **(config.get("rope_parameters") or {})}
    local = rope["sliding_attention"]
    reject_unless(local, source, "rope_type", "default")
    heads = read_global_heads(config, source, windows)
    spec = standard_spec(
        {**config, "rope_parameters": rope["full_attention"]},
        source,
        windows=windows,
        global_heads=heads,
        keys_as_values=bool(config.get("attention_k_eq_v", False)),
        value_norm=True,
        qk_norm=True,
        attention_scale=1.0,
        local_rope_theta=read_positive(local.get("rope_theta"), source, "rope_theta"),
        **read_biases(config),
        logit_softcap=read_cap(config, source, "final_logit_softcapping"),
        embed_scale=math.sqrt(read_size(config, source, "hidden_size")),
        hidden_act="gelu_tanh",
        names=_GEMMA4_NAMES,
        partial_rotary_factor=1.0,
    )
    if any(windows):
        return spec
    return replace(spec, num_key_value_heads=heads[0], head_dim=heads[1], global_heads=None)


def read_global_heads(config: Mapping[str, Any], source: str, windows: Sequence[int | None]) -> tuple[int, int]:
    """Return ``ModelSpec.global_heads``, in both notations: ``per_layer_config`` of each layer without a window, or keys for
    all of them.
    """
    num_kv_heads = read_size(config, source, "num_key_value_heads")
    sizes_by_layer = config.get("per_layer_config")
    if sizes_by_layer is None:
        if config.get("attention_k_eq_v", False):
            num_kv_heads = read_size(config, source, "num_global_key_value_heads", num_kv_heads)
        return num_kv_heads, read_size(config, source, "global_head_dim", 512)
    layers = [str(layer) for layer, window in enumerate(windows) if window is None]
    if sorted(sizes_by_layer) != sorted(layers) or any(sizes_by_layer[layer] != sizes_by_layer[layers[0]] for layer in layers):
        raise ValueError(
            f"{source}: 'per_layer_config' is {sizes_by_layer!r}; it must give the same for layers {', '.join(layers)}, which have "
            "no window"
        )
    sizes = sizes_by_layer[layers[0]]
    where = f"{source}: per_layer_config"
    return read_size(sizes, where, "num_key_value_heads", num_kv_heads), read_size(sizes, where, "head_dim")
