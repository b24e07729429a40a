"""The benchmark scripts run at their smallest size and write what they promise; the figures themselves are not judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run_script(name: str, out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts" / "bench" / name), *arguments, "--out", str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text()), done.stdout


def test_control_writes_a_figure_for_every_case(tmp_path: Path) -> None:
    report, printed = run_script("control.py", tmp_path / "control.json", "--ranks", "2", "--repeats", "2")
    assert report["ranks"] == 2 and {"python", "torch", "cores"} <= set(report["machine"])
    names = [case["case"] for case in report["cases"]]
    for wanted in (
        "empty call to all",
        "chain on one pool",
        "pool(1) to pool(1)",
        "bare gloo",
        "controller.get",
        "controller.decide",
    ):
        assert any(wanted in name for name in names), names
    for case in report["cases"]:
        assert case["calls"] > 0 and 0 < case["median_us"] <= case["p90_us"] and case["own_cpu_us"] > 0
        assert case["case"] in printed


def test_step_writes_phases_and_tokens_per_second(tmp_path: Path) -> None:
    arguments = ("--model", "tiny", "--ranks", "1", "--steps", "2", "--programs", "ppo")
    report, printed = run_script("step.py", tmp_path / "step.json", *arguments)
    (run,) = report["runs"]
    assert (run["program"], run["ranks"], run["steps"]) == ("ppo", 1, 1)
    assert run["tokens_per_s"] > 0 and run["peak_gb"] > 0
    phases = " ".join(run["phases_s"])
    assert all(phase in phases for phase in ("generate_sequences", "compute_log_prob", "compute_values", "update_actor"))
    assert max(run["phases_s"].values()) < run["step_s"]
    assert "whole step" in printed
