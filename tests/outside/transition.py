"""PPO whose rank 1 has no room for weights on their way, inside step 2: those of the actor's transition to the generation layout, or
those of a reallocation to the layout of a call."""

import os
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.algorithms import ppo
from rlhf_spmd.algorithms.ppo import PPOConfig
from rlhf_spmd.reshard import execute, move


@dataclass(frozen=True)
class Config(PPOConfig):
    fault: str = "transition"


def step(models: Any, prompts: Any, config: Config, sampling: Any, number: int) -> Any:
    if number == 2 and os.environ["RANK"] == "1":
        if config.fault == "transition":
            execute.land_bucket = failing(execute.land_bucket, "bucket")
        else:
            move.Move._start_some = failing(move.Move._start_some, "message")
    return ppo.step(models, prompts, config, sampling, number)


def failing(function: Any, what: str) -> Any:
    calls = []

    def fail_on_second(*args: Any) -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise MemoryError(f"no room for the second {what}")
        function(*args)

    return fail_on_second
