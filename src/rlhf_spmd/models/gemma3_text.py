"""Gemma 3 (text): Gemma 2 with a norm per head on q and k instead of capped scores, five layers with a window to one without,
and another rotary theta for those with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.gemma2 import DEFAULTS, gemma_spec
from rlhf_spmd.models.keys import read_positive, read_size, reject_unless
from rlhf_spmd.models.spec import ModelSpec, read_windows


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Gemma3TextConfig, with its defaults, in both notations of the rotary parameters: one object per kind of
    layer, or ``rope_theta``, ``rope_scaling`` (of the layers without a window) and ``rope_local_base_freq``."""
    reject_unless(config, source, "attn_logit_softcapping", None)
    per_kind = config.get("rope_parameters") or {}
    rope = per_kind.get("full_attention") or config.get("rope_scaling") or {}
    local = per_kind.get("sliding_attention") or {}
    reject_unless(local, source, "rope_type", "default")
    theta = local.get("rope_theta", config.get("rope_local_base_freq", 1e4))
    full = {**DEFAULTS, "rope_theta": 1e6, **config, "rope_scaling": rope, "rope_parameters": None}
    return gemma_spec(
        full,
        source,
        qk_norm=True,
        windows=read_windows(full, source, read_size(full, source, "sliding_window_pattern", 6)),
        local_rope_theta=read_positive(theta, source, "rope_local_base_freq"),
        hf_config=dict(config),
    )
