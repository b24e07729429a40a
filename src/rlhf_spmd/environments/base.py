"""What an environment must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

Message = dict[str, Any]  # with ``role`` and ``content`` (text)


class Environment(Protocol):
    """One object per row: made, reset, then stepped once for each turn of the model, by one thread at a time.

    A class may have ``schemas(**args)``, a static method: OpenAI's schemas of its tools, which chat templates tell the model of;
    and ``gives_reward = False``: its rows need a score from elsewhere.
    """

    def reset(self, row: Mapping[str, Any]) -> str | None:
        """Begin. ``row``: the data's columns, as rewards see them. Returns a text that the model reads after its prompt, or None."""

    def step(self, text: str) -> tuple[str | list[Message], float, bool]:
        """``text``: the model's turn with its special tokens, but those that end a text. Returns (observation, reward, done).

        The model reads the observation (``?`` for a lone surrogate) and goes on, unless it is done. Messages are read as its chat
        template writes them between two of its turns. Rewards of a row's turns are added up.
        """
