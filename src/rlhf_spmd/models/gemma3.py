"""Gemma 3 directories with a vision tower: refused, with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.spec import ModelSpec


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    raise ValueError(
        f"{source}: model_type 'gemma3' has a vision tower, which is not supported; give its language model a directory of its "
        "own, of model_type 'gemma3_text': config.json is the text_config, the tensors are those of language_model without "
        "that prefix"
    )
