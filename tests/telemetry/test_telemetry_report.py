"""report.html: complete, self-contained, safe against what samples contain, and possible from any part of a run directory."""

from __future__ import annotations

import http.client
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import tasks
from ranks import run_command
from report_pages import Page, browse
from rlhf_spmd import report as report_program
from rlhf_spmd.telemetry import report, run_lock, timeline_chart
from rlhf_spmd.telemetry.report import MAX_POINTS, RunRecord, read_run, render, write_report
from rlhf_spmd.telemetry.run_dir import (
    METRICS_FILE,
    ROLLOUTS_FILE,
    STARTS_FILE,
    VALIDATION_FILE,
    ExitStatus,
    JsonlLog,
    atomic_write_text,
    write_exit_status,
)
from rlhf_spmd.telemetry.summary import summarize
from rlhf_spmd.telemetry.trace import Timeline, write_trace

HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(1)> & \u2028 ]]> <!--'
MS = 1_000_000
CONFIG = (
    "run: {name: sorting, steps: 50, seed: 1}\nalgorithm: {name: ppo}\nmodels: {actor: {path: '<b>tiny</b>', layout: {tp: 2}}}"
)


METRICS = {
    **dict.fromkeys(("reward/max", "timing_s/step", "custom/<metric>"), 1.0),
    **dict.fromkeys(("critic/explained_variance", "timing_s/generate_sequences"), 0.5),
    **dict.fromkeys(("reward/min", "rollout/log_prob_diff_max"), 0.0),
    **{"reward/std": 0.1, "timing_s/update_actor": 0.25, "response_length/mean": 20.0, "response_length/max": 30},
}


def fill(run_dir: Path, steps: int = 50) -> None:
    atomic_write_text(run_dir / "config.yaml", CONFIG)
    files = (METRICS_FILE, ROLLOUTS_FILE, VALIDATION_FILE)
    logger, rollouts, validations = (JsonlLog(run_dir / file, None) for file in files)
    timelines = [Timeline(rank, ("main",)) for rank in range(3)]
    for step in range(1, steps + 1):
        metrics = METRICS | {
            "reward/mean": step / 100,
            "actor/kl": math.nan if step == 3 else 0.01,
            "unix_s": 1.8e9 + 36 * step,
        }
        logger.append([{"step": step, **metrics} | ({"val/sort/accuracy": step / 60} if step % 10 == 0 else {})])
        rollouts.append([{"step": step, "row_id": step, "prompt": HOSTILE, "response": HOSTILE, "score": 0.5, "note": HOSTILE}])
        for timeline in timelines:
            start = step * 1000 * MS
            timeline.add("actor.generate_sequences", "compute", step, start, start + 500 * MS, {"rows": 8})
            timeline.add(HOSTILE, "communication", step, start + 500 * MS, start + 600 * MS, {"note": HOSTILE})
        if step % 10 == 0:
            row = {"step": step, "set": "sort", "row_id": 8, "prompt": "53>", "response": f"{step}", "answer": "35"}
            validations.append([row])
    for log in (logger, rollouts, validations):
        log.close()
    starts = {"step": 0, "host": "node7", "started": "A"}, {"step": 9, "host": "node8", "started": "B"}
    atomic_write_text(run_dir / STARTS_FILE, "".join(json.dumps(start) + "\n" for start in starts))
    write_trace(run_dir / "trace.json", [timeline.to_bytes() for timeline in timelines])
    write_exit_status(run_dir, ExitStatus("numerics", HOSTILE, rank=2, call="actor.update_actor", step=steps))
    (run_dir / "checkpoints" / "step_40").mkdir(parents=True)
    (run_dir / "checkpoints" / "step_40" / "COMMIT").touch()


