"""report.html: complete, self-contained, safe against what samples contain, and possible from any part of a run directory."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from places import ROOT
from rlhf_spmd.telemetry import charts, timeline_chart
from rlhf_spmd.telemetry.jsonl import JsonlLog
from rlhf_spmd.telemetry.logger import LoggerConfig, MetricLogger
from rlhf_spmd.telemetry.report import main, write_report
from rlhf_spmd.telemetry.run_dir import ROLLOUTS_FILE, ExitStatus, atomic_write_text, write_exit_status
from rlhf_spmd.telemetry.summary import summarize
from rlhf_spmd.telemetry.trace import Timeline, write_trace

HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(1)> & \u2028 ]]> <!--'
MS = 1_000_000
CONFIG = (
    "run: {name: sorting, steps: 50, seed: 1}\nalgorithm: {name: ppo}\nmodels: {actor: {path: '<b>tiny</b>', layout: {tp: 2}}}"
)


class Page(HTMLParser):
    """Collects tags, the curves' names, and checks that every element is closed."""

    VOID = frozenset({"meta", "br", "img", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.series: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.VOID:
            self.open.append(tag)
        hover = dict(attrs).get("data-hover")
        if hover:
            self.series += [curve["name"] for curve in json.loads(hover)]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"unexpected </{tag}>"

    def handle_data(self, data: str) -> None:
        self.text += data


def fill(run_dir: Path, steps: int = 50) -> None:
    atomic_write_text(run_dir / "config.yaml", CONFIG)
    logger = MetricLogger(run_dir, LoggerConfig())
    rollouts = JsonlLog(run_dir / ROLLOUTS_FILE, None)
    timelines = [Timeline(rank, ("main",)) for rank in range(3)]
    for step in range(1, steps + 1):
        metrics = {
            "reward/mean": step / 100,
            "reward/std": 0.1,
            "reward/min": 0.0,
            "reward/max": 1.0,
            "actor/kl": math.nan if step == 3 else 0.01,
            "critic/explained_variance": 0.5,
            "response_length/mean": 20.0,
            "response_length/max": 30,
            "rollout/log_prob_diff_max": 0.0,
            "custom/<metric>": 1.0,
            "timing_s/generate_sequences": 0.5,
            "timing_s/update_actor": 0.25,
            "timing_s/step": 1.0,
        }
        logger.log(step, metrics | ({"val/sort/accuracy": step / 60} if step % 10 == 0 else {}))
        rollouts.append([{"step": step, "row_id": step, "prompt": HOSTILE, "response": HOSTILE, "score": 0.5, "note": HOSTILE}])
        for timeline in timelines:
            start = step * 1000 * MS
            timeline.add("actor.generate_sequences", "compute", step, start, start + 500 * MS, {"rows": 8})
            timeline.add(HOSTILE, "communication", step, start + 500 * MS, start + 600 * MS, {"note": HOSTILE})
    logger.close()
    rollouts.close()
    write_trace(run_dir / "trace.json", [timeline.to_bytes() for timeline in timelines])
    write_exit_status(run_dir, ExitStatus("numerics", HOSTILE, rank=2, call="actor.update_actor", step=steps))
    (run_dir / "checkpoints" / "step_40").mkdir(parents=True)
    (run_dir / "checkpoints" / "step_40" / "COMMIT").touch()


def test_report_shows_curves_phases_timeline_samples_and_status(tmp_path: Path) -> None:
    fill(tmp_path)
    text = write_report(tmp_path).read_text()
    page = Page(text)
    assert page.series[:3] == ["reward/mean", "val/sort/accuracy", "actor/kl"]
    assert {"response_length/mean", "response_length/max", "rollout/log_prob_diff_max", "custom/<metric>"} <= set(page.series)
    assert not any(name.startswith("timing_s/") for name in page.series)
    for expected in (
        "sorting",
        "failed: numerics",
        "rank 2 in actor.update_actor after step 50",
        "Step 1",
        "Step 50",
        "step_40",
    ):
        assert expected in page.text
    assert "rank 0 (pools main)" in page.text and "Steps 48 to 50 of 50 traced." in page.text
    assert "generate_sequences 50%" in page.text and "other 25%" in page.text
    assert "<b>tiny</b>" in page.text, "configuration values are shown as text"


def test_report_fetches_nothing_and_runs_no_text_of_the_run(tmp_path: Path) -> None:
    fill(tmp_path)
    text = write_report(tmp_path).read_text()
    page = Page(text)
    assert page.tags.count("script") == 1 and not {"img", "link", "iframe", "object", "base"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert not re.search(r"https?://|url\(|@import", text)
    assert "default-src 'none'" in text
    assert 'alert("x")' in page.text  # the sample itself can be read


@pytest.mark.parametrize("missing", ["metrics.jsonl", "rollouts.jsonl", "trace.json", "config.yaml", "exit_status.json"])
def test_report_does_without_any_of_the_files(tmp_path: Path, missing: str) -> None:
    fill(tmp_path, steps=3)
    (tmp_path / missing).unlink()
    assert "sorting" in Page(write_report(tmp_path).read_text()).text or missing == "config.yaml"


def test_report_of_an_empty_directory_and_of_damaged_files(tmp_path: Path) -> None:
    Page(write_report(tmp_path).read_text())
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "reward/mean": null}\n\xff\n[1]\n{"step": "x"}\n{"step": 2, "a": 1}\n{"ste'
    )
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1, "prompt": [{"role": "user"}], "score": null}\n{}\n')
    (tmp_path / "trace.json").write_text('{"traceEvents": [{"ph": "X"}, 3]}')
    (tmp_path / "config.yaml").write_text("a: [\n")
    (tmp_path / "exit_status.json").write_text("{")
    page = Page(write_report(tmp_path).read_text())
    assert page.series == ["a"] and "not finished" in page.text


def test_of_supervised_fine_tuning_the_loss_comes_first(tmp_path: Path) -> None:
    steps = [{"step": n, "actor/loss": 2.0 / n, "val/loss": 3.0 / n, "val/reward_mean": 0.1 * n} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    page = Page(write_report(tmp_path).read_text())
    assert page.series == ["val/reward_mean", "actor/loss", "val/loss"]
    assert page.text.index("Loss") < page.text.index("Validation")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    assert main([str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_long_curves_keep_their_spikes() -> None:
    spike = charts.Point(5003, 9.0)
    thinned = charts.thin([spike if step == spike.step else charts.Point(step, 0.0) for step in range(10_000)])
    assert len(thinned) <= charts.MAX_POINTS and spike in thinned


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0.0, 40_000.0, ["0", "10k", "20k", "30k", "40k"]),
        (-3e-5, 1e-5, ["-3e-5", "-2e-5", "-1e-5", "0", "1e-5"]),
        (1780.0, 1820.0, ["1,780", "1,790", "1,800", "1,810", "1,820"]),
        (5.0, 5.0, ["5"]),
    ],
)
def test_axis_labels_are_round_and_even(low: float, high: float, expected: list[str]) -> None:
    assert charts.tick_labels(charts.ticks(low, high, 5)) == expected


def test_numbers_for_reading() -> None:
    numbers = [0.0, 0.12345, 1234.5678, 1.5e-7, 2.5e6, -3.0, math.nan]
    assert [charts.number_text(number) for number in numbers] == ["0", "0.1235", "1,235", "1.5e-07", "2.5M", "-3", "n/a"]


def test_a_planned_schedule_is_drawn_in_the_same_form() -> None:
    rows = [timeline_chart.Row("rank 0", [[timeline_chart.Box("generate", 0.0, 1.5, "generate\n1.5 s")]])]
    svg = timeline_chart.draw(timeline_chart.TimelineChart(rows, [(0.0, "step 1")]), {"generate": "red"})
    assert Page(svg).tags.count("rect") == 2 and "generate" in svg
    assert timeline_chart.draw(timeline_chart.TimelineChart(()), {}) == ""


def test_the_timeline_is_bounded() -> None:
    events = [
        {"ph": "X", "name": "call", "cat": "compute", "ts": float(i), "dur": 0.5, "pid": i % 64, "tid": 1, "args": {"step": 1}}
        for i in range(9000)
    ]
    chart, totals = timeline_chart.from_trace({"traceEvents": events})
    svg = timeline_chart.draw(chart, {})
    assert svg.count("<rect") <= timeline_chart.MAX_BOXES + timeline_chart.MAX_ROWS
    assert "4000 shortest spans are not drawn" in chart.note and "first 32 of 64 ranks" in chart.note
    assert totals == {"call": pytest.approx(9000 * 0.5e-6)}


def test_the_summary_of_no_run_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhf_spmd.telemetry.summary", str(tmp_path / "none")]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"run directory {tmp_path / 'none'} does not exist; give the run.dir of a run\n"


def test_summary_compares_start_and_end(tmp_path: Path) -> None:
    fill(tmp_path)
    write_report(tmp_path)
    text = summarize(tmp_path)
    assert re.search(r"reward +0\.03 -> 0\.48 +\(\+0\.450; means of the first and the last 5 logged\)", text)
    assert "val/sort/accuracy" in text and "steps               50 in 00:50" in text
    assert "samples of step 1\n" in text and "samples of step 50\n" in text and "[0.5]" in text
    assert str(tmp_path / "report.html") in text and "step_40" in text and "export" not in text
    assert summarize(tmp_path / "checkpoints").startswith("run ")
