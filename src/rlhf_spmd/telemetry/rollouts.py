"""``rollouts.jsonl``: some samples of every step, for people to read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_spmd.telemetry.jsonl import JsonlLog
from rlhf_spmd.telemetry.run_dir import ROLLOUTS_FILE


class RolloutWriter:
    """Rank 0 only. Appends at most ``max_per_step`` samples a step; ``resume_step`` as for the metrics."""

    def __init__(self, run_dir: str | os.PathLike[str], max_per_step: int = 8, resume_step: int | None = None) -> None:
        if max_per_step < 0:
            raise ValueError(f"max_per_step={max_per_step} must be 0 or more")
        self.max_per_step = max_per_step
        self._log = JsonlLog(Path(run_dir) / ROLLOUTS_FILE, resume_step)

    def write(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """The first samples in the order given. Keys: ``row_id``, ``prompt``, ``response``, ``score``, and any others."""
        self._log.append({"step": step, **sample} for sample in samples[: self.max_per_step])

    def close(self) -> None:
        self._log.close()