def test_report_has_curves_phases_timeline_samples_and_status(tmp_path: Path) -> None:
    fill(tmp_path)
    text = write_report(tmp_path).read_text()
    page = Page(text)
    (run,) = page.runs
    assert run["steps"] == list(range(1, 51)) and run["hours"][-1] == pytest.approx(0.49)
    assert run["metrics"]["reward/mean"] == [step / 100 for step in range(1, 51)]
    assert run["metrics"]["actor/kl"][:4] == [0.01, 0.01, None, 0.01]
    assert run["metrics"]["val/sort/accuracy"][9::10] == pytest.approx([n / 6 for n in range(1, 6)], rel=1e-5)
    assert "custom/<metric>" in run["metrics"] and not {"step", "unix_s"} & run["metrics"].keys()
    assert run["status"]["text"] == "failed: numerics" and run["name"] == "sorting"
    assert run["status"]["message"].startswith("rank 2 in actor.update_actor after step 50: ")
    facts = {"Steps": "50 of 50", "Host": "node8", "Started": "B", "Starts": "A after step 0, B after step 9"}
    assert run["facts"].items() >= facts.items()
    assert "step_40" in run["facts"]["Resume"] and run["artifacts"] == [["checkpoints/step_40", "whole", "0 B"]]
    assert [[sample["step"] for sample in column] for column in run["samples"]] == [[1], [50]]
    assert [sample["response"] for sample in run["validations"]["samples"]] == ["10", "20", "30", "40", "50"]
    assert run["config"]["models.actor.path"] == "<b>tiny</b>"
    assert page.text.count("rank 0 (pools main)") == 1 and run["timeline"]["note"] == "Steps 48 to 50 of 50 traced."
    colors = json.loads(page.data)["colors"]
    assert colors["generate_sequences"] == "var(--c0)" and set(run["timeline"]["keys"]) <= colors.keys()
    # it fetches nothing and runs no text of the run, whose samples can be read
    assert run["samples"][0][0]["response"] == HOSTILE
    assert page.tags.count("script") == 3 and not {"img", "link", "iframe", "object", "base"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert not re.search(r"https?://|url\(|@import", text) and "default-src 'none'" in text
    assert "Permission is hereby granted" in text, "the licence of the library"


def test_report_of_an_empty_directory_and_of_damaged_files(tmp_path: Path) -> None:
    Page(write_report(tmp_path).read_text())
    lines = b'{"step": 1, "reward/mean": null}\n\xff\n[1]\n{"step": "x"}\n{"step": 2, "a": 1}\n{"ste'
    (tmp_path / "metrics.jsonl").write_bytes(lines)
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1, "prompt": [{"role": "user"}], "score": null}\n{}\n')
    (tmp_path / "trace.json").write_text('{"traceEvents": [{"ph": "X"}, 3]}')
    (tmp_path / "config.yaml").write_text("a: [\n")
    (tmp_path / "exit_status.json").write_text("{")
    (run,) = Page(write_report(tmp_path).read_text()).runs
    assert list(run["metrics"]) == ["a"] and run["status"]["text"] == "not finished"
    (tmp_path / "run").mkdir()
    fill(tmp_path / "run", steps=3)
    for file in (METRICS_FILE, "trace.json", STARTS_FILE):
        (tmp_path / "run" / file).unlink()
        assert "sorting" in Page(write_report(tmp_path / "run").read_text()).text


def test_the_command_compares_runs_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "run").mkdir(parents=True)
        fill(tmp_path / name / "run", steps=2)
    first, second = (str(tmp_path / name / "run") for name in "ab")
    assert report_program.main([first]) == 0
    assert capsys.readouterr().out == f"{first}/report.html\n"
    assert report_program.main([first, second, f"out={tmp_path / 'both.html'}"]) == 0
    page = Page((tmp_path / "both.html").read_text())
    assert [run["name"] for run in page.runs] == ["a/run", "b/run"] and page.tags.count("template") == 2
    assert report_program.main([str(tmp_path)]) == 0, "a folder of runs"
    assert [run["name"] for run in Page((tmp_path / "report.html").read_text()).runs] == ["a/run", "b/run"]
    (tmp_path / "c" / "deep").mkdir(parents=True)
    for arguments, line in (
        ([first, second], "2 directories and no out=FILE; give out=FILE for a page of several"),
        ([str(tmp_path / "none")], f"run directory {tmp_path / 'none'} does not exist; give the run.dir of a run"),
        (
            [str(tmp_path / "c")],
            f"{tmp_path / 'c'} is no run's directory: it has none of .*, nor have folders in it; give a run.dir",
        ),
        ([first, f"out={tmp_path}/none/x.html"], f"out={tmp_path}/none/x.html: No such file or directory; give a file in .*"),
        ([first, "ot=x.html"], "ot=x.html: there is no such key, and no such run directory; allowed are .* out=FILE"),
    ):
        assert re.fullmatch(f"config error: {line}\n", refusal(arguments, capsys)), line


