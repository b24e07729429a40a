"""Names of other projects and what stands for them here (``foreign.yaml``): hints at unknown keys, conversions of configurations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from yaml import safe_load

SLIPS = "slips"  # in the projects' place: what people write without thinking of one
SHARED = ("algorithm", "data", "reward")  # sections that are ours too


class ForeignSettings(dict[str, Any]):
    """Another project's settings by dotted key. ``given``: keys that are not its defaults. ``read``: keys that were looked up, so
    that a conversion can name the others."""

    def __init__(self, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__({**defaults, **given})
        self.given, self.read = dict(given), set[str]()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def left(
        self, ours: Callable[[str], str | None], made: Mapping[str, Any], why: Callable[[str, str | None], str]
    ) -> dict[str, str]:
        """Return, with a reason, each given key that is in ``made`` by no name of ours and was not read.

        ``ours``: what stands for a key. ``why``: the reason for a key and what stands for it.
        """
        names = {key: ours(key) for key in self.given}
        lost = {key: name for key, name in names.items() if (key not in self.read if name is None else name not in made)}
        return {key: why(key, name) for key, name in lost.items()}


def checkpoint_limit(key: str, limit: int | None, left: dict[str, str]) -> int | None:
    """Return how many checkpoints are kept, None for all, where ``key`` has this limit: numbers below 1 are none.

    The least is 2; adds to ``left`` why.
    """
    if limit == 1:
        left[key] = "the one before the newest is kept too, in case that is damaged"
    return None if limit is None or limit < 1 else max(2, limit)


@cache
def foreign_names() -> dict[str, dict[str, dict[str, Any]]]:
    """Return ``defaults``, ``keys``, ``said`` and ``not_needed`` of each project, as the file explains them. What is ``absent`` there
    is said to be nothing, and why."""
    tables: dict[str, Any] = safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for names in tables.values():
        absent = {name: f"nothing, {why}" for why, group in names.pop("absent", {}).items() for name in group.split()}
        names["said"] = {**absent, **names.get("said", {})}
    return {project: {"defaults": {}, "keys": {}, "not_needed": {}, **names} for project, names in tables.items()}


def foreign_hint(keys: Sequence[str], by_end: bool) -> str | None:
    """Return the first of these dotted keys that is another project's, with what stands for it here; None if none is.

    ``by_end``: a key also counts where only its last part is another project's name.
    """
    for key in keys:
        for project, names in foreign_names().items():
            for name in (key, key.rpartition(".")[2])[: 1 + by_end]:
                ours = names["said"].get(name) or names["keys"].get(name)
                if ours not in (None, name, key):
                    origin = "" if project == SLIPS else f"it is {project}'s; "
                    return f"'{key}'; {origin}here: {ours}"
    return next(filter(None, map(_of_section, keys)), None)


def _of_section(key: str) -> str | None:
    """Return the hint for a key in a section that only another project has; None for any other key."""
    for project, names in foreign_names().items():
        sections = {one.partition(".")[0] for one in (*names["keys"], *names["said"]) if "." in one and project != SLIPS}
        if key.partition(".")[0] in sections.difference(SHARED):
            why = next((why for pattern, why in names["not_needed"].items() if re.search(pattern, key)), None)
            return f"'{key}'; it is {project}'s; " + (
                f"not needed: {why}" if why else "docs/migrating.md says what stands for it"
            )
    return None
