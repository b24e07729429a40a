"""What a run did, in a few lines: reward before and after, samples, where the report and the model are."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median_high
from typing import Any

from tqdm import tqdm

from rlhf_spmd.telemetry.progress import reward_of
from rlhf_spmd.telemetry.report import Sample, first_and_last_samples, read_lines, read_run
from rlhf_spmd.telemetry.run_dir import (
    EXPORT_DIR,
    EXPORTS_DIR,
    REPORT_FILE,
    ROLLOUTS_FILE,
    exported_checkpoint,
    newest_checkpoint,
    read_config,
)
from rlhf_spmd.telemetry.signals import read_signals

LABEL_WIDTH = 20
AVERAGED_STEPS = 5  # steps that "first" and "last" average
NUM_SAMPLES = 3  # from the first and from the last step


def summarize(run_dir: str | os.PathLike[str]) -> str:
    """Return the summary, from the files of the run directory; missing ones are left out. Raises ValueError if there is no run."""
    run = read_run(run_dir)
    lines = [f"run {run.directory}" + (f": {run.status.class_}" if run.status else "")]
    if run.status is not None and run.status.message:
        lines.append(_row("message", run.status.message))
    if run.metrics:
        seconds = run.values("timing_s/step")
        duration = f" in {tqdm.format_interval(sum(seconds))}" if seconds else ""
        total = f" of {run.config['run.steps']}" if "run.steps" in run.config else ""
        lines.append(_row("steps", f"{run.metrics[-1]['step']}{total}{duration}"))
    validation = [name for name in run.names() if name.startswith("val/")]
    named = [("reward", reward_of(run.names())), *((name, name) for name in validation)]
    for label, name in [*named, ("KL to reference", "actor/kl"), ("explained variance", "critic/explained_variance")]:
        first, last, k = _first_and_last(run.values(name), 1 if name in validation else AVERAGED_STEPS)
        if k > 0:
            note = f"means of the first and the last {k} logged" if k > 1 else "first and last"
            lines.append(_row(label, f"{first:.4g} -> {last:.4g}  ({last - first:+.3f}; {note})"))
    if rates := run.values("perf/tokens_per_s"):
        lines.append(_row("tokens/s", f"{median_high(rates):,.0f} (median)"))
    lines += [_row("warning", text) for text in read_signals(run.metrics)]
    for samples in first_and_last_samples(read_lines(run.directory, ROLLOUTS_FILE), NUM_SAMPLES):
        lines += [f"  samples of step {samples[0]['step']}", *map(_sample, samples)]
    lines += artifact_lines(run.directory)
    return "\n".join(lines)


def _sample(sample: Sample) -> str:
    score = sample.get("score")
    text = f"{score:.4g}" if isinstance(score, (int, float)) else "?"
    return f"    [{text}] {_one_line(sample.get('prompt'))} => {_one_line(sample.get('response'))}"


def artifact_lines(run_dir: str | os.PathLike[str]) -> list[str]:
    """Return a line each for report, export and newest checkpoint, if they exist.

    The line of an export says if it is of another checkpoint.
    """
    newest = newest_checkpoint(run_dir)
    exported = exported_checkpoint(run_dir)
    stale = f" (of {exported or 'an unknown checkpoint'}, not of the one below)" if newest and exported != newest.name else ""
    artifacts = [("report", Path(run_dir) / REPORT_FILE, ""), ("export", Path(run_dir) / EXPORT_DIR, stale)]
    if read_config(run_dir).get("run.keep_best", "null") != "null":
        artifacts += [("best by validation", Path(run_dir) / EXPORTS_DIR / "best", "")]
    artifacts += [("checkpoint", newest, "")] if newest else []
    return [_row(label, f"{path}{note}") for label, path, note in artifacts if path.exists()]


def _row(label: str, text: str) -> str:
    return f"  {label:<{LABEL_WIDTH - 1}} {text}"


def _one_line(value: Any, limit: int = 100) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _first_and_last(values: Sequence[float], limit: int = AVERAGED_STEPS) -> tuple[float, float, int]:
    """Return means of the first and last k values, and k: at most ``limit``, fewer in short runs, 0 without values."""
    if not values:
        return math.nan, math.nan, 0
    k = min(limit, max(1, len(values) // 2))
    return sum(values[:k]) / k, sum(values[-k:]) / k, k
