"""What a run does where its directory is not as it left it: another job in it, damage, links, a full disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tasks
from rlhf_spmd.checkpoint.directory import read_manifest
from rlhf_spmd.checkpoint.manifest import DTYPES, CheckpointError
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.train import main, prepare
from rlhf_spmd.training import disk
from rlhf_spmd.training.resume import check_state
from rlhf_spmd.training.run_config import run_dir_hint
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
    told = [name if name == "metrics.jsonl" else "COMMIT" for name in synced if name == "metrics.jsonl" or "COMMIT" in name]
    assert told == ["metrics.jsonl", "COMMIT"] * 2


def test_a_job_that_was_suspended_and_followed_ends_and_leaves_all_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other one takes the lock in the middle of the second step, when the first checkpoint is written."""
    run_dir, lock, other = tmp_path / "run", tmp_path / "run" / run_lock.LOCK_FILE, tmp_path / "other"
    (tmp_path / "rewards.py").write_text(f"""
import json, os, time
from pathlib import Path

def score(prompt, response):
    lock = Path({str(lock)!r})
    while lock.with_name("metrics.jsonl").read_text() and not lock.with_name("checkpoints").joinpath("latest").exists():
        time.sleep(0.01)
    if len(Path({str(run_dir / "metrics.jsonl")!r}).read_text().splitlines()) == 1 and not os.path.exists({str(other)!r}):
        owner = json.loads(lock.read_text())
        lock.write_text(json.dumps({{**owner, "host": "node7", "pid": 4711, "machine": "another", "job": "SLURM job 17"}}))
        Path({str(other)!r}).touch()
    return 0.0
""")
    assert run(run_dir, 4, *EVERY, f"reward.function={tmp_path}/rewards.py:score") == 4
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"run.dir={run_dir} was taken from this job" in said and "in use by SLURM job 17, process 4711 on node7" in said
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 1
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["latest", "step_1"]
    assert json.loads(lock.read_text())["pid"] == 4711 and not (run_dir / "exit_status.json").exists()


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
    for change, told in (
        (lambda state: state.update(step=7), "manifest of step 2 has step=7 in its state"),
        (lambda state: state.update(data=[1]), "has data=[1] in its state, no dict"),
        (lambda state: state.update(data={"prompts": 3}), "has no dict as data.prompts in its state"),
        (lambda state: state.pop("stopped"), "has stopped=None in its state, no bool"),
    ):
        edit_state(second, change)
        with pytest.raises(CheckpointError, match=re.escape(told)):
            check_state(read_manifest(second))
        edit_state(second, lambda state: state.update(step=2, data={}))
    train(run_dir, 3, *EVERY)
    err = capsys.readouterr().err
    assert f"warning: passing over {second}: " in err and "has stopped=None" in err
    assert f"resumed from {run_dir}/checkpoints/step_1 (step 1)" in err


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state["data"]["prompts"].pop("epoch"), "KeyError: 'epoch'"),
        (lambda state: state["optimizer_steps"].pop("actor"), "KeyError: 'actor'"),
        (lambda state: state.update(versions={}), "KeyError: 'newest'"),
    ],
)
def test_a_state_that_lacks_something_is_one_line(
    run_dir: Path, capsys: pytest.CaptureFixture[str], change: Any, told: str
) -> None:
    edit_state(run_dir / "checkpoints" / "step_2", change)
    assert run(run_dir, 3) == 4
    err = capsys.readouterr().err
    assert f"{run_dir}/checkpoints/step_2: its state is not what a run saves ({told}" in err and "Traceback" not in err


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a: [", None])
def test_settings_that_cannot_be_read_are_named(
    run_dir: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    config = run_dir / "config.yaml"
    config.unlink()
    config.mkdir() if content is None else config.write_bytes(content)
    assert run(run_dir, 3) == 2
    err = capsys.readouterr().err
    assert f"config error: the run's configuration '{config}'" in err.splitlines()[-1] and "Traceback" not in err


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


MIXED = ("models.actor.lora.rank=2", "models.critic.optim.name=muon", "models.critic.dtype=bfloat16")


@pytest.mark.parametrize("more", [(), MIXED])
def test_what_a_checkpoint_takes_is_known_before(saved: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    run_dir = saved if not more else tmp_path
    if more:
        train(run_dir, 1, *more)
    manifest = read_manifest(run_dir / "checkpoints" / ("step_1" if more else "step_2"))
    plans, device = plans_of(tmp_path, *more).plans, torch.device("cpu")
    for role in ("actor", "critic"):
        written = sum(
            math.prod(piece.size) * DTYPES[piece.dtype].itemsize
            for key in manifest.lines
            if key[0] == role
            for piece in manifest.pieces_in(key)
        )
        assert disk.saved_bytes(plans[role], device) == written, role


def test_a_run_that_cannot_save_is_refused_and_one_that_may_fill_the_disk_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = plans_of(tmp_path / "run", "run.export=true")
    size = sum(disk.saved_bytes(ready.plans[role], torch.device("cpu")) for role in ("actor", "critic"))
    export = disk.exported_bytes(ready.plans["actor"], torch.device("cpu"))

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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount a file system here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    with contextlib.suppress(OSError), (place / "other files").open("wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass


def test_a_disk_that_is_full_from_the_start_is_told(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(small_disk)
    assert run(small_disk / "run", 1) == 4
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and err[0].startswith(f"checkpoint error: run.dir={small_disk}/run: a checkpoint needs ")


def test_a_disk_that_fills_up_ends_the_run_and_nothing_is_lost(
    small_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = small_disk / "run"
    (tmp_path / "rewards.py").write_text(f"""
import time
from pathlib import Path

def score(prompt, response):
    if len(Path({str(run_dir / "metrics.jsonl")!r}).read_text().splitlines()) == 2:
        while not Path({str(run_dir / "checkpoints" / "step_2")!r}).exists():
            time.sleep(0.01)
        with open({str(small_disk / "other files")!r}, "ab", buffering=0) as file:
            try:
                while file.write(bytes(4096)) == 4096:
                    pass
            except OSError:
                pass
    return 0.0
""")
    reward = f"reward.function={tmp_path}/rewards.py:score"
    assert run(run_dir, 4, *EVERY[:1], reward) == 4
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"cannot write {run_dir}/" in line or f"cannot write checkpoint {run_dir}/" in line
    assert "No space left on device" in line
    assert sorted(path.name for path in (run_dir / "checkpoints").glob("step_*")) == ["step_1", "step_2"]
    (small_disk / "other files").unlink()
    train(run_dir, 3, *EVERY[:1])
    assert "resumed from" in capsys.readouterr().err
    assert [json.loads(row)["step"] for row in (run_dir / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([], "runs/run"),
        (["run.name=mine"], "runs/mine"),
        (["run.dir=runs/${run.name}", "run.name=007"], "runs/007"),
        (['run.dir="q"'], "q"),
        (["run={dir: x}"], "x"),
        (["run.dir=null"], "runs/run"),
        (["run.dir=there", "not an override"], "there"),
        (["run.dir=${oc.env:NOT_SET_ANYWHERE}"], None),
    ],
)
def test_where_a_refusal_is_written_down(overrides: list[str], wanted: str | None) -> None:
    """So that a script never reads the ending of an earlier start."""
    assert run_dir_hint(None, overrides) == (None if wanted is None else Path(wanted))
