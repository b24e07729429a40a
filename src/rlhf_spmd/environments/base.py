"""What an environment must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Environment(Protocol):
    """One object per row: made, reset, then stepped once for each turn of the model, by one thread at a time."""

    def reset(self, row: Mapping[str, Any]) -> str | None:
        """Begin. ``row``: the data's columns, as rewards see them. Returns a text that the model reads after its prompt, or None."""

    def step(self, text: str) -> tuple[str, float, bool]:
        """``text``: the model's turn, without special tokens. Returns (observation, reward, done).

        The model reads the observation (``?`` for a lone surrogate) and goes on, unless it is done. Rewards of a row's turns are
        added up.
        """
