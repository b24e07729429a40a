"""Qwen3.5 with a vision tower: its language model, for text. Exports are of the text-only class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models import qwen3_5_text
from rlhf_spmd.models.keys import read_text_config
from rlhf_spmd.models.spec import ModelSpec


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """That of ``text_config``."""
    spec = qwen3_5_text.build_spec({**read_text_config(config, source), "model_type": "qwen3_5_text"}, source)
    return replace(spec, text_prefix="language_model.")
