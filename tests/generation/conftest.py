"""The model that most tests of generation use."""

from __future__ import annotations

import pytest

from generators import MODELS
from rlhf_spmd.models.weights import write_random_model


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "qwen3"
    write_random_model(path, MODELS["qwen3"], seed=7)
    return str(path)
