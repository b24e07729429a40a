"""Profiles of models whose layers differ: each kind is measured, and the model's layer is the average over all of its layers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ranks import run_ranks
from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.planner.profile import sizes_of
from rlhf_spmd.planner.shapes import Workload, shape_of
from rlhf_spmd.preflight.plan_profile import LayerProfiler, _layer_and_ends, kinds, profile
from small_models import CONFIGS

LARGE = {"vocab_size": 151936, "hidden_size": 4096, "head_dim": 128, "num_attention_heads": 96, "num_key_value_heads": 8}
LARGE |= {"moe_intermediate_size": 1536, "n_routed_experts": 160, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1}


def model(family: str, layers: int, **more: Any) -> ModelSpec:
    return spec_from_config(CONFIGS[family] | {"num_hidden_layers": layers} | more, "test")


def test_layers_of_each_kind_are_counted() -> None:
    glm, qwen = model("glm4-moe", 46, first_k_dense_replace=3), model("qwen3-5", 60, full_attention_interval=4)
    (dense, num_dense), (mixture, num_mixtures) = kinds(glm)
    assert (num_dense, num_mixtures) == (3, 43) and dense.experts is None and mixture.experts is not None
    (linear, num_linear), (full, num_full) = kinds(qwen)
    assert (num_linear, num_full) == (45, 15) and linear.delta_rule is not None and full.delta_rule is None
    for spec in (glm, qwen):
        shape, of_kinds = shape_of(spec, "none"), [shape_of(kind, "none") for kind, _ in kinds(spec)]
        assert shape.num_layers * shape.layer_params == pytest.approx(
            sum(kind.num_layers * kind.layer_params for kind in of_kinds)
        )


def test_layers_that_do_not_fit_are_not_measured() -> None:
    """Five layers of GLM-4.5 with their optimizer states do not fit into 80 GB, nor do two, but with tp 8 five do."""
    spec = kinds(model("glm4-moe", 92, topk_group=1, **LARGE))[-1][0]
    workload = Workload(64, 512, (512.0,))
    profiler = LayerProfiler(None, workload, 8192, torch.bfloat16, 80e9)  # type: ignore[arg-type]
    assert [profiler.max_layers(spec, "none", tp, 8192) for tp in (1, 2, 4, 8)] == [0, 2, 3, 5]
    assert profiler.zero(spec, "none") == ([0.0] * 4, 0.0)


def test_models_of_other_layers_have_other_times() -> None:
    """A mixture whose token meets as many columns as that of a dense model, and linear attention."""
    mixture = model("glm4-moe", 4, n_shared_experts=0, moe_intermediate_size=16, first_k_dense_replace=0)
    dense = replace(mixture, experts=None)
    linear, full = (kind for kind, _ in kinds(model("qwen3-5", 8)))
    assert shape_of(mixture, "lm").intermediate == shape_of(dense, "lm").intermediate == 48
    assert len({sizes_of(shape_of(spec, "lm")) for spec in (mixture, dense, linear, full)}) == 4


def test_times_of_layers_grow_with_their_sizes() -> None:
    """A layer is the difference of two models of 1 and 5 layers. A dip is noise: neighbours get their mean, and totals stay."""
    layer, outside = np.array([1.0, 2.0, 4.0, 8.0]), np.array([5.0, 6.0, 7.0, 8.0])
    exact = _layer_and_ends(layer + outside, 5 * layer + outside, 5)
    np.testing.assert_allclose(exact, [layer, outside])
    base, larger = np.array([4.0, 4.4, 4.0]), np.array([8.0, 7.6, 8.8])  # layers of 1.0, 0.8, 1.2
    noisy = _layer_and_ends(base, larger, 5)
    np.testing.assert_allclose(noisy[0], [0.9, 0.9, 1.2])
    np.testing.assert_allclose(noisy[1], [2.95, 2.95, 2.95], atol=0.2)


def test_measured_rows_share_prompts() -> None:
    """Six rows of 5 + 7 tokens in groups of four: two prompts, and each row's last token of its prompt."""
    profiler = LayerProfiler(
        SimpleNamespace(device=torch.device("cpu")), Workload(8, 5, (7.0,), group=4), 64, torch.float32, 1e9
    )  # type: ignore[arg-type]
    micro = profiler._batch(SimpleNamespace(spec=model("llama", 1)), 6)  # type: ignore[arg-type]
    assert micro.lengths.tolist() == [12] * 6 and len(micro.tokens) == 2 * 4 + 6 * 8


def seconds(world: Any) -> list[tuple[float, float, float]]:
    """Of a layer forward, with its backward pass, and of a decode step, of the longest batches."""
    models = [model(family, 4) for family in ("glm4-moe", "qwen3-5", "gemma4")]
    workload = Workload(2, 32, (32.0,))
    layers = profile(world, {(spec, "lm"): GenerationConfig() for spec in models}, workload, 128, torch.float32).layers
    times = {layer.sizes: (layer.forward[-1], layer.both[-1], layer.decode[-1]) for layer in layers}
    return [times[sizes_of(shape_of(spec, "lm"))] for spec in models]


def test_layers_of_several_kinds_are_measured() -> None:
    (times,) = run_ranks(1, seconds)
    assert len(times) == 3 and min(map(min, times)) > 0
