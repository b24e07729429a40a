"""What the tests of agents share: a model that they train, and how its conversations are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from generate_runs import CONFIG, write_tokenizer
from rlhf_spmd.agents.dialect import Dialect
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.data.tokenizer import load_tokenizer
from rlhf_spmd.models.weights import write_random_model
from tool_models import END, write_tool_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that reads characters, and prompts."""
    directory = tmp_path_factory.mktemp("agents")
    write_random_model(directory / "model", {**CONFIG, "max_position_embeddings": 512, "initializer_range": 0.1}, seed=3)
    write_tokenizer(directory / "model")
    prompts = [{"prompt": f"{i} what{'x' * (i % 5)}"} for i in range(20)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    return directory


@pytest.fixture(scope="module")
def dialect(tmp_path_factory: pytest.TempPathFactory) -> Dialect:
    path = tmp_path_factory.mktemp("server") / "model"
    write_tool_model(path)
    return Dialect(load_tokenizer(str(path)), EncodingConfig(), (END,))
