"""PPO whose actor has no room for a bucket of weights on rank 1, inside step 2's transition to the generation layout."""

import os
from typing import Any

from rlhf_spmd.algorithms import ppo
from rlhf_spmd.algorithms.ppo import PPOConfig
from rlhf_spmd.reshard import execute

Config = PPOConfig


def step(models: Any, prompts: Any, config: Config, sampling: Any, number: int) -> Any:
    if number == 2 and os.environ["RANK"] == "1":
        land, landed = execute.land_bucket, []

        def fail_on_third(*args: Any) -> None:
            landed.append(len(landed))
            if len(landed) == 3:
                raise MemoryError("no room for the third bucket")
            land(*args)

        execute.land_bucket = fail_on_third
    return ppo.step(models, prompts, config, sampling, number)
