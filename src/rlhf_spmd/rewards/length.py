"""Length of the response, in tokens."""

from __future__ import annotations

from collections.abc import Sequence


def check(where: str, max_length: int, min_length: int = 0, buffer: int = 0) -> None:
    """Raises ValueError for lengths that do not fit together."""
    for key, value in (("max_length", max_length), ("min_length", min_length), ("buffer", buffer)):
        if not isinstance(value, int) or not 0 <= value <= max_length:
            raise ValueError(f"{where}.{key}={value!r} must be a whole number from 0 to max_length={max_length}")


def score(completion_ids: Sequence[Sequence[int]], max_length: int, min_length: int = 0) -> list[float]:
    """Returns 1.0 for a response of ``min_length`` to ``max_length`` tokens, else 0.0."""
    return [float(min_length <= len(ids) <= max_length) for ids in completion_ids]


def overlong(completion_ids: Sequence[Sequence[int]], max_length: int, buffer: int) -> list[float]:
    """Soft over-long punishment (DAPO, arXiv 2503.14476, equation 13).

    Returns 0 up to ``max_length - buffer`` tokens, falls linearly to -1 at ``max_length``, and stays -1 beyond.
    """
    start = max_length - buffer
    return [-min(max(len(ids) - start, 0) / buffer, 1.0) if buffer else -float(len(ids) > max_length) for ids in completion_ids]
