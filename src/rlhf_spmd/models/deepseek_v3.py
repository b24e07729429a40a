"""DeepSeek-V3 and R1: latent attention, and behind the first layers experts chosen by sigmoid scores, in groups, with a correction.

The layer that predicts further tokens, which the files have behind the last one, is read by nobody and not exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.glm4_moe import NAMES, sigmoid_experts
from rlhf_spmd.models.keys import reject_unless
from rlhf_spmd.models.latent import latent_scale, read_latent
from rlhf_spmd.models.spec import ModelSpec, standard_spec

IGNORED = ("auto_map",)  # published with their own code, which transformers has since
ATTENTION = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEFAULTS = {
    **ATTENTION,
    "max_position_embeddings": 4096,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
}


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' DeepseekV3Config, with its defaults."""
    full = {**DEFAULTS, **config}
    reject_unless(full, source, "scoring_func", "sigmoid")
    reject_unless(full, source, "topk_method", "noaux_tc")
    return latent_spec(full, source, experts=sigmoid_experts(full, source, (256, 8, 2048)), hf_config=dict(config))


def latent_spec(full: Mapping[str, Any], source: str, **flags: Any) -> ModelSpec:
    """What DeepSeek-V2 and V3 share. Raises ValueError naming file, key and what is allowed."""
    latent, heads = read_latent(full, source), full.get("num_attention_heads")
    reject_unless(full, source, "num_key_value_heads", heads)
    reject_unless(full, source, "moe_layer_freq", 1)
    spec = standard_spec(
        {**full, "num_key_value_heads": heads},
        source,
        names=NAMES,
        latent=latent,
        head_dim=latent.nope_dim + latent.rope_dim,
        interleaved_rope=bool(full.get("rope_interleave", True)),
        attention_out_bias=bool(full.get("attention_bias", False)),
        attention_bias=bool(full.get("attention_bias", False)),
        **flags,
    )
    scaling = full.get("rope_parameters") or full.get("rope_scaling") or {}
    return replace(spec, attention_scale=latent_scale(latent, scaling, source))
