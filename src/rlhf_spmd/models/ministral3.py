"""Ministral 3: Llama's shape with yarn; queries grow with the logarithm of their position behind the context of pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.keys import read_positive, read_size
from rlhf_spmd.models.spec import ModelSpec, read_windows, standard_spec

DEFAULTS = {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 262144}
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Ministral3Config, with its defaults."""
    rope, name = config.get("rope_parameters") or config.get("rope_scaling") or ROPE, "original_max_position_embeddings"
    full = {**DEFAULTS, **config, "rope_parameters": rope}
    beta = read_positive(rope.get("llama_4_scaling_beta"), source, "rope_parameters.llama_4_scaling_beta")
    growth = beta, read_size(rope, f"{source}: rope_parameters", name)
    return standard_spec(full, source, query_growth=growth, windows=read_windows(full, source), hf_config=dict(config))
