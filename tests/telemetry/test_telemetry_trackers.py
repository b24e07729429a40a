"""Trackers get what a run writes, and never hold it up: offline, without a network, with a server that never answers, killed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

import tasks
from rlhf_spmd.config.load import check_tree, load, to_yaml
from rlhf_spmd.config.schema import ConfigError
from rlhf_spmd.telemetry import trackers
from rlhf_spmd.telemetry.run_dir import read_jsonl
from rlhf_spmd.telemetry.trackers import LoggerConfig
from rlhf_spmd.training.recorder import Recorder
from rlhf_spmd.training.train_config import RunConfig


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing of the account or the network of this machine: settings, cache and netrc in the test's directory."""
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@dataclass(frozen=True)
class GlobalReduce:
    """What a recorder reads of a configuration."""

    run: RunConfig = field(default_factory=RunConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)


def settings(*overrides: str) -> GlobalReduce:
    config = load(GlobalReduce, None, ["run.name=mine", "run.steps=4", *overrides])
    check_tree(config)
    return config


def tracked_by(tracker: str, *overrides: str) -> GlobalReduce:
    pytest.importorskip(tracker)
    return settings("logger.wandb=online" if tracker == "wandb" else f"logger.trackers=[{tracker}]", *overrides)


def run_steps(run_dir: Path, config: GlobalReduce, started_at: int = 0, steps: int = 3) -> None:
    """A run that its trackers must not hold up."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    start = time.monotonic()
    recorder = Recorder(run_dir, config, started_at, {"host": "here"})
    for step in range(started_at + 1, started_at + steps + 1):
        sample = {"row_id": 0, "prompt": "12", "response": f"wrote {step}\n", "score": step / 10, "versions": [[1, 2]]}
        metrics = {"reward/mean": step / 10, "actor/kl": float("nan"), "val/a/mean@1": 0.5}
        recorder.log(step, metrics, [sample], [{**sample, "answer": None}] if step == 2 else [])
    assert time.monotonic() - start < 20.0, "the steps wait for the trackers"
    recorder.close()
    recorder.close()
    assert time.monotonic() - start < 80.0


def steps_of(run_dir: Path) -> list[int]:
    return [line["step"] for line in read_jsonl(run_dir / "metrics.jsonl")]


def test_without_a_tracker_no_process_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    run_steps(tmp_path / "run", settings())
    assert steps_of(tmp_path / "run") == [1, 2, 3]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "trackers=[tensorbord]",
            r"trackers\[0\]='tensorbord' is not known; did you mean 'tensorboard'\? allowed: tensorboard",
        ),
        ("wandb=onlin", r"wandb='onlin' is not known; did you mean 'online'\? allowed: online, offline, disabled"),
        ("wandb_init.tag=[a]", r"wandb_init\.tag'.*tags"),
        ("timeout_s=0", r"timeout_s=0"),
    ],
)
def test_bad_settings_are_one_line(override: str, line: str) -> None:
    with pytest.raises(ConfigError, match=rf"logger\.{line}"):
        settings(f"logger.{override}")


def test_a_package_that_is_missing_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the working directory has one of its name, such as wandb's own."""
    (tmp_path / "tensorboard").mkdir()
    for found in (None, importlib.util.spec_from_loader("tensorboard", None, is_package=True)):
        monkeypatch.setattr("rlhf_spmd.telemetry.trackers.find_spec", lambda name, found=found: found)
        with pytest.raises(ConfigError, match=r"^logger\.trackers=.*: tensorboard is not installed; pip install tensorboard"):
            settings("logger.trackers=[tensorboard]")


# -- Weights & Biases


