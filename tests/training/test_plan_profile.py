"""Profiles of models whose layers differ: each kind is measured, and the model's layer is the average over all of its layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ranks import run_ranks
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.models.spec import ModelSpec, spec_from_config
from rlhf_spmd.planner.profile import sizes_of
from rlhf_spmd.planner.shapes import Workload, shape_of
from rlhf_spmd.training.plan_profile import _zero, kinds, most_layers, profile
from small_models import CONFIGS

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GLM = SIZES | {
    "model_type": "glm4_moe",
    "head_dim": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 512,
    "n_routed_experts": 16,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
}
QWEN = SIZES | {
    "model_type": "qwen3_5_text",
    "head_dim": 16,
    "intermediate_size": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LARGE = {"vocab_size": 151936, "hidden_size": 4096, "head_dim": 128, "num_attention_heads": 96, "num_key_value_heads": 8}


def model(config: dict[str, Any], layers: int, **more: Any) -> ModelSpec:
    return spec_from_config(config | {"num_hidden_layers": layers} | more, "test")


def test_layers_of_each_kind_are_counted() -> None:
    glm = kinds(model(GLM, 46, first_k_dense_replace=3))
    assert [number for _, number in glm] == [3, 43] and [one.experts is None for one, _ in glm] == [True, False]
    qwen = kinds(model(QWEN, 60))
    assert [number for _, number in qwen] == [45, 15] and [one.delta is None for one, _ in qwen] == [False, True]
    assert all(one.num_hidden_layers == number for one, number in (*glm, *qwen))
    windows = ["sliding_attention"] * 5 + ["full_attention"]
    gemma = SIZES | {"model_type": "gemma3_text", "head_dim": 16, "intermediate_size": 128, "sliding_window": 32}
    assert [number for _, number in kinds(model(gemma, 12, layer_types=2 * windows))] == [10, 2]
    for spec, parts in ((model(GLM, 46, first_k_dense_replace=3), glm), (model(QWEN, 60), qwen)):
        whole, of_kinds = shape_of(spec, "none"), [shape_of(one, "none") for one, _ in parts]
        assert whole.layers * whole.layer == pytest.approx(sum(one.layers * one.layer for one in of_kinds))


def test_layers_that_do_not_fit_are_not_measured() -> None:
    """Five layers of GLM-4.5 with their optimizer states do not fit into 80 GB, nor do two, but with tp 8 five do."""
    glm = LARGE | {
        "model_type": "glm4_moe",
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "max_position_embeddings": 4096,
    }
    spec = kinds(model(glm | {"n_routed_experts": 160, "num_experts_per_tok": 8, "n_shared_experts": 1}, 92))[-1][0]
    found = [most_layers(spec, "none", tp, Workload(64, 512, (512.0,)), 8192, torch.bfloat16, 80e9) for tp in (1, 2, 4, 8)]
    assert found == [0, 2, 3, 5]
    assert _zero(None, spec, "none", Workload(64, 512, (512.0,)), torch.bfloat16, 80e9) == ([0.0] * 4, 0.0)  # type: ignore[arg-type]


def test_models_of_other_layers_have_other_times() -> None:
    """A mixture whose token meets as many columns as that of a dense model, and linear attention."""
    mixture = model(GLM, 4, n_shared_experts=0, moe_intermediate_size=2)
    dense = replace(mixture, experts=None)
    linear, full = (kinds(model(QWEN, 8))[i][0] for i in (0, 1))
    assert shape_of(mixture, "lm").intermediate == shape_of(dense, "lm").intermediate == 16
    assert len({sizes_of(shape_of(spec, "lm")) for spec in (mixture, dense, linear, full)}) == 4


def measured(world: Any) -> list[tuple[float, float, float]]:
    """Seconds of a layer forward, with its backward pass, and of a decode step, of the longest batches."""
    models = model(GLM, 8, first_k_dense_replace=2), model(QWEN, 8), spec_from_config(CONFIGS["gemma4"], "test")
    work = Workload(2, 32, (32.0,))
    found = profile(world, {(spec, "lm"): GenerationConfig() for spec in models}, work, 128, torch.float32)
    times = {one.sizes: (one.forward[-1], one.both[-1], one.decode[-1]) for one in found.layers}
    return [times[sizes_of(shape_of(spec, "lm"))] for spec in models]


def test_layers_of_several_kinds_are_measured() -> None:
    (found,) = run_ranks(1, measured)
    assert len(found) == 3 and min(map(min, found)) > 0
