"""What a run does where its directory is not as it left it: edited manifests, links, a full disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tasks
from rlhf_spmd.checkpoint.directory import read_manifest
from rlhf_spmd.checkpoint.manifest import DTYPES, CheckpointError
from rlhf_spmd.preflight import disk
from rlhf_spmd.train import main, prepare
from rlhf_spmd.training.checkpoints import check_state
from rlhf_spmd.training.train_config import run_dir_hint
from tasks import train_alone as train

EVERY = ("run.save_freq=1", "run.keep_checkpoints=3")


def run(run_dir: Path, steps: int, *more: str) -> int:
    """The program as a single process; returns its exit status."""
    try:
        main(["--config", str(tasks.task() / "ppo.json"), *tasks.settings(run_dir, steps, *more)])
    except SystemExit as ending:
        return int(ending.code or 0)
    return 0


def edit_state(checkpoint: Path, change: Any) -> None:
    """As one who makes COMMIT fit it."""
    head, *lines = (checkpoint / "manifest.jsonl").read_text().splitlines(keepends=True)
    value = json.loads(head)
    change(value["state"])
    text = "".join([json.dumps(value) + "\n", *lines])
    (checkpoint / "manifest.jsonl").write_text(text)
    mark = json.loads((checkpoint / "COMMIT").read_text())
    (checkpoint / "COMMIT").write_text(json.dumps({**mark, "manifest_sha256": hashlib.sha256(text.encode()).hexdigest()}))


def test_metrics_are_on_disk_before_the_checkpoint_that_has_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    train(tmp_path / "run", 2, *EVERY)
    order = [name if name == "metrics.jsonl" else "COMMIT" for name in synced if name == "metrics.jsonl" or "COMMIT" in name]
    assert order == ["metrics.jsonl", "COMMIT"] * 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint of each; to be copied."""
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    train(run_dir, 2, *EVERY)
    return run_dir


@pytest.fixture
def run_dir(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_a_manifest_that_was_edited_is_passed_over(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = run_dir / "checkpoints" / "step_2"
    for change, message in (
        (lambda state: state.update(step=7), "manifest of step 2 has step=7 in its state"),
        (lambda state: state.update(data={"prompts": 3}), "has no dict as data.prompts in its state"),
        (lambda state: state.pop("stopped"), "has stopped=None in its state, no bool"),
    ):
        edit_state(second, change)
        with pytest.raises(CheckpointError, match=re.escape(message)):
            check_state(read_manifest(second))
        edit_state(second, lambda state: state.update(step=2, data={}))
    train(run_dir, 3, *EVERY)
    err = capsys.readouterr().err
    assert f"warning: passing over {second}: " in err and "has stopped=None" in err
    assert f"resumed from {run_dir}/checkpoints/step_1 (step 1)" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["data"]["prompts"].pop("epoch"), "KeyError: 'epoch'"),
        (lambda state: state["optimizer_steps"].pop("actor"), "KeyError: 'actor'"),
        (lambda state: state.update(versions={}), "KeyError: 'newest'"),
    ],
)
def test_a_state_that_lacks_something_is_one_line(
    run_dir: Path, capsys: pytest.CaptureFixture[str], change: Any, message: str
) -> None:
    edit_state(run_dir / "checkpoints" / "step_2", change)
    assert run(run_dir, 3) == 4
    err = capsys.readouterr().err
    assert f"{run_dir}/checkpoints/step_2: its state is not what a run saves ({message}" in err and "Traceback" not in err


def test_settings_are_compared_where_checkpoints_lie_elsewhere(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_dir / "checkpoints").rename(tmp_path / "disk")
    (run_dir / "checkpoints").symlink_to(tmp_path / "disk")
    (tmp_path / "link").symlink_to(run_dir)
    train(tmp_path / "link", 3, "algorithm.gamma=0.5")
    assert "algorithm.gamma=0.5 (was 0.99)" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["latest", "step_2", "step_3"]


# -- the disk


def plans_of(run_dir: Path, *more: str) -> Any:
    return prepare(str(tasks.task() / "ppo.json"), tasks.settings(run_dir, 1, *more), 1)


def test_what_a_checkpoint_takes_is_known_before(tmp_path: Path) -> None:
    """Whatever its parts' dtypes and optimizers."""
    more = "models.actor.lora.rank=2", "models.critic.optim.name=muon", "models.critic.dtype=bfloat16"
    train(tmp_path, 1, *more)
    manifest = read_manifest(tmp_path / "checkpoints" / "step_1")
    plans = plans_of(tmp_path, *more).roles
    for role in ("actor", "critic"):
        pieces = [piece for key in manifest.lines if key[0] == role for piece in manifest.pieces_in(key)]
        written = sum(math.prod(piece.size) * DTYPES[piece.dtype].itemsize for piece in pieces)
        assert disk.saved_bytes(plans[role], torch.device("cpu")) == written, role


def test_a_run_that_cannot_save_is_refused_and_one_that_may_fill_the_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = plans_of(tmp_path / "run", "run.export=true")
    size = sum(disk.saved_bytes(ready.roles[role], torch.device("cpu")) for role in ("actor", "critic"))
    export = disk.exported_bytes(ready.roles["actor"], torch.device("cpu"))

    def check(free: int) -> str | None:
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
        return disk.check_disk(ready)

    line = rf"^run\.dir={tmp_path}/run: a checkpoint needs \d+\.\d MiB, as estimated, and {tmp_path} has {(size - 1) / 2**20:.1f} MiB"
    with pytest.raises(CheckpointError, match=line):
        check(size - 1)
    assert "checkpoints and exports that the run keeps need" in str(check(size))
    assert check(3 * size + export - 1) and check(3 * size + export) is None  # two that stay, and one that is being written
    train(tmp_path / "run", 1)
    assert check(0) is None  # nothing is left to do
    ready = plans_of(tmp_path / "all", "run.steps=4", "run.save_freq=1", "run.keep_checkpoints=null")
    assert check(5 * size - 1) and check(5 * size) is None  # as many as there are
    ready = replace(ready, config=replace(ready.config, run=replace(ready.config.run, dir=str(tmp_path / "a{b}"))))
    assert str(check(5 * size - 1)).startswith(f"run.dir={tmp_path}/a{{b}}: the checkpoints and exports")


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["run.dir=runs/${run.name}", "run.name=007"], "runs/007"),
        (["run={dir: x}"], "x"),
        (["run.dir=null"], "runs/run"),
        (["run.dir=there", "not an override"], "there"),
        (["run.dir=${oc.env:NOT_SET_ANYWHERE}"], None),
    ],
)
def test_where_a_refusal_is_written_down(overrides: list[str], wanted: str | None) -> None:
    """So that a script never reads the ending of an earlier start."""
    assert run_dir_hint(None, overrides) == (None if wanted is None else Path(wanted).absolute())


def test_the_users_code_moves_no_directory_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("import os\nfrom rlhf_spmd.algorithms.ppo import *\nos.chdir('/')\n")
    Path("old", "checkpoints", "step_1").mkdir(parents=True)
    more = "run.resume=old/checkpoints/step_1", f"algorithm.name={tmp_path}/mine.py"
    run = prepare(str(tasks.task() / "ppo.json"), tasks.settings(Path("run"), 2, *more), 1).config.run
    assert Path.cwd() == Path("/") and run.dir == f"{tmp_path}/run" and run.resume == f"{tmp_path}/old/checkpoints/step_1"
