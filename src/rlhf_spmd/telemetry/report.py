"""``report.html``: one self-contained file about a run, from the files of its run directory. Any of them may be missing.

``python -m rlhf_spmd.telemetry.report RUN_DIR`` writes it again, also while the run goes on.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median_high
from typing import Any

from rlhf_spmd.telemetry import charts, timeline_chart
from rlhf_spmd.telemetry.charts import Point, Values
from rlhf_spmd.telemetry.jsonl import read_jsonl
from rlhf_spmd.telemetry.progress import reward_of
from rlhf_spmd.telemetry.report_sections import (
    artifacts_section,
    config_section,
    flatten_config,
    legend,
    samples_section,
    status_badge,
    status_message,
    validation_section,
)
from rlhf_spmd.telemetry.run_dir import (
    CONFIG_FILE,
    METRICS_FILE,
    REPORT_FILE,
    ROLLOUTS_FILE,
    TRACE_FILE,
    VALIDATION_FILE,
    ExitStatus,
    atomic_write_text,
    read_exit_status,
    read_json,
)

TIMING = "timing_s/"
DETAIL = re.compile(r"^val/loss$|/(pass|maj)@")  # of a validation: a panel of its own elsewhere, or among the others
SPREAD = ("std", "min", "max")  # what may stand beside a mean
AVERAGED_STEPS = 5  # what "first" and "last" mean in the tiles and in the summary


Panel = tuple[str, tuple[str, ...]]  # title of a chart, and its metrics: drawn where at least one of them exists

PANELS: tuple[Panel, ...] = (
    ("Reward", ("reward/total_mean", "reward/mean")),
    ("Loss", ("actor/loss", "val/loss")),
    ("KL to the reference", ("actor/kl",)),
    ("Entropy", ("actor/entropy",)),
    ("Response length", ("response_length/mean", "response_length/max")),
    ("Critic explained variance", ("critic/explained_variance",)),
    ("Value loss", ("critic/vf_loss",)),
    ("Policy loss", ("actor/pg_loss",)),
    ("KL of the update", ("actor/ppo_kl",)),
    ("Clipped fraction", ("actor/clip_frac", "critic/clip_frac")),
    ("Gradient norm", ("actor/grad_norm", "critic/grad_norm")),
    ("Log-prob difference to training", ("rollout/log_prob_diff_max",)),
    ("Tokens per second", ("perf/tokens_per_s",)),
)


@dataclass(frozen=True)
class Run:
    """What lies in a run directory, parsed."""

    directory: Path
    metrics: Sequence[Mapping[str, Any]]
    rollouts: Sequence[Mapping[str, Any]]
    validations: Sequence[Mapping[str, Any]]
    trace: Mapping[str, Any]
    config_text: str
    status: ExitStatus | None

    def values(self, name: str) -> list[float]:
        """The numbers of a metric, by rising step; steps that have none are left out."""
        return [number for row in self.metrics if (number := _number(row.get(name))) is not None]

    def names(self) -> list[str]:
        """Every metric with at least one number, in the order of appearance."""
        seen = dict.fromkeys(name for row in self.metrics for name, value in row.items() if _number(value) is not None)
        return [name for name in seen if name != "step"]


def read_run(run_dir: str | os.PathLike[str], status: ExitStatus | None = None) -> Run:
    """Parse what is there. ``status`` replaces exit_status.json. Raises ValueError where there is no such directory."""
    directory = Path(run_dir)
    if not directory.is_dir():
        raise ValueError(f"run directory {directory} does not exist; give the run.dir of a run")
    by_step = {row["step"]: row for row in read_jsonl(directory / METRICS_FILE) if isinstance(row.get("step"), int)}
    config = directory / CONFIG_FILE
    trace = read_json(directory / TRACE_FILE)
    return Run(
        directory=directory,
        metrics=[by_step[step] for step in sorted(by_step)],
        rollouts=read_jsonl(directory / ROLLOUTS_FILE),
        validations=read_jsonl(directory / VALIDATION_FILE),
        trace=trace if isinstance(trace, dict) else {},
        config_text=config.read_text(encoding="utf-8", errors="replace") if config.exists() else "",
        status=status or read_exit_status(directory),
    )


def write_report(run_dir: str | os.PathLike[str], status: ExitStatus | None = None) -> Path:
    """Write ``report.html`` into the run directory (atomically) and return its path. ValueError: no such directory.

    ``status``: how the run ends, where the report is written before exit_status.json is.
    """
    run = read_run(run_dir, status)
    path = run.directory / REPORT_FILE
    atomic_write_text(path, render(run))
    return path


def render(run: Run) -> str:
    """The page. It fetches nothing: a content security policy in it forbids that, so data in it cannot make it so either."""
    config = flatten_config(run.config_text)
    name = config.get("run.name") or run.directory.resolve().name
    drawn, busy = timeline_chart.from_trace(run.trace)
    timed = [row for row in run.metrics if any(key.startswith(TIMING) for key in row)]  # not a validation before the first step
    totals = [_number(row.get(TIMING + "step")) for row in timed]
    phases = _phases(timed, totals)
    colors = _phase_colors(phases, busy)
    body = [
        _header(run, name, config),
        _tiles(run),
        _curves(run),
        _phase_section([row["step"] for row in timed], totals, phases, colors),
        _timeline_section(drawn, busy, colors),
        validation_section(run.validations),
        samples_section(run.rollouts),
        artifacts_section(run.directory),
        config_section(config, run.config_text),
        f"<footer>rlhf_spmd report of {escape(str(run.directory.resolve()))}</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        "script-src 'unsafe-inline'\">"
        f"<title>{escape(name)}</title><style>{_packaged('report.css')}</style></head>\n<body><main>"
        + "\n".join(part for part in body if part)
        + f'</main><div id="tip"></div><script>{_packaged("report.js")}</script></body></html>\n'
    )


def first_and_last(values: Sequence[float], most: int = AVERAGED_STEPS) -> tuple[float, float, int]:
    """Means of the first and of the last k values, and k (``most``, fewer in short runs; 0: no values)."""
    if not values:
        return math.nan, math.nan, 0
    k = min(most, max(1, len(values) // 2))
    return sum(values[:k]) / k, sum(values[-k:]) / k, k


def _header(run: Run, name: str, config: Mapping[str, str]) -> str:
    facts = [config.get("algorithm.name"), config.get("models.actor.path")]
    if run.metrics:
        total = config.get("run.steps")
        facts.append(f"step {run.metrics[-1]['step']}" + (f" of {total}" if total else ""))
    ranks = {event.get("pid") for event in run.trace.get("traceEvents", ()) if isinstance(event, dict)}
    if ranks:
        facts.append(f"{len(ranks)} rank" + ("s" if len(ranks) > 1 else ""))
    if config.get("run.seed"):
        facts.append(f"seed {config['run.seed']}")
    listed = "".join(f"<span>{escape(fact)}</span>" for fact in facts if fact)
    return (
        f'<header><div class="line"><h1>{escape(name)}</h1>{status_badge(run.status)}</div>'
        f'<p class="facts">{listed}</p>{status_message(run.status)}</header>'
    )


def _tiles(run: Run) -> str:
    tiles = []
    reward = reward_of(run.names())
    main = ("Reward", reward) if run.values(reward) else ("Loss", "actor/loss")
    validation = next((name for name in run.names() if name.startswith("val/") and name != "val/loss"), "val/loss")
    for title, metric in (main, ("Validation", validation)):
        first, last, k = first_and_last(run.values(metric), 1 if title == "Validation" else AVERAGED_STEPS)
        if k > 0:
            direction = "" if title == "Loss" else "up" if last > first else "down"
            note = f'<span class="{direction}">{last - first:+.3g}</span>; first, last {k}'
            value = f'{charts.number_text(first, 3)}<span class="arrow">→</span>{charts.number_text(last, 3)}'
            tiles.append((title, value, note))
    for title, metric, unit in (
        ("KL to the reference", "actor/kl", ""),
        ("Response length", "response_length/mean", "tokens, "),
        ("Explained variance", "critic/explained_variance", "critic, "),
    ):
        _, last, k = first_and_last(run.values(metric))
        if k > 0:
            tiles.append((title, charts.number_text(last, 3), f"{unit}last {k} steps"))
    for title, metric, unit in (("Tokens per second", "perf/tokens_per_s", ""), ("Step time", TIMING + "step", " s")):
        if values := run.values(metric):
            note = "median" if unit == "" else f"median; {charts.number_text(sum(values) / 60, 3)} min"
            tiles.append((title, charts.number_text(median_high(values), 3 if unit else 4) + unit, note))
    drawn = [
        f'<div class="tile"><div class="name">{escape(title)}</div><div class="value">{value}</div>'
        f'<div class="note">{note}</div></div>'
        for title, value, note in tiles
    ]
    return f'<div class="tiles">{"".join(drawn)}</div>' if drawn else ""


def _curves(run: Run) -> str:
    names = run.names()
    validation = [("Validation", (name,)) for name in names if name.startswith("val/") and not DETAIL.search(name)]
    panels = [*PANELS[:1], *validation, *PANELS[1:]]
    shown = {name for _, metrics in panels for name in metrics} | {f"reward/{part}" for part in SPREAD}
    others = [name for name in names if name not in shown and not name.startswith(TIMING)]
    drawn = [figure for title, metrics in panels if (figure := _figure(run, title, metrics))]
    more = [_figure(run, name.replace("/", " ").replace("_", " ").capitalize(), (name,)) for name in others]
    if not drawn:
        drawn, more = more, []
    if not drawn:
        return '<h2>Curves</h2><p class="caption">No metrics yet.</p>'
    caption = "Bands: one standard deviation over the samples of a step."
    if len(run.metrics) >= charts.SMOOTH_FROM:
        window = max(2, round(len(run.metrics) / charts.SMOOTH_PARTS))
        caption += f" Bold: exponential average over about {window} steps; thin: the steps themselves."
    curves = f'<h2>Curves</h2><p class="caption">{caption}</p><div class="panels">{"".join(drawn)}</div>'
    if more:
        curves += f'<details><summary>{len(more)} more metrics</summary><div class="panels">{"".join(more)}</div></details>'
    return curves


def _figure(run: Run, title: str, metrics: Sequence[str]) -> str:
    curves = {name: points for name in metrics if charts.known(points := _points(run, name))}
    if not curves:
        return ""
    _, last = charts.known(next(iter(curves.values())))[-1]
    if len(curves) > 1:
        keys = legend({name: charts.color(index) for index, name in enumerate(curves)})
    else:
        keys = f'<div class="metric">{escape(metrics[0])}</div>'
    return (
        f'<figure class="card"><figcaption><span class="title">{escape(title)}</span>'
        f'<span class="last">{charts.number_text(last)}</span></figcaption>{keys}{charts.line_chart(curves)}</figure>'
    )


def _points(run: Run, name: str) -> list[Point]:
    """A metric's curve; of a mean with its ``std``, ``min`` and ``max`` beside it."""
    prefix, _, last = name.rpartition("/")
    points = []
    for row in run.metrics:
        if name not in row:
            continue
        value = _number(row[name])
        std, low, high = (_number(row.get(f"{prefix}/{part}")) for part in SPREAD)
        if last == "mean" and value is not None and std is not None:
            band = (
                (value - std if low is None else max(value - std, low)),
                (value + std if high is None else min(value + std, high)),
            )
            known = ((part, number) for part, number in zip(SPREAD, (std, low, high), strict=True) if number is not None)
            points.append(Point(row["step"], value, band, ", ".join(f"{part} {charts.number_text(n)}" for part, n in known)))
        else:
            points.append(Point(row["step"], value))
    return points


