"""``report.html``: one self-contained page about one or several runs, from the files of their run directories.

Any of these files may be missing. Python turns them into one JSON object; ``report.js`` draws it in the browser with
uPlot (``uplot/``, MIT), which is part of the page. ``open_server`` serves a page of running jobs, which asks for new
data again and again.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate, takewhile
from pathlib import Path
from statistics import mean
from typing import Any

from rlhf_spmd.telemetry import timeline_chart
from rlhf_spmd.telemetry.episodes import page_episodes
from rlhf_spmd.telemetry.progress import LOWER_IS_BETTER
from rlhf_spmd.telemetry.run_dir import (
    CHECKPOINTS_DIR,
    EXPORT_DIR,
    METRICS_FILE,
    REPORT_FILE,
    ROLLOUTS_FILE,
    STARTS_FILE,
    TRACE_FILE,
    VALIDATION_FILE,
    ExitStatus,
    atomic_write_text,
    finite_number,
    json_value,
    list_checkpoints,
    newest_checkpoint,
    pick_samples,
    read_config,
    read_exit_status,
    read_json,
    read_jsonl,
)
from rlhf_spmd.telemetry.run_lock import other_owner
from rlhf_spmd.telemetry.signals import read_signals

TIMING = "timing_s/"
NOT_DRAWN = ("step", "unix_s")  # keys of metrics.jsonl that are axes, not curves
MAX_POINTS = 2000  # of a curve
MAX_STEPS = 8  # columns of the validation samples
SAMPLES_PER_STEP = 6
MAX_CHARACTERS = 4000  # of a sample's text
TOKEN_KEYS = ("ids", "mask", "log_probs", "node", "parent")  # of a sample, which the page shows as an episode
PER_START_KEYS = ("run.seed", "run.name", "run.dir", "run.resume", "logger.name")  # which may differ in one experiment
NUM_COLORS = 10  # css variables --c0 ... --c9; everything after that is grey

Values = Sequence[float | None]
Sample = Mapping[str, Any]  # a line of rollouts.jsonl or validation.jsonl


@dataclass(frozen=True)
class RunRecord:
    """The parsed contents of a run directory.

    - metrics: lines of metrics.jsonl by rising step
    - config: values as text, by dotted key
    - is_running: a living process owns the directory
    """

    directory: Path
    metrics: Sequence[Mapping[str, Any]]
    config: Mapping[str, str]
    status: ExitStatus | None
    is_running: bool = False

    def values(self, name: str) -> list[float]:
        """Return the numbers of a metric by rising step, without steps that lack it."""
        return [number for row in self.metrics if (number := finite_number(row.get(name))) is not None]

    def names(self) -> list[str]:
        """Return every metric with at least one number, in order of appearance."""
        names = dict.fromkeys(name for row in self.metrics for name, value in row.items() if finite_number(value) is not None)
        return [name for name in names if name not in NOT_DRAWN]


def read_lines(directory: Path, file: str) -> list[dict[str, Any]]:
    """Return the objects of a JSON lines file that have a step."""
    return [line for line in read_jsonl(directory / file) if isinstance(line.get("step"), int)]


def first_and_last_samples(rollouts: Sequence[Sample], limit: int) -> list[Sequence[Sample]]:
    """Return up to ``limit`` rollouts of the first and of the last step that has any, spread over prompts."""
    steps = sorted({sample["step"] for sample in rollouts})
    picked: list[Sequence[Sample]] = []
    for step in dict.fromkeys([*steps[:1], *steps[-1:]]):
        samples = [sample for sample in rollouts if sample["step"] == step]
        picked.append([samples[i] for i in pick_samples((str(sample.get("prompt")) for sample in samples), limit)])
    return picked


def read_run(run_dir: str | os.PathLike[str], status: ExitStatus | None = None) -> RunRecord:
    """Parse a run directory. ``status`` replaces exit_status.json. Raises ValueError if there is no such directory."""
    directory = Path(run_dir)
    if not directory.is_dir():
        raise ValueError(f"run directory {directory} does not exist; give the run.dir of a run")
    by_step = {row["step"]: row for row in read_lines(directory, METRICS_FILE)}
    metrics = [by_step[step] for step in sorted(by_step)]
    status = status or read_exit_status(directory)
    is_running = False
    with suppress(OSError):  # a directory in which this user cannot write shows no age of its lock
        is_running = status is None and other_owner(directory) is not None
    return RunRecord(directory, metrics, read_config(directory), status, is_running)


def write_report(run_dir: str | os.PathLike[str], status: ExitStatus | None = None) -> Path:
    """Write ``report.html`` into the run directory, atomically, and return its path. Raises ValueError without a directory.

    ``status``: how the run ends, if exit_status.json is not written yet.
    """
    run = read_run(run_dir, status)
    path = run.directory / REPORT_FILE
    atomic_write_text(path, render([run]))
    return path


def page_data(runs: Sequence[RunRecord], is_live: bool = False) -> tuple[str, list[str]]:
    """Return what report.js reads, as JSON, and the timelines as SVG. ``is_live``: the page asks for new data."""
    traces = [timeline_chart.from_trace(_trace(run)) for run in runs]
    colors = _phase_colors(runs, [busy for _, busy in traces])
    entries = [_run_data(run, *trace, colors) for run, trace in zip(runs, traces, strict=True)]
    names = Counter(entry["name"] for entry in entries)
    same_name_paths = {n: run.directory.resolve() for n, run in enumerate(runs) if names[entries[n]["name"]] > 1}
    for n, path in same_name_paths.items():  # they are told apart by their directories
        entries[n]["name"] = str(path.relative_to(os.path.commonpath([other.parent for other in same_name_paths.values()])))
    groups = _seed_groups(runs)
    for number, group in enumerate(groups):
        for n in group:
            entries[n]["group"] = number
    curves = [_mean_curves([runs[n] for n in group], [entries[n]["name"] for n in group]) for group in groups]
    data = json_value({"runs": entries, "groups": curves, "colors": colors, "live": is_live})
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text, [timeline_chart.draw(chart, colors) for chart, _ in traces]


def render(runs: Sequence[RunRecord], is_live: bool = False) -> str:
    """Return the page. It loads nothing, or with ``is_live`` only its data from its own server.

    A content security policy in the page forbids all else, even if data try it.
    """
    data, timelines = page_data(runs, is_live)
    data = data.replace("<", "\\u003c")  # no text of a run can end the element that holds the data
    templates = "".join(f"<template>{svg}</template>" for svg in timelines)
    connect = "; connect-src 'self'" if is_live else ""
    # the library, with its licence in place of its first line (an address)
    library = f"/* uPlot\n{_packaged('uplot/LICENSE')}*/\n" + _packaged("uplot/uPlot.iife.min.js").partition("\n")[2]
    scripts = "".join(map(_packaged, ("report_samples.js", "report_episodes.js", "report.js")))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'unsafe-inline'{connect}\">"
        f"<title>{escape(', '.join(_name(run) for run in runs))}</title>"
        f"<style>{_packaged('uplot/uPlot.min.css')}\n{_packaged('report.css')}</style></head>\n<body>"
        f"<main><noscript>The page is made by a script in it.</noscript></main>{templates}"
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>{library}</script>\n<script>{scripts}</script></body></html>\n"
    )


def _run_data(
    run: RunRecord, chart: timeline_chart.TimelineChart, busy: Mapping[str, float], colors: Mapping[str, str]
) -> dict[str, Any]:
    """Return what report.js reads about a run."""
    best = _best(run)
    rollouts = read_lines(run.directory, ROLLOUTS_FILE)
    used = {box.key for row in chart.rows for track in row.tracks for box in track}
    return {
        "name": _name(run),
        "directory": str(run.directory),
        "status": _status(run),
        "signals": read_signals(run.metrics),
        "facts": _facts(run),
        **_curves(run),
        "best": best,
        "timeline": {"note": chart.note, "keys": sorted(used & colors.keys(), key=lambda key: -busy.get(key, 0.0))},
        "samples": [[_short(sample) for sample in samples] for samples in first_and_last_samples(rollouts, SAMPLES_PER_STEP)],
        "episodes": page_episodes(rollouts, run.directory, run.config.get("models.actor.path")),
        "validations": _validations(read_lines(run.directory, VALIDATION_FILE), best["step"] if best else None),
        "artifacts": list(_artifacts(run.directory)),
        "config": run.config,
    }


def _name(run: RunRecord) -> str:
    return run.config.get("run.name") or run.directory.resolve().name


def _status(run: RunRecord) -> dict[str, str]:
    """Return the badge: ``kind`` (its colour), ``text``, and ``message``: what stopped the run, where, the last checkpoint."""
    status = run.status
    if status is None:
        return {"kind": "", "text": "running" if run.is_running else "not finished", "message": ""}
    kind = {"done": "good", "preempted": "warn"}.get(status.class_, "bad")
    where = (
        f"rank {status.rank}" if status.rank is not None else "",
        f"in {status.call}" if status.call else "",
        f"after step {status.step}" if status.step is not None else "",
    )
    cause = ": ".join(filter(None, (" ".join(filter(None, where)), status.message)))
    checkpoint = f"Last checkpoint: {status.last_checkpoint}" if status.last_checkpoint else ""
    text = f"failed: {status.class_}" if kind == "bad" else status.class_
    return {"kind": kind, "text": text, "message": "" if kind == "good" else "\n".join(filter(None, (cause, checkpoint)))}


def _facts(run: RunRecord) -> dict[str, str]:
    """Return the settings, versions and starts of a run by their titles; versions are those of the last start."""
    config = run.config
    facts = {
        "Algorithm": config.get("algorithm.name"),
        "Model": config.get("models.actor.path"),
        "Seed": config.get("run.seed"),
    }
    if run.metrics:
        total = config.get("run.steps")
        facts["Steps"] = f"{run.metrics[-1]['step']}" + (f" of {total}" if total else "")
    starts = read_lines(run.directory, STARTS_FILE)
    if starts:
        facts |= {name.capitalize(): str(value) for name, value in starts[-1].items() if name != "step"}
    if len(starts) > 1:
        facts["Starts"] = ", ".join(f"{start.get('started')} after step {start['step']}" for start in starts)
    checkpoint = newest_checkpoint(run.directory)
    facts["Resume"] = f"the same command goes on from {checkpoint.name} (run.resume=auto)" if checkpoint else "no checkpoint"
    return {name: value for name, value in facts.items() if value}


def _curves(run: RunRecord) -> dict[str, Any]:
    """Return ``steps``, ``hours`` (since the first line) and ``metrics``, one column each. Long curves keep their extremes."""
    steps = [row["step"] for row in run.metrics]
    times = [finite_number(row.get("unix_s")) for row in run.metrics]
    if None in times:  # the time of steps alone
        times = list(accumulate(finite_number(row.get(TIMING + "step")) or 0.0 for row in run.metrics))
    bucket_size = math.ceil(2 * len(steps) / MAX_POINTS) if len(steps) > MAX_POINTS else 1
    begins = range(0, len(steps), bucket_size)
    bucket_edges = [i for begin in begins for i in sorted({begin, min(begin + bucket_size, len(steps)) - 1})]
    columns = {name: [finite_number(row.get(name)) for row in run.metrics] for name in run.names()}
    return {
        "steps": [steps[i] for i in bucket_edges],
        "hours": [_rounded(((times[i] or 0.0) - (times[0] or 0.0)) / 3600) for i in bucket_edges],
        "metrics": {name: list(map(_rounded, _extremes(column, bucket_size))) for name, column in columns.items()},
    }


def _seed_groups(runs: Sequence[RunRecord]) -> list[list[int]]:
    """Return the positions of runs that differ in ``run.seed``, and but for names and directories in nothing else."""
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for n, run in enumerate(runs):
        settings = sorted((key, value) for key, value in run.config.items() if key not in PER_START_KEYS)
        groups.setdefault(tuple(settings), []).append(n)
    seeds = [[runs[n].config.get("run.seed") for n in group] for group in groups.values()]
    return [group for group, values in zip(groups.values(), seeds, strict=True) if None not in values and len(set(values)) > 1]


def _mean_curves(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, Any]:
    """Return what :func:`_curves` returns of the means of ``runs`` at each step, with their ``low`` and ``high`` ends."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for run in runs:
        start_s = next(iter(run.values("unix_s")), 0.0)
        for row in run.metrics:
            elapsed_s = (finite_number(row.get("unix_s")) or start_s) - start_s
            by_step.setdefault(row["step"], []).append({**row, "unix_s": elapsed_s})
    keys = dict.fromkeys(name for run in runs for name in (*run.names(), "unix_s"))
    columns: dict[str, list[dict[str, Any]]] = {"mean": [], "low": [], "high": []}
    for step, rows in sorted(by_step.items()):
        for rows_of_kind in columns.values():
            rows_of_kind.append({"step": step})
        for key in keys:
            values = [value for row in rows if (value := finite_number(row.get(key))) is not None]
            for kind, pick in (("mean", mean), ("low", min), ("high", max)) if values else ():
                columns[kind][-1][key] = pick(values)
    curves = {kind: _curves(RunRecord(Path(), rows, {}, None)) for kind, rows in columns.items()}
    bands = {kind: curves[kind]["metrics"] for kind in ("low", "high")}
    shared = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    name = "".join(letters[0] for letters in shared).rstrip("-_./ ") or names[0]
    return {"name": f"{name}, {len(runs)} seeds", **curves["mean"], **bands}


