"""Writes the tables of docs/configuration.md from the dataclasses: their keys, defaults and what their docstrings say of each key.

    python scripts/configuration_page.py            # the page is changed in place
    python scripts/configuration_page.py --check    # status 1 if it would be

A table stands between ``<!-- keys NAME: PATTERNS -->`` and ``<!-- end -->``; all else on the page is written by hand. NAME is a
program, or an algorithm, for ``train`` with it. PATTERNS choose keys, those with ``!`` leave some out; ``beyond OTHER ...`` leaves out
what is the same there, default included.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from rlhf_spmd.config.keys import Key
from rlhf_spmd.config.registry import available

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
TABLE = re.compile(r"(<!-- keys ([\w ]+): (.*?)(?: beyond ([\w ]+))? -->\n).*?(<!-- end -->)", flags=re.DOTALL)
PROGRAMS = ("plan", "generate", "evaluate", "score")  # beside train, which has the algorithms


@cache
def keys_of(name: str) -> list[Key]:
    program = importlib.import_module(f"rlhf_spmd.{name if name in PROGRAMS else 'train'}")
    return list(program.keys(() if name in PROGRAMS else [f"algorithm.name={name}"]))


def names() -> list[str]:
    """All that a table can be of."""
    return [*available("rlhf_spmd.algorithms", exports="step"), *PROGRAMS]


def chosen(name: str, patterns: Sequence[str], others: Sequence[str]) -> list[Key]:
    left_out = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    elsewhere = {key for other in others for key in keys_of(other)}
    return [
        key
        for key in keys_of(name)
        if any(fnmatchcase(key.name, pattern) for pattern in patterns)
        and not any(fnmatchcase(key.name, pattern) for pattern in left_out)
        and key not in elsewhere
    ]


def table(name: str, patterns: Sequence[str], others: Sequence[str]) -> str:
    """Raises ValueError for a table without rows, and for a key that its dataclass says nothing about."""
    keys = chosen(name, patterns, others)
    if not keys:
        raise ValueError(f"keys {name}: {' '.join(patterns)}: there is no such key")
    return "\n".join(["\n| key | default | |", "|---|---|---|", *map(row, keys), "\n"])


def row(key: Key) -> str:
    if not key.text:
        raise ValueError(f"{key.name}: the docstring of its dataclass has no line '- {key.name.rpartition('.')[2]}: ...'")
    default = "required" if key.default is None else f"`{plain(key.default)}`" if plain(key.default) else "(empty)"
    told = " | ".join(text.replace("|", "\\|") for text in (f"`{key.name}`", default, key.text))
    return f"| {told} |"


def plain(default: str) -> str:
    """Text without its quotation marks, where that can be told from other values."""
    return default[1:-1] if re.fullmatch(r'"[\w./${}-]*"', default) else default


def written(page: str) -> str:
    def replaced(found: re.Match[str]) -> str:
        opening, name, patterns, others, closing = found.groups()
        return opening + table(name, patterns.split(), (others or "").split()) + closing

    return TABLE.sub(replaced, page)


def main(arguments: Sequence[str]) -> int:
    text = PAGE.read_text(encoding="utf-8")
    made = written(text)
    if "--check" in arguments:
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
