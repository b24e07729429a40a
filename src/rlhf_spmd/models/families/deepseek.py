"""GLM-4 and DeepSeek, whose mixtures of experts are alike. Each function is named after its ``model_type``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.keys import read_biases, read_positive, read_rotary_factor, read_size, reject_unless
from rlhf_spmd.models.layer_kinds import Experts, Latent
from rlhf_spmd.models.spec import ModelSpec, Names, read_choice, standard_spec

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
    full = {**_GLM4_DEFAULTS, "eos_token_id": _GLM4_ENDS, **config}
    rope = {"partial_rotary_factor": read_rotary_factor(full, source, 0.5), "interleaved_rope": True}
    bias = bool(full.get("attention_bias", True))
    return standard_spec(full, source, attention_bias=bias, names=_GLM4_NAMES, **rope)


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
    full = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072, **config}
    return standard_spec(
        full,
        source,
        names=_GLM4_MOE_NAMES,
        attention_bias=bool(full.get("attention_bias", False)),
        qk_norm=bool(full.get("use_qk_norm", False)),
        partial_rotary_factor=read_rotary_factor(full, source, 0.5),
        experts=routed_experts({"n_shared_experts": 1, "first_k_dense_replace": 1, **full}, source, (128, 8, 1408)),
    )


def routed_experts(full: Mapping[str, Any], source: str, sizes: tuple[int, int, int]) -> Experts:
    """Return the mixture of DeepSeek-V3 and its kin. ``sizes``: of experts, of those that a token takes, and columns of one,
    where the configuration does not say.
    """
    count, per_token = read_choice(full, source, "n_routed_experts", *sizes[:2])
    width = read_size(full, source, "moe_intermediate_size", sizes[2])
    dense, shared = (read_count(full, source, key) for key in ("first_k_dense_replace", "n_shared_experts"))
    return Experts(
        count,
        per_token,
        width,
        bool(full.get("norm_topk_prob", True)),
        tuple(range(min(dense, read_size(full, source, "num_hidden_layers")))),
        "sigmoid",
        read_positive(full.get("routed_scaling_factor", 1.0), source, "routed_scaling_factor"),
        *read_groups(full, source, count, per_token),
        score_biased=True,
        shared_size=shared * width,
        wide_router=True,
    )


def read_groups(full: Mapping[str, Any], source: str, count: int, per_token: int) -> tuple[int, int]:
    """Return the number of groups of the ``count`` experts, and from how many a token takes its ``per_token``. Raises
    ValueError unless that can be.
    """
    groups, top_groups = read_size(full, source, "n_group", 1), read_size(full, source, "topk_group", 1)
    if count % groups or top_groups > groups or per_token > count // groups * top_groups:
        raise ValueError(
            f"{source}: n_group={groups} must divide n_routed_experts={count}, and topk_group={top_groups} of the groups must have "
            f"num_experts_per_tok={per_token} experts"
        )
    return groups, top_groups


def read_count(full: Mapping[str, Any], source: str, key: str) -> int:
    """Return ``read_size``, or 0 where the key is missing or says so."""
    return read_size(full, source, key) if full.get(key) else 0


def deepseek_v2(config: Mapping[str, Any], source: str) -> ModelSpec:
    """DeepSeek-V2, V2.5 and V2-Lite: latent attention, experts by softmax scores that are not normalised, and shared
    experts.

    transformers' DeepseekV2Config, with its defaults. It does not normalise the experts' weights, whatever the
    configuration. All but V2-Lite choose experts from groups, those that have the highest scores.
    """
    full = {**_DEEPSEEK_V3_ATTENTION, "n_shared_experts": 2, **config, "rope_interleave": True}
    reject_unless(full, source, "scoring_func", "softmax")
    reject_unless(full, source, "topk_method", "greedy", "group_limited_greedy")
    reject_unless(full, source, "norm_topk_prob", False)
    reject_unless(full, source, "mlp_bias", False)
    if full.get("topk_method") != "group_limited_greedy":
        full |= {"n_group": 1, "topk_group": 1}
    experts = routed_experts(full, source, (64, 6, 1407))
    experts = replace(experts, normalise=False, scoring="softmax", group_best=1, score_biased=False)
    return latent_spec(full, source, experts=experts)


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
    full = {**_DEEPSEEK_V3_DEFAULTS, **config}
    reject_unless(full, source, "scoring_func", "sigmoid")
    reject_unless(full, source, "topk_method", "noaux_tc")
    return latent_spec(full, source, experts=routed_experts(full, source, (256, 8, 2048)))


def latent_spec(full: Mapping[str, Any], source: str, **flags: Any) -> ModelSpec:
    """Return what DeepSeek-V2 and V3 share. Raises ValueError naming file, key and what is allowed."""
    latent, heads = read_latent(full, source), full.get("num_attention_heads")
    reject_unless(full, source, "num_key_value_heads", heads)
    reject_unless(full, source, "moe_layer_freq", 1)
    spec = standard_spec(
        {**full, "num_key_value_heads": heads},
        source,
        names=_GLM4_MOE_NAMES,
        latent=latent,
        head_dim=latent.nope_dim + latent.rope_dim,
        interleaved_rope=bool(full.get("rope_interleave", True)),
        **read_biases(full),
        **flags,
    )
    scaling = full.get("rope_parameters") or full.get("rope_scaling") or {}
    return replace(spec, attention_scale=latent_scale(latent, scaling, source))


def read_latent(full: Mapping[str, Any], source: str) -> Latent:
    """Return the sizes, from a configuration that has all keys. Raises ValueError naming file, key and value."""
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    kv_rank, nope, rope, value = (read_size(full, source, name) for name in names)
    if rope % 2:
        raise ValueError(f"{source}: 'qk_rope_head_dim' is {rope}; it must be even: rotary embeddings turn pairs")
    return Latent(read_size(full, source, "q_lora_rank") if full.get("q_lora_rank") else None, kv_rank, nope, rope, value)


def latent_scale(latent: Latent, scaling: Mapping[str, Any], source: str) -> float:
    """Return the factor of the scores. ``scaling``: the configuration's, of rotary embeddings, whose ``mscale_all_dim`` raises it."""
    scale = 1 / math.sqrt(latent.nope_dim + latent.rope_dim)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default" and scaling.get("mscale_all_dim"):
        factor, of_all = (read_positive(scaling.get(key), source, key) for key in ("factor", "mscale_all_dim"))
        scale *= (0.1 * of_all * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0
    return scale
