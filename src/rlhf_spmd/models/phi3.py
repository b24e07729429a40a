"""Phi-3: Llama's shape with q, k and v in one stored tensor, gate and up in another, and a sliding window in every layer.

Refused: rotary embeddings of a part of the head (Phi-4-mini) and long-rope scaling (the 128k models), whose frequencies change
with the length of the sequence, so that a token's log-prob would depend on what follows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.spec import ModelSpec, Names, read_windows, standard_spec

IGNORED = ("auto_map",)  # first published with code of its own, which transformers has since taken in
_QKV, _GATE_UP = "model.layers.{layer}.self_attn.qkv_proj", "model.layers.{layer}.mlp.gate_up_proj"
NAMES = replace(Names(), q=_QKV, k=_QKV, v=_QKV, gate=_GATE_UP, up=_GATE_UP)


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Phi3Config. Its dropouts are not applied."""
    full = {"rms_norm_eps": 1e-5, **config}
    return standard_spec(full, source, names=NAMES, windows=read_windows(full, source), hf_config=dict(config))
