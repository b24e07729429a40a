"""The workers of the small task's roles (``tasks``) without a run around them, and rows to update them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import tasks
from rlhf_spmd.controller import Controller
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.parallel.world import World
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.train import prepare
from rlhf_spmd.training.build import build_models
from rlhf_spmd.workers.config import BatchLimits, WorkerContext


def build(world: World, *overrides: str, checkpointing: str = "none", config: str = "") -> tuple[Controller, Any]:
    """A controller of all of ``world`` and the roles that PPO has with these overrides. ``checkpointing``: what auto comes to here.
    ``config``: another file than that of ``tasks.task``."""
    ready = prepare(config or str(tasks.task() / "ppo.json"), tasks.settings(Path("unused"), 1, *overrides), world.size)
    controller = Controller(world.all)
    more = {"rewards": {"reward": RewardConfig()}, "tokenizer": ready.tokenizer, "checkpointing": checkpointing}
    settings = WorkerContext(controller, world, BatchLimits(), seed=0, **more)
    return controller, build_models(ready.roles, settings)


def batch_of(lengths: list[tuple[int, int]], group_size: int = 1) -> Batch:
    """Rows of these prompt and response tokens."""
    prompts, responses = ([torch.arange(n) % 30 + 3 for n in side] for side in zip(*lengths, strict=True))
    ids = torch.arange(len(lengths))
    fields = {"prompt_ids": ragged(prompts, torch.int64), "response_ids": ragged(responses, torch.int64)}
    return Batch(ids, ids // group_size, fields)
