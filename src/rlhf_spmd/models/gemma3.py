"""Gemma 3 with a vision tower: its language model, for text. Exports are of the text-only class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models import gemma3_text
from rlhf_spmd.models.keys import read_text_config
from rlhf_spmd.models.spec import ModelSpec

DEFAULTS = {"num_attention_heads": 8, "vocab_size": 262208, "max_position_embeddings": 131072}  # transformers' Gemma3TextConfig


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """That of ``text_config``."""
    spec = gemma3_text.build_spec({**DEFAULTS, **read_text_config(config, source), "model_type": "gemma3_text"}, source)
    return replace(spec, text_prefix="language_model.")
