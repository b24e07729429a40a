"""PPO whose rank 1 has no memory left from some ``phase`` on, as a container's limit would have it: the start, generation, the update
or the save of step 3."""

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_spmd.algorithms import ppo
from rlhf_spmd.algorithms.ppo import Config as PPOConfig
from rlhf_spmd.checkpoint.save import Draft
from rlhf_spmd.generation.generator import Generator
from rlhf_spmd.workers.train_engine import TrainEngine

PHASES: dict[str, tuple[Any, str]] = {
    "start": (TrainEngine, "__init__"),
    "generation": (Generator, "generate"),
    "update": (TrainEngine, "optimizer_step"),
    "save": (Draft, "write"),
}


@dataclass(frozen=True)
class Config(PPOConfig):
    phase: str = "generation"


def step(models: Any, data: Any, config: Config, number: int) -> Any:
    if os.environ.get("RANK") == "1" and (number == 3 or config.phase == "start"):  # the first trace is before any model
        where, name = PHASES[config.phase]
        usual = getattr(where, name)
        if usual.__name__ != "without_memory":
            setattr(where, name, without(usual))
    return ppo.step(models, data, config, number)


def without(function: Any) -> Any:
    def without_memory(*args: Any, **kwargs: Any) -> Any:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
        torch.empty(1 << 28, dtype=torch.uint8)
        return function(*args, **kwargs)

    return without_memory
