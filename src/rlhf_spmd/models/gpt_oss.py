"""gpt-oss: sinks of attention and a window in every other layer; experts with biases and a clamped gate, softmax over the chosen.

The published weights of the experts are MXFP4, see ``file_forms``; exports are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.expert_config import Experts
from rlhf_spmd.models.keys import read_positive, read_size, reject_unless
from rlhf_spmd.models.spec import ModelSpec, Names, read_choice, read_windows, standard_spec

IGNORED = ("quantization_config",)
NAMES = replace(Names(), router="model.layers.{layer}.mlp.router.weight", sinks="model.layers.{layer}.self_attn.sinks")
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
DEFAULTS = {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150000.0}


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' GptOssConfig, with its defaults; layers 0, 2, ... have the window unless ``layer_types`` says otherwise."""
    full = {**DEFAULTS, "max_position_embeddings": 131072, **config}
    if full.get("rope_parameters") is None and full.get("rope_scaling") is None:
        full["rope_parameters"] = {**YARN, "original_max_position_embeddings": 4096, "rope_theta": full["rope_theta"]}
    reject_unless(full.get("quantization_config") or {}, f"{source}: quantization_config", "quant_method", "mxfp4")
    count, per_token = read_choice(full, source, "num_local_experts", 128, 4)
    usual = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    alpha, limit = (read_positive(full.get(key, value), source, key) for key, value in usual.items())
    width = read_size(full, source, "intermediate_size")
    experts = Experts(count, per_token, width, False, scoring="chosen", biased=True, clamp=(alpha, limit), fused=True)
    bias = bool(full.get("attention_bias", True))
    flags = {"attention_bias": bias, "attention_out_bias": bias, "windows": read_windows(full, source, pattern=2)}
    return standard_spec(full, source, names=NAMES, experts=experts, **flags, hf_config=dict(config))
