"""Rank 0's side of a run: the ranks' reports as metrics, and where metrics and samples are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlhf_spmd.controller import CallStats, ordered_values
from rlhf_spmd.data.batch import Batch, Ragged
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.progress import Progress
from rlhf_spmd.telemetry.run_dir import METRICS_FILE, ROLLOUTS_FILE, STARTS_FILE, VALIDATION_FILE, JsonlLog, read_jsonl
from rlhf_spmd.telemetry.signals import Signals
from rlhf_spmd.telemetry.trackers import TrackerProcesses
from rlhf_spmd.training.validation import mean_extras


class MadeStep(NamedTuple):
    """A step that this rank has made; other ranks may still be at it.

    ``rows``: the data's rows. ``calls``: all calls that it made; ``num_reported`` of them report values. ``told``: metrics of its data.
    ``preempted``: waits for all ranks.
    """

    global_step: int
    rows: Sequence[Batch]
    calls: Sequence[CallStats]
    num_reported: int
    told: dict[str, float]
    preempted: Callable[[], bool]


def merge_reports(
    step: MadeStep, reports: Sequence[Any], utilisation: Callable[[Sequence[CallStats], int, float, float], dict[str, float]]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return a step's metrics and samples. ``reports``: of each rank the values of its calls, and metrics of which the largest counts.

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


def merge_values(calls: list[list[Any]]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the collected values of a step's calls as metrics (keys with a slash) and samples.

    The values of a key, of all members of all calls that report it, are equal, or each has its own. Lists are of sums, which add up:
    [total], [total, count] for a mean, or [total, count, squares] for a standard deviation. Of other values, a name that ends in max
    takes the largest, one in min the smallest, and any other their mean.
    """
    reports = [member for members in calls for member in members if isinstance(member, dict)]
    metrics: dict[str, float] = {}
    values_by_key: dict[str, list[Any]] = {}
    for report in reports:
        for key, value in report.items():
            if "/" in key:
                values_by_key.setdefault(key, []).append(value)
    for key, values in values_by_key.items():
        if isinstance(values[0], list):
            metrics[key] = _of_sums(*map(sum, zip(*values, strict=True)))
        elif key.endswith(("max", "min")):  # numpy's let nan through wherever it stands
            metrics[key] = float((np.max if key.endswith("max") else np.min)(values))
        else:
            metrics[key] = values[0] if len(set(values)) == 1 else sum(values) / len(values)
    metrics |= mean_extras(reports)
    samples = [sample for report in reports for sample in report.get("samples", [])]
    return {key: float(value) for key, value in metrics.items()}, samples


def _of_sums(total: float, count: float | None = None, squares: float | None = None) -> float:
    if count is None:
        return total
    mean = total / count if count else 0.0
    return mean if squares is None else max(squares / count - mean**2, 0.0) ** 0.5 if count else 0.0


class Recorder:
    """Writes metrics and samples, and shows progress. Rank 0 only."""

    def __init__(self, run_dir: Path, config: Any, started_at: int, facts: Mapping[str, str]) -> None:
        """``config``: has ``run`` and ``logger``; it is in the run directory already. ``facts``: about this start, for the report."""
        self.run_dir, resume = run_dir, started_at or None
        starts = JsonlLog(run_dir / STARTS_FILE, resume)
        starts.append([{"step": started_at, **facts}])
        starts.close()
        files = (ROLLOUTS_FILE, VALIDATION_FILE, METRICS_FILE)
        self._logs = [JsonlLog(run_dir / file, resume) for file in files]
        self.rollouts, self.validations, self.metrics = self._logs
        steps = config.run.steps
        self.trackers = TrackerProcesses(run_dir, config.logger, config.run.name, steps, resume)
        self.num_samples = config.run.log_samples
        self.progress = Progress(steps, start_step=started_at)
        self.signals = Signals()
        for row in read_jsonl(run_dir / METRICS_FILE):  # of earlier starts, which have said what they found
            self.signals.add(row)

    def log(
        self, global_step: int, metrics: dict[str, float], samples: list[dict[str, Any]], validated: list[dict[str, Any]]
    ) -> None:
        """Write a step. Its metrics come last, so that trackers then find all of it. Raises LockLost."""
        run_lock.check_still_held(self.run_dir)
        ordered = sorted(samples, key=lambda sample: int(sample["row_id"]))
        count = min(len(ordered), self.num_samples)
        shown = [ordered[i * len(ordered) // count] for i in range(count)]  # of all the step's calls alike
        self.rollouts.append({"step": global_step, **sample} for sample in shown)
        self.validations.append({"step": global_step, **sample} for sample in validated)
        self.metrics.append([{"step": global_step, "unix_s": round(time.time(), 3), **metrics}])
        self.progress.update(global_step, metrics)
        for text in self.signals.add(metrics):
            self.progress.say(f"warning: {text}")

    def sync(self) -> None:
        """Flush to the disk, so that the files hold the steps of the checkpoint that follows."""
        for log in self._logs:
            log.sync()

    def close(self) -> None:
        self.progress.close()
        for log in self._logs:
            log.close()
        self.trackers.close()


def token_count(batch: Batch) -> int:
    """Return the tokens of all token fields that the data gave."""
    return sum(int(x.lengths.sum()) for name, x in batch.fields.items() if isinstance(x, Ragged) and name.endswith("_ids"))
