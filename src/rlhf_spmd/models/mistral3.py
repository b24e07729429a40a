"""Mistral Small 3.1 and Ministral 3 with a vision tower: their language model, for text. Exports are of the text-only class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models import ministral3, mistral
from rlhf_spmd.models.spec import ModelSpec

FAMILIES = {"mistral": mistral, "ministral3": ministral3}


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """That of ``text_config``."""
    text = config.get("text_config")
    kind = text.get("model_type", "mistral") if isinstance(text, Mapping) else None
    if not isinstance(text, Mapping) or kind not in FAMILIES:
        raise ValueError(f"{source}: 'text_config' is {text!r}; model_type 'mistral3' must have one of {' or '.join(FAMILIES)}")
    spec = FAMILIES[str(kind)].build_spec({**text, "model_type": kind}, source)
    return replace(spec, text_prefix="language_model.")
