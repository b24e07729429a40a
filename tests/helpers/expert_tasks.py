"""The small task of ``tasks`` with models whose layers are mixtures of experts."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import tasks
from rlhf_spmd.models.weights import write_random_model

MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": len(tasks.VOCABULARY),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 64,
    "rope_theta": 1000.0,
    "eos_token_id": tasks.EOS,
    "initializer_range": 0.15,
}
ARCHITECTURES = {
    "actor": "Qwen3MoeForCausalLM",
    "reference": "Qwen3MoeForCausalLM",
    "critic": "Qwen3MoeForSequenceClassification",
}


@functools.cache
def config(directory: Path) -> str:
    """The configuration file of the task with models in ``directory``."""
    found = json.loads((tasks.task() / "ppo.json").read_text())
    for seed, (role, architecture) in enumerate(ARCHITECTURES.items()):
        write_random_model(directory / role, {**MODEL, "architectures": [architecture]}, seed)
        shutil.copytree(tasks.task() / "tokenizer", directory / role, dirs_exist_ok=True)
        found["models"][role]["path"] = str(directory / role)
    (directory / "ppo.json").write_text(json.dumps(found))
    return str(directory / "ppo.json")
