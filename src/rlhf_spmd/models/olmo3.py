"""Olmo 3: Olmo 2 with a window in three layers of four; the rotary embeddings of the fourth alone are scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models import olmo2
from rlhf_spmd.models.keys import read_positive, reject_unless
from rlhf_spmd.models.spec import ModelSpec, read_windows

THETA = 5e5


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Olmo3Config, with its defaults, in both notations of the rotary parameters. In the older one ``rope_theta`` is of
    the layers without a window, those with one have ``THETA``."""
    per_kind = config.get("rope_parameters") or {}
    local = per_kind.get("sliding_attention") or {}
    reject_unless(local, source, "rope_type", "default")
    rope = {**(per_kind.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    full = {"sliding_window": 4096, "rope_theta": THETA, **config, "rope_scaling": rope, "rope_parameters": None}
    theta = read_positive(local.get("rope_theta", THETA), source, "rope_parameters.sliding_attention.rope_theta")
    windows = read_windows(full, source, pattern=4)
    return olmo2.build_spec(full, source, windows=windows, local_rope_theta=theta, hf_config=dict(config))
