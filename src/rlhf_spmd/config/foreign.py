"""Names of other projects and what stands for them here (``foreign.yaml``): hints at unknown keys, conversions of configurations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from yaml import safe_load

SLIPS = "slips"  # in the projects' place: what people write without thinking of one
SHARED = ("algorithm", "data", "reward")  # sections that are ours too


class ForeignSettings(dict[str, Any]):
    """Another project's settings by dotted key.

    ``written``: the settings that are not its defaults. ``read``: keys that were looked up, so that a conversion can name the others.
    """

    def __init__(self, written: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        super().__init__({**defaults, **written})
        self.written = dict(written)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


@dataclass
class Conversion:
    """A conversion under way.

    - source: the other project's settings
    - settings: ours, by dotted key
    - left_out: by key of the source that is not carried over as it is, the reason
    - dropped: by key of ours that is not set after all, the reason
    """

    source: ForeignSettings
    settings: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)

    def set_missing(self, settings: Mapping[str, Any]) -> None:
        """Set those of ``settings`` that are not set yet."""
        self.settings = {**settings, **self.settings}

    def drop(self, key: str, why: str) -> None:
        """Leave out a setting of ours, and say why."""
        if key in self.settings:
            del self.settings[key]
            self.dropped[key] = why

    def drop_with_prefix(self, prefix: str, why: str) -> None:
        """Leave out the settings of ours whose keys begin so, and say why."""
        for key in [key for key in self.settings if key.startswith(prefix)]:
            self.drop(key, why)

    def keep_checkpoints(self, key: str) -> None:
        """Set how many checkpoints are kept, by their ``key``: at least 2, null for all. Numbers below 1 are no limit."""
        limit = self.source[key]
        if limit == 1:
            self.left_out[key] = "the one before the newest is kept too, in case that is damaged"
        self.settings["run.keep_checkpoints"] = None if limit is None or limit < 1 else max(2, limit)

    def result(
        self, our_name: Callable[[str], str | None], reason: Callable[[str, str | None], str]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the settings, and a reason for each key that was written, is set by no name of ours, and was not read.

        ``our_name``: returns what stands for a key, or None. ``reason``: returns it for a key and what stands for that.
        """
        reasons = {}
        for key in self.source.written:
            name = our_name(key)
            if key not in self.source.read if name is None else name not in self.settings:
                reasons[key] = self.dropped.get(name or "") or reason(key, name)
        return self.settings, {**reasons, **self.left_out}


@cache
def foreign_names() -> dict[str, dict[str, dict[str, Any]]]:
    """Return ``defaults``, ``keys``, ``hints`` and ``not_needed`` of each project, as the file explains them. What is ``absent`` there
    is said to be nothing, and why."""
    tables: dict[str, Any] = safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    for names in tables.values():
        absent = {name: f"nothing, {why}" for why, group in names.pop("absent", {}).items() for name in group.split()}
        names["hints"] = {**absent, **names.get("hints", {})}
    return {project: {"defaults": {}, "keys": {}, "not_needed": {}, **names} for project, names in tables.items()}


def foreign_hint(keys: Sequence[str], by_end: bool) -> str | None:
    """Return the first of these dotted keys that is another project's, with what stands for it here; None if none is.

    ``by_end``: a key also counts where only its last part is another project's name.
    """
    for key in keys:
        for project, names in foreign_names().items():
            for name in (key, key.rpartition(".")[2])[: 1 + by_end]:
                ours = names["hints"].get(name) or names["keys"].get(name)
                if ours not in (None, name, key):
                    origin = "" if project == SLIPS else f"it is {project}'s; "
                    return f"'{key}'; {origin}here: {ours}"
    return next(filter(None, map(_of_section, keys)), None)


def not_needed(names: Mapping[str, Any], key: str) -> str | None:
    """Return why there is nothing to set for a project's ``key``, None if its tables do not say."""
    return next((why for pattern, why in names["not_needed"].items() if re.search(pattern, key)), None)


def _of_section(key: str) -> str | None:
    """Return the hint for a key in a section that only another project has; None for any other key."""
    for project, names in foreign_names().items():
        dotted = [name for name in (*names["keys"], *names["hints"]) if "." in name and project != SLIPS]
        sections = {name.partition(".")[0] for name in dotted}
        if key.partition(".")[0] in sections.difference(SHARED):
            why = not_needed(names, key)
            hint = f"not needed: {why}" if why else "docs/migrating.md says what stands for it"
            return f"'{key}'; it is {project}'s; {hint}"
    return None
