"""Gemma 4 with a vision tower: its language model, for text. Exports are of the text-only class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models import gemma4_text
from rlhf_spmd.models.spec import ModelSpec


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """That of ``text_config``."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"{source}: 'text_config' is {text!r}; model_type 'gemma4' must have one")
    spec = gemma4_text.build_spec({**text, "model_type": "gemma4_text"}, source)
    return replace(spec, text_prefix="language_model.")
