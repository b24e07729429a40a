"""Gemma 2: norms around attention and MLP that multiply by 1 + weight, scaled embeddings, GeGLU, capped attention scores and
logits, and a sliding window in every other layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.keys import read_positive, read_size, reject_unless
from rlhf_spmd.models.spec import ModelSpec, Names, read_windows, standard_spec

NAMES = replace(
    Names(),
    attention_norm="model.layers.{layer}.post_attention_layernorm.weight",
    post_norm="model.layers.{layer}.pre_feedforward_layernorm.weight",
    mlp_norm="model.layers.{layer}.post_feedforward_layernorm.weight",
)
DEFAULTS = {"head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "sliding_window": 4096}


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Gemma2Config, with its defaults; layers 0, 2, ... have the window unless ``layer_types`` says otherwise."""
    full = {**DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}
    return gemma_spec(
        full,
        source,
        windows=read_windows(full, source, pattern=2),
        attention_softcap=read_cap(full, source, "attn_logit_softcapping"),
        hf_config=dict(config),
    )


def gemma_spec(full: Mapping[str, Any], source: str, **flags: Any) -> ModelSpec:
    """What Gemma 2 and 3 have in common. ``full``: config.json with the family's defaults."""
    reject_unless(full, source, "hidden_activation", "gelu_pytorch_tanh")
    reject_unless(full, source, "use_bidirectional_attention", False)
    bias = bool(full.get("attention_bias", False))
    common = {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "attention_scale": read_positive(full.get("query_pre_attn_scalar"), source, "query_pre_attn_scalar") ** -0.5,
        "logit_softcap": read_cap(full, source, "final_logit_softcapping"),
        "norm_plus_one": True,
        "embed_scale": math.sqrt(read_size(full, source, "hidden_size")),
        "hidden_act": "gelu_tanh",
        "names": NAMES,
    }
    return standard_spec({"tie_word_embeddings": True, **full}, source, **common, **flags)


def read_cap(config: Mapping[str, Any], source: str, key: str) -> float | None:
    """A softcap, None where it is null."""
    return None if config.get(key) is None else read_positive(config[key], source, key)
