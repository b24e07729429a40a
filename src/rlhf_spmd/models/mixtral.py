"""Mixtral: Mistral's shape, and in every layer a mixture of experts whose width is ``intermediate_size``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.expert_config import Experts
from rlhf_spmd.models.keys import read_size
from rlhf_spmd.models.spec import ModelSpec, Names, read_choice, read_windows, standard_spec

_MIXTURE = "model.layers.{layer}.block_sparse_moe."
NAMES = replace(
    Names(),
    router=_MIXTURE + "gate.weight",
    expert_gate=_MIXTURE + "experts.{expert}.w1",
    expert_up=_MIXTURE + "experts.{expert}.w3",
    expert_down=_MIXTURE + "experts.{expert}.w2",
)


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' MixtralConfig, with its defaults. The noise of its router in training (``router_jitter_noise``) is not applied."""
    full = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6, **config}
    count, per_token = read_choice(full, source, "num_local_experts", 8, 2)
    experts = Experts(count, per_token, read_size(full, source, "intermediate_size"), normalise=True)
    return standard_spec(full, source, names=NAMES, windows=read_windows(full, source), experts=experts, hf_config=dict(config))
