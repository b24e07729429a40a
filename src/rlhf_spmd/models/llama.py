"""Llama (2, 3, 3.1, 3.2 and the many models of that shape)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.keys import reject_unless
from rlhf_spmd.models.spec import ModelSpec, standard_spec


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' LlamaConfig; ``attention_bias`` covers q, k, v and the output projection."""
    reject_unless(config, source, "mlp_bias", False)
    bias = bool(config.get("attention_bias", False))
    return standard_spec(config, source, attention_bias=bias, attention_out_bias=bias)
