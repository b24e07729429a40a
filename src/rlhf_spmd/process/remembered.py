"""The keys of programs as they were when they were last imported, for questions and slips that are to be answered without torch.

A program's keys stand in dataclasses beside its code, and importing these takes seconds. So the command notes them in
``~/.cache/rlhf_spmd/keys``, with a fingerprint of this package's files: after any change they count as unknown.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from rlhf_spmd.config.keys import Key
from rlhf_spmd.telemetry.run_dir import atomic_write_json, read_json

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class ProgramKeys:
    """``about``: the program's description; ``default``: the algorithm where none is named, "" where there are none; ``keys``: by
    algorithm."""

    about: str
    default: str
    keys: Mapping[str, Sequence[Key]]


def recall(program: str) -> ProgramKeys | None:
    """None where nothing is known of the program as it is now."""
    file = _file(program)
    found = read_json(file) if file else None
    if not isinstance(found, dict) or found.get("fingerprint") != fingerprint():
        return None
    keys = {algorithm: [Key(*row) for row in rows] for algorithm, rows in found["keys"].items()}
    return ProgramKeys(found["about"], found["default"], keys)


def remember(program: str, known: ProgramKeys) -> None:
    """Where nothing can be written, nothing is remembered."""
    keys: dict[str, Any] = {algorithm: list(map(astuple, its)) for algorithm, its in known.keys.items()}
    file = _file(program)
    if file is None:
        return
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(file, {"fingerprint": fingerprint(), "about": known.about, "default": known.default, "keys": keys})


def fingerprint() -> str:
    """A hash of Python's version and of the paths, sizes and times of the package's files."""
    files = sorted((*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.yaml")))
    facts = [(str(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]
    return hashlib.sha256(repr((sys.version, facts)).encode()).hexdigest()


def _file(program: str) -> Path | None:
    """None for a user who has no home, as some containers' have."""
    try:
        return Path("~/.cache/rlhf_spmd/keys").expanduser() / f"{program}.json"
    except RuntimeError:
        return None
