"""What a job has finished so far, on disk: a job that was killed goes on from it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhf_spmd.telemetry.run_dir import writing


def other_job(out: str, what: str) -> ValueError:
    """What to raise where this job would be mixed with another one."""
    return ValueError(
        f"out={out}: {what} of a job with another model, other prompts or other settings; remove it, or give another out"
    )


class Journal:
    """Rows that have ended, on disk as soon as they have: a file for each rank that answers for some, of lines [set, row id, row].

    A line torn by a kill is none. Raises ValueError for the rows of another job, since their draws would be mixed with this one's;
    only the first rank looks (``checks``).
    """

    def __init__(self, directory: Path, job: str, out: str, checks: bool) -> None:
        self.directory, self.job = directory, job
        self._file: Any = None
        for path in sorted(directory.glob("*.jsonl")) if checks else ():
            with path.open(encoding="utf-8", errors="replace") as lines:
                first = lines.readline()
            if first.endswith("\n") and first.rstrip("\n") != json.dumps(job):
                raise other_job(out, f"{directory} holds rows")

    def read(self, places: Collection[tuple[int, int]]) -> dict[tuple[int, int], dict[str, Any]]:
        """What earlier starts of the same job have left of the rows at these places, (set, row id)."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for path in sorted(self.directory.glob("*.jsonl")):
            with path.open(encoding="utf-8", errors="replace") as lines:
                lines.readline()
                for line in lines:
                    if line.endswith("\n"):
                        number, row_id, row = json.loads(line)
                        if (number, row_id) in places:
                            found[number, row_id] = row
        return found

    def append(self, records: Sequence[tuple[tuple[int, int], Any]]) -> None:
        """Written and flushed: there after a kill of this process. Raises WriteError."""
        with writing(self.directory):
            if self._file is None:
                self.directory.mkdir(parents=True, exist_ok=True)
                path = self.directory / f"{time.time_ns()}-{os.getpid()}.jsonl"
                self._file = path.open("x", encoding="utf-8", errors="replace")
                self._file.write(json.dumps(self.job) + "\n")
            self._file.writelines(json.dumps([*place, row]) + "\n" for place, row in records)
            self._file.flush()

    def remove(self) -> None:
        """When the results are in place, and no rank writes any more."""
        for path in self.directory.glob("*.jsonl"):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # there was none
            self.directory.rmdir()
