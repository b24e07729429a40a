"""What a run did, in a few lines at its end: reward before and after, samples, where the report and the model lie."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_high
from typing import Any

from tqdm import tqdm

from rlhf_spmd.telemetry.charts import number_text
from rlhf_spmd.telemetry.progress import reward_of
from rlhf_spmd.telemetry.report import AVERAGED_STEPS, first_and_last, read_run, run_on_directory
from rlhf_spmd.telemetry.run_dir import EXPORT_DIR, REPORT_FILE, exported_checkpoint, list_checkpoints

LABEL_WIDTH = 20
NUM_SAMPLES = 3  # of the first and of the last step


def summarize(run_dir: str | os.PathLike[str]) -> str:
    """The summary as text, from the files of the run directory; what is missing there is left out. ValueError: no directory."""
    run = read_run(run_dir)
    lines = [f"run {run.directory}" + (f": {run.status.class_}" if run.status else "")]
    if run.status is not None and run.status.class_ != "done" and run.status.message:
        lines.append(_row("message", run.status.message))
    if run.metrics:
        seconds = run.values("timing_s/step")
        took = f" in {tqdm.format_interval(sum(seconds))}" if seconds else ""
        lines.append(_row("steps", f"{len(run.metrics)}{took}"))
    validation = [name for name in run.names() if name.startswith("val/")]
    for label, name in [("reward", reward_of(run.names())), *((name, name) for name in validation)]:
        first, last, k = first_and_last(run.values(name), 1 if name in validation else AVERAGED_STEPS)
        if k > 0:
            which = f"means of the first and the last {k} logged" if k > 1 else "first and last"
            lines.append(_row(label, f"{number_text(first)} -> {number_text(last)}  ({last - first:+.3f}; {which})"))
    for label, name in (("KL to reference", "actor/kl"), ("explained variance", "critic/explained_variance")):
        first, last, k = first_and_last(run.values(name))
        if k > 0:
            lines.append(_row(label, f"{number_text(first)} -> {number_text(last)}"))
    if rates := run.values("perf/tokens_per_s"):
        lines.append(_row("tokens/s", f"{median_high(rates):,.0f} (median)"))
    lines += _samples(run.rollouts)
    lines += places(run.directory)
    return "\n".join(lines)


def _samples(rollouts: Sequence[Mapping[str, Any]]) -> list[str]:
    steps = sorted({sample["step"] for sample in rollouts if isinstance(sample.get("step"), int)})
    lines = []
    for step in dict.fromkeys(steps[:1] + steps[-1:]):
        lines.append(f"  samples of step {step}")
        for sample in [sample for sample in rollouts if sample.get("step") == step][:NUM_SAMPLES]:
            score = sample.get("score")
            shown = number_text(score) if isinstance(score, (int, float)) else "?"
            lines.append(f"    [{shown}] {_one_line(sample.get('prompt'))} => {_one_line(sample.get('response'))}")
    return lines


def places(run_dir: str | os.PathLike[str]) -> list[str]:
    """Where report, export and newest checkpoint lie, one a line; those that are there. An export of another checkpoint says so."""
    newest, of = list_checkpoints(run_dir)[-1:], exported_checkpoint(run_dir)
    stale = f" (of {of or 'an unknown checkpoint'}, not of the one below)" if newest and of != newest[0].name else ""
    named = [("report", Path(run_dir) / REPORT_FILE, ""), ("export", Path(run_dir) / EXPORT_DIR, stale)]
    named += [("checkpoint", path, "") for path in newest]
    return [_row(label, f"{path}{more}") for label, path, more in named if path.exists()]


def _row(label: str, text: str) -> str:
    return f"  {label:<{LABEL_WIDTH - 1}} {text}"


def _one_line(value: Any, limit: int = 100) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


if __name__ == "__main__":
    sys.exit(run_on_directory("rlhf_spmd.telemetry.summary", "What a run did, in a few lines.", summarize))
