"""Runs of models whose experts several ranks share, in training or for generation only: one rank's responses, metrics and weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

import tasks
from algorithm_cases import assert_same_run
from expert_tasks import ARCHITECTURES, COMMON, GRPO, MODEL, config, train_grpo, write_model
from generate_runs import arguments, read_output, run_program_on_rank, write_rows
from overrides import FP64, ONE_SCORER, layouts, micro_batches
from ranks import run_ranks
from rlhf_spmd.preflight.prepare import prepare
from tiers import tiers

STEPS = 2
# name -> ranks, layouts, other overrides
LAYOUTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "ep2 with generation in tp2": (
        4,
        "actor tp2 dp2 ep2, generation tp2, critic pp2 dp2 ep2, reference dp4 ep4 zero3",
        micro_batches(rows=3),
    ),
    "ep2 of ZeRO's copies, generation in a grid of its own": (
        4,
        "actor dp4 ep2 zero3, generation tp2, critic dp4 ep4 zero2 zero_size2, reference tp2 cp2 ep2",
        micro_batches(rows=2),
    ),
    "weights on loan": (
        4,
        "actor dp4 ep4 zero2, critic tp2 dp2 ep2, reference dp4 ep2",
        (
            "placement.pools.b=[2,3]",
            "models.actor.calls.generate_sequences.pool=b",
            "models.critic.calls.compute_values.layout.ep=4",
        ),
    ),
    "ep2 in stages, regrouped for generation": (4, "actor pp2 dp2 ep2 zero1, critic dp4 ep2 zero1, reference pp2 dp2 ep2", ()),
    "gathered whole": (2, "actor dp2 ep2, critic dp2", ("models.actor.generation.reshard_method=full_gather",)),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("experts")
    for name, model in MODELS.items():
        write_model(root / name, {**model, "model_type": name}, ARCHITECTURE[name])
    return root


@functools.cache
def run(directory: Path, name: str) -> tasks.Run:
    ranks, text, overrides = LAYOUTS[name] if name else (1, "actor", ())
    run_dir = directory / (name or "one rank").replace(" ", "_")
    return tasks.train(ranks, run_dir, STEPS, *layouts(text), *ONE_SCORER, *overrides, *FP64, config=config(directory))


@pytest.mark.parametrize("name", tiers(LAYOUTS, list(LAYOUTS)[:3]))
def test_the_same_run_in_fp64(directory: Path, name: str) -> None:
    assert_same_run(run(directory, ""), run(directory, name))


# -- whole experts on the ranks of tp, for generation


MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **MODEL,
        "num_experts": 8,
        "moe_intermediate_size": 18,  # which 4 does not divide
        "mlp_only_layers": [1],
    },
    "gpt_oss": {
        **COMMON,
        "head_dim": 8,
        "num_local_experts": 4,
        "sliding_window": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "deepseek_v3": {
        **COMMON,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}

ARCHITECTURE = {"qwen3_moe": ARCHITECTURES["actor"], "gpt_oss": "GptOssForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM"}


EP = "models.actor.generation.ep="
BUFFERS = "models.actor.generation.buffers="
# name -> model, ranks, layouts, other overrides
GENERATED: dict[str, tuple[str, int, str, tuple[str, ...]]] = {
    "ep2 of ZeRO's copies to ep4": ("gpt_oss", 4, "actor dp4 ep2 zero3, generation tp4", (f"{EP}4", f"{BUFFERS}offload")),
    "tp2 ep2 to stages of ep2": ("deepseek_v3", 4, "actor tp2 dp2 ep2, generation pp2 tp2", (f"{EP}2",)),
    "adapters": ("qwen3_moe", 2, "actor tp2, generation tp2", (f"{EP}2", "models.actor.lora.rank=2")),
    "ep4 to the same experts in tp4": (
        "qwen3_moe",
        4,
        "actor dp4 ep4 zero1, generation tp4",
        (f"{EP}4", *micro_batches(rows=3)),
    ),
    "pp2 tp2 to ep2 in two replicas": ("gpt_oss", 4, "actor pp2 tp2, generation tp2", (f"{EP}2", f"{BUFFERS}keep")),
}
SHORT = list(GENERATED)[:3]


@functools.cache
def run_grpo(directory: Path, model: str, ranks: int, *more: str) -> tasks.Run:
    return train_grpo(directory / f"run_{len(list(directory.iterdir()))}", directory / model, *more, ranks=ranks)


@pytest.mark.parametrize("name", tiers(GENERATED, SHORT))
def test_the_same_run_with_experts_for_generation(directory: Path, name: str) -> None:
    model, ranks, text, more = GENERATED[name]
    one = run_grpo(directory, model, 1, *(key for key in more if "lora" in key))
    other = run_grpo(directory, model, ranks, *layouts(text), *more)
    assert_same_run(one, other)
    is_exact = name != "adapters"
    assert not is_exact or max(run.log_prob_difference() for run in (one, other)) < 1e-10, "generation and training differ"


@pytest.mark.parametrize("name", tiers(MODELS, ["gpt_oss"]))
def test_a_model_that_is_not_trained(directory: Path, tmp_path: Path, name: str) -> None:
    """``generate``, greedily: one rank's tokens, and its log-probs."""
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [3 + i % 5, 4, 5][: 1 + i % 3]} for i in range(7)])
    more = ["sampling.temperature=0", "sampling.max_response_length=12", "model.dtype=float32"]
    written = []
    for ranks in (1, 4):
        out = tmp_path / f"{ranks}.jsonl"
        experts = [f"layout.tp={ranks}", f"generation.ep={ranks}"]
        run_ranks(ranks, run_program_on_rank, arguments(directory / name, rows, out, *more, *experts))
        written.append(read_output(out))
    for one, other in zip(*written, strict=True):
        assert other["log_probs"] == pytest.approx(one["log_probs"], abs=2e-5) and other["response_ids"] == one["response_ids"]


def test_what_cannot_be(directory: Path, tmp_path: Path) -> None:
    keys = (f"models.actor.path={directory / 'qwen3_moe'}", *layouts("actor tp2, generation tp2"), f"{EP}2")
    overrides = tasks.settings(tmp_path / "run", STEPS, *keys, "models.actor.generation.reuse_rollout_log_probs=true")
    with pytest.raises(ValueError, match=r"generation\.ep=2 adds the results of experts in another order than training"):
        prepare(tasks.other_task(GRPO, "actor"), overrides, 2)
