"""``rlhf_spmd.train(config)``: a run in a process that goes on afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tasks
from rlhf_spmd import train
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.parallel.program import ProgramSettings
from rlhf_spmd.parallel.world import choose_cpu_matmul
from rlhf_spmd.rewards.runner import RewardError


def configuration(run_dir: Path) -> dict[str, object]:
    config: dict[str, object] = json.loads((tasks.task() / "ppo.json").read_text())
    return {**config, "run": {"name": "mine", "dir": f"{run_dir}/${{run.name}}", "steps": 2, "export": False}}


def test_it_trains_as_the_program_does_and_the_process_goes_on(tmp_path: Path) -> None:
    runs = [train(configuration(tmp_path / name)) for name in ("one", "two")]
    assert runs == [tmp_path / name / "mine" for name in ("one", "two")]
    tasks.train_alone(tmp_path / "beside", 2)
    rows = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (*runs, tmp_path / "beside")
    ]
    norms = [[row["actor/grad_norm"] for row in its] for its in rows]
    assert norms[0] == norms[1] == norms[2] and len(norms[0]) == 2
    assert json.loads((runs[0] / "exit_status.json").read_text())["class"] == "done"


def test_the_input_is_checked_with_the_products_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are exact is asked before there is a world."""
    found: list[str] = []
    usual = choose_cpu_matmul()
    monkeypatch.setattr(
        sys.modules["rlhf_spmd.train"], "prepare", lambda *_, **__: found.append(torch.get_float32_matmul_precision()) or 1 / 0
    )
    torch.set_float32_matmul_precision("high")
    with pytest.raises(ZeroDivisionError):
        train(configuration(tmp_path))
    assert found == [usual]


def test_what_is_wrong_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'run\.step'; did you mean 'run\.steps'\?"):
        train({"run": {"step": 3}})
    with pytest.raises(ConfigError, match="run"):
        train({"run": object()})
    with pytest.raises(RewardError, match="always_fails"):
        train(configuration(tmp_path) | {"reward": {"function": "outside.rewards:always_fails"}})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="one rank; under torchrun start the program"):
        train({})


def test_code_that_leaves_does_not_end_the_caller_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = sys.modules["rlhf_spmd.train"]
    monkeypatch.setattr(program, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(program, "settings_of", lambda _: ProgramSettings(tmp_path))
    monkeypatch.setattr(program, "train", lambda _: sys.exit(0))
    with pytest.raises(RuntimeError, match="the run was left before its end by SystemExit: 0"):
        train({})
    assert json.loads((tmp_path / "exit_status.json").read_text())["class"] == "lost"


def test_train_is_the_same_however_it_is_imported() -> None:
    code = "import rlhf_spmd; first = rlhf_spmd.train; import rlhf_spmd.train; from rlhf_spmd import train; "
    code += "assert first is train is rlhf_spmd.train and callable(train) and train.prepare"
    subprocess.run([sys.executable, "-c", code], env=tasks.environment(), check=True, timeout=120)
