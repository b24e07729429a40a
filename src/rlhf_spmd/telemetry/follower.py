"""The process of one tracker: follows the files of a run and sends every step to W&B or TensorBoard.

logger.py starts it. Its standard input has one JSON line with the job, and later one with the exit code. The process
ends after that line, or when the training process is gone, and at the latest ``timeout_s`` after that. So no tracker
can delay a step or end the run: ``wandb.init`` blocks for up to 91 s without a network, clients retry for minutes, exit
hooks wait for uploads.
"""

from __future__ import annotations

import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, Protocol

import yaml

from rlhf_spmd.telemetry.progress import Progress, say
from rlhf_spmd.telemetry.run_dir import CONFIG_FILE

POLL_S = 0.5
LOCAL_TIMEOUT_S = 30.0  # for work without a network, which is slow only on an overloaded machine
METRICS, *SAMPLES = "metrics", "rollouts", "validation"  # files of the run directory, without .jsonl

Metrics = Mapping[str, float]


class Table(NamedTuple):
    """Samples of a step: one row each, of numbers, texts and None."""

    columns: list[str]
    data: list[list[Any]]


@dataclass(frozen=True)
class TrackerJob:
    """What a tracker process is told.

    ``offsets``: bytes of each file before this start of the run. ``resumed_at``: a step, None for a new run.
    ``settings``: ``logger.<tracker>``; for W&B ``mode`` and ``logger.wandb_init``.
    """

    tracker: str
    run_dir: str
    offsets: dict[str, int]
    steps: int
    resumed_at: int | None
    project: str
    name: str
    settings: dict[str, Any]
    timeout_s: float

    @property
    def config(self) -> str:
        """The run's configuration as YAML."""
        return (Path(self.run_dir) / CONFIG_FILE).read_text(encoding="utf-8", errors="replace")


class Tracker(Protocol):
    """Made from a :class:`TrackerJob`. Exceptions in its methods end this process at most."""

    def log(self, step: int, unix_s: float, metrics: Metrics, tables: Mapping[str, Table]) -> None:
        """``tables``: samples of the step by the name of their file, if there are any."""

    def finish(self, exit_code: int) -> None: ...


class Wandb:
    """Restarts this process offline if online does not start in time."""

    def __init__(self, job: TrackerJob) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        given = {key: value for key, value in job.settings.items() if value}
        online = given["mode"] == "online"
        limit_s = job.timeout_s if online else max(LOCAL_TIMEOUT_S, job.timeout_s)
        id_file = Path(job.run_dir) / "wandb" / "run_id"  # W&B's id of the run, for a resume
        id_file.parent.mkdir(parents=True, exist_ok=True)
        known = id_file.read_text().strip() if job.resumed_at is not None and id_file.exists() else None
        given["id"] = given.get("id") or known or os.urandom(5).hex()
        id_file.write_text(given["id"] + "\n")
        given |= {"project": job.project, "name": job.name, "dir": job.run_dir, "config": yaml.safe_load(job.config)}
        given["settings"] = wandb.Settings(init_timeout=limit_s, console="wrap", silent=True)
        try:
            self._run = wandb.init(resume="allow" if online else None, **given)
        except Exception as error:  # a process boundary: whatever wandb raises
            if not online:
                raise
            warn(job.tracker, f"online failed ({_reason(error)}); going on offline")
            _restart(replace(job, settings={**job.settings, "mode": "offline"}), wandb.teardown)
        if online:
            say(f"wandb: {self._run.url}")
        self._table: Any = wandb.Table
        self._console = Progress(job.steps, sys.stdout, job.resumed_at or 0)  # W&B shows it as the run's console

    def log(self, step: int, unix_s: float, metrics: Metrics, tables: Mapping[str, Table]) -> None:
        made = {name: self._table(*table, allow_mixed_types=True) for name, table in tables.items()}
        self._run.log({**metrics, **made}, step=step)
        self._console.update(step, metrics)

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class TensorBoard:
    def __init__(self, job: TrackerJob) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first = 0 if job.resumed_at is None else job.resumed_at + 1  # hides later steps of earlier starts
        self._writer: Any = SummaryWriter(job.settings["dir"] or Path(job.run_dir) / "tensorboard", purge_step=first)
        self._writer.add_text("config", _preformatted(job.config), first)

    def log(self, step: int, unix_s: float, metrics: Metrics, tables: Mapping[str, Table]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, walltime=unix_s)
        for name, (columns, data) in tables.items():
            texts = ("\n".join(f"{key}: {value}" for key, value in zip(columns, row, strict=True)) for row in data)
            self._writer.add_text(name, "\n\n---\n\n".join(map(_preformatted, texts)), step)
        self._writer.flush()

    def finish(self, exit_code: int) -> None:
        self._writer.close()


