"""Qwen3-Next: Qwen3.5's layers, whose linear attention has two fused matrices, with a mixture of experts and a shared one.

Layers that predict further tokens (``mtp``) are not read, and not exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.expert_config import Experts
from rlhf_spmd.models.keys import read_size
from rlhf_spmd.models.qwen3_5_text import DEFAULTS, hybrid_spec
from rlhf_spmd.models.qwen3_moe import read_dense_layers
from rlhf_spmd.models.spec import ModelSpec, read_choice

SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Qwen3NextConfig, with its defaults."""
    full = {**DEFAULTS, **SIZES, **config}
    dense, normalise = read_dense_layers(full, source), bool(full.get("norm_topk_prob", True))
    return hybrid_spec(full, config, source, fused=True, experts=shared_mixture(full, source, (512, 10), normalise, dense))


def shared_mixture(
    full: Mapping[str, Any],
    source: str,
    sizes: tuple[int, int],
    normalise: bool,
    dense: tuple[int, ...] = (),
    stacked: bool = False,
) -> Experts:
    """The mixture of Qwen3-Next and Qwen3.5. ``sizes``: of experts, and of those that a token takes, where the configuration does not
    say."""
    count, per_token = read_choice(full, source, "num_local_experts" if "num_local_experts" in full else "num_experts", *sizes)
    return Experts(
        count,
        per_token,
        read_size(full, source, "moe_intermediate_size", 512),
        normalise,
        dense,
        shared_size=read_size(full, source, "shared_expert_intermediate_size", 512),
        shared_gate=True,
        stacked=stacked,
    )
