"""Files that ``generate``, ``evaluate`` and ``score`` write: results, and finished rows from which a killed job goes on."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_spmd.telemetry.run_dir import atomic_write_text, writing


def check_out(out: Path, *sources: str) -> None:
    """Make the directory of ``out`` and check that a file can be written there, before hours of work. Raises ValueError."""
    try:
        if out.exists() and not out.is_file():
            raise ValueError(f"out={out} is {'a directory' if out.is_dir() else 'not a regular file'}; name a file")
        for source in sources:
            if out.exists() and os.path.exists(source) and out.samefile(source):
                raise ValueError(f"out={out} is the input, data.path={source}; name another file")
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out.parent):
            pass
    except OSError as error:
        raise ValueError(f"out={out}: cannot write in {out.parent}: {error.strerror or error}") from error


def write_rows(out: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as lines of JSON, all or none."""
    atomic_write_text(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def other_job(out: str, finding: str) -> ValueError:
    """Return the error for ``out`` that has results of another job. ``finding``: says where they are."""
    return ValueError(
        f"out={out}: {finding} of a job with another model, other prompts or other settings; remove it, or give another out"
    )


class Journal:
    """The finished rows of a job on disk, from which a killed job goes on.

    The first rank of each replica writes a file of lines [set, row id, row]. An incomplete last line does not count. With
    ``checks``, which only rank 0 sets, raises ValueError for rows of another job.
    """

    def __init__(self, directory: Path, job: str, out: str, checks: bool) -> None:
        self.directory = directory
        self.job = job
        self._file: Any = None
        for path in sorted(directory.glob("*.jsonl")) if checks else ():
            with path.open(encoding="utf-8", errors="replace") as lines:
                first = lines.readline()
            if first.endswith("\n") and first.rstrip("\n") != json.dumps(job):
                raise other_job(out, f"{directory} holds rows")

    def read(self, places: Collection[tuple[int, int]]) -> dict[tuple[int, int], dict[str, Any]]:
        """Return rows that earlier starts of the job have finished, among ``places``: (set, row id)."""
        rows: dict[tuple[int, int], dict[str, Any]] = {}
        for path in sorted(self.directory.glob("*.jsonl")):
            with path.open(encoding="utf-8", errors="replace") as lines:
                lines.readline()
                for line in lines:
                    if line.endswith("\n"):
                        number, row_id, row = json.loads(line)
                        if (number, row_id) in places:
                            rows[number, row_id] = row
        return rows

    def append(self, records: Sequence[tuple[tuple[int, int], Any]]) -> None:
        """Write and flush ``records``, so that they survive a kill of this process. Raises WriteError."""
        with writing(self.directory):
            if self._file is None:
                self.directory.mkdir(parents=True, exist_ok=True)
                path = self.directory / f"{time.time_ns()}-{os.getpid()}.jsonl"
                self._file = path.open("x", encoding="utf-8", errors="replace")
                self._file.write(json.dumps(self.job) + "\n")
            self._file.writelines(json.dumps([*place, row]) + "\n" for place, row in records)
            self._file.flush()

    def remove(self) -> None:
        """Delete the files, once the results are in place and no rank writes any more."""
        for path in self.directory.glob("*.jsonl"):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # there was no directory
            self.directory.rmdir()
