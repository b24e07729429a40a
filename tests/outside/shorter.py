"""PPO with a mistake: in step 2 one rank leaves out an update, so that it goes on to other collectives of the same ranks."""

import os
from dataclasses import replace
from typing import Any

from rlhf_spmd.algorithms import ppo
from rlhf_spmd.algorithms.ppo import Config

__all__ = ["Config", "step"]


def step(models: Any, data: Any, config: Config, number: int) -> Any:
    if number == 2 and os.environ["RANK"] == "1":
        config = replace(config, critic_warmup=2)
    return ppo.step(models, data, config, number)
