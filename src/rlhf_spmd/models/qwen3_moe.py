"""Qwen3-MoE: Qwen3 with a mixture of experts in place of the MLP, in all layers or in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.expert_config import Experts
from rlhf_spmd.models.keys import read_size, reject_unless
from rlhf_spmd.models.spec import ModelSpec, read_choice, standard_spec


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Qwen3MoeConfig, with its defaults. A layer has experts where ``decoder_sparse_step`` divides its number,
    counted from 1, and ``mlp_only_layers`` does not name it, counted from 0."""
    reject_unless(config, source, "use_sliding_window", False)
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"  # transformers 5 writes the former
    count, per_token = read_choice(config, source, name, 128, 8)
    dense, width = read_dense_layers(config, source), read_size(config, source, "moe_intermediate_size", 768)
    bias = bool(config.get("attention_bias", False))
    flags = {"attention_bias": bias, "attention_out_bias": bias, "qk_norm": True, "hf_config": dict(config)}
    experts = Experts(count, per_token, width, bool(config.get("norm_topk_prob", False)), dense)
    return standard_spec({"num_key_value_heads": 4, **config}, source, **flags, experts=experts)


def read_dense_layers(config: Mapping[str, Any], source: str) -> tuple[int, ...]:
    """The layers without experts."""
    step, layers = read_size(config, source, "decoder_sparse_step", 1), read_size(config, source, "num_hidden_layers")
    named = config.get("mlp_only_layers") or ()
    return tuple(layer for layer in range(layers) if layer in named or (layer + 1) % step)
