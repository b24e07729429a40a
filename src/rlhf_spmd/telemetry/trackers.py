"""W&B and TensorBoard beside ``metrics.jsonl``: their settings, and a process for each that follows the files of a run.

Rank 0 starts the processes with their job as the argument, and writes the run's exit code to their standard input. A process ends
after that, or when the training process is gone, and at the latest ``timeout_s`` later. So no tracker can delay a step or end the
run: ``wandb.init`` blocks for up to 91 s without a network, clients retry for minutes, exit hooks wait for uploads.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Literal, NamedTuple, NoReturn, Protocol

import yaml

from rlhf_spmd.config.constraints import Seconds
from rlhf_spmd.config.rules import Rule, Rules
from rlhf_spmd.telemetry.progress import Progress, say
from rlhf_spmd.telemetry.run_dir import CONFIG_FILE

POLL_S = 0.5
LOCAL_TIMEOUT_S = 30.0  # for work without a network, which is slow only on an overloaded machine
METRICS = "metrics"  # file of the run directory, without .jsonl
SAMPLES = ("rollouts", "validation")  # the same

Metrics = Mapping[str, float]


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
class LoggerConfig:
    """``logger``. A run waits for its trackers only at the end.

    - wandb: `online`, `offline`, `disabled`
    - trackers: further trackers: `tensorboard`, whose event files are in `tensorboard/` of the run directory
    - project: W&B's project
    - name: the run's name there; null: `run.name`
    - timeout_s: how long W&B may take to start before the run is logged offline; also how long a tracker may take for
      the rest after the run has ended
    """

    wandb: Literal["online", "offline", "disabled"] = "disabled"
    trackers: list[Literal["tensorboard"]] = field(default_factory=list)
    project: str = "rlhf_spmd"
    name: str | None = None
    timeout_s: Seconds = 20.0
    wandb_init: WandbConfig = field(default_factory=WandbConfig)
    rules: ClassVar[Rules] = (
        Rule(("project",), lambda s: not s.project, "W&B lists runs by project", "give the name of a project"),
    )

    @property
    def tracker_settings(self) -> dict[str, dict[str, Any]]:
        """Return the settings of each tracker, by its name."""
        wandb = {} if self.wandb == "disabled" else {"wandb": {"mode": self.wandb, **asdict(self.wandb_init)}}
        return wandb | {name: {} for name in self.trackers}

    def check(self, where: str = "logger") -> None:
        for name in self.trackers:
            package = find_spec(name)
            if package is None or package.origin is None:  # missing, or only a directory of that name
                line = f"{where}.trackers={list(self.trackers)}: {name} is not installed; pip install {name}, or leave it out"
                raise ValueError(line)


class TrackerProcesses:
    """The tracker processes of a run. A line on standard input, or this process's end, ends each."""

    def __init__(self, run_dir: Path, config: LoggerConfig, run_name: str, steps: int, resumed_at: int | None) -> None:
        """Start the processes. The files of this start must exist already, cut to ``resumed_at``."""
        self._timeout_s = config.timeout_s
        offsets = {name: (run_dir / f"{name}.jsonl").stat().st_size for name in (METRICS, *SAMPLES)}
        paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, settings in config.tracker_settings.items():
            run_settings = config.project, config.name or run_name, settings, config.timeout_s
            job = TrackerJob(name, str(run_dir.resolve()), offsets, steps, resumed_at, *run_settings)
            self._processes[name] = subprocess.Popen(
                job.command,
                env={**os.environ, "PYTHONPATH": paths},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C ends the run, and the run then ends its trackers
            )

    def close(self, exit_code: int = 0) -> None:
        """Wait for the trackers, at most as long as :class:`LoggerConfig` allows. May be called twice."""
        for process in self._processes.values():
            assert process.stdin is not None, "started with a pipe"
            with contextlib.suppress(OSError):  # it ended early and gave the reason on standard error
                process.stdin.write(b"%d\n" % exit_code)
                process.stdin.flush()
        # trackers keep their own limits for starting and uploading; this one covers what they cannot foresee
        deadline = time.monotonic() + 2 * self._timeout_s + LOCAL_TIMEOUT_S
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


# The process of one tracker


class Table(NamedTuple):
    """Samples of a step, a row each. ``data``: numbers, texts and None."""

    columns: list[str]
    data: list[list[Any]]


@dataclass(frozen=True)
class TrackerJob:
    """What a tracker process follows.

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
        """Return the run's configuration as YAML."""
        return (Path(self.run_dir) / CONFIG_FILE).read_text(encoding="utf-8", errors="replace")

    @property
    def command(self) -> list[str]:
        """Return the command of the process. ``-P``: nothing in the working directory, such as wandb/, hides a package."""
        return [sys.executable, "-P", "-m", "rlhf_spmd.telemetry.trackers", json.dumps(asdict(self))]


class Tracker(Protocol):
    """A tracker, which is made from a :class:`TrackerJob`. Exceptions in its methods end this process at most."""

    def log(self, step: int, unix_s: float, metrics: Metrics, tables: Mapping[str, Table]) -> None:
        """Log a step. ``tables``: its samples by the name of their file, if there are any."""

    def finish(self, exit_code: int) -> None: ...


