"""Rows of preference data, read back as texts."""

from __future__ import annotations

from typing import Any

import torch

import tasks
from rlhf_spmd.data.files import Row
from rlhf_spmd.data.tokenizer import load_tokenizer


def rows_of(*values: dict[str, Any]) -> list[Row]:
    return [Row(value, f"x:{i}") for i, value in enumerate(values, 1)]


def texts_of(rows: list[torch.Tensor]) -> list[str]:
    return ["".join(tasks.VOCABULARY[i] for i in ids) for ids in rows]


def tokenizer() -> Any:
    return load_tokenizer(tasks.task() / "actor")
