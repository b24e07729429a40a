"""A placement strategy with a slip."""

from __future__ import annotations

from typing import Any


def place(graph: Any, cluster: Any, roles: Any) -> Any:
    return cluster.all_ranks
