"""Metrics of a run: ``metrics.jsonl`` always, Weights & Biases where it is asked for.

W&B runs in a process of its own that follows ``metrics.jsonl`` (wandb_follower.py), because ``wandb.init`` blocks for up to
91 s without a network and its exit hooks wait for uploads. So no state of the network can hold a training step up.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.telemetry import wandb_follower
from rlhf_spmd.telemetry.jsonl import JsonlLog, read_jsonl
from rlhf_spmd.telemetry.run_dir import METRICS_FILE

WANDB_MODES = ("online", "offline", "disabled")


@dataclass(frozen=True)
class LoggerConfig:
    """``logger.*``. ``name``: the run's name at W&B (default: run.name). ``entity``: the W&B team (default: the account's).

    ``wandb_timeout_s``: how long W&B may take to start before the run is logged offline instead, and to upload what is left
    at the end. The run itself waits only at the end.
    """

    wandb: str = "disabled"
    project: str = "rlhf_spmd"
    name: str | None = None
    entity: str | None = None
    wandb_timeout_s: float = 20.0

    def check(self, where: str = "logger") -> None:
        if self.wandb not in WANDB_MODES:
            raise ValueError(f"{where}.wandb={self.wandb!r}: unknown; allowed: {', '.join(WANDB_MODES)}")
        if not self.project:
            raise ValueError(f"{where}.project is empty; give the name of a W&B project")
        check_bounds(self, where, "wandb_timeout_s", above=0)


class MetricLogger:
    """Rank 0 only. One JSON object per step; on a resume at step N, lines of steps after N are dropped first.

    ``resume_step``: the step of the checkpoint that the run goes on from, None for a new run.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        config: LoggerConfig,
        run_name: str = "",
        resolved_config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
    ) -> None:
        self.path = Path(run_dir) / METRICS_FILE
        self._log = JsonlLog(self.path, resume_step)
        written = read_jsonl(self.path)
        self._last_step: int | None = written[-1]["step"] if written else None
        self._follower = None if config.wandb == "disabled" else _Follower(self.path, config, run_name, resolved_config or {})

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append ``{"step": step, **metrics}`` and flush. Values that are not finite are written as null.

        Steps must rise: each has one line, so everything known about a step is given in one call.
        """
        assert self._last_step is None or step > self._last_step, (
            f"metrics of step {step} after step {self._last_step}: each step is logged once, in order"
        )
        self._last_step = step
        self._log.append([{"step": step, **metrics}])

    def close(self, exit_code: int = 0) -> None:
        """Ends W&B; waits at most ``logger.wandb_timeout_s`` for its upload. May be called twice."""
        self._log.close()
        if self._follower is not None:
            self._follower.close(exit_code)
            self._follower = None


class _Follower:
    """The W&B process: told what to follow in its first input line, ended by a second line or by the end of this process."""

    def __init__(self, metrics: Path, config: LoggerConfig, run_name: str, resolved_config: Mapping[str, Any]) -> None:
        self._timeout_s = config.wandb_timeout_s
        order = {
            "metrics": str(metrics.resolve()),
            "offset": metrics.stat().st_size,
            "mode": config.wandb,
            "project": config.project,
            "entity": config.entity,
            "name": config.name or run_name or None,
            "config": json.loads(json.dumps(resolved_config, default=str)),
            "timeout_s": config.wandb_timeout_s,
        }
        # -P: the directory of the script stays off sys.path, where its trace.py would hide the standard library's;
        # a session of its own: Ctrl-C ends the run, and the run then ends W&B
        command = [sys.executable, "-P", wandb_follower.__file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        assert self._process.stdin is not None, "the follower is started with a pipe"
        self._input = self._process.stdin
        self._send(json.dumps(order))

    def close(self, exit_code: int) -> None:
        self._send(json.dumps({"exit_code": exit_code}))
        try:
            # the follower keeps to its own limits, for starting and for uploading; this one is for what it cannot foresee
            self._process.wait(2 * self._timeout_s + wandb_follower.LOCAL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            print("wandb: gave up on the upload; metrics.jsonl has every step", file=sys.stderr)
        with contextlib.suppress(OSError):  # the follower is gone: there is nobody left to tell
            self._input.close()

    def _send(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it ended early, and has said why on standard error
            self._input.write(line.encode() + b"\n")
            self._input.flush()
