"""Qwen2 and Qwen2.5: Llama's shape with a bias on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.keys import reject_unless
from rlhf_spmd.models.spec import ModelSpec, standard_spec


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Qwen2Config."""
    reject_unless(config, source, "use_sliding_window", False)
    return standard_spec(config, source, attention_bias=True)
