"""Length of the response, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rlhf_spmd.config.constraints import NonNegativeInt
from rlhf_spmd.config.rules import Rule, Rules, check_rules


@dataclass(frozen=True)
class LengthSettings:
    """The settings of both rewards."""

    max_length: NonNegativeInt
    min_length: NonNegativeInt = 0
    buffer: NonNegativeInt = 0

    rules: ClassVar[Rules] = (
        Rule(
            ("min_length", "max_length"),
            lambda s: s.min_length > s.max_length,
            "no response could be as long",
            "lower the first or raise the second",
        ),
        Rule(
            ("buffer", "max_length"),
            lambda s: s.buffer > s.max_length,
            "the penalty would begin below length 0",
            "lower the first or raise the second",
        ),
    )


def check(where: str, **settings: int) -> None:
    """Raise ValueError for lengths that do not fit together."""
    check_rules(LengthSettings.rules, LengthSettings(**settings), where)


def score(completion_ids: Sequence[Sequence[int]], max_length: NonNegativeInt, min_length: NonNegativeInt = 0) -> list[float]:
    """Return 1.0 for a response of ``min_length`` to ``max_length`` tokens, else 0.0."""
    return [float(min_length <= len(ids) <= max_length) for ids in completion_ids]


def overlong(completion_ids: Sequence[Sequence[int]], max_length: NonNegativeInt, buffer: NonNegativeInt) -> list[float]:
    """Return the soft over-long punishment (DAPO, arXiv 2503.14476, equation 13).

    It is 0 up to ``max_length - buffer`` tokens, falls linearly to -1 at ``max_length``, and is -1 beyond.
    """
    start = max_length - buffer
    return [-min(max(len(ids) - start, 0) / buffer, 1.0) if buffer else -float(len(ids) > max_length) for ids in completion_ids]
