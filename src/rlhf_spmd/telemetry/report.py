"""``report.html``: one self-contained file about a run, from the files of its run directory. Any of them may be missing.

``python -m rlhf_spmd.telemetry.report RUN_DIR`` writes it again, also while the run goes on.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from rlhf_spmd.telemetry import charts, timeline_chart
from rlhf_spmd.telemetry.charts import Series, Values
from rlhf_spmd.telemetry.jsonl import read_jsonl
from rlhf_spmd.telemetry.report_sections import (
    artifacts_section,
    config_section,
    flatten_config,
    legend,
    samples_section,
    status_badge,
    status_message,
)
from rlhf_spmd.telemetry.run_dir import (
    CONFIG_FILE,
    METRICS_FILE,
    REPORT_FILE,
    ROLLOUTS_FILE,
    TRACE_FILE,
    ExitStatus,
    atomic_write_text,
    read_exit_status,
    read_json,
)

TIMING = "timing_s/"
AVERAGED_STEPS = 5  # what "first" and "last" mean in the tiles and in the summary


@dataclass(frozen=True)
class Panel:
    """A chart of the report: metric names, drawn where at least one of them exists."""

    title: str
    metrics: tuple[str, ...]


PANELS = (
    Panel("Reward", ("reward/mean",)),
    Panel("Loss", ("actor/loss", "val/loss")),
    Panel("KL to the reference", ("actor/kl",)),
    Panel("Entropy", ("actor/entropy",)),
    Panel("Response length", ("response_length/mean", "response_length/max")),
    Panel("Critic explained variance", ("critic/explained_variance",)),
    Panel("Value loss", ("critic/vf_loss",)),
    Panel("Policy loss", ("actor/pg_loss",)),
    Panel("KL of the update", ("actor/ppo_kl",)),
    Panel("Clipped fraction", ("actor/clip_frac", "critic/clip_frac")),
    Panel("Gradient norm", ("actor/grad_norm", "critic/grad_norm")),
    Panel("Log-prob difference to training", ("rollout/log_prob_diff_max",)),
    Panel("Tokens per second", ("perf/tokens_per_s",)),
)


@dataclass(frozen=True)
class Run:
    """What lies in a run directory, parsed."""

    directory: Path
    metrics: Sequence[Mapping[str, Any]]
    rollouts: Sequence[Mapping[str, Any]]
    trace: Mapping[str, Any]
    config_text: str
    status: ExitStatus | None

    def curve(self, name: str) -> tuple[list[int], list[float | None]]:
        """Steps and values of a metric, where it was logged (null included)."""
        rows = [row for row in self.metrics if name in row]
        return [row["step"] for row in rows], [_number(row[name]) for row in rows]

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
    phases = _phases(run)
    colors = _phase_colors(phases, busy)
    body = [
        _header(run, name, config),
        _tiles(run),
        _curves(run),
        _phase_section(run, phases, colors),
        _timeline_section(drawn, busy, colors),
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


def first_and_last(values: Values, most: int = AVERAGED_STEPS) -> tuple[float, float, int]:
    """Means of the first and of the last k finite values, and k (``most``, fewer in short runs; 0: no values)."""
    finite = [value for value in values if value is not None]
    k = min(most, max(1, len(finite) // 2)) if finite else 0
    if not k:
        return math.nan, math.nan, 0
    return sum(finite[:k]) / k, sum(finite[-k:]) / k, k


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
    main = ("Reward", "reward/mean") if "reward/mean" in run.names() else ("Loss", "actor/loss")
    for title, metric in (main, ("Validation", _first_validation(run))):
        first, last, k = first_and_last(run.curve(metric)[1], 1 if title == "Validation" else AVERAGED_STEPS)
        if k > 0:
            change = last - first
            direction = "up" if change > 0 else "down"
            note = f'<span class="{direction if title != "Loss" else ""}">{change:+.3g}</span>; first, last {k}'
            value = f'{charts.number_text(first, 3)}<span class="arrow">→</span>{charts.number_text(last, 3)}'
            tiles.append((title, value, note))
    explained = first_and_last(run.curve("critic/explained_variance")[1])
    for title, metric, unit in (
        ("KL to the reference", "actor/kl", ""),
        ("Response length", "response_length/mean", "tokens, "),
    ):
        _, last, k = first_and_last(run.curve(metric)[1])
        if k > 0:
            tiles.append((title, charts.number_text(last, 3), f"{unit}last {k} steps"))
    if explained[2]:
        tiles.append(("Explained variance", charts.number_text(explained[1], 3), f"critic, last {explained[2]} steps"))
    for title, metric, unit in (("Tokens per second", "perf/tokens_per_s", ""), ("Step time", TIMING + "step", " s")):
        values = sorted(value for value in run.curve(metric)[1] if value is not None)
        if values:
            note = "median" if unit == "" else f"median; {charts.number_text(sum(values) / 60, 3)} min"
            tiles.append((title, charts.number_text(values[len(values) // 2], 3 if unit else 4) + unit, note))
    drawn = [
        f'<div class="tile"><div class="name">{escape(title)}</div><div class="value">{value}</div>'
        f'<div class="note">{note}</div></div>'
        for title, value, note in tiles
    ]
    return f'<div class="tiles">{"".join(drawn)}</div>' if drawn else ""


def _curves(run: Run) -> str:
    names = run.names()
    validation = [Panel("Validation", (name,)) for name in names if name.startswith("val/") and name != "val/loss"]
    panels = [*PANELS[:1], *validation, *PANELS[1:]]
    shown = {name for panel in panels for name in panel.metrics} | {f"reward/{part}" for part in ("std", "min", "max")}
    rest = [Panel(_title_of(name), (name,)) for name in names if name not in shown and not name.startswith(TIMING)]
    drawn = [figure for panel in panels if (figure := _figure(run, panel))]
    if not drawn:
        drawn, rest = [figure for panel in rest if (figure := _figure(run, panel))], []
    if not drawn:
        return '<h2>Curves</h2><p class="caption">No metrics yet.</p>'
    caption = "Bands: one standard deviation over the samples of a step."
    if len(run.metrics) >= charts.SMOOTH_FROM:
        window = max(2, round(len(run.metrics) / charts.SMOOTH_PARTS))
        caption += f" Bold: exponential average over about {window} steps; thin: the steps themselves."
    more = "".join(_figure(run, panel) for panel in rest)
    if more:
        more = f'<details><summary>{len(rest)} more metrics</summary><div class="panels">{more}</div></details>'
    return f'<h2>Curves</h2><p class="caption">{caption}</p><div class="panels">{"".join(drawn)}</div>{more}'


def _figure(run: Run, panel: Panel) -> str:
    curves = [_series(run, name) for name in panel.metrics]
    curves = [curve for curve in curves if any(value is not None for value in curve.values)]
    svg = charts.line_chart(curves)
    if not svg:
        return ""
    finite = [value for value in curves[0].values if value is not None]
    keys = legend({curve.name: charts.color(index) for index, curve in enumerate(curves)}) if len(curves) > 1 else ""
    metric = f'<div class="metric">{escape(panel.metrics[0])}</div>' if len(curves) == 1 else ""
    return (
        f'<figure class="card"><figcaption><span class="title">{escape(panel.title)}</span>'
        f'<span class="last">{charts.number_text(finite[-1])}</span></figcaption>{keys}{metric}{svg}</figure>'
    )


def _series(run: Run, name: str) -> Series:
    steps, values = run.curve(name)
    prefix, _, last = name.rpartition("/")
    if last != "mean":
        return Series(name, steps, values)
    rows = [row for row in run.metrics if name in row]
    spread = {part: [_number(row.get(f"{prefix}/{part}")) for row in rows] for part in ("std", "min", "max")}
    extra: dict[str, Values] = {part: found for part, found in spread.items() if any(value is not None for value in found)}
    if "std" not in extra:
        return Series(name, steps, values)
    pairs = list(zip(values, spread["std"], spread["min"], spread["max"], strict=True))
    low = [None if v is None or s is None else max(v - s, v - s if m is None else m) for v, s, m, _ in pairs]
    high = [None if v is None or s is None else min(v + s, v + s if m is None else m) for v, s, _, m in pairs]
    return Series(name, steps, values, low, high, extra)


def _phases(run: Run) -> dict[str, list[float | None]]:
    """Seconds by phase and step from ``timing_s/*``, the largest first; ``other`` is what of the step no phase accounts for."""
    names = [name for name in run.names() if name.startswith(TIMING) and name != TIMING + "step"]
    rows = _timed_rows(run)
    columns: dict[str, list[float | None]] = {name[len(TIMING) :]: [_number(row.get(name)) for row in rows] for name in names}
    order = sorted(columns, key=lambda name: -sum(value or 0.0 for value in columns[name]))
    phases = {name: columns[name] for name in order}
    if phases and any(TIMING + "step" in row for row in rows):
        totals = [_number(row.get(TIMING + "step")) for row in rows]
        known = [sum(column[i] or 0.0 for column in phases.values()) for i in range(len(totals))]
        rest: list[float | None] = [max(0.0, (total or 0.0) - part) for total, part in zip(totals, known, strict=True)]
        if sum(value or 0.0 for value in rest) > 0.01 * sum(value or 0.0 for value in totals):
            phases["other"] = rest
    return phases


def _timed_rows(run: Run) -> list[Mapping[str, Any]]:
    """Steps with times; a validation before the first step has none."""
    return [row for row in run.metrics if any(name.startswith(TIMING) for name in row)]


def _phase_colors(phases: Mapping[str, Values], busy: Mapping[str, float]) -> dict[str, str]:
    """One colour per phase for bars and timeline, the largest phases first."""
    seconds = {name: sum(value or 0.0 for value in values) for name, values in phases.items()}
    by_bar = sorted((name for name in seconds if name != "other"), key=lambda name: -seconds[name])
    keys = dict.fromkeys([timeline_chart.phase_key(name) for name in by_bar])
    keys |= dict.fromkeys(sorted((key for key in busy if key != timeline_chart.WAITING), key=lambda key: -busy[key]))
    by_key = {key: charts.color(index) for index, key in enumerate(keys)} | {timeline_chart.WAITING: "var(--wait)"}
    return by_key | {name: by_key[timeline_chart.phase_key(name)] for name in by_bar} | {"other": "var(--other)"}


def _phase_section(run: Run, phases: Mapping[str, Values], colors: dict[str, str]) -> str:
    rows = _timed_rows(run)
    steps = [row["step"] for row in rows]
    totals = [_number(row.get(TIMING + "step")) for row in rows]
    svg = charts.stacked_bars(steps, dict(phases), totals, colors) if phases else ""
    if not svg:
        return ""
    sums = {name: sum(value or 0.0 for value in values) for name, values in phases.items()}
    shares = {f"{name} {sums[name] / (sum(sums.values()) or 1.0):.0%}": colors[name] for name in phases if sums[name] > 0}
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


def _first_validation(run: Run) -> str:
    return next((name for name in run.names() if name.startswith("val/") and name != "val/loss"), "val/loss")


def _title_of(name: str) -> str:
    return name.replace("/", " ").replace("_", " ").capitalize()


def _number(value: Any) -> float | None:
    """A finite number, or None (null, text, NaN)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def _packaged(name: str) -> str:
    return resources.files("rlhf_spmd.telemetry").joinpath(name).read_text(encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rlhf_spmd.telemetry.report", description="Write report.html of a run directory.")
    parser.add_argument("run_dir", help="the run.dir of a run, finished or not")
    try:
        print(write_report(parser.parse_args(arguments).run_dir))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
