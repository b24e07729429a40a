"""Qwen3.5 (dense): three layers of four have linear attention, the fourth has attention with a gate; norms multiply by 1 + weight.

Layers that predict further tokens (``mtp``) are not read, and not exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.delta_config import read_delta
from rlhf_spmd.models.keys import read_rotary_factor
from rlhf_spmd.models.spec import ModelSpec, standard_spec

DEFAULTS = {"num_attention_heads": 16, "head_dim": 256, "max_position_embeddings": 32768}
DENSE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "vocab_size": 248320,
}


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Qwen3_5TextConfig, with its defaults."""
    return hybrid_spec({**DEFAULTS, **DENSE, **config}, config, source)


def hybrid_spec(
    full: Mapping[str, Any], config: Mapping[str, Any], source: str, fused: bool = False, **flags: Any
) -> ModelSpec:
    """What Qwen3.5 and Qwen3-Next have in common. ``full``: the configuration with its defaults."""
    bias = bool(full.get("attention_bias", False))
    return standard_spec(
        full,
        source,
        delta=read_delta(full, source, fused),
        attention_bias=bias,
        attention_out_bias=bias,
        attention_gate=True,
        qk_norm=True,
        norm_plus_one=True,
        partial_rotary_factor=read_rotary_factor(full, source, 0.25),
        hf_config=dict(config),
        **flags,
    )
