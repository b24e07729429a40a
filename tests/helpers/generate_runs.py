"""Runs of ``rlhf_spmd.generate`` on small models, and its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_spmd import generate as program
from rlhf_spmd.models.weights import write_random_model
from rlhf_spmd.parallel.world import World

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.2,
    "eos_token_id": 2,
    "hidden_act": "silu",
}

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

ROWS: list[dict[str, Any]] = [
    {"prompt": "abc abd", "id": "first", "max_response_length": 5},
    {"prompt_ids": [5, 6, 7, 8]},
    {"prompt": [{"role": "user", "content": "abd"}], "id": 17},
    {"prompt_ids": list(range(3, 63))},
]


def write_tokenizer(path: Path) -> None:
    """A word-level tokenizer over single characters, with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{chr(c): c - 29 for c in range(32, 127)}}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    write_random_model(path, CONFIG, seed=3)
    write_tokenizer(path)
    return path


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_output(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def arguments(model: Path, rows: Path, out: Path, *more: str) -> list[str]:
    return [f"model.path={model}", f"data.path={rows}", f"out={out}", *more]


def run_program_on_rank(world: World, argv: list[str]) -> None:
    program.generate(program.prepare(None, argv, world.launch), world)
