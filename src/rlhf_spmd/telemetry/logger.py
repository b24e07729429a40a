"""Trackers beside ``metrics.jsonl``: their settings, and on rank 0 a process for each that follows the files of the run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from rlhf_spmd.config.constraints import Seconds
from rlhf_spmd.config.schema import nearest
from rlhf_spmd.telemetry import follower
from rlhf_spmd.telemetry.progress import say

PACKAGES = ("tensorboard", "mlflow", "trackio")  # other trackers, by the names of their packages


@dataclass(frozen=True)
class WandbConfig:
    """``logger.wandb_init``, as ``wandb.init`` has them.

    - entity: W&B team; null: the account's
    - group, job_type, tags, notes: as W&B shows them
    - id: of the run that is gone on with; null: a new one, kept in the run directory for when this run is resumed
    """

    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class TensorBoardConfig:
    """``logger.tensorboard``.

    - dir: of the event files; null: `tensorboard/` in the run directory
    """

    dir: str | None = None


@dataclass(frozen=True)
class MlflowConfig:
    """``logger.mlflow``.

    - uri: of the tracking server or database; null: `MLFLOW_TRACKING_URI`, or MLflow's own
    - tags: of the run
    """

    uri: str | None = None
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrackioConfig:
    """``logger.trackio``.

    - space_id: of a Hugging Face space; null: this machine's `TRACKIO_DIR`
    - group: of the run
    """

    space_id: str | None = None
    group: str | None = None


@dataclass(frozen=True)
class LoggerConfig:
    """``logger``. A run waits for its trackers only at the end.

    - wandb: `online`, `offline`, `disabled`
    - trackers: others that follow the run, of `tensorboard`, `mlflow`, `trackio`
    - project: at W&B and Trackio, MLflow's experiment
    - name: of the run there; null: `run.name`
    - timeout_s: how long W&B may take to start before the run is logged offline, and what a tracker gets for the rest once the run
      has ended
    """

    wandb: Literal["online", "offline", "disabled"] = "disabled"
    trackers: list[str] = field(default_factory=list)
    project: str = "rlhf_spmd"
    name: str | None = None
    timeout_s: Seconds = 20.0
    wandb_init: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    trackio: TrackioConfig = field(default_factory=TrackioConfig)

    @property
    def followed(self) -> dict[str, dict[str, Any]]:
        """Tracker -> its settings."""
        found = {} if self.wandb == "disabled" else {"wandb": {"mode": self.wandb, **asdict(self.wandb_init)}}
        return found | {name: asdict(getattr(self, name)) for name in self.trackers}

    def check(self, where: str = "logger") -> None:
        for name in self.trackers:
            said = f"{where}.trackers={list(self.trackers)}: "
            if name not in PACKAGES:
                hint = nearest(name, PACKAGES) or ";"
                raise ValueError(f"{said}unknown tracker '{name}'{hint} available: {', '.join(PACKAGES)}")
            package = find_spec(name)
            if package is None or package.origin is None:  # nothing, or a mere directory of that name
                raise ValueError(f"{said}{name} is not installed; pip install {name}, or leave it out")
        if not self.project:
            raise ValueError(f"{where}.project is empty; give the name of a project")


class Followers:
    """The processes of the trackers, each told what to follow in its first input line, ended by a second one or by the end of
    this process."""

    def __init__(self, run_dir: Path, config: LoggerConfig, run_name: str, steps: int, resumed_at: int | None) -> None:
        """The files of this start are there already, cut to ``resumed_at``."""
        self._timeout_s = config.timeout_s
        files = {name: run_dir / f"{name}.jsonl" for name in (follower.METRICS, *follower.SAMPLES)}
        offsets = {name: path.stat().st_size for name, path in files.items()}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # -P: nothing in the working directory, such as wandb/, hides a package;
        # a session of its own: Ctrl-C ends the run, and the run then ends its trackers
        command = [sys.executable, "-P", "-m", follower.__name__]
        paths = os.pathsep.join(filter(None, (str(Path(follower.__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        started: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "start_new_session": True}
        for name, settings in config.followed.items():
            told = config.project, config.name or run_name, settings, config.timeout_s
            order = follower.Order(name, str(run_dir.resolve()), offsets, steps, resumed_at, *told)
            self._processes[name] = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, **started)
            self._send(name, asdict(order))

    def close(self, exit_code: int = 0) -> None:
        """Waits at most for what :class:`LoggerConfig` allows. May be called twice."""
        for name in self._processes:
            self._send(name, {"exit_code": exit_code})
        # they keep to their own limits, for starting and for uploading; this one is for what they cannot foresee
        deadline = time.monotonic() + 2 * self._timeout_s + follower.LOCAL_TIMEOUT_S
        while self._processes:
            name, process = self._processes.popitem()
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                say(f"{name}: given up; metrics.jsonl has every step")
            with contextlib.suppress(OSError):  # it is gone: there is nobody left to tell
                process.stdin.close()  # type: ignore[union-attr]  # started with a pipe

    def _send(self, name: str, value: Mapping[str, Any]) -> None:
        pipe = self._processes[name].stdin
        assert pipe is not None, "a follower is started with a pipe"
        with contextlib.suppress(OSError):  # it ended early, and has said why on standard error
            pipe.write(json.dumps(value).encode() + b"\n")
            pipe.flush()
