"""Bounds of the numbers in a configuration: one way to check them, one form of the message."""

from __future__ import annotations

import math


def check_bounds(
    config: object, where: str, *keys: str, least: float = -math.inf, above: float = -math.inf, most: float = math.inf
) -> None:
    """Raise ValueError for the first of these fields that is not a finite number within the bounds that are given.

    ``where``: dotted path of ``config`` ("" for the root), for the message. None (null) in a field is left alone.
    """
    words = {"at least": least, "above": above, "at most": most}
    limits = [f"{word} {bound}" for word, bound in words.items() if math.isfinite(bound)]
    for key in keys:
        value = getattr(config, key)
        if value is not None and not (math.isfinite(value) and least <= value <= most and above < value):
            allowed = " and ".join(limits) if limits and math.isfinite(value) else ", ".join(["a finite number", *limits])
            raise ValueError(f"{where}{'.' if where else ''}{key}={value}: must be {allowed}")
