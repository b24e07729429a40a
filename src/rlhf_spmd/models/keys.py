"""The values of a config.json, checked: each reader names the file, the key and the value in its messages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# sizes that multiply the tensors of a model, of which lists are made: several times the largest published
MOST = {"num_hidden_layers": 1000, "num_experts": 10_000, "num_local_experts": 10_000}


def reject_unless(config: Mapping[str, Any], source: str, key: str, *allowed: Any) -> None:
    """ValueError if ``key`` is set to something other than ``allowed`` (a missing key or null passes)."""
    value = config.get(key)
    if value is not None and value not in allowed:
        listed = ", ".join(repr(a) for a in allowed if a is not None) or "nothing (leave it out)"
        raise ValueError(f"{source}: '{key}' is {value!r}, which is not supported; allowed: {listed}")


def read_size(config: Mapping[str, Any], source: str, key: str, default: int | None = None) -> int:
    """A positive integer, within ``MOST`` if the key is there; ``default`` where the key is missing or null. Raises ValueError naming
    the key and the value."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{source}: '{key}' is {value!r}; it must be a positive integer")
    if value > MOST.get(key, value):
        raise ValueError(f"{source}: '{key}' is {value}; it must be at most {MOST[key]}")
    return value


def read_positive(value: Any, source: str, key: str) -> float:
    """``value`` of ``key`` as a float. Raises ValueError naming both unless it is a positive number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{source}: '{key}' is {value!r}; it must be a positive number")
    return float(value)
