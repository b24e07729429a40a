"""DeepSeek-V2, V2.5 and V2-Lite: latent attention, experts by softmax scores that are not normalised, and shared experts.

All but V2-Lite choose experts from groups, those that have the highest scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_spmd.models.deepseek_v3 import ATTENTION, latent_spec
from rlhf_spmd.models.expert_config import Experts
from rlhf_spmd.models.glm4_moe import read_count, read_groups
from rlhf_spmd.models.keys import read_positive, read_size, reject_unless
from rlhf_spmd.models.spec import ModelSpec, read_choice

IGNORED = ("auto_map",)  # published with their own code, which transformers has since


def build_spec(config: Mapping[str, Any], source: str) -> ModelSpec:
    """transformers' DeepseekV2Config, with its defaults. It does not normalise the experts' weights, whatever the configuration."""
    full = {**ATTENTION, "n_shared_experts": 2, **config, "rope_interleave": True}
    reject_unless(full, source, "scoring_func", "softmax")
    reject_unless(full, source, "topk_method", "greedy", "group_limited_greedy")
    reject_unless(full, source, "norm_topk_prob", False)
    reject_unless(full, source, "mlp_bias", False)
    count, per_token = read_choice(full, source, "n_routed_experts", 64, 6)
    grouped = full.get("topk_method") == "group_limited_greedy"
    groups, top_groups = read_groups(full, source, count, per_token) if grouped else (1, 1)
    width, dense = read_size(full, source, "moe_intermediate_size", 1407), read_count(full, source, "first_k_dense_replace")
    experts = Experts(
        count,
        per_token,
        width,
        False,
        tuple(range(min(dense, read_size(full, source, "num_hidden_layers")))),
        "softmax",
        read_positive(full.get("routed_scaling_factor", 1.0), source, "routed_scaling_factor"),
        groups,
        top_groups,
        group_best=1,
        shared_size=read_count(full, source, "n_shared_experts") * width,
        wide_router=True,
    )
    return latent_spec(full, source, experts=experts, hf_config=dict(config))