TRACKERS: dict[str, Callable[[TrackerJob], Tracker]] = {"wandb": Wandb, "tensorboard": TensorBoard}


def follow(tracker: Tracker, job: TrackerJob, end: Future[int]) -> None:
    """Logs every step until the run has ended. A refused step is left out; the first one is reported."""
    files = {name: (Path(job.run_dir) / f"{name}.jsonl").open("rb") for name in job.offsets}
    for name, file in files.items():
        file.seek(job.offsets[name])
    waiting: dict[str, list[dict[str, Any]]] = {name: [] for name in SAMPLES}
    refused = over = False
    while not over:
        over = bool(wait([end], POLL_S).done)
        lines = appended(files[METRICS])
        for name in SAMPLES:  # a step's samples are written before its metrics
            waiting[name] += appended(files[name])
        for line in lines:
            step, unix_s = line.pop("step"), line.pop("unix_s")
            tables = {name: [row for row in rows if row["step"] <= step] for name, rows in waiting.items()}
            waiting = {name: rows[len(tables[name]) :] for name, rows in waiting.items()}
            numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
            try:
                tracker.log(step, unix_s, numbers, {name: as_table(rows) for name, rows in tables.items() if rows})
            except Exception as error:  # a process boundary: whatever the tracker raises
                if not refused:
                    warn(job.tracker, f"step {step} was not logged ({_reason(error)}); metrics.jsonl has it")
                refused = True


def appended(file: BinaryIO) -> list[dict[str, Any]]:
    """Returns the complete JSON lines since the last call."""
    lines = file.readlines()
    if lines and not lines[-1].endswith(b"\n"):
        file.seek(-len(lines.pop()), os.SEEK_CUR)
    return [json.loads(line) for line in lines]


def as_table(rows: list[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    plain = (str, int, float, type(None))
    values = ([row.get(name) for name in columns] for row in rows)
    return Table(columns, [[value if isinstance(value, plain) else json.dumps(value) for value in row] for row in values])


def wait_for_end(job: TrackerJob, end: Future[int]) -> None:
    """Thread: waits until the training process ends or is gone. Then this process has ``timeout_s`` left."""
    parent = os.getppid()
    while (line := next_line(POLL_S)) is None and os.getppid() == parent:
        pass  # the parent's id is checked too: a forked child of it may hold the pipe open
    end.set_result(int(json.loads(line)["exit_code"]) if line else 1)
    time.sleep(job.timeout_s)
    rest = "; 'wandb sync' on the run directory's wandb/ sends the rest" if job.tracker == "wandb" else ""
    warn(job.tracker, f"not done {job.timeout_s:g} s after the run; metrics.jsonl has every step{rest}")
    os._exit(1)


def main() -> int:
    """Reads the job from the first line of standard input, or after a restart from the argument."""
    line = sys.argv[1] if len(sys.argv) > 1 else next_line(timeout_s=None)
    if not line:
        return 0
    job = TrackerJob(**json.loads(line))
    if len(sys.argv) == 1:
        os.nice(5)  # ranks on CPUs need the cores more
    try:
        tracker = TRACKERS[job.tracker](job)
    except Exception as error:  # a process boundary
        warn(job.tracker, f"cannot start ({_reason(error)}); metrics go to metrics.jsonl only")
        return 1
    end: Future[int] = Future()
    threading.Thread(target=wait_for_end, args=(job, end), daemon=True).start()
    follow(tracker, job, end)
    tracker.finish(end.result())
    return 0


def warn(tracker: str, message: str) -> None:
    say(f"{tracker}: {message}")


def next_line(timeout_s: float | None) -> str | None:
    """Returns the next line of standard input, "" at its end, None on time-out. Reads nothing ahead."""
    descriptor = sys.stdin.fileno()
    if not select.select([descriptor], [], [], timeout_s)[0]:
        return None
    line = b""
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


def _restart(job: TrackerJob, teardown: Callable[[], object]) -> NoReturn:
    """Restarts this program in this process, because wandb's service keeps the id of a run that failed to start."""
    ending = threading.Thread(target=teardown, daemon=True)
    ending.start()
    ending.join(timeout=2.0)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "rlhf_spmd.telemetry.follower", json.dumps(asdict(job))])


def _preformatted(text: str) -> str:
    """Returns the text as a Markdown code block."""
    return "\n".join("    " + line for line in text.splitlines())


def _reason(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as failure:  # a process boundary: one line, not a traceback among the lines of the run
        warn("tracker", f"stopped ({type(failure).__name__}: {failure}); metrics.jsonl has every step")
        sys.exit(1)
