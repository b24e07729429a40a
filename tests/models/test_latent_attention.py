"""Multi-head latent attention: one rank's numbers in every layout, the bytes of its cache, and runs that learn with it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tasks
from engine_runs import OPTIM, assert_same, single, together, train
from generators import SMALL, build_generator, generate_on_rank, ragged_requests, tokens_of
from overrides import FP64, layout
from ranks import run_ranks
from rlhf_spmd.generation import SamplingConfig, backends
from rlhf_spmd.generation.backends import build_backend, choose_backend
from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.models.latent import Latent, latent_scale
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.sharding import check_layout, plan_params
from rlhf_spmd.models.spec import spec_from_config
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.planner.costs import kv_bytes_per_token
from rlhf_spmd.planner.shapes import call_settings, shape_of
from rlhf_spmd.training.checks import exact_rollouts
from rlhf_spmd.training.prepare import prepare
from rlhf_spmd.workers.flops import forward_flops
from small_models import CONFIGS, make_model

CPU = torch.device("cpu")
KINDS = ("deepseek-v3", "deepseek-v2")  # with a short vector of the queries, and without


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("latent")
    return {name: str(make_model(root / name, {**CONFIGS[name], "vocab_size": 301})) for name in KINDS}


@pytest.mark.parametrize(
    ("name", "layout", "micro", "options"),
    [
        ("deepseek-v3", Layout(tp=2), [2], {}),
        ("deepseek-v3", Layout(tp=4, sequence_parallel=True), [3], {"activation_checkpointing": "selective"}),
        ("deepseek-v3", Layout(pp=2, dp=2, zero=1), [2, 3], {"activation_checkpointing": "full"}),
        ("deepseek-v3", Layout(tp=2, dp=2, zero=3), [2, 2], {}),
        ("deepseek-v3", Layout(cp=2, tp=2), [2], {}),
        ("deepseek-v2", Layout(cp=4), [2], {}),
        ("deepseek-v2", Layout(pp=2, tp=2, sequence_parallel=True), [3], {"activation_checkpointing": "selective"}),
    ],
    ids=str,
)
def test_training_is_the_same_as_on_one_rank(
    models: dict[str, str], name: str, layout: Layout, micro: list[int], options: dict[str, Any]
) -> None:
    assert_same(together(run_ranks(layout.size, train, models[name], layout, micro, "lm", options)), single(models[name], "lm"))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "options", [{"lora": LoraConfig(rank=2)}, {"optim": replace(OPTIM, name="muon")}], ids=["lora", "muon"]
)
def test_adapters_and_muon_too(models: dict[str, str], name: str, options: dict[str, Any]) -> None:
    want = together(run_ranks(1, train, models[name], Layout(), [1], "lm", options))
    layout = Layout(tp=2, dp=2, zero=2, sequence_parallel=True)
    assert_same(together(run_ranks(4, train, models[name], layout, [2, 2], "lm", options)), want, 1e-9)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=4), Layout(pp=2, tp=2)], ids=str)
def test_generation_in_layouts(models: dict[str, str], name: str, layout: Layout) -> None:
    wanted = build_generator(models[name]).generate(ragged_requests(), SamplingConfig(temperature=0.8), 3, 5)
    for found, _, _ in run_ranks(layout.size, generate_on_rank, models[name], layout, SMALL, 0.8):
        for completion in wanted:
            tokens, log_probs = found[completion.row_id]
            assert tokens == completion.token_ids
            torch.testing.assert_close(torch.tensor(log_probs), completion.log_probs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("attention", ["torch", "cpp"])
def test_chunks_shared_pages_and_guesses_change_no_token(models: dict[str, str], attention: str) -> None:
    sampling, requests = SamplingConfig(temperature=0.8), ragged_requests()
    first, *others = (
        build_generator(models["deepseek-v3"], replace(SMALL, attention=attention, **more)).generate(requests, sampling, 3, 5)
        for more in (
            {"enable_prefix_caching": False},
            {"max_num_batched_tokens": 24},
            {"speculative_tokens": 3},
            {"num_pages": 40, "page_size": 4},
        )
    )
    for other in others:
        assert tokens_of(other) == tokens_of(first)
        for ours, theirs in zip(other, first, strict=True):
            torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=2e-5, rtol=0)


def test_a_token_takes_the_bytes_of_its_entry(models: dict[str, str]) -> None:
    """kv_rank + rope_dim numbers a token and layer on every rank of tp; the C++ kernels keep values beside keys."""
    spec = spec_from_config(CONFIGS["deepseek-v3"], "test")
    entry, layers, pages, size = 16 + 6, 4, 5, 16
    for name, planes in (("torch", 1), ("cpp", 2)):
        backend = build_backend(name, torch.float32, CPU)
        generator = build_generator(models["deepseek-v3"], replace(SMALL, attention=name))
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
    assert shape.params == pytest.approx(671e9, rel=1e-3) and shape.entry == 576
    assert forward_flops(spec, 1, 0) / 2 == pytest.approx(37e9, rel=0.02)
    held = sum(
        torch.Size(shard.shape).numel() for name, shard in plan_params(spec, "lm", 0, 61, 0, 8).items() if ".latent." in name
    )
    whole = 7168 * (1536 + 576) + 1536 + 512
    assert held == whole + (1536 * 192 + 512 * 256) * 128 // 8
    with pytest.raises(ValueError, match=r"layout: tp=3 does not divide num_attention_heads=128"):
        check_layout(spec, 1, 3, "layout")


def test_the_scale_of_scores() -> None:
    latent = Latent(None, 512, 128, 64, 128)
    plain, yarn = 192**-0.5, {"rope_type": "yarn", "factor": 40.0}
    assert latent_scale(latent, {}, "test") == latent_scale(latent, yarn, "test") == pytest.approx(plain)
    assert latent_scale(latent, {**yarn, "mscale_all_dim": 1.0}, "test") == pytest.approx(plain * 1.3689**2, rel=1e-4)


def test_flash_attention_is_refused() -> None:
    spec, gpu = spec_from_config(CONFIGS["deepseek-v3"], "test"), torch.device("cuda")
    with pytest.raises(
        ValueError, match=r"generation.attention=flash_attn: it has no latent attention; set it to auto or triton"
    ):
        choose_backend("flash_attn", "auto", torch.bfloat16, gpu, "generation.attention", spec)


def test_auto_is_triton_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "unavailable", lambda *arguments: None)
    spec, gpu = spec_from_config(CONFIGS["deepseek-v3"], "test"), torch.device("cuda")
    assert choose_backend("auto", "auto", torch.bfloat16, gpu, "generation.attention", spec) == "triton"


@pytest.fixture(scope="module")
def roles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Actor, critic and reference with latent attention, for the task of tests/helpers/tasks.py."""
    root = tmp_path_factory.mktemp("roles")
    sizes = {"vocab_size": len(tasks.VOCABULARY), "eos_token_id": tasks.EOS, "initializer_range": 0.12}
    for role, kind, seed in (("actor", "CausalLM", 1), ("critic", "SequenceClassification", 3), ("reference", "CausalLM", 2)):
        name = "deepseek-v2" if role == "critic" else "deepseek-v3"
        config = {**CONFIGS[name], **sizes, "architectures": [f"AFor{kind}"], "pad_token_id": None}
        write_random_model(root / role, config, seed)
        shutil.copytree(tasks.task() / "tokenizer", root / role, dirs_exist_ok=True)
    return root


