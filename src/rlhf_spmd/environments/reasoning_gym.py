"""Questions of reasoning-gym, which its own functions score. ``data.path=reasoning_gym:chain_sum?size=500&seed=1``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from rlhf_spmd.environments.libraries import LIBRARIES, Source, import_library, read_source, source_of

# what some scores raise for a text that is no answer; others are failures of the library
NOT_ANSWERS = (ArithmeticError, AssertionError, LookupError, SyntaxError, TypeError, ValueError)
SEED = 0  # the library's own default is another one in every process


def rows(source: Source) -> Iterator[dict[str, Any]]:
    """Yield the questions of a data set of the library. The source's arguments are its settings, with ``size`` and ``seed``."""
    for entry in _dataset(str(source)):
        yield {"prompt": entry["question"], "answer": entry["answer"]}


class ReasoningGym:
    """The environment: one turn, scored by the library.

    The answer is what stands in the last ``<answer>...</answer>``; without these tags it is the whole turn.
    """

    @staticmethod
    def load() -> Any:
        """Import the library. Raises ValueError if it is absent."""
        return import_library("reasoning_gym", LIBRARIES["reasoning_gym"])

    def reset(self, row: Mapping[str, Any]) -> None:
        """Make the row's question again. Raises ValueError if it differs: a few data sets depend on PYTHONHASHSEED."""
        path = str(source_of(row))
        self.dataset, self.entry = _dataset(path), _entry(path, row["index"])
        if self.entry["answer"] != row["answer"]:
            raise ValueError(f"{path} makes other questions in every process; set PYTHONHASHSEED=0 for all ranks")

    def step(self, text: str) -> tuple[str, float, bool]:
        answer = self.load().utils.extract_answer(text)
        try:
            reward = float(self.dataset.score_answer(text.strip() if answer is None else answer, self.entry))
        except NOT_ANSWERS:
            reward = 0.0
        return "", reward, True


environment = ReasoningGym


@lru_cache
def _dataset(path: str) -> Any:
    source = read_source(path)
    return ReasoningGym.load().create_dataset(source.name, **{"seed": SEED, **source.args})


@lru_cache(maxsize=4096)  # all samples of a prompt have the same entry
def _entry(path: str, index: int) -> dict[str, Any]:
    entry: dict[str, Any] = _dataset(path)[index]
    return entry