def test_runs_that_differ_in_their_seed_are_one_line(tmp_path: Path) -> None:
    """The mean of each step's numbers, where there are any, between the lowest and the highest."""
    rows = {1: [0.0, 1.0, 2.0], 2: [1.0, 2.0, 6.0], 3: [4.0, 6.0]}
    for seed, values in rows.items():
        (tmp_path / f"ppo-{seed}").mkdir()
        made = {"run": {"seed": seed, "name": f"ppo-{seed}", "dir": f"runs/{seed}"}, "algorithm": {"name": "ppo"}}
        atomic_write_text(tmp_path / f"ppo-{seed}" / "config.yaml", json.dumps(made))
        lines = ({"step": step, "a": value, "unix_s": 3600.0 * (step + seed)} for step, value in enumerate(values, 1))
        atomic_write_text(tmp_path / f"ppo-{seed}" / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "other").mkdir()
    atomic_write_text(tmp_path / "other" / "config.yaml", "run: {seed: 4}\nalgorithm: {name: grpo}")
    assert report_program.main([str(tmp_path)]) == 0
    page = Page((tmp_path / "report.html").read_text())
    (line,) = json.loads(page.data)["groups"]
    assert [(run["name"], run.get("group")) for run in page.runs] == [("other", None), *((f"ppo-{seed}", 0) for seed in rows)]
    assert line["name"] == "ppo, 3 seeds" and line["steps"] == [1, 2, 3] and line["hours"] == [0, 1, 2]
    assert [line[part]["a"] for part in ("low", "high")] == [[0, 1, 2], [4, 6, 6]]
    assert line["metrics"]["a"] == pytest.approx([5 / 3, 3, 4], abs=1e-5)