def _phases(timed: Sequence[Mapping[str, Any]], totals: Values) -> dict[str, list[float | None]]:
    """Seconds by phase and step from ``timing_s/*``, the largest first; ``other`` is what of the step no phase accounts for."""
    names = dict.fromkeys(name for row in timed for name in row if name.startswith(TIMING) and name != TIMING + "step")
    columns = {name.removeprefix(TIMING): [_number(row.get(name)) for row in timed] for name in names}
    phases = dict(sorted(columns.items(), key=lambda column: -_sum(column[1])))
    if phases and any(total is not None for total in totals):
        known = [_sum(row) for row in zip(*phases.values(), strict=True)]
        rest: list[float | None] = [max(0.0, (total or 0.0) - part) for total, part in zip(totals, known, strict=True)]
        if _sum(rest) > 0.01 * _sum(totals):
            phases["other"] = rest
    return phases


def _phase_colors(phases: Mapping[str, Values], busy: Mapping[str, float]) -> dict[str, str]:
    """One colour per phase for bars and timeline, the largest phases first."""
    by_bar = [name for name in phases if name != "other"]
    keys = dict.fromkeys([timeline_chart.phase_key(name) for name in by_bar])
    keys |= dict.fromkeys(sorted((key for key in busy if key != timeline_chart.WAITING), key=lambda key: -busy[key]))
    by_key = {key: charts.color(index) for index, key in enumerate(keys)} | {timeline_chart.WAITING: "var(--wait)"}
    return by_key | {name: by_key[timeline_chart.phase_key(name)] for name in by_bar} | {"other": "var(--other)"}


