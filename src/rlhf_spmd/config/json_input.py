"""JSON that comes from outside: files of models, rows of data, manifests. All of it is parsed here."""

from __future__ import annotations

import json
from typing import Any

MOST_LEVELS = 100  # whoever walks through the value, here or in another package, may recurse


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, one line; json.JSONDecodeError where the text is no JSON."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {MOST_LEVELS} levels deep") from None
    opening = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, opening)) > MOST_LEVELS and _is_deeper(value, MOST_LEVELS):  # type: ignore[arg-type]
        raise ValueError(f"nested more than {MOST_LEVELS} levels deep")
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
