"""What is said of a run that learns nothing or goes astray: once, after as many steps as its rule has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_spmd.telemetry.report import read_run, render
from rlhf_spmd.telemetry.run_dir import METRICS_FILE, atomic_write_text
from rlhf_spmd.telemetry.signals import Signals
from rlhf_spmd.telemetry.summary import summarize
from rlhf_spmd.telemetry.trackers import LoggerConfig
from rlhf_spmd.training.recorder import Recorder

UPDATE = {"loss": 0.0, "lr": 1e-6, "grad_norm": 0.2}
HEALTHY = {
    **{
        "reward/min": 0.0,
        "reward/max": 1.0,
        "group/equal_fraction": 0.9,
        "group/right_fraction": 0.2,
        "group/wrong_fraction": 0.7,
    },
    **{
        "response_length/clip_ratio": 0.9,
        "response_length/min": 3,
        "response_length/max": 9,
        "actor/entropy": 0.3,
        "actor/kl": 0.4,
    },
}
UNGROUPED = {name: value for name, value in HEALTHY.items() if not name.startswith("group/")}
CONSTANT = {"reward/min": 0.5, "reward/max": 0.5}


def update(role: str = "reward", **values: float) -> dict[str, float]:
    return {f"{role}/{name}": value for name, value in {**UPDATE, **values}.items()}


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda i: update(loss=0.6931 - 2e-6 * i), {49: "reward/loss stays at 0.693 for 50 steps"}),  # a reward model at 1e-6
        (lambda i: update(loss=0.6931 - 2e-4 * i), {}),
        (lambda i: update(loss=0.0), {}),  # of advantages that add up to 0
        (lambda i: update(loss=0.0, grad_norm=0.0), {49: "reward/loss stays at 0 for 50 steps"}),
        (lambda i: update(loss=1e-9 * (-1) ** i), {}),
        (lambda i: update(loss=0.6931, lr=1e-6 * (i + 1)), {}),  # a warm-up
        (lambda i: update(loss=0.6931, lr=1e-6 * min(i + 1, 5)), {53: "reward/loss stays"}),  # ends
        (lambda i: update(loss=0.6931, lr=1e-6 - 1e-9 * i), {49: "reward/loss stays"}),
        (lambda i: update(loss=0.5 if i < 20 else 0.3), {}),  # it has come to its end
        (lambda i: HEALTHY, {}),
        (lambda i: {**UNGROUPED, **CONSTANT}, {9: "every response of 10 steps scored 0.5: "}),
        (lambda i: {**UNGROUPED, "reward/min": i, "reward/max": i}, {}),
        (lambda i: {**UNGROUPED, **CONSTANT, "reward/total_mean": 0.3 * i}, {}),  # another reward tells them apart
        (
            lambda i: {**HEALTHY, **CONSTANT, "group/equal_fraction": 1.0},
            {9: "all responses of each prompt scored alike for 10 steps"},
        ),
        (lambda i: {**HEALTHY, "group/equal_fraction": 1.0 if i % 10 else 0.9}, {}),
        (lambda i: {**HEALTHY, "group/equal_fraction": 1.0 if i > 20 else 0.9}, {30: "all responses of each"}),
        (lambda i: {**HEALTHY, "response_length/clip_ratio": 1.0}, {9: "every response of 10 steps was cut at its limit"}),
        (lambda i: {**HEALTHY, "actor/entropy": 0.001}, {9: "actor/entropy is 0.001 nats after 10 steps below 0.01"}),
        (lambda i: {**HEALTHY, "actor/kl": 3.0 + i}, {9: "actor/kl is 12 nats per token after 10 steps above 1: "}),
        (lambda i: {**HEALTHY, "actor/kl": None if i == 4 else 3.0}, {10: "actor/kl is 3 nats"}),  # it is nan
        (lambda i: {"val/reward_mean": 0.5}, {}),
    ],
)
def test_a_rule_is_said_once(step: Callable[[int], dict[str, Any]], said: dict[int, str]) -> None:
    signals = Signals()
    texts = {i: lines for i in range(75) if (lines := signals.add(step(i)))}
    assert {i: len(lines) for i, lines in texts.items()} == dict.fromkeys(said, 1)
    assert all(texts[i][0].startswith(text) for i, text in said.items()), texts


def test_terminal_summary_and_report_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the run has begun anew meanwhile."""
    run = SimpleNamespace(steps=12, name="run", log_samples=1)
    for started_at, ends in ((0, 6), (6, 12)):
        recorder = Recorder(tmp_path, SimpleNamespace(run=run, logger=LoggerConfig()), started_at, {})
        for step in range(started_at + 1, ends + 1):
            recorder.log(step, {**HEALTHY, "actor/entropy": 0.0}, [], [])
        recorder.close()
    text = "actor/entropy is 0 nats after 10 steps below 0.01"
    assert capsys.readouterr().err.count(f"warning: {text}") == 1
    assert f"  warning             step 10: {text}" in summarize(tmp_path)
    assert f"step 10: {text}" in render([read_run(tmp_path)])
    atomic_write_text(tmp_path / METRICS_FILE, json.dumps({"step": 1, **HEALTHY}) + "\n")
    assert "warning" not in summarize(tmp_path)
