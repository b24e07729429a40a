"""Batches for a model directory of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_spmd.models.weights import write_random_model

LENGTHS = [1, 40, 7, 66, 3]


def make_model(path: Path, config: dict[str, Any]) -> Path:
    """Random weights large enough that attention is not uniform, and biases that matter."""
    write_random_model(path, {**config, "initializer_range": 0.2}, 5)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors.values():
        if tensor.ndim == 1:
            tensor += torch.randn(tensor.shape, generator=generator) * 0.3
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_batch(vocab_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, vocab_size, (sum(LENGTHS),), generator=generator)
    return ids, torch.randint(0, vocab_size, (sum(LENGTHS),), generator=generator)
