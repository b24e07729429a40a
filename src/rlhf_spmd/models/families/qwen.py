"""Qwen 2 to 3.5, dense and with experts. Each function is named after its ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.keys import read_biases, read_rotary_factor, read_size, reject_unless
from rlhf_spmd.models.layer_kinds import DeltaRule, Experts
from rlhf_spmd.models.spec import ModelSpec, read_expert_counts, standard_spec


def qwen2(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Qwen2 and Qwen2.5: Llama's shape with a bias on q, k and v.

    transformers' Qwen2Config.
    """
    reject_unless(config, source, "use_sliding_window", False)
    return standard_spec(config, source, attention_bias=True)


def qwen3(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Qwen3 (dense): Llama's shape with a norm per head on q and k, and head_dim independent of hidden_size.

    transformers' Qwen3Config, whose default head_dim is 128 whatever the hidden size.
    """
    reject_unless(config, source, "use_sliding_window", False)
    return standard_spec({"head_dim": 128, **config}, source, qk_norm=True, **read_biases(config))


def qwen2_moe(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Qwen2-MoE (Qwen1.5-MoE): Qwen2 with a mixture of experts, and beside it a shared expert times a gate of its own.

    transformers' Qwen2MoeConfig, with its defaults.
    """
    reject_unless(config, source, "use_sliding_window", False)
    num_experts, experts_per_token = read_experts(config, source, 60, 4)
    experts = Experts(
        num_experts,
        experts_per_token,
        read_size(config, source, "moe_intermediate_size", 1408),
        normalise=bool(config.get("norm_topk_prob", False)),
        dense_layers=read_dense_layers(config, source),
        shared_size=read_size(config, source, "shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    bias = bool(config.get("qkv_bias", True))
    config = {"num_key_value_heads": 16, **config}
    return standard_spec(config, source, attention_bias=bias, experts=experts)


def qwen3_moe(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Qwen3-MoE: Qwen3 with a mixture of experts in place of the MLP, in all layers or in some.

    transformers' Qwen3MoeConfig, with its defaults. A layer has experts where ``decoder_sparse_step`` divides its
    number, counted from 1, and ``mlp_only_layers`` does not name it, counted from 0.
    """
    reject_unless(config, source, "use_sliding_window", False)
    experts = Experts(
        *read_experts(config, source, 128, 8),
        read_size(config, source, "moe_intermediate_size", 768),
        normalise=bool(config.get("norm_topk_prob", False)),
        dense_layers=read_dense_layers(config, source),
    )
    config = {"num_key_value_heads": 4, **config}
    return standard_spec(config, source, qk_norm=True, experts=experts, **read_biases(config))


def read_experts(config: Mapping[str, Any], source: str, num_experts: int, experts_per_token: int) -> tuple[int, int]:
    """Return :func:`read_expert_counts` under either name of the number of experts, of which transformers 5 writes the first."""
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    return read_expert_counts(config, source, name, num_experts, experts_per_token)


def read_dense_layers(config: Mapping[str, Any], source: str) -> tuple[int, ...]:
    """Return the layers without experts."""
    step = read_size(config, source, "decoder_sparse_step", 1)
    listed = config.get("mlp_only_layers") or ()
    layers = range(read_size(config, source, "num_hidden_layers"))
    return tuple(layer for layer in layers if layer in listed or (layer + 1) % step)


_QWEN3_5_DEFAULTS = {"num_attention_heads": 16, "head_dim": 256, "max_position_embeddings": 32768}
_QWEN3_5_DENSE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "vocab_size": 248320,
}


def qwen3_5_text(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Qwen3.5 (dense): three layers of four have linear attention, the fourth has attention with a gate; norms multiply
    by 1 + weight.

    transformers' Qwen3_5TextConfig, with its defaults. Layers that predict further tokens (``mtp``) are not read, and
    not exported.
    """
    return hybrid_spec({**_QWEN3_5_DEFAULTS, **_QWEN3_5_DENSE, **config}, source)


def hybrid_spec(config: Mapping[str, Any], source: str, files_are_fused: bool = False, **flags: Any) -> ModelSpec:
    """Return what Qwen3.5 and Qwen3-Next have in common. ``config``: the configuration with its defaults."""
    return standard_spec(
        config,
        source,
        delta_rule=read_delta(config, source, files_are_fused),
        **read_biases(config),
        attention_gate=True,
        qk_norm=True,
        norm_unit_offset=True,
        partial_rotary_factor=read_rotary_factor(config, source, 0.25),
        **flags,
    )


_QWEN3_5_MOE_SIZES = {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "vocab_size": 248320}


def qwen3_5_moe_text(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Qwen3.5-MoE: Qwen3.5 with a mixture of experts and a shared one in every layer.

    transformers' Qwen3_5MoeTextConfig, with its defaults. Files on the hub have the matrices of all experts in one
    tensor; transformers writes one for each expert, as exports do.
    """
    config = {**_QWEN3_5_DEFAULTS, **_QWEN3_5_MOE_SIZES, **config}
    experts = shared_mixture(config, source, 256, 8, normalise=True, files_are_stacked=True)
    return hybrid_spec({**config, "intermediate_size": experts.intermediate_size}, source, experts=experts)


KINDS = ("linear_attention", "full_attention")


def read_delta(config: Mapping[str, Any], source: str, files_are_fused: bool) -> DeltaRule:
    """Return linear attention from transformers' keys. Raises ValueError naming the key."""
    layers = read_size(config, source, "num_hidden_layers")
    interval = read_size(config, source, "full_attention_interval", 4)
    types = config.get("layer_types") or [KINDS[layer % interval == 0] for layer in range(1, layers + 1)]
    if len(types) != layers or not set(types) <= set(KINDS):
        raise ValueError(
            f"{source}: 'layer_types' is {types!r}; it must call each of the num_hidden_layers={layers} layers "
            f"{KINDS[0]!r} or {KINDS[1]!r}"
        )
    keys = read_size(config, source, "linear_num_key_heads", 16)
    values = read_size(config, source, "linear_num_value_heads", 32)
    if values % keys:
        raise ValueError(f"{source}: linear_num_value_heads={values} is not divisible by linear_num_key_heads={keys}")
    return DeltaRule(
        layers=frozenset(layer for layer, kind in enumerate(types) if kind == KINDS[0]),
        key_heads=keys,
        value_heads=values,
        key_dim=read_size(config, source, "linear_key_head_dim", 128),
        value_dim=read_size(config, source, "linear_value_head_dim", 128),
        kernel=read_size(config, source, "linear_conv_kernel_dim", 4),
        files_are_fused=files_are_fused,
    )


_QWEN3_NEXT_SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}


def qwen3_next(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Qwen3-Next: Qwen3.5's layers, whose linear attention has two fused matrices, with a mixture of experts and a
    shared one.

    transformers' Qwen3NextConfig, with its defaults. Layers that predict further tokens (``mtp``) are not read, and not
    exported.
    """
    config = {**_QWEN3_5_DEFAULTS, **_QWEN3_NEXT_SIZES, **config}
    options = {"normalise": bool(config.get("norm_topk_prob", True)), "dense_layers": read_dense_layers(config, source)}
    experts = shared_mixture(config, source, 512, 10, **options)
    return hybrid_spec(config, source, files_are_fused=True, experts=experts)


def shared_mixture(config: Mapping[str, Any], source: str, num_experts: int, experts_per_token: int, **options: Any) -> Experts:
    """Return the mixture of Qwen3-Next and Qwen3.5. ``num_experts`` and ``experts_per_token``: values where the configuration
    lacks them. ``options``: other fields of Experts.
    """
    return Experts(
        *read_experts(config, source, num_experts, experts_per_token),
        read_size(config, source, "moe_intermediate_size", 512),
        shared_size=read_size(config, source, "shared_expert_intermediate_size", 512),
        shared_gate=True,
        **options,
    )
