"""EXAONE 4: norms behind attention and MLP only, q and k normed per head. Where some layers have a window, the others have no rotary
embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.keys import read_size
from rlhf_spmd.models.spec import ModelSpec, Names, read_windows, standard_spec

_NAMES = replace(
    Names(),
    input_norm=None,
    post_norm=None,
    attention_norm="model.layers.{layer}.post_attention_layernorm.weight",
    mlp_norm="model.layers.{layer}.post_feedforward_layernorm.weight",
)


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Exaone4Config, with its defaults. A pattern of letters needs ``layer_types``, as in transformers."""
    usual = {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}
    full = {**usual, **config}
    given = full["sliding_window"] is None or full.get("layer_types")
    windows = read_windows(full, source, 1 if given else read_size(full, source, "sliding_window_pattern"))
    unrotated = () if full["sliding_window"] is None else tuple(i for i, window in enumerate(windows) if window is None)
    flags = {"qk_norm": True, "windows": windows, "unrotated": unrotated, "names": _NAMES}
    return standard_spec(full, source, **flags, hf_config=dict(config))
