"""Trackers beside ``metrics.jsonl``: their settings, and on rank 0 a process for each that follows the run's files."""

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

PACKAGES = ("tensorboard",)  # other trackers, by package name


@dataclass(frozen=True)
class WandbConfig:
    """``logger.wandb_init``, named as in ``wandb.init``.

    - entity: W&B team; null: the account's
    - group, job_type, tags, notes: as W&B shows them
    - id: the run to continue; null: a new one, whose id the run directory keeps for a resume
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

    - dir: directory of the event files; null: `tensorboard/` in the run directory
    """

    dir: str | None = None


@dataclass(frozen=True)
class LoggerConfig:
    """``logger``. A run waits for its trackers only at the end.

    - wandb: `online`, `offline`, `disabled`
    - trackers: further trackers: `tensorboard`
    - project: W&B's project
    - name: the run's name there; null: `run.name`
    - timeout_s: how long W&B may take to start before the run is logged offline; also how long a tracker may take for
      the rest after the run has ended
    """

    wandb: Literal["online", "offline", "disabled"] = "disabled"
    trackers: list[str] = field(default_factory=list)
    project: str = "rlhf_spmd"
    name: str | None = None
    timeout_s: Seconds = 20.0
    wandb_init: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)

    @property
    def tracker_settings(self) -> dict[str, dict[str, Any]]:
        """Settings of each tracker, by its name."""
        found = {} if self.wandb == "disabled" else {"wandb": {"mode": self.wandb, **asdict(self.wandb_init)}}
        return found | {name: asdict(getattr(self, name)) for name in self.trackers}

    def check(self, where: str = "logger") -> None:
        for name in self.trackers:
            given = f"{where}.trackers={list(self.trackers)}: "
            if name not in PACKAGES:
                hint = nearest(name, PACKAGES) or ";"
                raise ValueError(f"{given}unknown tracker '{name}'{hint} available: {', '.join(PACKAGES)}")
            package = find_spec(name)
            if package is None or package.origin is None:  # missing, or only a directory of that name
                raise ValueError(f"{given}{name} is not installed; pip install {name}, or leave it out")
        if not self.project:
            raise ValueError(f"{where}.project is empty; give the name of a project")


class TrackerProcesses:
    """The tracker processes. A first input line tells each what to follow; a second one, or this process's end, ends it."""

    def __init__(self, run_dir: Path, config: LoggerConfig, run_name: str, steps: int, resumed_at: int | None) -> None:
        """The files of this start must exist already, cut to ``resumed_at``."""
        self._timeout_s = config.timeout_s
        files = {name: run_dir / f"{name}.jsonl" for name in (follower.METRICS, *follower.SAMPLES)}
        offsets = {name: path.stat().st_size for name, path in files.items()}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        # -P: nothing in the working directory, such as wandb/, hides a package.
        # New session: Ctrl-C ends the run, and the run then ends its trackers.
        command = [sys.executable, "-P", "-m", follower.__name__]
        paths = os.pathsep.join(filter(None, (str(Path(follower.__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        started: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "start_new_session": True}
        for name, settings in config.tracker_settings.items():
            named = config.project, config.name or run_name, settings, config.timeout_s
            job = follower.TrackerJob(name, str(run_dir.resolve()), offsets, steps, resumed_at, *named)
            self._processes[name] = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, **started)
            self._send(name, asdict(job))

    def close(self, exit_code: int = 0) -> None:
        """Waits at most as long as :class:`LoggerConfig` allows. May be called twice."""
        for name in self._processes:
            self._send(name, {"exit_code": exit_code})
        # trackers keep their own limits for starting and uploading; this one covers what they cannot foresee
        deadline = time.monotonic() + 2 * self._timeout_s + follower.LOCAL_TIMEOUT_S
        while self._processes:
            name, process = self._processes.popitem()
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                say(f"{name}: given up; metrics.jsonl has every step")
            with contextlib.suppress(OSError):  # the process is gone already
                process.stdin.close()  # type: ignore[union-attr]  # started with a pipe

    def _send(self, name: str, value: Mapping[str, Any]) -> None:
        pipe = self._processes[name].stdin
        assert pipe is not None, "a follower is started with a pipe"
        with contextlib.suppress(OSError):  # it ended early and gave the reason on standard error
            pipe.write(json.dumps(value).encode() + b"\n")
            pipe.flush()
