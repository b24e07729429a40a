"""JSON that comes from outside: files of models, rows of data, manifests. All of it is parsed here."""

from __future__ import annotations

import json
from typing import Any

MOST_LEVELS = 100  # whoever walks through the value, here or in another package, may recurse


def parse_json(text: str | bytes, unique_keys: bool = False) -> Any:
    """Return the value of a JSON text. Raises ValueError, one line; json.JSONDecodeError where the text is no JSON.

    ``unique_keys``: an object with a key twice is an error; otherwise the last value counts.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique_keys else None)
    except RecursionError:
        raise ValueError(f"nested more than {MOST_LEVELS} levels deep") from None
    opening = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, opening)) > MOST_LEVELS and _is_deeper(value, MOST_LEVELS):  # type: ignore[arg-type]
        raise ValueError(f"nested more than {MOST_LEVELS} levels deep")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Return True if lists and objects are nested more than ``levels`` deep."""
    inside = [value]
    for _ in range(levels + 1):
        containers = [each.values() if isinstance(each, dict) else each for each in inside if isinstance(each, dict | list)]
        if not containers:
            return False
        inside = [child for children in containers for child in children]
    return True
