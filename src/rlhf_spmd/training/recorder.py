"""Rank 0's part of a run: merges the reports of the ranks to metrics, and writes metrics and samples."""

from __future__ import annotations

import platform
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf_spmd.controller import CallStats, ordered_values
from rlhf_spmd.data.batch import Batch, Ragged
from rlhf_spmd.kernels import capabilities
from rlhf_spmd.parallel.world import World
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.progress import Progress
from rlhf_spmd.telemetry.run_dir import METRICS_FILE, ROLLOUTS_FILE, STARTS_FILE, VALIDATION_FILE, JsonlLog, read_jsonl
from rlhf_spmd.telemetry.signals import Signals
from rlhf_spmd.telemetry.trackers import TrackerProcesses
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.training.train_config import TrainConfig
from rlhf_spmd.training.validation import mean_extras
from rlhf_spmd.workers.flops import forward_flops, matmul_rate, rated_flops


class PendingStep(NamedTuple):
    """A step that this rank has ended, and other ranks perhaps not.

    - rows: the rows of each data stream
    - calls: all calls of the step; ``num_reported`` of them report values
    - step_metrics: metrics of the step's data
    - is_preempted: waits for all ranks; returns True if one was signalled to end
    """

    global_step: int
    rows: Sequence[Batch]
    calls: Sequence[CallStats]
    num_reported: int
    step_metrics: dict[str, float]
    is_preempted: Callable[[], bool]


class Utilisation:
    """Computes the share of the devices' arithmetic that a step used, by their data sheet if it is known, and as measured."""

    def __init__(self, run_plan: RunPlan, world: World) -> None:
        self.run_plan = run_plan
        self.num_ranks = world.size
        dtype = run_plan.exported.config.torch_dtype(world.device)
        self.peak_flops = matmul_rate(world.device, dtype, world.launch.local_size)  # of one rank
        self.rated_flops = rated_flops(world.device, dtype)
        if world.rank == 0 and capabilities(world.device).streams and self.rated_flops is None:
            rate = f"{self.peak_flops / 1e12:.0f} TFLOP/s measured here"
            print(f"perf/mfu is of {rate}: no figure of this device's data sheet is known", file=sys.stderr)

    def metrics(self, calls: Sequence[CallStats], num_rows: int, num_tokens: float, seconds: float) -> dict[str, float]:
        """Return ``perf/mfu``, and ``perf/mfu_measured`` if both are known.

        An epoch of an update counts as three forward passes: one forward, and a backward of two. Half of the backward are gradients of
        the weights, which a role with adapters does not compute. With rows in flight, the tokens of the rows that a step trains on
        count as the tokens that it generated.
        """
        mean_length = num_tokens / num_rows
        flops = 0.0
        for role, kind, rows, epochs in calls:
            role_plan = self.run_plan.roles[role]
            if role_plan.spec is not None and kind in ("generate", "infer", "train"):
                passes = (2.0 if role_plan.config.lora.rank else 3.0) * epochs if kind == "train" else 1.0
                if kind == "generate":
                    rows = min(rows, num_rows)  # a step takes so many of those in flight, and of the ids of episodes
                flops += forward_flops(role_plan.spec, rows * mean_length, mean_length) * passes
        rate = flops / seconds / self.num_ranks
        self.peak_flops = max(self.peak_flops, rate)
        measured = rate / self.peak_flops
        if self.rated_flops is None:
            return {"perf/mfu": measured}
        return {"perf/mfu": rate / self.rated_flops, "perf/mfu_measured": measured}


