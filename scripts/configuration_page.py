"""Prints every key of every program as a page of Markdown: its default, and what the docstring of its dataclass says.

    python scripts/configuration_page.py > docs/configuration.md

The page is not part of the repository: the dataclasses are, and ``rlhf-spmd PROGRAM --help`` says the same. Its links are those of a
page in ``docs/``.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from functools import cache
from itertools import groupby

from rlhf_spmd.config.keys import Key
from rlhf_spmd.config.registry import available

USUAL = "ppo"  # the algorithm of the tables of `train`
PROGRAMS = ("plan", "generate", "evaluate", "score", "serve")  # beside `train`, which has the algorithms
HEAD = """# Configuration

Every key of every program. `rlhf-spmd PROGRAM --help` prints the same, `--help WORD` the keys that contain WORD. [The
quickstart](quickstart.md#settings) explains how values are written.

## train

With `algorithm.name=ppo`. What other algorithms have follows below.
"""


@cache
def keys_of(name: str) -> tuple[Key, ...]:
    """The keys of a program, or of ``train`` with an algorithm."""
    program = importlib.import_module(f"rlhf_spmd.{name if name in PROGRAMS else 'train'}")
    return tuple(program.keys(() if name in PROGRAMS else [f"algorithm.name={name}"]))


def algorithms() -> list[str]:
    return available("rlhf_spmd.algorithms", required_attribute="step")


def page() -> str:
    """Raises ValueError for a key about which its dataclass says nothing."""
    parts = [HEAD]
    for section, keys in groupby(keys_of(USUAL), key=lambda key: key.name.partition(".")[0]):
        parts.append(f"### {section}\n\n{table(keys)}")
    for name in algorithms():
        if name != USUAL:
            parts.append(f"## algorithm.name={name}\n\n{difference(name)}")
    for name in PROGRAMS:
        own = [key for key in keys_of(name) if name != "plan" or key not in keys_of(USUAL)]
        above = "All keys of `train`, and:\n\n" * (name == "plan")
        parts.append(f"## {name}\n\n{above}{table(own)}")
    return "\n".join(parts)


def difference(name: str) -> str:
    """What ``train`` with another algorithm has otherwise than with the usual one."""
    usual, own = keys_of(USUAL), keys_of(name)
    names = {key.name for key in own}
    missing = sorted({_section(key.name, names) for key in usual if key.name not in names})
    told = f"Without {', '.join(f'`{one}`' for one in missing)}.\n\n" if missing else ""
    return told + table(key for key in own if key not in usual)


def _section(missing: str, names: set[str]) -> str:
    """The key, or the longest part of it below which there is nothing."""
    parts = missing.split(".")
    for end in range(1, len(parts)):
        above = ".".join(parts[:end])
        if not any(name == above or name.startswith(f"{above}.") for name in names):
            return above
    return missing


def table(keys: Iterable[Key]) -> str:
    """The keys, and below them what their sections refuse."""
    keys = list(keys)
    lines = ["| key | default | |", "|---|---|---|", *map(row, keys), ""]
    refused = [_row(f"`{refusal.keys}`", refusal.why) for key in keys for refusal in key.refusals]
    return "\n".join([*lines, *(["| settings | refused, because |", "|---|---|", *refused, ""] if refused else [])])


def row(key: Key) -> str:
    if not key.text:
        raise ValueError(f"{key.name}: the docstring of its dataclass has no line '- {key.name.rpartition('.')[2]}: ...'")
    default = "required" if key.default is None else f"`{plain(key.default)}`" if plain(key.default) else "(empty)"
    return _row(f"`{key.name}`", default, key.text)


def _row(*cells: str) -> str:
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def plain(default: str) -> str:
    """Text without its quotation marks, where that can be told from other values."""
    return default[1:-1] if re.fullmatch(r'"[\w./${}-]*"', default) else default


if __name__ == "__main__":
    sys.stdout.write(page())
