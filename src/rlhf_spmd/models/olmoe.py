"""OLMoE: experts in all layers, chosen by softmax; q and k normed over all heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.expert_config import Experts
from rlhf_spmd.models.keys import read_size, reject_unless
from rlhf_spmd.models.spec import ModelSpec, read_choice, standard_spec


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' OlmoeConfig, with its defaults."""
    reject_unless(config, source, "clip_qkv")
    full = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **config}
    count, per_token = read_choice(full, source, "num_experts", 64, 8)
    experts = Experts(count, per_token, read_size(full, source, "intermediate_size"), bool(full.get("norm_topk_prob")))
    biases = dict.fromkeys(("attention_bias", "attention_out_bias"), bool(full.get("attention_bias")))
    flags = {"qk_norm": True, "whole_qk_norm": True, "experts": experts, **biases}
    return standard_spec(full, source, **flags, hf_config=dict(config))
