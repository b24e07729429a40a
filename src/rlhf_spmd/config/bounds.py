"""Bounds of the numbers in a configuration, and settings that do nothing: one way to check them, one form of the message."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, Field
from operator import attrgetter
from typing import Any

SECONDS = {"above": 0, "most": 100_000_000}  # three years: a multiple of it is still a time that clocks and threads take
SEEDS = {"least": -(2**63), "most": 2**63 - 1}  # random numbers are made of 64 bits of a seed: beyond, two seeds would be one


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


def idle_settings(section: Any, where: str) -> Iterator[tuple[str, Any, Any, str]]:
    """Settings of a dataclass that are not their defaults and do nothing beside the others: dotted key, value, default, and without
    what.

    ``needs`` of its class and of the bases says which: ``{"val_path": ("val_batch_size",), "type=adaptive": ("horizon",)}``. What they
    need is given, true, or has that value; of several with ``or`` between, one. ``where``: dotted path of ``section``.
    """
    for kind in type(section).__mro__:
        for needed, keys in vars(kind).get("needs", {}).items():
            pairs = [condition.partition("=") for condition in needed.split(" or ")]
            if any(getattr(section, name) == value if value else getattr(section, name) for name, _, value in pairs):
                continue
            for key in keys:
                first, _, inner = key.partition(".")
                field: Field[Any] = section.__dataclass_fields__[first]
                default = field.default if field.default_factory is MISSING else field.default_factory()
                value, default = attrgetter(key)(section), attrgetter(inner)(default) if inner else default
                if value != default:
                    yield f"{where}.{key}", value, default, f"{where}.{needed}"
