"""Phi-3 and Phi-4: Llama's shape with q, k and v in one stored tensor, gate and up in another, a sliding window in every layer, and
in Phi-4-mini rotary embeddings of a part of each head.

Rows of models with long-rope scaling end where transformers would change the frequencies, at ``original_max_position_embeddings``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.keys import read_rotary_factor
from rlhf_spmd.models.spec import ModelSpec, Names, read_windows, standard_spec

IGNORED = ("auto_map",)  # first published with code of its own, which transformers has since taken in
_QKV, _GATE_UP = "model.layers.{layer}.self_attn.qkv_proj", "model.layers.{layer}.mlp.gate_up_proj"
NAMES = replace(Names(), q=_QKV, k=_QKV, v=_QKV, gate=_GATE_UP, up=_GATE_UP)
_OLD = {"su": "longrope", "yarn": "longrope"}  # what early models call it


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Phi3Config, with its defaults. Its dropouts are not applied."""
    full = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, **config}
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := full.get(key), Mapping):
            kind = rope.get("rope_type", rope.get("type"))
            full[key] = {**rope, "rope_type": _OLD.get(str(kind), kind or "default")}
    flags = {"names": NAMES, "windows": read_windows(full, source), "hf_config": dict(config)}
    return standard_spec(full, source, partial_rotary_factor=read_rotary_factor(full, source, 1.0), **flags)
