"""GLM-4.5 and 4.6: half of each head is rotated; behind the first layers a mixture with sigmoid scores and a shared expert.

The layer that predicts further tokens, which the files have behind the last one, is read by nobody and not exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_spmd.models.expert_config import Experts
from rlhf_spmd.models.keys import read_positive, read_rotary_factor, read_size
from rlhf_spmd.models.spec import ModelSpec, Names, read_choice, standard_spec

_SHARED = "model.layers.{layer}.mlp.shared_experts."
NAMES = replace(Names(), shared_gate=_SHARED + "gate_proj", shared_up=_SHARED + "up_proj", shared_down=_SHARED + "down_proj")


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' Glm4MoeConfig, with its defaults."""
    full = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072, **config}
    return standard_spec(
        full,
        source,
        names=NAMES,
        attention_bias=bool(full.get("attention_bias", False)),
        qk_norm=bool(full.get("use_qk_norm", False)),
        partial_rotary_factor=read_rotary_factor(full, source, 0.5),
        experts=sigmoid_experts({"n_shared_experts": 1, "first_k_dense_replace": 1, **full}, source, (128, 8, 1408)),
        hf_config=dict(config),
    )


def sigmoid_experts(full: Mapping[str, Any], source: str, sizes: tuple[int, int, int]) -> Experts:
    """The mixture of DeepSeek-V3 and its kin. ``sizes``: of experts, of those that a token takes, and columns of one, where the
    configuration does not say."""
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
        corrected=True,
        shared_size=shared * width,
        wide_router=True,
    )


def read_groups(full: Mapping[str, Any], source: str, count: int, per_token: int) -> tuple[int, int]:
    """The number of groups of the ``count`` experts, and from how many a token takes its ``per_token``. Raises ValueError unless that
    can be."""
    groups, top_groups = read_size(full, source, "n_group", 1), read_size(full, source, "topk_group", 1)
    if count % groups or top_groups > groups or per_token > count // groups * top_groups:
        raise ValueError(
            f"{source}: n_group={groups} must divide n_routed_experts={count}, and topk_group={top_groups} of the groups must have "
            f"num_experts_per_tok={per_token} experts"
        )
    return groups, top_groups


def read_count(full: Mapping[str, Any], source: str, key: str) -> int:
    """As ``read_size``, and 0 where the key is missing or says so."""
    return read_size(full, source, key) if full.get(key) else 0
