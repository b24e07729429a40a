"""Append-only files of one JSON object per line: a line torn by a kill is ignored, a resume cuts the steps after it off."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlhf_spmd.config.json_input import parse_json
from rlhf_spmd.telemetry.run_dir import atomic_write_bytes, fsync_directory, writing


class JsonlLog:
    """One file, one writer. Every object has an integer ``step``. All methods raise WriteError.

    ``resume_step`` N: lines of later steps are removed before the first append, so that a resumed run leaves each step once.
    None: a new run; a file that lies there is moved to ``<name>.before``.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None) -> None:
        self.path = Path(path)
        with writing(self.path):
            if self.path.exists():
                if resume_step is None:
                    os.replace(self.path, self.path.with_name(self.path.name + ".before"))
                else:
                    self._truncate_after(resume_step)
            self._file = open(self.path, "a", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by close)

    def append(self, objects: Iterable[Mapping[str, Any]]) -> None:
        """Write and flush: what was appended is there after a kill of this process."""
        lines = (json.dumps(json_value(value), allow_nan=False, ensure_ascii=False) + "\n" for value in objects)
        with writing(self.path):
            self._file.write("".join(lines))
            self._file.flush()

    def sync(self) -> None:
        """What was appended is there after a crash of this machine, too."""
        with writing(self.path):
            os.fsync(self._file.fileno())
            fsync_directory(self.path.parent)

    def close(self) -> None:
        with writing(self.path):
            self._file.close()

    def _truncate_after(self, step: int) -> None:
        """Keep the whole lines with ``step`` <= the given one, byte for byte; of a last one only its end may be lacking. The file is
        replaced atomically, or left as it is."""
        data = self.path.read_bytes()
        kept = b"".join(line for line in data.splitlines(keepends=True) if _step_of(line) <= step)
        kept += b"\n" * bool(kept and not kept.endswith(b"\n"))
        if kept != data:
            atomic_write_bytes(self.path, kept)


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of the file in order; missing file: empty. Lines that are no JSON object (torn by a kill) are left out."""
    try:
        data = Path(path).read_bytes()
    except OSError:
        return []
    return [value for line in data.splitlines() if (value := _parse(line)) is not None]


def json_value(value: Any) -> Any:
    """A value as strict JSON can hold it: nested dicts, lists, text, booleans, null, finite numbers (others become null).

    Arrays and tensors become lists and numbers, anything else its text.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return json_value(value.tolist())
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _step_of(line: bytes) -> float:
    step = (_parse(line) or {}).get("step")
    return step if isinstance(step, (int, float)) else math.inf