def _settings(roles: Path, run_dir: Path, *more: str) -> list[str]:
    return tasks.settings(run_dir, 2, *(f"models.{role.name}.path={role}" for role in roles.iterdir()), *more)


@pytest.mark.parametrize(
    ("ranks", "split"),
    [
        (2, (*layout("actor", tp=2), *layout("critic", dp=2, zero=3), *layout("reference", pp=2))),
        (4, (*layout("actor", tp=4), *layout("generation", tp=2), *layout("critic", pp=2, tp=2))),
        (4, (*layout("actor", dp=2, pp=2, zero=1), *layout("generation", pp=2), *layout("critic", cp=2, dp=2))),
    ],
    ids=["tp2 -> tp1", "tp4 -> tp2", "pp2"],
)
def test_ppo_is_the_same_run_in_layouts(roles: Path, tmp_path: Path, ranks: int, split: tuple[str, ...]) -> None:
    for number, overrides in ((1, ()), (ranks, split)):
        settings = _settings(roles, tmp_path / str(number), *FP64, *overrides)
        run_ranks(number, tasks.train_here, str(tasks.task() / "ppo.json"), settings)
    alone, other = (tasks.read_run(tmp_path / str(number)) for number in (1, ranks))
    assert alone.responses == other.responses and other.log_prob_difference() < 1e-12
    assert any("timing_s/compute_log_prob" in key for key in alone.raw[0])
    for difference, where in (tasks.worst_metric(alone, other, 1e-2), tasks.worst_tensor(alone, other)):
        assert difference < 1e-9, where


def test_generated_log_probs_are_not_taken_for_training(roles: Path, tmp_path: Path) -> None:
    config, settings = str(tasks.task() / "ppo.json"), _settings(roles, tmp_path)
    ready = prepare(config, settings, 1)
    assert not exact_rollouts(ready.config, ready.plans)
    with pytest.raises(ValueError, match=r"reuse_rollout_log_probs=true, but latent attention has other products"):
        prepare(config, [*settings, "models.actor.generation.reuse_rollout_log_probs=true"], 1)
