"""Settings of the reward (``reward.*``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.config import registry
from rlhf_spmd.config.bounds import check_bounds


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
        check_bounds(self, where, "weight", "model_weight", "default")
        check_bounds(self, where, "timeout_s", above=0)
        check_bounds(self, where, "num_workers", least=1)
        check_bounds(self, where, "max_failure_rate", least=0, most=1)
        if self.function is not None:
            function = resolve_reward(self.function, f"{where}.function")
            try:
                inspect.signature(function).bind("prompt", "response", {})
            except TypeError as error:
                raise ValueError(f"{where}.function={self.function!r} must take (prompt, response, row): {error}") from error


def resolve_reward(name: str, where: str = "reward.function") -> Callable[[str, str, dict[str, Any]], Any]:
    """The function called ``name``; see :func:`registry.resolve`."""
    return registry.resolve(where, "rlhf_spmd.rewards", name, "score")
