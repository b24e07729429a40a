"""SmolLM 3: Llama's shape without rotary embeddings in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.keys import read_size, reject_unless
from rlhf_spmd.models.spec import ModelSpec, standard_spec


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' SmolLM3Config, with its defaults; ``no_rope_layers`` has a 0 where a layer has none."""
    for key in ("mlp_bias", "use_sliding_window"):
        reject_unless(config, source, key, False)
    layers, interval = read_size(config, source, "num_hidden_layers"), read_size(config, source, "no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(rotated) < layers or not set(rotated) <= {0, 1}:
        raise ValueError(f"{source}: 'no_rope_layers' is {rotated!r}; it must have a 0 or 1 for each of {layers} layers")
    full = {
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        **config,
    }
    bias = bool(config.get("attention_bias", False))
    flags = {"attention_bias": bias, "attention_out_bias": bias, "hf_config": dict(config)}
    return standard_spec(full, source, unrotated=tuple(i for i in range(layers) if not rotated[i]), **flags)
