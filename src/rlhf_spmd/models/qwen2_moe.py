"""Qwen2-MoE (Qwen1.5-MoE): Qwen2 with a mixture of experts, and beside it a shared expert times a gate of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.expert_config import Experts
from rlhf_spmd.models.keys import read_size, reject_unless
from rlhf_spmd.models.qwen3_moe import read_dense_layers
from rlhf_spmd.models.spec import ModelSpec, read_choice, standard_spec


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Qwen2MoeConfig, with its defaults."""
    reject_unless(config, source, "use_sliding_window", False)
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    count, per_token = read_choice(config, source, name, 60, 4)
    experts = Experts(
        count,
        per_token,
        read_size(config, source, "moe_intermediate_size", 1408),
        bool(config.get("norm_topk_prob", False)),
        read_dense_layers(config, source),
        shared_size=read_size(config, source, "shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    bias = bool(config.get("qkv_bias", True))
    full = {"num_key_value_heads": 16, **config}
    return standard_spec(full, source, attention_bias=bias, experts=experts, hf_config=dict(config))
