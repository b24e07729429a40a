"""Families in layouts: training, adapters, Muon, generation, transitions and PPO have the numbers of one rank."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tasks
from engine_runs import OPTIM, assert_same, single, together, train
from generators import SMALL, build_generator, generate_on_rank, ragged_requests
from overrides import FP64, layout
from ranks import run_ranks
from reshard_cases import Simulated, layout_of
from reshard_generation import generate_in_layout
from reshard_plans import check_plans
from rlhf_spmd.generation import SamplingConfig
from rlhf_spmd.models.families import spec_from_config
from rlhf_spmd.models.lora import LoraConfig
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.layout import Layout
from small_models import CONFIGS, make_model
from tiers import tiers

LONG = pytest.mark.long
SELECTIVE, FULL = ({"activation_checkpointing": mode} for mode in ("selective", "full"))
LORA, MUON = {"lora": LoraConfig(rank=2)}, {"optim": replace(OPTIM, name="muon")}
SOME = {"lora": LoraConfig(rank=2, target_modules=["in_proj_qkv", "out_proj", "q_proj"])}
NEXT = {"lora": LoraConfig(rank=2, target_modules=["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"])}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@functools.cache
def model(name: str, directory: Path) -> str:
    return str(make_model(directory / name, {**CONFIGS[name], "vocab_size": 301}))


@pytest.mark.parametrize(
    ("name", "head", "layout", "options"),
    [
        ("gemma2", "lm", Layout(tp=2, sequence_parallel=True), {}),
        ("gemma4", "lm", Layout(pp=2, tp=2, sequence_parallel=True), SELECTIVE),
        ("gemma4", "value", Layout(tp=2, cp=2), {}),
        ("gpt-oss", "lm", Layout(tp=2, dp=2, zero=3), SELECTIVE),
        ("glm4-moe", "lm", Layout(pp=2, tp=2), FULL),
        ("deepseek-v3", "value", Layout(tp=4, sequence_parallel=True), SELECTIVE),
        ("deepseek-v3", "lm", Layout(pp=2, dp=2, zero=1), {}),
        ("deepseek-v3", "lm", Layout(cp=2, tp=2), {}),
        ("qwen3-5", "lm", Layout(pp=2, tp=2, sequence_parallel=True), {}),
        ("qwen3-5", "value", Layout(tp=2, dp=2, zero=3), SELECTIVE),
        ("olmo2", "lm", Layout(tp=2), FULL),  # norms over the heads of all ranks
        ("qwen2-moe", "lm", Layout(tp=2, sequence_parallel=True), {}),  # a gated shared expert
        *(
            pytest.param(*case, marks=LONG)
            for case in (
                ("qwen3-moe", "value", Layout(tp=2, sequence_parallel=True), {}),
                ("deepseek-v2", "lm", Layout(cp=4), {}),
                ("deepseek-v2", "lm", Layout(pp=2, tp=2, sequence_parallel=True), FULL),
                ("phi3", "lm", Layout(tp=4), {}),
                ("phi4-mini", "lm", Layout(pp=2, tp=2), {}),
                ("olmo3", "lm", Layout(pp=2, tp=2, sequence_parallel=True), {}),
                ("exaone4", "lm", Layout(pp=2, tp=2, sequence_parallel=True), {}),
                ("smollm3", "value", Layout(pp=2, dp=2, zero=1), {}),
                ("glm4", "lm", Layout(tp=2, dp=2, zero=3), {}),
                ("ministral3", "lm", Layout(tp=2, sequence_parallel=True), SELECTIVE),
            )
        ),
    ],
    ids=str,
)
def test_training_is_that_of_one_rank(directory: Path, name: str, head: str, layout: Layout, options: dict[str, Any]) -> None:
    path = model(name, directory)
    assert_same(together(run_ranks(layout.size, train, path, layout, [2, 3], head, options)), single(path, head), 1e-9)


@pytest.mark.parametrize(
    ("name", "layout", "options", "most"),
    [
        ("deepseek-v3", Layout(tp=2, dp=2, zero=2, sequence_parallel=True), LORA, 1e-9),
        ("deepseek-v3", Layout(tp=2, dp=2, zero=2, sequence_parallel=True), MUON, 1e-9),
        ("qwen3-5", Layout(pp=2, tp=2, sequence_parallel=True), SOME, 1e-9),
        ("qwen3-5", Layout(tp=2, dp=2, zero=1), MUON, 0.02),  # whose products are in bf16
        pytest.param("deepseek-v2", Layout(tp=2, dp=2, zero=2, sequence_parallel=True), LORA, 1e-9, marks=LONG),
        pytest.param("qwen3-next", Layout(tp=2, dp=2, zero=2), NEXT, 1e-9, marks=LONG),
    ],
    ids=str,
)
def test_adapters_and_muon(directory: Path, name: str, layout: Layout, options: dict[str, Any], most: float) -> None:
    path = model(name, directory)
    expected = together(run_ranks(1, train, path, Layout(), [1], "lm", options))
    assert_same(together(run_ranks(layout.size, train, path, layout, [2, 3], "lm", options)), expected, most)


@pytest.mark.parametrize(
    ("name", "layout", "most"),
    [
        ("gpt-oss", Layout(tp=2), 1e-4),
        ("deepseek-v3", Layout(pp=2, tp=2), 1e-4),
        ("qwen3-5", Layout(pp=2, tp=2), 1e-3),  # between one token at a time and chunks, with these weights
        pytest.param("gemma4", Layout(tp=2), 1e-4, marks=LONG),
        pytest.param("deepseek-v2", Layout(tp=4), 1e-4, marks=LONG),
        pytest.param("qwen3-5", Layout(pp=4), 1e-3, marks=LONG),
    ],
    ids=str,
)
def test_sampled_log_probs_in_layouts(directory: Path, name: str, layout: Layout, most: float) -> None:
    """tests/generation compares the greedy tokens of every family."""
    path, sampling = model(name, directory), SamplingConfig(temperature=0.8)
    expected = build_generator(path).generate(ragged_requests(), sampling, 3, 5)
    for completions, unequal, _ in run_ranks(layout.size, generate_on_rank, path, layout, SMALL, 0.8):
        assert unequal == 0 or name not in ("gpt-oss", "gemma4")
        for completion in expected:
            tokens, log_probs = completions[completion.row_id]
            assert tokens == completion.token_ids
            torch.testing.assert_close(torch.tensor(log_probs), completion.log_probs, atol=most, rtol=0)


@pytest.mark.parametrize(
    "name",
    tiers(
        ["gpt-oss", "glm4-moe", "deepseek-v3", "qwen3-5", "gemma3", "phi3", "olmo3", "qwen2-moe", "deepseek-v2", "qwen3-next"],
        ("gpt-oss", "glm4-moe", "deepseek-v3", "qwen3-5"),
    ),
)
def test_transitions_of_the_hybrid_engine(name: str) -> None:
    """Exact to the element, and computed in the generation layout, where fused rows of two training slices lie together."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "linear_num_key_heads": 8, "linear_num_value_heads": 16}
    sizes |= {"num_key_value_heads": 8} if name.startswith("deepseek") else {}
    sizes |= {} if name.startswith("qwen3-") else {"head_dim": 8}
    spec = spec_from_config({**CONFIGS[name], **sizes}, "test")
    for train_layout, pp, tp in ((Layout(2, 4, 1), 1, 2), (Layout(1, 2, 4, 3), 2, 4)):
        check_plans(Simulated("zero_redundancy", layout_of("zero_redundancy", train_layout, pp, tp), spec))
    generation = layout_of("zero_redundancy", Layout(tp=4), 1, 2)
    assert max(run_ranks(4, generate_in_layout, spec, "zero_redundancy", generation)) < 1e-12