def merge_reports(
    step: PendingStep, reports: Sequence[Any], utilisation: Utilisation
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return a step's metrics and samples.

    ``reports``: by rank, the values of its calls, and metrics of which the largest counts.
    """
    values, parts = zip(*reports, strict=True)
    metrics, samples = merge_values(ordered_values(values, step.num_reported))
    for name, value in (pair for part in parts for pair in part.items()):
        metrics[name] = max(metrics.get(name, 0.0), value)
    if metrics.get("generation/seconds_max"):
        metrics["generation/idle_fraction"] = 1 - metrics["generation/seconds"] / metrics["generation/seconds_max"]
    num_rows = sum(map(len, step.rows))
    generates = any(call.kind == "generate" for call in step.calls)
    # a reward reports the lengths; without one the tokens of a step that generates are unknown
    if num_rows and ("response_length/mean" in metrics or not generates):
        responses = metrics.get("response_length/mean", 0.0) + metrics.get("rollout/environment_tokens_mean", 0.0)
        num_tokens = sum(map(token_count, step.rows)) + responses * num_rows
        metrics["perf/tokens_per_s"] = num_tokens / metrics["timing_s/step"]
        metrics |= utilisation.metrics(step.calls, num_rows, num_tokens, metrics["timing_s/step"])
    return {**step.step_metrics, **metrics}, samples


def merge_values(calls: list[list[Any]]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the collected values of a step's calls as metrics (keys with a slash) and samples.

    Several members of several calls may report values of a key. Lists are sums, which add up: [total], [total, count] for a mean, or
    [total, count, squares] for a standard deviation. Of other values, a key that ends in max takes the largest, one that ends in min
    the smallest, and any other their mean.
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

    def __init__(self, run_dir: Path, config: TrainConfig, resumed_at: int, facts: Mapping[str, str]) -> None:
        """Open the files of the run.

        - config: the configuration, which the run directory has already
        - resumed_at: the last finished step; 0 for a new run
        - facts: facts about this start, for the report
        """
        self.run_dir = run_dir
        resume = resumed_at or None
        starts = JsonlLog(run_dir / STARTS_FILE, resume)
        starts.append([{"step": resumed_at, **facts}])
        starts.close()
        files = (ROLLOUTS_FILE, VALIDATION_FILE, METRICS_FILE)
        self._logs = [JsonlLog(run_dir / file, resume) for file in files]
        self.rollouts, self.validations, self.metrics = self._logs
        steps = config.run.steps
        assert steps is not None, "preflight has set it"
        self.trackers = TrackerProcesses(run_dir, config.logger, config.run.name, steps, resume)
        self.num_samples = config.run.log_samples
        self.progress = Progress(steps, start_step=resumed_at)
        self.signals = Signals()
        for row in read_jsonl(run_dir / METRICS_FILE):  # of earlier starts, which have printed their warnings
            self.signals.add(row)

    def log(
        self, global_step: int, metrics: dict[str, float], samples: list[dict[str, Any]], validated: list[dict[str, Any]]
    ) -> None:
        """Write a step. Its metrics come last, since trackers read the other files then. Raises LockLost."""
        run_lock.check_still_held(self.run_dir)
        ordered = sorted(samples, key=lambda sample: int(sample["row_id"]))
        episodes: dict[int, list[dict[str, Any]]] = {}  # by its id, the rows of each; without agents a row
        for sample in ordered:
            episodes.setdefault(sample.get("episode", sample["row_id"]), []).append(sample)
        count = min(len(episodes), self.num_samples)
        shown = [[*episodes.values()][i * len(episodes) // count] for i in range(count)]  # evenly over the calls of the step
        self.rollouts.append({"step": global_step, **sample} for rows in shown for sample in rows)
        self.validations.append({"step": global_step, **sample} for sample in validated)
        self.metrics.append([{"step": global_step, "unix_s": round(time.time(), 3), **metrics}])
        self.progress.update(global_step, metrics)
        for text in self.signals.add(metrics):
            self.progress.say(f"warning: {text}")

    def sync(self) -> None:
        """Flush to the disk, so that the files hold all steps of the checkpoint that is written next."""
        for log in self._logs:
            log.sync()

    def close(self) -> None:
        self.progress.close()
        for log in self._logs:
            log.close()
        self.trackers.close()


def token_count(batch: Batch) -> int:
    """Return the number of tokens in all token fields of the batch."""
    return sum(int(x.lengths.sum()) for name, x in batch.fields.items() if isinstance(x, Ragged) and name.endswith("_ids"))


def start_facts(world: World) -> dict[str, str]:
    """Return facts of this start: date, host, ranks, device, versions, commit, command line."""
    launch = world.launch
    device = world.device
    argv = sys.orig_argv
    hosts = -(-launch.size // launch.local_size)
    program = argv[argv.index("-m") :] if "-m" in argv else sys.argv
    torchrun = ["torchrun", *(["--nnodes", str(hosts)] if hosts > 1 else []), "--nproc-per-node", str(launch.local_size)]
    return {
        "started": datetime.now().astimezone().isoformat(" ", "seconds"),
        "host": socket.gethostname() + (f" and {hosts - 1} more" if hosts > 1 else ""),
        "ranks": str(launch.size),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {platform.machine()}",
        "versions": ", ".join(
            ["python " + platform.python_version(), *(f"{n} {version(n)}" for n in ("torch", "transformers"))]
        ),
        "commit": _commit(),
        "command": shlex.join(torchrun + program),
        "working directory": str(Path.cwd()),
    }


def _commit() -> str:
    """Return the commit of this package's git tree; "" if the package is in no git tree."""
    file = Path(__file__)
    commit = ""
    for command in (["ls-files", "--error-unmatch", file.name], ["describe", "--always", "--dirty", "--exclude", "*"]):
        try:
            git = subprocess.run(["git", *command], cwd=file.parent, capture_output=True, check=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return ""
        commit = git.stdout.strip()
    return commit
