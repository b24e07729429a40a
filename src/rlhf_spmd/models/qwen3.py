"""Qwen3 (dense): Llama's shape with a norm per head on q and k, and head_dim independent of hidden_size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.keys import reject_unless
from rlhf_spmd.models.spec import ModelSpec, standard_spec


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Qwen3Config, whose default head_dim is 128 whatever the hidden size."""
    reject_unless(config, source, "use_sliding_window", False)
    bias = bool(config.get("attention_bias", False))
    flags = {"attention_bias": bias, "attention_out_bias": bias, "qk_norm": True}
    return standard_spec({"head_dim": 128, **config}, source, **flags, hf_config=dict(config))
