"""JSON that comes from outside: files of models, rows of data, manifests. All of it is parsed here."""

from __future__ import annotations

import json
from typing import Any

MAX_LEVELS = 100  # so that code which walks through the value may recurse


def parse_json(text: str | bytes, unique_keys: bool = False) -> Any:
    """Return the value of a JSON text. Raises ValueError, one line; json.JSONDecodeError if the text is no JSON.

    ``unique_keys``: refuse an object that has a key twice; otherwise its last value counts.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique_dict if unique_keys else None)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_LEVELS} levels deep") from None
    opening = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, opening)) > MAX_LEVELS and _is_deeper(value, MAX_LEVELS):  # type: ignore[arg-type]
        raise ValueError(f"nested more than {MAX_LEVELS} levels deep")
    return value


def _unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict. Raises ValueError if a key occurs twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"an object has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Return True if lists and objects are nested more than ``levels`` deep."""
    level = [value]
    for _ in range(levels + 1):
        containers = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        if not containers:
            return False
        level = [child for children in containers for child in children]
    return True