def _best(run: RunRecord) -> dict[str, Any] | None:
    """Return metric, step and value of the best validation after step 0, by ``run.keep_best`` or else a usual metric."""
    names = (run.config.get("run.keep_best", ""), "val/reward_mean", "val/accuracy", "val/loss")
    name = next((name for name in names if name in run.names()), "")
    values = [
        (value, row["step"]) for row in run.metrics if row["step"] and (value := finite_number(row.get(name))) is not None
    ]
    if not values:
        return None
    value, step = (min if LOWER_IS_BETTER.fullmatch(name) else max)(values, key=lambda pair: pair[0])
    return {"name": name, "step": step, "value": _rounded(value)}


def _extremes(column: Values, bucket_size: int) -> Iterator[float | None]:
    """Yield the lowest and highest value of each bucket of neighbours, in their order, so spikes stay visible."""
    for begin in range(0, len(column), bucket_size):
        bucket = column[begin : begin + bucket_size]
        values = [value for value in bucket if value is not None]
        indices = sorted({values.index(pick(values)) for pick in (min, max)}) if values else []
        yield from (*(values[index] for index in indices), None, None)[: min(2, len(bucket))]


def _validations(samples: Sequence[Sample], best: int | None) -> dict[str, Any]:
    """Return responses to the same prompts at the first, the last, some other validations, and at step ``best``."""
    steps = sorted({sample["step"] for sample in samples})
    spread = {steps[round(i * (len(steps) - 1) / (MAX_STEPS - 1))] for i in range(MAX_STEPS)} if steps else set()
    columns = sorted(spread | {step for step in steps if step == best})
    return {"steps": columns, "samples": [_short(sample) for sample in samples if sample["step"] in columns]}


