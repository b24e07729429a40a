"""Rank 0's side of a session: the ranks' reports as metrics, and where metrics and samples are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_spmd.controller import CallStats, ordered_values
from rlhf_spmd.data.batch import Batch, Ragged
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.logger import TrackerProcesses
from rlhf_spmd.telemetry.progress import Progress
from rlhf_spmd.telemetry.run_dir import METRICS_FILE, ROLLOUTS_FILE, STARTS_FILE, VALIDATION_FILE, JsonlLog
from rlhf_spmd.training.streams import merge_values


class MadeStep(NamedTuple):
    """A step that this rank has made, and others perhaps not yet. ``rows``: what the data gave it. ``calls``: all that it made;
    ``num_reported``: how many report values. ``told``: metrics of its data; ``preempted``: waits for all ranks."""

    number: int
    rows: Sequence[Batch]
    calls: Sequence[CallStats]
    num_reported: int
    told: dict[str, float]
    preempted: Callable[[], bool]


def merge_reports(
    step: MadeStep, reports: Sequence[Any], utilisation: Callable[[Sequence[CallStats], int, float, float], dict[str, float]]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """A step's metrics and samples. ``reports``: of each rank the values of its calls, and metrics of which the largest count.

    ``utilisation(calls, rows, tokens, seconds)``: metrics of the share of the devices' arithmetic that the step used.
    """
    values, parts = zip(*reports, strict=True)
    metrics, samples = merge_values(ordered_values(values, step.num_reported))
    for name, value in (pair for part in parts for pair in part.items()):
        metrics[name] = max(metrics.get(name, 0.0), value)
    if metrics.get("generation/seconds_max"):
        metrics["generation/idle_fraction"] = 1 - metrics["generation/seconds"] / metrics["generation/seconds_max"]
    num_rows, generates = sum(map(len, step.rows)), any(call.kind == "generate" for call in step.calls)
    if num_rows and ("response_length/mean" in metrics or not generates):  # which a reward reports; its call may be left out
        responses = metrics.get("response_length/mean", 0.0) + metrics.get("rollout/environment_tokens_mean", 0.0)
        num_tokens = sum(map(token_count, step.rows)) + responses * num_rows
        metrics["perf/tokens_per_s"] = num_tokens / metrics["timing_s/step"]
        metrics |= utilisation(step.calls, num_rows, num_tokens, metrics["timing_s/step"])
    return {**step.told, **metrics}, samples


class Recorder:
    """Rank 0's side of a session: metrics, samples, progress."""

    def __init__(self, run_dir: Path, config: Any, started_at: int, facts: Mapping[str, str]) -> None:
        """``config``: with ``run`` and ``logger``; it lies in the run directory already. ``facts``: of this start, for the report."""
        self.run_dir, resume = run_dir, started_at or None
        starts = JsonlLog(run_dir / STARTS_FILE, resume)
        starts.append([{"step": started_at, **facts}])
        starts.close()
        files = (ROLLOUTS_FILE, VALIDATION_FILE, METRICS_FILE)
        self._logs = [JsonlLog(run_dir / file, resume) for file in files]
        self.rollouts, self.validations, self.metrics = self._logs
        steps = config.run.steps
        self.followers = TrackerProcesses(run_dir, config.logger, config.run.name, steps, resume)
        self.num_samples = config.run.log_samples
        self.progress = Progress(steps, start_step=started_at)

    def log(
        self, number: int, metrics: dict[str, float], samples: list[dict[str, Any]], validated: list[dict[str, Any]]
    ) -> None:
        """A step's metrics come last in the files: followers then find all of it. Raises LockLost, WriteError."""
        run_lock.check_still_held(self.run_dir)
        shown = sorted(samples, key=lambda sample: int(sample["row_id"]))[: self.num_samples]
        self.rollouts.append({"step": number, **sample} for sample in shown)
        self.validations.append({"step": number, **sample} for sample in validated)
        self.metrics.append([{"step": number, "unix_s": round(time.time(), 3), **metrics}])
        self.progress.update(number, metrics)

    def sync(self) -> None:
        """Before a checkpoint: the steps that it holds are in the files whatever happens to this machine. Raises WriteError."""
        for log in self._logs:
            log.sync()

    def close(self) -> None:
        self.progress.close()
        for log in self._logs:
            log.close()
        self.followers.close()


def token_count(batch: Batch) -> int:
    """Of all token fields that the data gave."""
    return sum(int(x.lengths.sum()) for name, x in batch.fields.items() if isinstance(x, Ragged) and name.endswith("_ids"))
