"""Games and tasks of GEM (gem-llm). ``data.path=gem:game:GuessTheNumber-v0-easy?size=500&seed=1``."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np

from rlhf_spmd.environments.config import ChatMessage
from rlhf_spmd.environments.libraries import LIBRARIES, Source, import_library, source_of

LOCK = Lock()  # GEM draws from Python's and numpy's common generators


def rows(source: Source) -> Iterator[dict[str, Any]]:
    """Yield first observations, ``size`` of them (500); row ``i`` is that of ``seed`` (0) + i. Other arguments are GEM's."""
    first = int(source.args.get("seed", 0))
    with _own_draws():
        environment = _make(source)
    for seed in range(first, first + int(source.args.get("size", 500))):
        with _own_draws():
            observation, info = environment.reset(seed=seed)
        yield {"prompt": _text(observation, info), "answer": None, "seed": seed}


class Gem:
    """The environment. The model reads observations as messages of the user, or as text if there is no chat template."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.has_template = chat_template is not None

    @staticmethod
    def load() -> Any:
        """Import the library. Raises ValueError if it is absent."""
        root, silent = logging.getLogger(), logging.NullHandler()
        root.addHandler(silent)  # or the library would set up the logs of the whole process
        try:
            return import_library("gem", LIBRARIES["gem"])
        finally:
            root.removeHandler(silent)

    def reset(self, row: Mapping[str, Any]) -> None:
        with _own_draws() as self.draws:
            self.environment = _make(source_of(row))
            self.environment.reset(seed=row["seed"])

    def step(self, text: str) -> tuple[str | list[ChatMessage], float, bool]:
        with _own_draws(self.draws) as self.draws:
            observation, reward, terminated, truncated, info = self.environment.step(text)
        done = bool(terminated or truncated)
        read = "" if done else _text(observation, info)
        return [{"role": "user", "content": read}] if self.has_template and not done else read, float(reward), done


environment = Gem


def _make(source: Source) -> Any:
    args = {key: value for key, value in source.args.items() if key not in ("size", "seed")}
    return Gem.load().make(source.name, **args)


@contextmanager
def _own_draws(state: Sequence[Any] = ()) -> Iterator[list[Any]]:
    """Let one environment at a time draw from the common generators, which go on from ``state``. Yields their later state.

    So what a row draws depends neither on other rows nor on their order.
    """
    later: list[Any] = []
    with LOCK:
        common = random.getstate(), np.random.get_state()
        if state:
            random.setstate(state[0])
            np.random.set_state(state[1])
        try:
            yield later
        finally:
            later += [random.getstate(), np.random.get_state()]
            random.setstate(common[0])
            np.random.set_state(common[1])


def _text(observation: str, info: Mapping[str, Any]) -> str:
    """Return an observation with what GEM shows behind it."""
    parts = [observation.rstrip("\n"), info.get("suffix", "")]
    return "\n".join(filter(None, parts))