def _artifacts(directory: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, state and size of the checkpoints (complete ones have a COMMIT file) and the export."""
    for path in list_checkpoints(directory):
        yield f"{CHECKPOINTS_DIR}/{path.name}", "whole" if (path / "COMMIT").exists() else "not committed", _size(path)
    if (directory / EXPORT_DIR).is_dir():
        yield EXPORT_DIR, "Hugging Face directory", _size(directory / EXPORT_DIR)


def _phase_colors(runs: Sequence[RunRecord], busy: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Return one colour per phase for bars and timelines of all runs, the longest phases first."""
    seconds: Counter[str] = Counter()
    for run in runs:
        seconds.update({name.removeprefix(TIMING): sum(run.values(name)) for name in run.names() if name.startswith(TIMING)})
    keys = [key for key, _ in (*seconds.most_common(), *sum(map(Counter, busy), Counter()).most_common())]
    keys = list(dict.fromkeys(key for key in keys if key not in ("step", timeline_chart.WAITING)))
    return {key: f"var(--c{i})" for i, key in enumerate(keys[:NUM_COLORS])} | {timeline_chart.WAITING: "var(--wait)"}


def _trace(run: RunRecord) -> Mapping[str, Any]:
    trace = read_json(run.directory / TRACE_FILE)
    return trace if isinstance(trace, dict) else {}


def _rounded(value: float | None) -> float | None:
    """Return the number with the digits that a curve shows."""
    if value is None:
        return None
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _short(sample: Sample) -> dict[str, Any]:
    """Return a sample with texts cut to the page's limit."""
    return {
        key: f"{value[:MAX_CHARACTERS]} [...]" if isinstance(value, str) and len(value) > MAX_CHARACTERS else value
        for key, value in sample.items()
        if key not in TOKEN_KEYS
    }


def _size(directory: Path) -> str:
    total = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    power = min((len(str(total)) - 1) // 3, 3)
    return f"{total / 1000**power:.1f} {('B', 'kB', 'MB', 'GB')[power]}" if power else f"{total} B"


def _packaged(name: str) -> str:
    return Path(__file__).parent.joinpath(name).read_text(encoding="utf-8")


LOOPBACK = ("localhost", "127.0.0.1")


def open_server(runs: Sequence[str], port: int) -> ThreadingHTTPServer:
    """Return a server on loopback, whose ``serve_forever`` runs until interrupted. ``port`` 0: a free port.

    Raises ValueError if a run directory does not exist, OSError if the port is taken.
    """
    for run in runs:
        read_run(run)

    class ReportHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Host", "").rpartition(":")[0] not in LOOPBACK:  # a foreign name that resolves to loopback
                return self.send_error(403)
            if self.path not in ("/", "/data"):
                return self.send_error(404)
            records = [read_run(run) for run in runs]
            text = render(records, is_live=True) if self.path == "/" else page_data(records, is_live=True)[0]
            body = text.encode(errors="replace")
            self.send_response(200)
            self.send_header("Content-Type", f"{'text/html' if self.path == '/' else 'application/json'}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):  # the browser has gone
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Print nothing: the page asks every few seconds."""

    return ThreadingHTTPServer((LOOPBACK[1], port), ReportHandler)
