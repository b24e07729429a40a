"""Settings of the rewards (``reward.*``, ``rewards.<name>.*``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.config import registry
from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.rewards.binding import BoundReward, bind_reward

FLOAT32_MAX = 3.4028234e38


@dataclass(frozen=True)
class RewardConfig:
    """A row's reward is ``weight`` * (score of ``function``) + ``model_weight`` * (score of the reward model), where present.

    ``function``: a built-in's name or ``package.module:function``; None for none. ``model``: directory of
    a reward model (the same as ``models.<role>.path``); None for none. ``data_sources``: rows of other ones are not scored: their
    score is 0 and they do not count in the statistics; None: all rows are. ``timeout_s``: time limit of one call,
    seconds. ``default``: score of a row whose call failed. ``num_workers``: processes per rank. ``max_failure_rate``: share of
    a step's calls that may fail (time-outs included); above it the run ends with class ``reward``; 1.0 never ends it after the
    first step.
    """

    function: str | None = None
    model: str | None = None
    data_sources: list[str] | None = None
    weight: float = 1.0
    model_weight: float = 1.0
    timeout_s: float = 10.0
    default: float = 0.0
    num_workers: int = 1
    max_failure_rate: float = 1.0

    def check(self, where: str = "reward") -> None:
        """Raises ValueError naming the key and the value; imports the function's module to see that it is there."""
        check_bounds(self, where, "weight", "model_weight", "default", least=-FLOAT32_MAX, most=FLOAT32_MAX)
        check_bounds(self, where, "timeout_s", above=0)
        check_bounds(self, where, "num_workers", least=1)
        check_bounds(self, where, "max_failure_rate", least=0, most=1)
        if self.data_sources is not None and not self.data_sources:
            raise ValueError(f"{where}.data_sources=[] scores no row; name a data source, or leave it out for all")
        if self.function is not None:
            self.bind(where)

    def bind(self, where: str) -> BoundReward:
        """The function, its arguments bound by name. Raises ValueError, one line, where it cannot be found or bound."""
        assert self.function is not None, "there is a function to bind"
        return bind_reward(resolve_reward(self.function, f"{where}.function"), f"{where}.function={self.function!r}")

    def chooses(self, row: Mapping[str, Any]) -> bool:
        """Whether this reward scores a row with these columns."""
        return self.data_sources is None or row.get("data_source") in self.data_sources

    def check_rows(self, where: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError for a data source that no row is of, and for an argument of the function that no row has."""
        for source in self.data_sources or ():
            if not any(row.get("data_source") == source for row in rows):
                there = sorted({str(row.get("data_source")) for row in rows})
                raise ValueError(
                    f"{where}.data_sources: no row has the data_source {source!r}; there are {', '.join(there[:20])}"
                )
        if self.function is not None:
            self.bind(where).check_rows(row for row in rows if self.chooses(row))


def reward_key(name: str) -> str:
    """The configuration key of a named reward, for messages."""
    return "reward" if name == "reward" else f"rewards.{name}"


def named_rewards(reward: RewardConfig, rewards: Mapping[str, RewardConfig]) -> dict[str, RewardConfig]:
    """``rewards``, with ``reward`` as the one of that name if it was given. Raises ValueError if both say what it is."""
    given = {} if reward == RewardConfig() else {"reward": reward}
    if given and "reward" in rewards:
        raise ValueError("reward and rewards.reward are the same reward; give one of them")
    return given | dict(rewards)


def resolve_reward(name: str, where: str = "reward.function") -> Callable[..., Any]:
    """The function called ``name``; see :func:`registry.resolve`. A module's ``compute_score`` (verl's name) stands in for
    ``score``."""
    exports = "score"
    if "." in name and ":" not in name:
        module = registry.find(where, "rlhf_spmd.rewards", name, "__name__")
        exports = next((found for found in ("score", "compute_score") if hasattr(module, found)), "score")
    return registry.resolve(where, "rlhf_spmd.rewards", name, exports)
