"""GLM-4 and DeepSeek, whose mixtures of experts are alike. Each function is named after its ``model_type``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.keys import read_biases, read_positive, read_rotary_factor, read_size, reject_unless
from rlhf_spmd.models.layer_kinds import Experts, Latent
from rlhf_spmd.models.spec import ModelSpec, Names, read_expert_counts, standard_spec

_GLM4_GATE_UP = "model.layers.{layer}.mlp.gate_up_proj"
_GLM4_NAMES = replace(
    Names(),
    attention_norm="model.layers.{layer}.post_self_attn_layernorm.weight",
    gate=_GLM4_GATE_UP,
    up=_GLM4_GATE_UP,
    mlp_norm="model.layers.{layer}.post_mlp_layernorm.weight",
)
_GLM4_ENDS = [151329, 151336, 151338]
_GLM4_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "max_position_embeddings": 131072}


def glm4(config: Mapping[str, Any], source: str) -> ModelSpec:
    """GLM-4 (the models of 2025): norms before and behind attention and MLP, and rotary embeddings of neighbouring dims
    in the first half of each head.

    transformers' Glm4Config, with its defaults.
    """
    config = {**_GLM4_DEFAULTS, "eos_token_id": _GLM4_ENDS, **config}
    rope = {"partial_rotary_factor": read_rotary_factor(config, source, 0.5), "interleaved_rope": True}
    bias = bool(config.get("attention_bias", True))
    return standard_spec(config, source, attention_bias=bias, names=_GLM4_NAMES, **rope)


_GLM4_MOE_SHARED = "model.layers.{layer}.mlp.shared_experts."
_GLM4_MOE_NAMES = replace(
    Names(),
    shared_gate=_GLM4_MOE_SHARED + "gate_proj",
    shared_up=_GLM4_MOE_SHARED + "up_proj",
    shared_down=_GLM4_MOE_SHARED + "down_proj",
)


def glm4_moe(config: Mapping[str, Any], source: str) -> ModelSpec:
    """GLM-4.5 and 4.6: half of each head is rotated; behind the first layers a mixture with sigmoid scores and a shared
    expert.

    transformers' Glm4MoeConfig, with its defaults. The layer that predicts further tokens, which the files have behind
    the last one, is read by nobody and not exported.
    """
    config = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072, **config}
    return standard_spec(
        config,
        source,
        names=_GLM4_MOE_NAMES,
        attention_bias=bool(config.get("attention_bias", False)),
        qk_norm=bool(config.get("use_qk_norm", False)),
        partial_rotary_factor=read_rotary_factor(config, source, 0.5),
        experts=routed_experts({"n_shared_experts": 1, "first_k_dense_replace": 1, **config}, source, 128, 8, 1408),
    )


def routed_experts(config: Mapping[str, Any], source: str, num_experts: int, experts_per_token: int, width: int) -> Experts:
    """Return the mixture of DeepSeek-V3 and models like it. ``num_experts``, ``experts_per_token`` and ``width``, the columns of an
    expert: values where the configuration lacks them.
    """
    num_experts, experts_per_token = read_expert_counts(config, source, "n_routed_experts", num_experts, experts_per_token)
    width = read_size(config, source, "moe_intermediate_size", width)
    num_dense = read_optional_size(config, source, "first_k_dense_replace")
    groups, top_groups = read_groups(config, source, num_experts, experts_per_token)
    return Experts(
        num_experts,
        experts_per_token,
        width,
        normalise=bool(config.get("norm_topk_prob", True)),
        dense_layers=tuple(range(min(num_dense, read_size(config, source, "num_hidden_layers")))),
        scoring="sigmoid",
        scale=read_positive(config.get("routed_scaling_factor", 1.0), source, "routed_scaling_factor"),
        groups=groups,
        top_groups=top_groups,
        score_biased=True,
        shared_size=read_optional_size(config, source, "n_shared_experts") * width,
        wide_router=True,
    )


def read_groups(config: Mapping[str, Any], source: str, num_experts: int, experts_per_token: int) -> tuple[int, int]:
    """Return the number of groups of the experts, and from how many groups a token takes its experts. Raises ValueError
    unless that can be.
    """
    groups = read_size(config, source, "n_group", 1)
    top_groups = read_size(config, source, "topk_group", 1)
    if num_experts % groups or top_groups > groups or experts_per_token > num_experts // groups * top_groups:
        raise ValueError(
            f"{source}: n_group={groups} must divide n_routed_experts={num_experts}, and topk_group={top_groups} of the groups must "
            f"have num_experts_per_tok={experts_per_token} experts"
        )
    return groups, top_groups


def read_optional_size(config: Mapping[str, Any], source: str, key: str) -> int:
    """Return ``read_size``, or 0 where the key is missing or 0."""
    return read_size(config, source, key) if config.get(key) else 0


def deepseek_v2(config: Mapping[str, Any], source: str) -> ModelSpec:
    """DeepSeek-V2, V2.5 and V2-Lite: latent attention, experts by softmax scores that are not normalised, and shared
    experts.

    transformers' DeepseekV2Config, with its defaults. It does not normalise the experts' weights, whatever the
    configuration. All but V2-Lite choose experts from groups, those that have the highest scores.
    """
    config = {**_DEEPSEEK_V3_ATTENTION, "n_shared_experts": 2, **config, "rope_interleave": True}
    reject_unless(config, source, "scoring_func", "softmax")
    reject_unless(config, source, "topk_method", "greedy", "group_limited_greedy")
    reject_unless(config, source, "norm_topk_prob", False)
    reject_unless(config, source, "mlp_bias", False)
    if config.get("topk_method") != "group_limited_greedy":
        config = {**config, "n_group": 1, "topk_group": 1}
    experts = routed_experts(config, source, 64, 6, 1407)
    experts = replace(experts, normalise=False, scoring="softmax", group_best=1, score_biased=False)
    return latent_spec(config, source, experts=experts)


_DEEPSEEK_V3_ATTENTION = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_V3_DEFAULTS = {
    **_DEEPSEEK_V3_ATTENTION,
    "max_position_embeddings": 4096,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
}


def deepseek_v3(config: Mapping[str, Any], source: str) -> ModelSpec:
    """DeepSeek-V3 and R1: latent attention, and behind the first layers experts chosen by sigmoid scores, in groups,
    with a bias of the scores.

    transformers' DeepseekV3Config, with its defaults. The layer that predicts further tokens, which the files have
    behind the last one, is read by nobody and not exported.
    """
    config = {**_DEEPSEEK_V3_DEFAULTS, **config}
    reject_unless(config, source, "scoring_func", "sigmoid")
    reject_unless(config, source, "topk_method", "noaux_tc")
    return latent_spec(config, source, experts=routed_experts(config, source, 256, 8, 2048))


def latent_spec(config: Mapping[str, Any], source: str, **flags: Any) -> ModelSpec:
    """Return what DeepSeek-V2 and V3 share. Raises ValueError naming file, key and what is allowed."""
    latent = read_latent(config, source)
    heads = config.get("num_attention_heads")
    reject_unless(config, source, "num_key_value_heads", heads)
    reject_unless(config, source, "moe_layer_freq", 1)
    spec = standard_spec(
        {**config, "num_key_value_heads": heads},
        source,
        names=_GLM4_MOE_NAMES,
        latent=latent,
        head_dim=latent.nope_dim + latent.rope_dim,
        interleaved_rope=bool(config.get("rope_interleave", True)),
        **read_biases(config),
        **flags,
    )
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return replace(spec, attention_scale=latent_scale(latent, scaling, source))


def read_latent(config: Mapping[str, Any], source: str) -> Latent:
    """Return the sizes, from a configuration that has all keys. Raises ValueError naming file, key and value."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    kv_rank, nope_dim, rope_dim, value_dim = (read_size(config, source, name) for name in names)
    if rope_dim % 2:
        raise ValueError(f"{source}: 'qk_rope_head_dim' is {rope_dim}; it must be even: rotary embeddings turn pairs")
    return Latent(read_optional_size(config, source, "q_lora_rank") or None, kv_rank, nope_dim, rope_dim, value_dim)


def latent_scale(latent: Latent, scaling: Mapping[str, Any], source: str) -> float:
    """Return the factor of the scores. ``scaling``: the configuration's rotary scaling, whose ``mscale_all_dim`` raises the factor."""
    scale = 1 / math.sqrt(latent.nope_dim + latent.rope_dim)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default" and scaling.get("mscale_all_dim"):
        factor, mscale = (read_positive(scaling.get(key), source, key) for key in ("factor", "mscale_all_dim"))
        scale *= (0.1 * mscale * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0
    return scale
