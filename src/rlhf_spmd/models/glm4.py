"""GLM-4 (the models of 2025): norms before and behind attention and MLP, and rotary embeddings of neighbouring dims in the first
half of each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.keys import read_rotary_factor
from rlhf_spmd.models.spec import ModelSpec, Names, standard_spec

_GATE_UP = "model.layers.{layer}.mlp.gate_up_proj"
NAMES = replace(
    Names(),
    attention_norm="model.layers.{layer}.post_self_attn_layernorm.weight",
    gate=_GATE_UP,
    up=_GATE_UP,
    mlp_norm="model.layers.{layer}.post_mlp_layernorm.weight",
)
ENDS = [151329, 151336, 151338]
DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131072}


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Glm4Config, with its defaults."""
    full = {**DEFAULTS, "eos_token_id": ENDS, **config}
    rope = {"partial_rotary_factor": read_rotary_factor(full, source, 0.5), "interleaved_rope": True}
    bias = bool(full.get("attention_bias", True))
    return standard_spec(full, source, attention_bias=bias, names=NAMES, **rope, hf_config=dict(config))