def _phase_section(steps: Sequence[int], totals: Values, phases: Mapping[str, Values], colors: dict[str, str]) -> str:
    svg = charts.stacked_bars(steps, phases, totals, colors) if phases else ""
    if not svg:
        return ""
    sums = {name: _sum(values) for name, values in phases.items()}
    shares = {f"{name} {sums[name] / sum(sums.values()):.0%}": colors[name] for name in phases if sums[name] > 0}
    caption = "Seconds of each phase; the mark is the whole step. Phases that run at the same time pile up above it."
    return (
        f'<h2>Time per step</h2><p class="caption">{caption}</p><figure class="card">{legend(shares)}'
        f'<div class="scroll">{svg}</div></figure>'
    )


def _timeline_section(drawn: timeline_chart.TimelineChart, busy: Mapping[str, float], colors: dict[str, str]) -> str:
    svg = timeline_chart.draw(drawn, colors)
    if not svg:
        return ""
    used = {box.key for row in drawn.rows for track in row.tracks for box in track}
    keys = {key: colors[key] for key in sorted(used, key=lambda key: -busy.get(key, 0.0)) if colors.get(key) != "var(--other)"}
    if len(keys) < len(used):
        keys["others"] = "var(--other)"
    caption = f"{drawn.note} Thin strips: communication and waiting. The whole trace is trace.json, which Perfetto opens."
    return (
        f'<h2>Timeline</h2><p class="caption">{escape(caption)}</p><figure class="card">{legend(keys)}'
        f'<div class="scroll">{svg}</div></figure>'
    )


def _number(value: Any) -> float | None:
    """A finite number, or None (null, text, NaN)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _sum(values: Values) -> float:
    return sum(value or 0.0 for value in values)


def _packaged(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def run_on_directory(name: str, description: str, work: Callable[[str], object], arguments: Sequence[str] | None = None) -> int:
    """The command line of a program that takes a run directory and prints what ``work`` returns; the exit code."""
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument("run_dir", help="the run.dir of a run, finished or not")
    try:
        print(work(parser.parse_args(arguments).run_dir))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_on_directory("rlhf_spmd.telemetry.report", "Write report.html of a run directory.", write_report, arguments)


if __name__ == "__main__":
    sys.exit(main())