def test_a_run_whose_process_lives_is_running(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "config.yaml", CONFIG)
    own = run_lock.this_process()
    for pid, text in ((1, "running"), (4_000_000, "not finished")):
        owner = replace(own, pid=pid, started=run_lock._started(pid) or "1")
        atomic_write_text(tmp_path / run_lock.LOCK_FILE, json.dumps(asdict(owner)))
        assert Page(render([read_run(tmp_path)])).runs[0]["status"]["text"] == text
    assert Page(render([read_run(tmp_path, ExitStatus("done"))])).runs[0]["status"]["text"] == "done"


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says of them, which it ends with."""
    with pytest.raises(SystemExit) as ending:
        report_program.main(arguments)
    assert ending.value.code == 2
    return capsys.readouterr().err


def test_long_curves_keep_their_spikes(tmp_path: Path) -> None:
    lines = ({"step": step, "a": 9.0 if step == 5003 else float(step % 2), "timing_s/step": 3.6} for step in range(10_000))
    atomic_write_text(tmp_path / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    (run,) = Page(write_report(tmp_path).read_text()).runs
    assert len(run["steps"]) == len(run["hours"]) == len(run["metrics"]["a"]) <= MAX_POINTS
    assert abs(run["steps"][run["metrics"]["a"].index(9)] - 5003) < 10
    assert run["steps"][-1] == 9999 and run["hours"][-1] == pytest.approx(9.999, rel=1e-3)  # without times the seconds of steps


def test_served_data_change_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, steps=2)
    command = [sys.executable, "-m", "rlhf_spmd.report", "--serve", "--port", "0", str(tmp_path)]
    with subprocess.Popen(command, env=tasks.environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = urllib.parse.urlsplit(process.stdout.readline().split()[0])
        assert url.hostname == "127.0.0.1"

        def ask(path: str, **headers: str) -> tuple[int, str]:
            connection = http.client.HTTPConnection(url.hostname or "", url.port or 0, timeout=60)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        page = Page(ask("/")[1])
        assert json.loads(page.data)["live"] and page.runs[0]["steps"] == [1, 2]
        assert any("connect-src 'self'" in value for _, value in page.attributes)
        assert json.loads(ask("/data")[1])["runs"] == page.runs
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "reward/mean": 0.5}\n')
        assert json.loads(ask("/data")[1])["runs"][0]["steps"] == [1, 2, 3]
        assert ask("/config.yaml")[0] == 404
        assert ask("/data", Host=f"evil.example:{url.port}")[0] == 403, "a name of elsewhere that leads here"
        assert f"--port {url.port}: " in refusal(["--serve", "--port", str(url.port), str(tmp_path)], capsys)
        process.send_signal(signal.SIGINT)  # as Ctrl-C
        assert process.wait(timeout=60) == 0


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser")
def test_a_browser_makes_panels_of_it(tmp_path: Path) -> None:
    fill(tmp_path)
    drawn = browse(write_report(tmp_path).resolve().as_uri())
    titles = re.findall(r'<span class="title">(.*?)</span>', drawn)
    assert titles[:4] == ["Reward", "Validation sort/accuracy", "KL to the reference", "Response length"]
    assert "custom/&lt;metric&gt;" in titles and drawn.count("<canvas") >= 7
    sections = "Curves, Time per step, Timeline, Validation samples, Samples, Checkpoints, How it was made, Configuration"
    assert re.findall("<h2>(.*?)</h2>", drawn) == sections.split(", ")
    texts = "0.03 \u2192 0.48", "failed: numerics", "rank 2 in actor.update_actor", "other 25%", "&lt;b&gt;tiny&lt;/b&gt;"
    assert [text for text in texts if text not in drawn] == []
    assert "<img" not in drawn and "<script" not in drawn

    (tmp_path / "other").mkdir()
    atomic_write_text(tmp_path / "other" / "metrics.jsonl", '{"step": 1, "mine": 2.5}\n')
    drawn = browse(write_report(tmp_path / "other").resolve().as_uri())
    assert all(text in drawn for text in ("not finished", '<details open="">', ">2.5<")), "unknown metrics are open"
    fill(tmp_path / "other", steps=3)
    atomic_write_text(tmp_path / "other" / "config.yaml", CONFIG.replace("tp: 2", "tp: 4").replace("seed: 1", "more: 1"))
    atomic_write_text(tmp_path / "both.html", render([read_run(tmp_path), read_run(tmp_path / "other")]))
    drawn = browse((tmp_path / "both.html").resolve().as_uri())
    marks = re.findall(r'class="key" style="--k: ?[^"]+">(.*?)</span>', drawn)
    # in the summary, over sections (the shorter run has no validation) and over the tables of settings
    assert "<h2>What differs</h2>" in drawn
    assert (marks.count(tmp_path.name), marks.count(f"{tmp_path.name}/other")) == (1 + 5 + 4, 1 + 4 + 4)
    assert "models.actor.layout.tp</td><td>2</td><td>4" in drawn and "in some of the runs, 2 values" in drawn


def test_samples_are_of_several_prompts_and_the_best_step_is_known(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "config.yaml", "run: {keep_best: null}")
    files = (METRICS_FILE, ROLLOUTS_FILE, VALIDATION_FILE)
    metrics, rollouts, validations = (JsonlLog(tmp_path / file, None) for file in files)
    scores = dict.fromkeys(range(0, 24, 2), 0.1) | {0: 9.0, 4: 0.2, 8: 0.7, 10: 0.7, 22: 0.3}
    for step, score in scores.items():
        metrics.append([{"step": step, "val/reward_mean": score, "val/loss": step}])
        rollouts.append({"step": step, "row_id": row, "prompt": f"p{row // 4}", "response": f"{row}"} for row in range(32))
        validations.append([{"step": step, "set": "a", "row_id": 0, "prompt": "p", "response": f"{step}"}])
    for log in (metrics, rollouts, validations):
        log.close()
    (run,) = Page(write_report(tmp_path).read_text()).runs
    assert [[row["response"] for row in its] for its in run["samples"]] == 2 * [["0", "4", "8", "12", "16", "20"]]
    assert run["best"] == {"name": "val/reward_mean", "step": 8, "value": 0.7}, "the first of equals, and none before training"
    assert {0, 8, 22} <= set(run["validations"]["steps"]) and len(run["validations"]["steps"]) == 9
    atomic_write_text(tmp_path / "config.yaml", "run: {keep_best: val/loss}")
    (run,) = Page(write_report(tmp_path).read_text()).runs
    assert run["best"] == {"name": "val/loss", "step": 2, "value": 2}


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser")
def test_a_browser_takes_over_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, steps=2)
    (tmp_path / "exit_status.json").unlink()

    def render_then_go_on(runs: Sequence[RunRecord], is_live: bool) -> str:
        page = render(runs, is_live)
        JsonlLog(tmp_path / METRICS_FILE, 2).append([{"step": 3, "reward/mean": 0.5, "late/metric": 7.25}])
        return page

    monkeypatch.setattr(report, "render", render_then_go_on)
    with report.open_server([str(tmp_path)], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        drawn = browse(f"http://127.0.0.1:{server.server_port}/", budget_ms=15_000)
        server.shutdown()
    assert "3 of 50" in drawn and "late (1)" in drawn and drawn.count("<h1>") == 1
    assert "<svg" in drawn, "the timeline is still there"


def test_the_timeline_is_bounded() -> None:
    span = {"ph": "X", "name": "call", "cat": "compute", "dur": 0.5, "tid": 1, "args": {"step": 1}}
    events = [{**span, "ts": float(i), "pid": i % 64} for i in range(9000)]
    chart, totals = timeline_chart.from_trace({"traceEvents": events})
    svg = timeline_chart.draw(chart, {})
    assert svg.count("<rect") <= timeline_chart.MAX_BOXES + timeline_chart.MAX_ROWS
    assert "4000 shortest spans are not drawn" in chart.note and "first 32 of 64 ranks" in chart.note
    assert totals == {"call": pytest.approx(9000 * 0.5e-6)}


def test_the_summary_of_no_run_is_one_line(tmp_path: Path) -> None:
    ended = run_command("rlhf_spmd.__main__", ["summary", str(tmp_path / "none")], tasks.environment())
    line = f"config error: run directory {tmp_path / 'none'} does not exist; give the run.dir of a run\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)


def test_summary_compares_start_and_end(tmp_path: Path) -> None:
    fill(tmp_path)
    write_report(tmp_path)
    text = summarize(tmp_path)
    assert re.search(r"reward +0\.03 -> 0\.48 +\(\+0\.450; means of the first and the last 5 logged\)", text)
    assert "val/sort/accuracy" in text and "steps               50 of 50 in 00:50" in text
    assert "samples of step 1\n" in text and "samples of step 50\n" in text and "[0.5]" in text
    assert str(tmp_path / "report.html") in text and "step_40" in text and "export" not in text
    assert summarize(tmp_path / "checkpoints").startswith("run ")
    atomic_write_text(tmp_path / "config.yaml", "run: {steps: 2}")
    lines = {"step": 0, "val/reward_mean": 0.5}, {"step": 1}, {"step": 2}  # the validation before the first step is no step
    atomic_write_text(tmp_path / METRICS_FILE, "".join(json.dumps(line) + "\n" for line in lines))
    assert "  steps               2 of 2\n" in summarize(tmp_path)
