"""Seed-OSS: Llama's shape with biases on q, k and v, and head_dim independent of hidden_size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.keys import reject_unless
from rlhf_spmd.models.spec import ModelSpec, standard_spec


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' SeedOssConfig, with its defaults. Its dropouts are not applied."""
    reject_unless(config, source, "mlp_bias", False)
    full = {"head_dim": 128, "num_key_value_heads": 8, "attention_bias": True, "max_position_embeddings": 524288, **config}
    flags = {"attention_bias": bool(full["attention_bias"]), "attention_out_bias": bool(full.get("attention_out_bias"))}
    return standard_spec(full, source, **flags, hf_config=dict(config))
