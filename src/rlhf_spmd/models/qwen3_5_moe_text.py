"""Qwen3.5-MoE: Qwen3.5 with a mixture of experts and a shared one in every layer.

Files on the hub have the matrices of all experts in one tensor; transformers writes one for each expert, as exports do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.qwen3_5_text import DEFAULTS, hybrid_spec
from rlhf_spmd.models.qwen3_next import shared_mixture
from rlhf_spmd.models.spec import ModelSpec

SIZES = {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "vocab_size": 248320}


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Qwen3_5MoeTextConfig, with its defaults."""
    full = {**DEFAULTS, **SIZES, **config}
    experts = shared_mixture(full, source, (256, 8), True, stacked=True)
    return hybrid_spec({**full, "intermediate_size": experts.intermediate_size}, config, source, experts=experts)
