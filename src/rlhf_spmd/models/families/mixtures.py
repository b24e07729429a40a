"""Other mixtures of experts. Each function is named after its ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.keys import read_biases, read_positive, read_size, reject_unless
from rlhf_spmd.models.layer_kinds import Experts
from rlhf_spmd.models.spec import ModelSpec, Names, read_expert_counts, read_windows, standard_spec

_MIXTRAL_MIXTURE = "model.layers.{layer}.block_sparse_moe."
_MIXTRAL_NAMES = replace(
    Names(),
    router=_MIXTRAL_MIXTURE + "gate.weight",
    expert_gate=_MIXTRAL_MIXTURE + "experts.{expert}.w1",
    expert_up=_MIXTRAL_MIXTURE + "experts.{expert}.w3",
    expert_down=_MIXTRAL_MIXTURE + "experts.{expert}.w2",
)


def mixtral(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Mixtral: Mistral's shape, and in every layer a mixture of experts whose width is ``intermediate_size``.

    transformers' MixtralConfig, with its defaults. The noise of its router in training (``router_jitter_noise``) is not
    applied.
    """
    config = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6, **config}
    num_experts, experts_per_token = read_expert_counts(config, source, "num_local_experts", 8, 2)
    experts = Experts(num_experts, experts_per_token, read_size(config, source, "intermediate_size"), normalise=True)
    return standard_spec(config, source, names=_MIXTRAL_NAMES, windows=read_windows(config, source), experts=experts)


def olmoe(config: Mapping[str, Any], source: str) -> ModelSpec:
    """OLMoE: experts in all layers, chosen by softmax; q and k normed over all heads.

    transformers' OlmoeConfig, with its defaults.
    """
    reject_unless(config, source, "clip_qkv")
    config = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **config}
    num_experts, experts_per_token = read_expert_counts(config, source, "num_experts", 64, 8)
    normalise = bool(config.get("norm_topk_prob"))
    experts = Experts(num_experts, experts_per_token, read_size(config, source, "intermediate_size"), normalise=normalise)
    return standard_spec(config, source, qk_norm=True, qk_norm_over_all_heads=True, experts=experts, **read_biases(config))


_GPT_OSS_NAMES = replace(Names(), router="model.layers.{layer}.mlp.router.weight", sinks="model.layers.{layer}.self_attn.sinks")
_GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GPT_OSS_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
}


def gpt_oss(config: Mapping[str, Any], source: str) -> ModelSpec:
    """gpt-oss: sinks of attention and a window in every other layer; experts with biases and a clamped gate, softmax
    over the chosen.

    transformers' GptOssConfig, with its defaults; layers 0, 2, ... have the window unless ``layer_types`` says
    otherwise. The published weights of the experts are MXFP4, see ``file_forms``; exports are not.
    """
    config = {**_GPT_OSS_DEFAULTS, "max_position_embeddings": 131072, **config}
    if config.get("rope_parameters") is None and config.get("rope_scaling") is None:
        rope = {**_GPT_OSS_YARN, "original_max_position_embeddings": 4096, "rope_theta": config["rope_theta"]}
        config = {**config, "rope_parameters": rope}
    reject_unless(config.get("quantization_config") or {}, f"{source}: quantization_config", "quant_method", "mxfp4")
    num_experts, experts_per_token = read_expert_counts(config, source, "num_local_experts", 128, 4)
    alpha = read_positive(config.get("swiglu_alpha", 1.702), source, "swiglu_alpha")
    limit = read_positive(config.get("swiglu_limit", 7.0), source, "swiglu_limit")
    width = read_size(config, source, "intermediate_size")
    experts = Experts(
        num_experts,
        experts_per_token,
        width,
        normalise=False,
        scoring="chosen",
        has_biases=True,
        clamp=(alpha, limit),
        files_are_transposed=True,
    )
    windows = read_windows(config, source, pattern=2)
    return standard_spec(
        config, source, names=_GPT_OSS_NAMES, experts=experts, windows=windows, **read_biases(config, default=True)
    )