@pytest.mark.long
def test_wandb_offline_has_metrics_samples_settings_and_console(tmp_path: Path) -> None:
    more = ["logger.wandb=offline", "logger.wandb_init={group: grouped, tags: [tagged], notes: noted}"]
    config = tracked_by("wandb", *more)
    run_steps(tmp_path / "run", config)
    [binary] = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    content = binary.read_bytes()
    for expected in ("reward/mean", "val/a/mean@1", "grouped", "tagged", "noted", "step 3/4  reward 0.300"):
        assert expected.encode() in content, expected
    tables = sorted((binary.parent / "files" / "media" / "table").glob("*.table.json"))
    assert [table.name.split("_")[0] for table in tables] == 3 * ["rollouts"] + ["validation"]
    assert "wrote 2\n" in json.loads(tables[-1].read_text())["data"][0]
    run_id = (tmp_path / "run" / "wandb" / "run_id").read_text().strip()
    assert run_id in binary.name

    run_steps(tmp_path / "run", config, started_at=3, steps=1)
    runs = list((tmp_path / "run" / "wandb").glob(f"offline-run-*/run-{run_id}.wandb"))
    assert len(runs) == 2, "a resume goes on under its id"
    run_steps(tmp_path / "run", config, steps=1)
    assert (tmp_path / "run" / "wandb" / "run_id").read_text().strip() != run_id, "a new run is another one"


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("trouble", "line"), [("no network", "wandb: online failed"), ("no account", "going on offline"), ("no answer", "")]
)
def test_wandb_online_goes_on_offline(
    tmp_path: Path,
    home: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    silent_server: str,
    trouble: str,
    line: str,
) -> None:
    home.setenv("WANDB_BASE_URL", silent_server if trouble == "no answer" else f"http://127.0.0.1:{tasks.free_port()}")
    if trouble == "no network":
        home.setenv("WANDB_API_KEY", "0" * 40)
    run_steps(tmp_path / "run", tracked_by("wandb", "logger.timeout_s=2"))
    assert steps_of(tmp_path / "run") == [1, 2, 3] and line in capfd.readouterr().err
    assert trouble != "no network" or list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))


# -- the others


@pytest.mark.long
def test_tensorboard_shows_what_was_written(tmp_path: Path) -> None:
    config = tracked_by("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_steps(tmp_path / "run", config)
    run_steps(tmp_path / "run", config, started_at=2, steps=2)  # as after a resume from a checkpoint of step 2
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    points = [(event.step, round(event.value, 6)) for event in events.Scalars("reward/mean")]
    assert points == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    written = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [event.wall_time for event in events.Scalars("val/a/mean@1")] == pytest.approx([line["unix_s"] for line in written])
    assert "actor/kl" not in events.Tags()["scalars"], "what is no number is no point"
    tensors = {tag: events.Tensors(tag) for tag in events.Tags()["tensors"]}
    texts = {tag: [event.tensor_proto.string_val[0].decode() for event in each] for tag, each in tensors.items()}
    assert "wrote 2" in texts["validation/text_summary"][0] and "name: mine" in texts["config/text_summary"][0]


@pytest.mark.long
def test_a_tracker_that_is_killed_ends_alone(tmp_path: Path) -> None:
    config = tracked_by("tensorboard")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    recorder = Recorder(tmp_path / "run", config, 0, {})
    [process] = recorder.trackers._processes.values()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    recorder.log(1, {"a": 1.0}, [], [])
    recorder.close()
    assert steps_of(tmp_path / "run") == [1]


def test_a_step_that_a_tracker_refuses_is_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    steps: list[tuple[int, list[str]]] = []

    def log(step: int, unix_s: float, metrics: trackers.Metrics, tables: Mapping[str, trackers.Table]) -> None:
        if step < 3:
            raise OSError("no such\nserver")
        steps.append((step, [row[tables["rollouts"].columns.index("response")] for row in tables["rollouts"].data]))

    run_steps(tmp_path, settings())
    offsets = dict.fromkeys((trackers.METRICS, *trackers.SAMPLES), 0)
    order = trackers.TrackerJob("mine", str(tmp_path), offsets, 3, None, "p", "n", {}, 1.0)
    ended = Future[int]()
    ended.set_result(0)
    trackers.follow(SimpleNamespace(log=log, finish=lambda exit_code: None), order, ended)
    assert steps == [(3, ["wrote 3\n"])]
    assert capfd.readouterr().err.splitlines()[-1] == "mine: step 1 was not logged (no such server); metrics.jsonl has it"