@pytest.mark.parametrize(
    ("actor", "critic", "layers", "ranks", "split"),
    [
        ("deepseek-v3", "gpt-oss", 4, 2, (*layout("actor", tp=2), *layout("generation"), *layout("reference", pp=2))),
        ("qwen3-5", "glm4-moe", 4, 2, (*layout("actor", tp=2), *layout("generation"), *layout("critic", dp=2, zero=3))),
        pytest.param(  # stages may have two layers and one
            *("gemma2", "qwen3-next", 3, 2),
            (*layout("actor", pp=2), *layout("generation"), *layout("critic", dp=2, zero=3)),
            marks=LONG,
        ),
        pytest.param(
            *("deepseek-v3", "deepseek-v2", 4, 4),
            (*layout("actor", dp=2, pp=2, zero=1), *layout("generation", pp=2), *layout("critic", cp=2, dp=2)),
            marks=LONG,
        ),
    ],
    ids=["deepseek-v3", "qwen3-5", "gemma2", "deepseek-v3 in stages"],
)
def test_ppo_is_the_same_run_in_layouts(
    tmp_path: Path, actor: str, critic: str, layers: int, ranks: int, split: Sequence[str]
) -> None:
    """An actor learns with a critic of another family, on one rank and, split, on several, in layouts that generation regroups."""
    sizes = {"vocab_size": len(tasks.VOCABULARY), "eos_token_id": tasks.EOS, "initializer_range": 0.12, "pad_token_id": None}
    paths = []
    for role, name, kind, seed in (
        ("actor", actor, "CausalLM", 1),
        ("critic", critic, "SequenceClassification", 3),
        ("reference", actor, "CausalLM", 2),
    ):
        config = {**CONFIGS[name], **sizes, "architectures": [f"AFor{kind}"], "num_hidden_layers": layers}
        write_random_model(tmp_path / role, config, seed)
        shutil.copytree(tasks.task() / "tokenizer", tmp_path / role, dirs_exist_ok=True)
        paths.append(f"models.{role}.path={tmp_path / role}")
    for number, overrides in ((1, ()), (ranks, split)):
        settings = tasks.settings(tmp_path / str(number), 2, *paths, *FP64[:3], *overrides)
        run_ranks(number, tasks.train_here, str(tasks.task() / "ppo.json"), settings)
    alone, other = (tasks.read_run(tmp_path / str(number)) for number in (1, ranks))
    assert alone.responses == other.responses and other.log_prob_difference() < 1e-10
    if actor != "gemma2":  # others' generated log-probs are not those of training
        assert all("timing_s/compute_log_prob" in row for row in alone.raw)
    for difference, where in (tasks.worst_metric(alone, other, 1e-2), tasks.worst_tensor(alone, other)):
        assert difference < 1e-8, where
