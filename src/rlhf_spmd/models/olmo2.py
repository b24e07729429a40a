"""Olmo 2: norms behind attention and MLP, none before them, and norms of q and k over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.spec import ModelSpec, Names, standard_spec

NAMES = replace(
    Names(),
    input_norm=None,
    attention_norm="model.layers.{layer}.post_attention_layernorm.weight",
    post_norm=None,
    mlp_norm="model.layers.{layer}.post_feedforward_layernorm.weight",
)


def build_spec(config: Mapping[str, Any], source: str, **flags: Any) -> ModelSpec:
    """transformers' Olmo2Config, with its defaults. ``flags``: what Olmo 3 has besides."""
    full = {"rms_norm_eps": 1e-5, **config}
    bias = bool(full.get("attention_bias", False))
    norms = {"names": NAMES, "qk_norm": True, "whole_qk_norm": True}
    biases = {"attention_bias": bias, "attention_out_bias": bias}
    return standard_spec(full, source, **{**norms, **biases, "hf_config": dict(config), **flags})