class Wandb:
    """W&B's client. If it does not start online in time, this process starts again offline."""

    def __init__(self, job: TrackerJob) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        settings = {key: value for key, value in job.settings.items() if value}
        online = settings["mode"] == "online"
        limit_s = job.timeout_s if online else max(LOCAL_TIMEOUT_S, job.timeout_s)
        id_file = Path(job.run_dir) / "wandb" / "run_id"  # W&B's id of the run, for a resume
        id_file.parent.mkdir(parents=True, exist_ok=True)
        run_id = id_file.read_text().strip() if job.resumed_at is not None and id_file.exists() else None
        settings["id"] = settings.get("id") or run_id or os.urandom(5).hex()
        id_file.write_text(settings["id"] + "\n")
        settings |= {"project": job.project, "name": job.name, "dir": job.run_dir, "config": yaml.safe_load(job.config)}
        settings["settings"] = wandb.Settings(init_timeout=limit_s, console="wrap", silent=True)
        try:
            self._run = wandb.init(resume="allow" if online else None, **settings)
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
        samples = {name: self._table(*table, allow_mixed_types=True) for name, table in tables.items()}
        self._run.log({**metrics, **samples}, step=step)
        self._console.update(step, metrics)

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class TensorBoard:
    def __init__(self, job: TrackerJob) -> None:
        from torch.utils.tensorboard import SummaryWriter

        first = 0 if job.resumed_at is None else job.resumed_at + 1  # hides later steps of earlier starts
        self._writer: Any = SummaryWriter(Path(job.run_dir) / "tensorboard", purge_step=first)
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
    """Log every step until the run has ended. A refused step is left out; the first one is reported."""
    files = {name: (Path(job.run_dir) / f"{name}.jsonl").open("rb") for name in job.offsets}
    for name, file in files.items():
        file.seek(job.offsets[name])
    waiting: dict[str, list[dict[str, Any]]] = {name: [] for name in SAMPLES}
    has_refused = has_ended = False
    while not has_ended:
        has_ended = bool(wait([end], POLL_S).done)
        lines = appended(files[METRICS])
        for name in SAMPLES:  # a step's samples are written before its metrics
            waiting[name] += appended(files[name])
        for line in lines:
            step = line.pop("step")
            unix_s = line.pop("unix_s")
            tables = {name: [row for row in rows if row["step"] <= step] for name, rows in waiting.items()}
            waiting = {name: rows[len(tables[name]) :] for name, rows in waiting.items()}
            numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
            try:
                tracker.log(step, unix_s, numbers, {name: as_table(rows) for name, rows in tables.items() if rows})
            except Exception as error:  # a process boundary: whatever the tracker raises
                if not has_refused:
                    warn(job.tracker, f"step {step} was not logged ({_reason(error)}); metrics.jsonl has it")
                has_refused = True


def appended(file: BinaryIO) -> list[dict[str, Any]]:
    """Return the complete JSON lines since the last call."""
    lines = file.readlines()
    if lines and not lines[-1].endswith(b"\n"):
        file.seek(-len(lines.pop()), os.SEEK_CUR)
    return [json.loads(line) for line in lines]


def as_table(rows: list[dict[str, Any]]) -> Table:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cell_types = (str, int, float, type(None))
    values = ([row.get(name) for name in columns] for row in rows)
    return Table(columns, [[value if isinstance(value, cell_types) else json.dumps(value) for value in row] for row in values])


def wait_for_end(job: TrackerJob, end: Future[int]) -> None:
    """Wait, in a thread, until the training process ends or is gone. Then this process has ``timeout_s`` left."""
    parent = os.getppid()
    while (line := next_line(POLL_S)) is None and os.getppid() == parent:
        pass  # the parent's id is checked too: a forked child of it may hold the pipe open
    end.set_result(int(line) if line else 1)
    time.sleep(job.timeout_s)
    rest = "; 'wandb sync' on the run directory's wandb/ sends the rest" if job.tracker == "wandb" else ""
    warn(job.tracker, f"not done {job.timeout_s:g} s after the run; metrics.jsonl has every step{rest}")
    os._exit(1)


def main() -> int:
    """Follow the run of the job in the first argument until it ends. Returns the exit code."""
    job = TrackerJob(**json.loads(sys.argv[1]))
    os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), 5))  # ranks on CPUs need the cores more
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


def next_line(timeout_s: float) -> str | None:
    """Return the next line of standard input, "" at its end, None on time-out. Reads nothing ahead."""
    descriptor = sys.stdin.fileno()
    if not select.select([descriptor], [], [], timeout_s)[0]:
        return None
    line = b""
    while (byte := os.read(descriptor, 1)) not in (b"", b"\n"):
        line += byte
    return line.decode()


def _restart(job: TrackerJob, teardown: Callable[[], object]) -> NoReturn:
    """Restart this program in this process, because wandb's service keeps the id of a run that failed to start."""
    ending = threading.Thread(target=teardown, daemon=True)
    ending.start()
    ending.join(timeout=2.0)
    os.execv(sys.executable, job.command)


def _preformatted(text: str) -> str:
    """Return the text as a Markdown code block."""
    return "\n".join("    " + line for line in text.splitlines())


def _reason(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as failure:  # a process boundary: one line, not a traceback among the lines of the run
        warn("tracker", f"stopped ({type(failure).__name__}: {failure}); metrics.jsonl has every step")
        sys.exit(1)
