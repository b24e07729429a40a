"""PPO whose rank 1 has no room for weights on their way, inside step 2. ``fault`` says which: "bucket": of a gather to the generation
layout, "parameter": of those that come back to training, "target": of those that are cut out of the gathered model, "message":
of a reallocation to the layout of a call, "small message": the same while rank 1 only sends, and goes on with the script."""

import os
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlhf_spmd.algorithms import ppo
from rlhf_spmd.algorithms.ppo import Config as PPOConfig
from rlhf_spmd.reshard import hybrid, start_transfer, transfer, transfer_steps
from rlhf_spmd.workers import weight_sync

PLACES: dict[str, tuple[Any, str]] = {
    "bucket": (transfer.Transfer, "_finish"),
    "parameter": (hybrid.HybridWeights, "_restore"),
    "target": (hybrid.HybridWeights, "allocate"),
    "message": (transfer.Transfer, "_start"),
    "small message": (transfer.Transfer, "_finish"),
}


@dataclass(frozen=True)
class Config(PPOConfig):
    fault: str = "bucket"


def step(models: Any, data: Any, config: Config, number: int) -> Any:
    if config.fault == "small message":  # so that not all of them start at once
        weight_sync.transfer_steps = partial(transfer_steps, message_bytes=1 << 12)
        weight_sync.start_transfer = partial(start_transfer, buffer_bytes=1 << 12)
    if number == 2 and os.environ["RANK"] == "1":
        where, name = PLACES[config.fault]
        setattr(where, name, failing(getattr(where, name), config.fault))
    return ppo.step(models, data, config, number)


def failing(function: Any, what: str) -> Any:
    calls = []

    def fail_on_second(*args: Any) -> Any:
        if what == "small message" and threading.current_thread() is threading.main_thread():
            return function(*args)  # a transition of the same step
        calls.append(len(calls))
        if len(calls) == 2:
            raise MemoryError(f"no room for the second {what}")
        return function(*args)

    return fail_on_second
