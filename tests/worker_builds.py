"""A worker alone in this process, with a controller of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tasks
from rlhf_spmd.controller import Controller
from rlhf_spmd.parallel.world import World
from rlhf_spmd.rewards.config import RewardConfig
from rlhf_spmd.runtime.roles import build_models
from rlhf_spmd.train import prepare
from rlhf_spmd.workers.config import BatchLimits
from rlhf_spmd.workers.model_worker import Build


def build(world: World, *overrides: str) -> tuple[Controller, Any]:
    ready = prepare(str(tasks.task() / "ppo.json"), tasks.settings(Path("unused"), 1, *overrides), world.size)
    controller = Controller(world.all)
    settings = Build(controller, world, BatchLimits(), seed=0, rewards={"reward": RewardConfig()}, tokenizer=ready.tokenizer)
    return controller, build_models(ready.plans, settings)
