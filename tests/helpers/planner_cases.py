"""Configurations of known models on clusters of GPUs, as the checks before a run see them: their config.json, a tokenizer, and rows."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

import tasks
from rlhf_spmd import train
from rlhf_spmd.training.job import trace
from rlhf_spmd.training.memory_estimate import StepFacts, step_facts

GIB = 1 << 30
H100, H200 = 79.2 * GIB, 139.8 * GIB  # as their drivers report them
# family, vocabulary, hidden, intermediate, layers, heads, KV heads, tied embeddings: the models' own config.json
MODELS = {
    "qwen2.5_0.5b": ("qwen2", 151936, 896, 4864, 24, 14, 2, True),
    "qwen2.5_7b": ("qwen2", 152064, 3584, 18944, 28, 28, 4, False),
    "qwen2.5_32b": ("qwen2", 152064, 5120, 27648, 64, 40, 8, False),
    "llama3.1_8b": ("llama", 128256, 4096, 14336, 32, 32, 8, False),
    "llama3.1_70b": ("llama", 128256, 8192, 28672, 80, 64, 8, False),
}
KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
ROLES = {
    "sft": ("actor",),
    "dpo": ("actor", "reference"),
    "grpo": ("actor", "reference"),
    "ppo": ("actor", "critic", "reference"),
}
NUM_ROWS, LONG = 256, 2048  # rows; tokens of those that are trained on as they are


def directory(root: Path, model: str) -> Path:
    """A model's config.json, in ``root``, with the tokenizer of ``tasks``."""
    path = root / model
    if not path.exists():
        shutil.copytree(tasks.task() / "actor", path, ignore=shutil.ignore_patterns("*.safetensors"))
        family, *sizes, tied = MODELS[model]
        config = {"model_type": family, **dict(zip(KEYS, sizes, strict=True)), "tie_word_embeddings": tied}
        (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32768, "eos_token_id": 1}))
    return path


def rows(root: Path, algorithm: str) -> Path:
    """A file of rows: prompts of 12 tokens; of SFT and DPO together with their responses ``LONG``."""
    path, rng = root / f"{algorithm}.jsonl", random.Random(0)
    if not path.exists():
        answers = {"sft": ("response",), "dpo": ("chosen", "rejected")}.get(algorithm, ())
        with path.open("w") as file:
            for _ in range(NUM_ROWS):
                row = {"prompt": "".join(rng.choices(tasks.VOCABULARY[1:], k=12))}
                row |= {key: "".join(rng.choices(tasks.VOCABULARY[1:], k=LONG - 13)) for key in answers}
                file.write(json.dumps(row) + "\n")
    return path


def overrides(root: Path, algorithm: str, model: str, *more: str) -> list[str]:
    """256 prompts of up to 1,024 tokens, a response each of up to 1,024 (GRPO: 8 responses to 128), mini-batches of 256 rows; all other
    settings are the defaults."""
    chosen = [f"algorithm.name={algorithm}", f"data.path={rows(root, algorithm)}", "run.dir=" + str(root / "run")]
    if algorithm in ("sft", "dpo"):
        chosen += ["data.max_length=4096", "data.train_batch_size=256"]
    else:
        responses = 8 if algorithm == "grpo" else 1
        chosen += ["data.max_prompt_length=1024", "data.max_response_length=1024", f"sampling.n={responses}"]
        chosen += [
            f"data.train_batch_size={128 if responses > 1 else 256}",
            f"algorithm.ppo_mini_batch_size={256 // responses}",
        ]
        chosen.append("reward.function=tasks:even_share")
    for role in ROLES[algorithm]:
        chosen += [f"models.{role}.path={directory(root, model)}", f"models.{role}.random_init=true"]
    return [*chosen, *more]


def everyone(algorithm: str, **values: int) -> list[str]:
    """A layout for all of an algorithm's roles; dp is what it leaves."""
    return [f"models.{role}.layout.{key}={value}" for role in ROLES[algorithm] for key, value in values.items()]


@dataclass(frozen=True)
class Fit:
    """``needed``: GiB of the fullest rank, by the arithmetic of docs/planner.md. ``remedy``: what the refusal names, or ""."""

    algorithm: str
    model: str
    gpus: int
    memory: float
    more: tuple[str, ...]
    needed: float
    remedy: str = ""

    def checked(self, root: Path, *more: str) -> tuple[train.TrainJob, StepFacts]:
        given = overrides(root, self.algorithm, self.model, *self.more, *more)
        ready = train.prepare(None, given, self.gpus, local_size=min(self.gpus, 8))
        return ready, step_facts(ready, trace(ready), torch.device("cuda"))


SLICED = {name: (*everyone(name, zero=1, tp=8), "models.actor.generation.tp=8") for name in ("grpo", "ppo")}
NONE = tuple(f"models.{role}.activation_checkpointing=none" for role in ("actor", "critic"))
FITS = [  # docs/planner.md has the arithmetic
    Fit("sft", "qwen2.5_0.5b", 1, H100, (), 28.3),
    Fit("sft", "qwen2.5_7b", 1, H100, (), 137.4, "models.actor.optim.offload=true"),
    Fit("sft", "qwen2.5_7b", 1, H200, (), 137.4),
    Fit("dpo", "llama3.1_8b", 8, H100, (), 159.7, "models.actor.layout.zero=2"),
    Fit("dpo", "llama3.1_8b", 8, H100, (*everyone("dpo", zero=2),), 44.0),
    Fit("ppo", "qwen2.5_7b", 8, H100, NONE, 309.9, "models.actor.activation_checkpointing=full"),
    Fit("ppo", "qwen2.5_7b", 8, H100, (*everyone("ppo", zero=3),), 44.8),
    Fit("grpo", "qwen2.5_32b", 8, H200, (*everyone("grpo", zero=3),), 131.3),
    Fit("grpo", "llama3.1_70b", 64, H100, SLICED["grpo"], 90.9, "algorithm.ppo_max_token_len_per_gpu=4096"),
    Fit("ppo", "llama3.1_70b", 16, H100, SLICED["ppo"], 196.8, "models.critic.optim.offload=true"),
]
