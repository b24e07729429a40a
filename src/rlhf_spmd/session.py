"""A run from its first step to its last: the loop that ``train`` and ``sft`` share, with its metrics, checkpoints and resume."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml

from rlhf_spmd.checkpoint.directory import read_manifest
from rlhf_spmd.checkpoint.export import export_hugging_face
from rlhf_spmd.checkpoint.load import find_resumable, load_checkpoint
from rlhf_spmd.checkpoint.save import RoleState, save_checkpoint
from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.config.load import to_dict, to_yaml
from rlhf_spmd.controller import Controller
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.parallel.program import Preempted, ProgramContext, ProgramSettings, read_command_line, run_program
from rlhf_spmd.parallel.world import read_launch
from rlhf_spmd.reshard import LABELS
from rlhf_spmd.roles import model_directory
from rlhf_spmd.telemetry.jsonl import JsonlLog
from rlhf_spmd.telemetry.logger import MetricLogger
from rlhf_spmd.telemetry.progress import Progress
from rlhf_spmd.telemetry.report import write_report
from rlhf_spmd.telemetry.report_sections import flatten_config
from rlhf_spmd.telemetry.run_dir import (
    CONFIG_FILE,
    EXPORT_DIR,
    ROLLOUTS_FILE,
    TRACE_FILE,
    ExitStatus,
    atomic_write_text,
)
from rlhf_spmd.telemetry.summary import places
from rlhf_spmd.telemetry.trace import Timeline, write_trace
from rlhf_spmd.workers.flops import forward_flops, matmul_rate
from rlhf_spmd.workers.model_worker import ModelWorker

RESUME = ("auto", "force", "never")
EXPERIMENT = re.compile(r"algorithm\.name|models\.\w+\.path|model\.path|data\.path")  # keys that make it another experiment


@dataclass(frozen=True)
class RunConfig:
    """``run``. ``save_freq``, ``test_freq``: steps between checkpoints and validations; 0: only at the end, or never.

    ``resume``: auto (from the newest good checkpoint in ``dir``, if there is one, and if it is of the same algorithm, models and
    data), force (of whatever it is), never, or a checkpoint directory.
    ``keep_checkpoints``: how many stay, at least 2. ``timeout_s``: how long ranks wait for each other before the run ends.
    ``threads``: of a rank on CPUs; on GPUs it is not read. ``log_samples``: rollouts written per step. ``export``: write a Hugging
    Face directory at the end.
    """

    name: str = "run"
    dir: str = "runs/${run.name}"
    seed: int = 0
    steps: int = 100
    save_freq: int = 0
    test_freq: int = 0
    resume: str = "auto"
    keep_checkpoints: int = 2
    timeout_s: float = 600.0
    threads: int = 1
    log_samples: int = 4
    export: bool = True

    def check(self, where: str) -> None:
        check_bounds(self, where, "steps", "threads", least=1)
        check_bounds(self, where, "save_freq", "test_freq", "log_samples", least=0)
        check_bounds(self, where, "keep_checkpoints", least=2)
        check_bounds(self, where, "timeout_s", above=0)
        here = Path(self.dir).absolute()
        root = next(path for path in (here, *here.parents) if path.exists())
        if not (root.is_dir() and os.access(root, os.W_OK)):
            raise ValueError(f"{where}.dir={self.dir}: {root} is not a directory that this user can write to; give another one")
        if self.resume not in RESUME and not Path(self.resume).is_dir():
            raise ValueError(f"{where}.resume={self.resume!r} is none of {', '.join(RESUME)}, and no checkpoint directory")


def run_dir_hint(path: str | None, overrides: Sequence[str]) -> Path | None:
    """Where exit_status.json goes when the configuration is refused: ``run.dir`` of the command line or file, as far as readable."""
    given = [value.removeprefix("run.dir=") for value in overrides if value.startswith("run.dir=")]
    if given or path is None:
        return Path(given[-1]) if given else None
    try:
        written = (yaml.safe_load(Path(path).read_text()) or {}).get("run", {}).get("dir")
    except (OSError, UnicodeDecodeError, AttributeError, yaml.YAMLError):
        return None
    return Path(written) if isinstance(written, str) and "${" not in written else None


def run_session_program(
    name: str,
    description: str | None,
    prepare: Callable[[str | None, Sequence[str], int], Any],
    body: Callable[[ProgramContext[Any]], None],
    keys: Callable[[], Iterable[str]],
    argv: Sequence[str] | None,
) -> None:
    """The command line of ``train`` and ``sft``: ``prepare(config file, overrides, world size)``, then ``body`` on all ranks.

    ``keys``: lines about the configuration's keys, for ``--help``.
    """
    config, overrides = read_command_line(name, description, keys, argv)
    run_program(
        lambda: prepare(config, overrides, read_launch().size),
        body,
        lambda ready: ProgramSettings(Path(ready.config.run.dir), ready.config.run.timeout_s, ready.config.run.threads),
        run_dir_hint(config, overrides),
        saves_on_signal=True,
    )


Step = Callable[[int], tuple[dict[str, float], list[dict[str, Any]]]]  # number -> metrics and samples


@dataclass
class Session:
    """What a run carries besides its ``models``. ``state``/``restore``: what a checkpoint holds besides the trained roles.

    ``context.prepared`` has ``config`` (with ``run`` and ``logger``) and ``plans``. The actor is exported.
    """

    context: ProgramContext[Any]
    models: SimpleNamespace
    state: Callable[[], dict[str, Any]]
    restore: Callable[[dict[str, Any]], None]
    started_at: int = field(default=0, init=False)
    finished_before: bool = field(default=False, init=False)  # its goal was reached in an earlier start

    def __post_init__(self) -> None:
        self.world, self.board, ready = self.context.world, self.context.board, self.context.prepared
        self.config: RunConfig = ready.config.run
        self.controller: Controller = self.models.actor.controller
        self.run_dir = Path(self.config.dir)
        self.is_first = self.world.rank == 0
        workers = {role: worker for role, worker in vars(self.models).items() if isinstance(worker, ModelWorker)}
        self.trained = {role: worker for role, worker in workers.items() if worker.trained}
        # FLOP/s of one rank, by which utilisation (perf/mfu) is measured
        self.peak_flops = matmul_rate(self.world.device, ready.plans["actor"].config.torch_dtype(self.world.device))

    def run(self, one_step: Step, validate: Callable[[int], dict[str, float]], goal: float | None = None) -> None:
        """All steps from where the run stands; what ``one_step`` and ``validate`` give is the same on every rank.

        ``validate`` is called where ``run.test_freq`` says. The run ends when ``val/reward_mean`` has reached ``goal``.
        Collective over the world: every rank of it must call. Raises Preempted after saving if any rank was signalled.
        """
        self.started_at = self.resume()
        if self.finished_before or self.started_at >= self.config.steps:
            self.board.set_step(self.started_at)
            if self.is_first:
                done, remedy = f"step {self.started_at} of {self.config.steps} is done", "raise run.steps or "
                if self.finished_before:
                    done, remedy = f"its goal was reached in step {self.started_at}", ""
                print(f"nothing to do: {done}; {remedy}give another run.dir", file=sys.stderr)
            if self.config.export and self.controller.decide(self.is_first and not (self.run_dir / EXPORT_DIR).exists()):
                self._export()  # the run was ended between its last checkpoint and its export
            return
        if self.is_first:
            atomic_write_text(self.run_dir / CONFIG_FILE, to_yaml(self.context.prepared.config))
        recorder = Recorder(self) if self.is_first else None
        test_freq = self.config.test_freq
        if test_freq and self.started_at == 0:
            first = validate(0)
            if recorder is not None:
                recorder.log(0, first, [])
        for number in range(self.started_at + 1, self.config.steps + 1):
            metrics, samples = self._timed(one_step, number)
            if test_freq and (number % test_freq == 0 or number == self.config.steps):
                metrics |= validate(number)
            stopped = goal is not None and metrics.get("val/reward_mean", -math.inf) >= goal
            ended = stopped or number == self.config.steps
            if recorder is not None:
                recorder.log(number, metrics, samples)
            preempted = self.controller.decide(self.board.preempted)
            if ended or preempted or (self.config.save_freq and number % self.config.save_freq == 0):
                self.save(number, stopped)
            if preempted and not ended:
                self._close(recorder, "preempted", number)
                raise Preempted(f"saved {self.board.last_checkpoint}; start again with run.resume=auto to go on")
            if ended:
                break
        if self.config.export:
            self._export()
        self._close(recorder, "done", number)

    def _timed(self, one_step: Step, number: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
        self.board.set_step(number)
        self.controller.timeline.begin_step(number)
        received = sum(RECORDER.received[label] for label in LABELS)
        start = time.perf_counter()
        metrics, samples = one_step(number)
        seconds = time.perf_counter() - start
        phases = self.controller.timeline.phase_totals(number)
        own_phases = {key: value for key, value in phases.items() if ":" not in key}
        received = sum(RECORDER.received[label] for label in LABELS) - received
        mine = json.dumps([own_phases, peak_memory_gb(self.world.device), received]).encode()
        parts = self.world.all.gather_bytes(mine, "control")
        metrics = {"step": float(number), **metrics, "timing_s/step": seconds, "reshard/bytes": 0.0}
        for phase_seconds, peak, num_bytes in map(json.loads, parts or []):
            metrics["reshard/bytes"] = max(metrics["reshard/bytes"], float(num_bytes))
            for name, value in phase_seconds.items():
                key = f"timing_s/{name.rsplit('.', 1)[-1]}"
                metrics[key] = max(metrics.get(key, 0.0), value)
            metrics["memory/peak_gb"] = max(metrics.get("memory/peak_gb", 0.0), peak)
        if "perf/total_tokens" in metrics:
            metrics["perf/tokens_per_s"] = metrics.pop("perf/total_tokens") / seconds
            metrics["perf/mfu"] = metrics.pop("perf/total_flops") / seconds / (self.peak_flops * self.world.size)
        return metrics, samples

    def work(self, num_tokens: float, num_rows: int, epochs: int = 1) -> dict[str, float]:
        """Metrics from which ``run`` makes tokens/s and utilisation: tokens, and FLOPs of the calls of the last script.

        An update counts three forward passes in each of its ``epochs``: one, and backward twice that.
        """
        plans = self.context.prepared.plans
        calls = [(plans[node.role].spec, node.method.startswith("update_")) for node in self.controller.graph.nodes]
        passes = [(spec, 3.0 * epochs if is_update else 1.0) for spec, is_update in calls if spec is not None]
        flops = sum(forward_flops(spec, num_tokens, num_tokens / num_rows) * count for spec, count in passes)
        return {"perf/total_tokens": num_tokens, "perf/total_flops": flops}

    # Checkpoints

    def save(self, number: int, stopped: bool = False) -> None:
        """Collective over the world: every rank of it must call, in program order. Raises CheckpointError on all of them."""
        with self.controller.timeline.span("save_checkpoint", category="io"):
            progress = self.controller.get(*(worker.progress() for worker in self.trained.values()))
            steps = {role: values[0]["optimizer_steps"] for role, values in zip(self.trained, progress, strict=True)}
            state = {"step": number, "stopped": stopped, "optimizer_steps": steps, **self.state()}
            held = {role: role_state(worker) for role, worker in self.trained.items() if worker.member}
            path = save_checkpoint(self.run_dir, number, held, state, self.world.all, self.config.keep_checkpoints)
        self.board.last_checkpoint = str(path)

    def resume(self) -> int:
        """Load the checkpoint that ``run.resume`` asks for; returns its step, 0 for a new run.

        Collective over the world: every rank of it must call. Raises CheckpointError, and ValueError where a new run would
        mix with the checkpoints of an older one, or go on with those of another experiment.
        """
        found = find_resumable(self.run_dir, self.world.all)
        if self.config.resume == "never" and found.directory is not None:
            raise ValueError(
                f"run.resume=never, but run.dir={self.config.dir} holds {found.directory.name}; give another run.dir"
            )
        path = found.directory if self.config.resume in RESUME else Path(self.config.resume)
        if self.is_first:
            for warning in found.warnings:
                print(f"warning: {warning}", file=sys.stderr)
        if path is None:
            return 0
        state = read_manifest(path).state
        self._compare(path, state)
        for role, worker in self.trained.items():
            if worker.member:
                load_checkpoint(path, role, role_state(worker), worker.mesh.pool)
                assert worker.engine.optimizer is not None
                worker.engine.optimizer.step_count = int(state["optimizer_steps"][role])
        self.restore(dict(state))
        self.finished_before = bool(state["stopped"])
        self.board.last_checkpoint = str(path)
        if self.is_first:
            print(f"resumed from {path} (step {state['step']})", file=sys.stderr)
        return int(state["step"])

    def _compare(self, path: Path, saved: dict[str, Any]) -> None:
        """Say what is another than in the run whose checkpoint ``path`` is; raise ValueError where that is another experiment.

        Collective over the world: every rank of it must call.
        """
        file = path.resolve().parents[1] / CONFIG_FILE
        new = flatten_config(to_yaml(self.context.prepared.config))
        old = flatten_config(file.read_text(encoding="utf-8")) if file.is_file() else new
        pairs = {key: (new.get(key, "null"), old.get(key, "null")) for key in {**old, **new}}
        keys = [key for key, (is_now, was) in pairs.items() if is_now != was and key not in ("run.dir", "run.resume")]
        changed = {key: f"{key}={pairs[key][0]} (was {pairs[key][1]})" for key in keys}
        then, now = (state["loader"]["fingerprint"] for state in (saved, self.state()))
        other = [
            text for key, text in changed.items() if EXPERIMENT.fullmatch(key) and len(set(map(full_path, pairs[key]))) > 1
        ]
        if then != now:
            other.append(f"the prompts or pairs in data.path are {now} (were {then})")
        if other and self.config.resume == "auto":
            raise ValueError(
                f"{path} is of another experiment: {', '.join(other)}; give another run.dir, or run.resume=force to go on with it"
            )
        if changed and self.is_first:
            print(f"other settings than in {file}: {', '.join(changed.values())}", file=sys.stderr)

    def _close(self, recorder: Recorder | None, ended: str, number: int) -> None:
        payloads = self.world.all.gather_bytes(self.controller.timeline.to_bytes(), "control")
        if recorder is not None and payloads is not None:
            write_trace(self.run_dir / TRACE_FILE, payloads)
            recorder.close()
            write_report(self.run_dir, status=ExitStatus(ended, step=number, last_checkpoint=self.board.last_checkpoint))
            print(*places(self.run_dir), sep="\n", file=sys.stderr)

    def _export(self) -> None:
        """Rank 0 writes for as long as it takes; nobody waits for it in one collective, whose time is limited."""
        if self.board.last_checkpoint is None:
            return
        source = model_directory(self.context.prepared.plans, "actor")
        with ThreadPoolExecutor(1) as pool:
            arguments = Path(self.board.last_checkpoint), "actor", source, self.run_dir / EXPORT_DIR
            written = pool.submit(export_hugging_face, *arguments) if self.is_first else None
            pause_s = 0.01
            while self.controller.decide(written is not None and not written.done()):
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)
        if written is not None:
            written.result()
        self.world.all.barrier("control")


class Recorder:
    """Rank 0's side of a session: metrics, samples, progress."""

    def __init__(self, session: Session) -> None:
        resume = session.started_at or None
        config, whole = session.config, session.context.prepared.config
        self.metrics = MetricLogger(session.run_dir, whole.logger, config.name, to_dict(whole), resume)
        self.rollouts = JsonlLog(session.run_dir / ROLLOUTS_FILE, resume)
        self.num_samples = config.log_samples
        self.progress = Progress(config.steps, start_step=session.started_at)

    def log(self, number: int, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        self.metrics.log(number, {key: value for key, value in metrics.items() if key != "step"})
        shown = sorted(samples, key=lambda sample: int(sample["row_id"]))[: self.num_samples]
        self.rollouts.append({"step": number, **sample} for sample in shown)
        self.progress.update(number, metrics)

    def close(self) -> None:
        self.progress.close()
        self.rollouts.close()
        self.metrics.close()


def start_controller(context: ProgramContext[Any]) -> Controller:
    """A controller whose timeline has the pools that this rank is in; on GPUs the wait for the started work ends a timed span.

    It waits for the work of the present stream only: weights on loan are sent from another one while the script goes on.
    """
    world, plans = context.world, context.prepared.plans.values()
    pools = [pool for plan in plans for pool in (plan.pool, *(call.pool for call in plan.calls.values()))]
    names = sorted({pool.name for pool in pools if world.rank in pool.ranks})
    synchronize = (lambda: torch.cuda.current_stream().synchronize()) if world.device.type == "cuda" else None
    return Controller(world.all, context.board, Timeline(world.rank, names, synchronize=synchronize))


def full_path(text: str) -> Path:
    """One form of what names the same file in several ways."""
    return Path(text).expanduser().resolve()


def role_state(worker: ModelWorker) -> RoleState:
    """What this rank holds of a trained role, by reference: saving reads it, loading writes it."""
    engine = worker.engine
    assert engine.optimizer is not None, f"{worker.name} is not trained"
    return RoleState(engine.param_shards(), worker.weights(), engine.optimizer.state_tensors())


def peak_memory_gb(device: torch.device) -> float:
    """Peak memory so far: of the GPU's allocator, on CPUs the resident size of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
