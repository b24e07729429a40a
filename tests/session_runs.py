"""A training run in this process."""

from __future__ import annotations

from pathlib import Path

import torch

import tasks
from rlhf_spmd.parallel.world import Launch, World


def train(run_dir: Path, steps: int, *more: str, config: Path | None = None) -> None:
    """In this process, a single rank."""
    torch.set_num_threads(1)
    world = World(Launch(), torch.device("cpu"), torch.distributed.HashStore(), 60.0)
    tasks.train_here(world, str(config or tasks.task() / "ppo.json"), tasks.settings(run_dir, steps, *more))
