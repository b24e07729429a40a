"""Granite: Llama's shape with factors of the embeddings, the attention scores, what each layer adds, and the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.keys import read_positive, reject_unless
from rlhf_spmd.models.spec import ModelSpec, standard_spec


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' GraniteConfig, with its defaults."""
    reject_unless(config, source, "mlp_bias", False)
    names = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
    embed, attention, residual, logits = (read_positive(config.get(name, 1.0), source, name) for name in names)
    bias = bool(config.get("attention_bias", False))
    factors = {"embed_scale": embed, "attention_scale": attention, "residual_scale": residual, "logit_scale": 1 / logits}
    return standard_spec(config, source, attention_bias=bias, attention_out_bias=bias, **factors)
