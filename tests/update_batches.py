"""Rows to update a worker with."""

from __future__ import annotations

import torch

from rlhf_spmd.data.batch import Batch, ragged


def batch_of(lengths: list[tuple[int, int]], group_size: int = 1) -> Batch:
    """Rows of these prompt and response tokens."""
    prompts, responses = ([torch.arange(n) % 30 + 3 for n in side] for side in zip(*lengths, strict=True))
    ids = torch.arange(len(lengths))
    fields = {"prompt_ids": ragged(prompts, torch.int64), "response_ids": ragged(responses, torch.int64)}
    return Batch(ids, ids // group_size, fields)
