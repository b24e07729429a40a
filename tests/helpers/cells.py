"""A notebook's cells, as a notebook runs them: their source can be found."""

from __future__ import annotations

import linecache
from typing import Any


def run_cell(text: str, scope: dict[str, Any]) -> None:
    """``scope``: what the cells before have defined."""
    file = f"<cell {len(linecache.cache)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    scope.setdefault("__name__", "__main__")
    exec(compile(text, file, "exec", dont_inherit=True), scope)
