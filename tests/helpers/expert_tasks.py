"""The small task of ``tasks`` with models whose layers are mixtures of experts."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import tasks
from overrides import ONE_SCORER
from rlhf_spmd.models.weights import write_random_model

COMMON: dict[str, Any] = {
    "vocab_size": len(tasks.VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": tasks.EOS,
    "initializer_range": 0.15,
    "num_experts_per_tok": 2,
}
MODEL = {
    **COMMON,
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "rope_theta": 1000.0,
}
ARCHITECTURES = {
    "actor": "Qwen3MoeForCausalLM",
    "reference": "Qwen3MoeForCausalLM",
    "critic": "Qwen3MoeForSequenceClassification",
}
GRPO = {"name": "grpo", "ppo_mini_batch_size": 4, "ppo_epochs": 2, "use_kl_loss": False}


def write_model(directory: Path, model: dict[str, Any], architecture: str, seed: int = 1) -> str:
    """The directory, in which are random weights and the task's tokenizer."""
    write_random_model(directory, {**model, "architectures": [architecture]}, seed)
    shutil.copytree(tasks.task() / "tokenizer", directory, dirs_exist_ok=True)
    return str(directory)


@functools.cache
def config(directory: Path) -> str:
    """The configuration file of PPO with models in ``directory``."""
    sections = json.loads((tasks.task() / "ppo.json").read_text())
    for seed, (role, architecture) in enumerate(ARCHITECTURES.items()):
        sections["models"][role]["path"] = write_model(directory / role, MODEL, architecture, seed)
    (directory / "ppo.json").write_text(json.dumps(sections))
    return str(directory / "ppo.json")


def train_grpo(run_dir: Path, model: Path, *more: str, ranks: int = 1, steps: int = 2) -> tasks.Run:
    """In double precision, if ``more`` does not say otherwise."""
    scorers = () if any("models.reward" in key for key in more) else ONE_SCORER
    actor = f"models.actor.path={model}", "models.actor.dtype=float64", "models.actor.optim.eps=1e-3"
    return tasks.train(ranks, run_dir, steps, *actor, *scorers, *more, config=tasks.other_task(GRPO, "actor"))
