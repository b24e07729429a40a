"""Mistral: Llama's shape with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.spec import ModelSpec, read_windows, standard_spec


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' MistralConfig: without ``sliding_window`` it is 4096, with null there is none."""
    full = {"sliding_window": 4096, "num_key_value_heads": 8, **config}
    return standard_spec(full, source, windows=read_windows(full, source), hf_config=dict(config))
