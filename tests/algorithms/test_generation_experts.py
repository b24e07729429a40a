"""Runs that generate with whole experts on the ranks of tp: one rank's responses, metrics and weights, from any layout."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest

import tasks
from generate_runs import arguments, read_output, run_program_on_rank, write_rows
from overrides import layout, micro_batches
from ranks import run_ranks
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.training.prepare import prepare

STEPS = 2
GRPO = {"name": "grpo", "ppo_mini_batch_size": 4, "ppo_epochs": 2, "use_kl_loss": False}
COMMON: dict[str, Any] = {
    "vocab_size": len(tasks.VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "eos_token_id": tasks.EOS,
    "initializer_range": 0.15,
    "num_experts_per_tok": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "moe_intermediate_size": 18,  # which 4 does not divide
        "head_dim": 8,
        "mlp_only_layers": [1],
    },
    "gpt_oss": {
        **COMMON,
        "architectures": ["GptOssForCausalLM"],
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "sliding_window": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "deepseek_v3": {
        **COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
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
ALONE = ("placement.pools={a: [0], b: [1]}", "models.actor.pool=a", "models.actor.calls.generate_sequences.pool=b")
GENERATION = "models.actor.generation"
APART = ("placement.pools.b=[2,3]", "models.actor.calls.generate_sequences.pool=b")
LAYOUTS: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "tp2 to ep2": ("qwen3_moe", 2, (*layout("actor", tp=2), f"{GENERATION}.tp=2", f"{GENERATION}.ep=2")),
    "ep4 to the same experts in tp4": (
        "qwen3_moe",
        4,
        (*layout("actor", dp=4, ep=4, zero=1), f"{GENERATION}.tp=4", f"{GENERATION}.ep=4", *micro_batches(rows=3)),
    ),
    "pp2 tp2 to ep2 in two replicas": (
        "gpt_oss",
        4,
        (*layout("actor", pp=2, tp=2), f"{GENERATION}.tp=2", f"{GENERATION}.ep=2", f"{GENERATION}.buffers=keep"),
    ),
    "ep2 of ZeRO's copies to ep4": (
        "gpt_oss",
        4,
        (*layout("actor", dp=4, ep=2, zero=3), f"{GENERATION}.tp=4", f"{GENERATION}.ep=4", f"{GENERATION}.buffers=offload"),
    ),
    "tp2 ep2 to stages of ep2": (
        "deepseek_v3",
        4,
        (*layout("actor", tp=2, dp=2, ep=2), f"{GENERATION}.pp=2", f"{GENERATION}.tp=2", f"{GENERATION}.ep=2"),
    ),
    "weights gathered whole": (
        "deepseek_v3",
        2,
        (*layout("actor", tp=2), f"{GENERATION}.tp=2", f"{GENERATION}.ep=2", f"{GENERATION}.reshard_method=full_gather"),
    ),
    "weights on loan": (
        "gpt_oss",
        4,
        ("placement.pools.a=[0,1]", "models.actor.pool=a", *APART, f"{GENERATION}.tp=2", f"{GENERATION}.ep=2",
         *layout("actor", dp=2, zero=2)),
    ),
    "a step ahead": (
        "qwen3_moe",
        4,
        ("placement.pools.a=[0,1]", "models.actor.pool=a", *APART, f"{GENERATION}.ep=2", "placement.max_staleness=1",
         "models.actor.calls.generate_sequences.layout.tp=2", *layout("actor", tp=2)),
    ),
    "adapters": ("qwen3_moe", 2, (*layout("actor", tp=2), f"{GENERATION}.tp=2", f"{GENERATION}.ep=2", "models.actor.lora.rank=2")),
}  # fmt: skip
ALIKE = ("placement.max_staleness=1", "models.actor.lora.rank=2")  # what one rank's run has, too


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole_experts")
    for name, model in MODELS.items():
        write_random_model(root / name, {**model, "model_type": name}, 1)
        shutil.copytree(tasks.task() / "tokenizer", root / name, dirs_exist_ok=True)
    return root


@functools.cache
def run(directory: Path, name: str, ranks: int, *more: str) -> tasks.Run:
    run_dir = directory / f"run_{len(list(directory.iterdir()))}"
    own = f"models.actor.path={directory / name}", "models.actor.dtype=float64", "models.actor.optim.eps=1e-3"
    run_ranks(ranks, tasks.train_here, tasks.other_task(GRPO, "actor"), tasks.settings(run_dir, STEPS, *own, *more))
    return tasks.read_run(run_dir)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_run_in_fp64(directory: Path, name: str) -> None:
    model, ranks, more = LAYOUTS[name]
    alike = tuple(one for one in more if one in ALIKE)
    apart = ALONE if ALIKE[0] in alike else ()
    one = run(directory, model, 1 + bool(apart), *apart, *alike)
    other = run(directory, model, ranks, *more)
    assert other.responses == one.responses
    assert alike or max(made.log_prob_difference() for made in (one, other)) < 1e-10, "generation and training differ"
    difference, where = tasks.worst_metric(one, other, floor=1e-2)
    weights, tensor = tasks.worst_tensor(one, other)
    print(f"{name}: metrics {difference:.1e} ({where}), weights {weights:.1e} ({tensor})")
    assert difference < 1e-10, where
    assert weights < 1e-9, tensor


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_not_trained(directory: Path, tmp_path: Path, name: str) -> None:
    """``generate``, greedily: one rank's tokens, and its log-probs."""
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt_ids": [3 + i % 5, 4, 5][: 1 + i % 3]} for i in range(7)])
    more = ["sampling.temperature=0", "sampling.max_response_length=12", "model.dtype=float32"]
    written = []
    for ranks in (1, 2, 4):
        out = tmp_path / f"{ranks}.jsonl"
        layout = [f"layout.tp={ranks}", f"generation.ep={ranks}"]
        run_ranks(ranks, run_program_on_rank, arguments(directory / name, rows, out, *more, *layout))
        written.append(read_output(out))
    for other in written[1:]:
        for a, b in zip(written[0], other, strict=True):
            assert b["log_probs"] == pytest.approx(a["log_probs"], abs=2e-5) and b["response_ids"] == a["response_ids"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("tp=1",),
            r"^models\.actor\.generation\.ep=2: the tp ranks share the experts, and \S+\.generation\.tp is 1; allowed: 1$",
        ),
        (("tp=2", "overlap=true"), r"^models\.actor\.generation\.overlap=true: .* and generation\.ep=2; leave it out$"),
        (
            ("tp=2", "reuse_rollout_log_probs=true"),
            r"generation\.ep=2 adds the results of experts in another order than training",
        ),
    ],
)
def test_what_cannot_be(directory: Path, tmp_path: Path, more: tuple[str, ...], message: str) -> None:
    own = f"models.actor.path={directory / 'qwen3_moe'}", *layout("actor", tp=2), f"{GENERATION}.ep=2"
    given = tasks.settings(tmp_path / "run", STEPS, *own, *(f"{GENERATION}.{one}" for one in more))
    with pytest.raises(ValueError, match=message):
        prepare(tasks.other_task(GRPO, "actor"), given, 2)
