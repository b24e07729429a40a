"""Settings of the reward (``reward.*``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlhf_spmd.rewards.resolve import resolve_function


@dataclass(frozen=True)
class RewardConfig:
    """A row's reward is ``weight`` * (score of ``function``) + ``model_weight`` * (score of the reward model), where present.

    ``function``: a built-in's name or ``package.module:function``; None for none. ``model``: directory of
    a reward model (the same as ``models.reward.path``); None for none. ``timeout_s``: time limit of one call,
    seconds. ``default``: score of a row whose call failed. ``num_workers``: processes per rank. ``max_failure_rate``: share of
    a step's calls that may fail (time-outs included); above it the run ends with class ``reward``; 1.0 never ends it.
    """

    function: str | None = None
    model: str | None = None
    weight: float = 1.0
    model_weight: float = 1.0
    timeout_s: float = 10.0
    default: float = 0.0
    num_workers: int = 1
    max_failure_rate: float = 1.0

    def check(self, where: str = "reward") -> None:
        """Raises ValueError naming the key and the value; imports the function's module to see that it is there."""
        for key in ("weight", "model_weight", "default"):
            if not math.isfinite(getattr(self, key)):
                raise ValueError(f"{where}.{key} = {getattr(self, key)}: must be a finite number")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ValueError(f"{where}.timeout_s = {self.timeout_s}: must be a finite number of seconds > 0")
        if self.num_workers < 1:
            raise ValueError(f"{where}.num_workers = {self.num_workers}: must be >= 1 (processes per rank)")
        if not 0.0 <= self.max_failure_rate <= 1.0:
            raise ValueError(f"{where}.max_failure_rate = {self.max_failure_rate}: must lie in [0, 1]")
        if self.function is not None:
            resolve_function(self.function, f"{where}.function")
