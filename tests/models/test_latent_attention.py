"""Multi-head latent attention: what changes no token, the bytes of its cache, published sizes, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tasks
from generators import SMALL, build_generator, ragged_requests, tokens_of
from rlhf_spmd.generation import SamplingConfig, backends
from rlhf_spmd.generation.backends import build_backend, choose_backend
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.layout_rules import check_layout
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.planner.costs import kv_bytes_per_token
from rlhf_spmd.planner.shapes import call_settings, shape_of
from rlhf_spmd.preflight.exactness import exact_rollouts
from rlhf_spmd.preflight.prepare import prepare
from rlhf_spmd.workers.flops import forward_flops
from small_models import CONFIGS, make_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("latent"), {**CONFIGS["deepseek-v3"], "vocab_size": 301}))


@pytest.mark.parametrize("attention", ["torch", "cpp"])
def test_chunks_and_shared_pages_change_no_token(model: str, attention: str) -> None:
    sampling, requests = SamplingConfig(temperature=0.8), ragged_requests()
    first, *others = (
        build_generator(model, replace(SMALL, attention=attention, **more)).generate(requests, sampling, 3, 5)
        for more in (
            {"enable_prefix_caching": False},
            {"max_num_batched_tokens": 24},
            {"num_pages": 40, "page_size": 4},
        )
    )
    for other in others:
        assert tokens_of(other) == tokens_of(first)
        for ours, theirs in zip(other, first, strict=True):
            torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=2e-5, rtol=0)


def test_a_token_takes_the_bytes_of_its_entry(model: str) -> None:
    """kv_rank + rope_dim numbers a token and layer on every rank of tp; the C++ kernels keep values beside keys."""
    spec = spec_from_config(CONFIGS["deepseek-v3"], "test")
    entry, layers, pages, size = 16 + 6, 4, 5, 16
    for name, planes in (("torch", 1), ("cpp", 2)):
        backend = build_backend(name, torch.float32, CPU)
        generator = build_generator(model, replace(SMALL, attention=name))
        assert generator._cache_shapes == [(layers, 1, entry)]
        cache = KVCache(layers, 1, entry, pages, size, torch.float32, CPU, backend, value_dim=16)
        numbers = planes * layers * pages * backend.ops.page_elements(size, entry)
        assert cache.pages.nbytes == 4 * numbers
        if name == "torch":
            assert cache.pages.nbytes == 4 * layers * pages * size * entry
    settings = call_settings([(1, 1, 1), (1, 4, 1), (2, 4, 1)])
    assert kv_bytes_per_token(shape_of(spec, "lm"), settings).tolist() == [2 * layers * entry] * 2 + [layers * entry]


def test_published_sizes() -> None:
    """DeepSeek-V3 as its report counts it: 671 billion parameters, 37 of them for a token, 576 numbers a token and layer."""
    config = {"model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432}
    config |= {"num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128}
    spec = spec_from_config(config, "test")
    shape = shape_of(spec, "lm")
    assert shape.params == pytest.approx(671e9, rel=1e-3) and shape.cache_entry == 576
    assert forward_flops(spec, 1, 0) / 2 == pytest.approx(37e9, rel=0.02)
    held = sum(
        torch.Size(shard.shape).numel() for name, shard in plan_params(spec, "lm", 0, 61, 0, 8).items() if ".latent." in name
    )
    whole = 7168 * (1536 + 576) + 1536 + 512
    assert held == whole + (1536 * 192 + 512 * 256) * 128 // 8
    with pytest.raises(ValueError, match=r"layout.tp=3: does not divide num_attention_heads=128"):
        check_layout(spec, "layout", tp=3)


def test_attention_on_gpus_is_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "unavailable", lambda *arguments: None)
    assert choose_backend("auto", "auto", torch.bfloat16, torch.device("cuda"), "generation.attention") == "triton"


def test_generated_log_probs_are_not_taken_for_training(tmp_path: Path) -> None:
    sizes = {"vocab_size": len(tasks.VOCABULARY), "eos_token_id": tasks.EOS, "pad_token_id": None}
    write_random_model(tmp_path / "model", {**CONFIGS["deepseek-v3"], **sizes}, 1)
    shutil.copytree(tasks.task() / "tokenizer", tmp_path / "model", dirs_exist_ok=True)
    paths = [f"models.{role}.path={tmp_path / 'model'}" for role in ("actor", "reference")]
    config, settings = str(tasks.task() / "ppo.json"), tasks.settings(tmp_path / "run", 2, *paths)
    ready = prepare(config, settings, 1)
    assert not exact_rollouts(ready.config, ready.roles)
    with pytest.raises(ValueError, match=r"reuse_rollout_log_probs=true: latent attention has other products"):
        prepare(config, [*settings, "models.actor.generation.reuse_rollout_log_probs=true"], 1)
