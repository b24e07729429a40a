"""The loop of a run, from its first step to its last, with metrics, checkpoints and resume."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlhf_spmd.checkpoint.adapters import STATE as ADAPTERS
from rlhf_spmd.checkpoint.directory import Committed, checkpoints_of, named_checkpoint, read_manifest, step_directory
from rlhf_spmd.checkpoint.load import find_resumable, load_checkpoint
from rlhf_spmd.checkpoint.save import prepare_checkpoint
from rlhf_spmd.config.load import to_yaml
from rlhf_spmd.controller import CallStats, Controller, Reference
from rlhf_spmd.controller.versions import Versions
from rlhf_spmd.data.prompts import PromptDataset
from rlhf_spmd.kernels import capabilities, wait
from rlhf_spmd.kernels.devices import peak_bytes
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.preflight.checks import in_flight
from rlhf_spmd.process.exit import Preempted
from rlhf_spmd.process.program import ProgramContext
from rlhf_spmd.reshard import LABELS
from rlhf_spmd.rewards.eval_metrics import repeated_means
from rlhf_spmd.telemetry import run_dir, run_lock
from rlhf_spmd.telemetry.report import write_report
from rlhf_spmd.telemetry.summary import artifact_lines
from rlhf_spmd.telemetry.trace import Timeline, events_of_a_rank, write_trace
from rlhf_spmd.training import resume
from rlhf_spmd.training.banner import start_facts
from rlhf_spmd.training.checkpoint_writer import CheckpointWriter
from rlhf_spmd.training.exports import Exports
from rlhf_spmd.training.recorder import MadeStep, Recorder, merge_reports
from rlhf_spmd.training.run_config import RESUME, RunConfig
from rlhf_spmd.training.streams import Data
from rlhf_spmd.workers.flops import forward_flops, matmul_rate, rated_flops
from rlhf_spmd.workers.model_worker import ModelWorker

TARGET = "val/reward_mean"  # what an algorithm's goal is of
Script = Callable[[int], list[Reference]]  # number of a step -> the calls whose values are its metrics
Validate = Callable[[int], dict[str, float]]


class Trainer:
    """Runs ``models`` on ``data``. ``context.prepared``: the :class:`~rlhf_spmd.training.job.TrainJob`."""

    def __init__(self, context: ProgramContext[Any], models: SimpleNamespace, data: Data) -> None:
        self.context, self.models, self.data = context, models, data
        self.finished_before = False  # its goal was reached in an earlier start
        self.damaged: tuple[Committed, ...] = ()  # checkpoints of the run that cannot be read
        self._received = 0  # bytes of weights that have been reported
        self.world, self.board, ready = context.world, context.board, context.prepared
        self.config: RunConfig = ready.config.run
        assert self.config.steps is not None, "the data have said how long the run is"
        self.steps = self.config.steps
        self.controller: Controller = self.models.controller
        self.run_dir = Path(self.config.dir)
        self.is_first = self.world.rank == 0
        self.exports = Exports(ready, self.controller)
        self.writer = CheckpointWriter(self.world, self.board)
        algorithm, device = ready.config.algorithm, self.world.device
        self.goal = algorithm.goal
        prompts = [row for rows in ready.training.values() if isinstance(rows, PromptDataset) for row in rows.examples()]
        self.repeated = repeated_means(ready.rewards, [prompts])  # metrics that are left out
        self.num_bad = sum(rows.tally.num_bad for rows in (*ready.training.values(), *ready.validation.values()))
        self.saved = {
            role: worker
            for role, worker in vars(self.models).items()
            if isinstance(worker, ModelWorker) and worker.name == role and (worker.trained or role in algorithm.moved)
        }
        dtype = ready.plans[algorithm.exported].config.torch_dtype(device)
        self.peak_flops = matmul_rate(device, dtype, self.world.launch.local_size)  # of one rank
        self.rated_flops = rated_flops(device, dtype)
        if self.is_first and capabilities(device).streams and self.rated_flops is None:
            rate = f"{self.peak_flops / 1e12:.0f} TFLOP/s measured here"
            print(f"perf/mfu is of {rate}: no figure of this device's data sheet is known", file=sys.stderr)

    def run(self, script: Script, validate: Validate) -> None:
        """Run all steps from where the run stands. ``validate`` returns the same on every rank; it is called every
        ``run.test_freq`` steps.

        The run ends early when ``TARGET`` reaches the algorithm's goal. Collective over the world: every rank of it must call.
        Raises Preempted, after saving, if any rank was signalled.
        """
        with self.writer:
            self._run(script, validate)

    def _run(self, script: Script, validate: Validate) -> None:
        started_at = self.resume()
        if self.finished_before or started_at >= self.steps:
            self.board.set_step(started_at)
            if self.is_first:
                done, remedy = f"step {started_at} of {self.steps} is done", "raise run.steps or "
                if self.finished_before:
                    done, remedy = f"its goal was reached in step {started_at}", ""
                print(f"nothing to do: {done}; {remedy}give another run.dir", file=sys.stderr)
            self._export(started_at, ended=True)
            return
        if started_at:
            self._export(started_at, ended=False)
        recorder = None
        if self.is_first:
            run_dir.atomic_write_text(self.run_dir / run_dir.CONFIG_FILE, to_yaml(self.context.prepared.config))
            recorder = Recorder(self.run_dir, self.context.prepared.config, started_at, start_facts(self.world))
            self.controller.timeline.listener = recorder.progress.phase
        test_freq = self.config.test_freq
        if test_freq and started_at == 0:
            first, shown = validate(0), self.data.validation.take_shown()
            self.exports.is_best(0, first)
            if recorder is not None:
                recorder.log(0, first, [], shown)
        self._moved_bytes()
        under_way: deque[MadeStep] = deque()  # steps that some ranks may not have ended yet
        for global_step in range(started_at + 1, self.steps + 1):
            under_way.append(self._make(script, global_step))
            self.writer.check()
            is_tested = bool(test_freq) and (global_step % test_freq == 0 or global_step == self.steps)
            is_exported, is_saved = (bool(n) and global_step % n == 0 for n in (self.config.export_freq, self.config.save_freq))
            spare = 0 if is_tested or is_saved or is_exported or global_step == self.steps else self.controller.versions.ahead
            preempted = stopped = is_best = False
            while len(under_way) > spare:
                step = under_way.popleft()
                if step.preempted():
                    preempted, spare = True, 0  # the checkpoint comes after all steps
                metrics, samples = self._receive(step)
                if is_tested and not under_way:
                    self.writer.wait()
                    found = validate(global_step)
                    self._moved_bytes()  # not of a step
                    metrics |= found
                    is_best = self.exports.is_best(global_step, found)
                    stopped = self.goal is not None and found.get(TARGET, -math.inf) >= self.goal
                shown = self.data.validation.take_shown()
                if recorder is not None:
                    recorder.log(step.global_step, metrics, samples, shown)
                if recorder is not None and stopped:
                    recorder.progress.say(
                        f"target reached: {TARGET} {found[TARGET]:.4g} >= {self.goal:g} at step {global_step}"
                    )
            ended = stopped or global_step == self.steps
            is_awaited = ended or preempted or is_exported or is_best
            if is_awaited or is_saved:
                if recorder is not None:
                    recorder.sync()  # before the checkpoint is there
                self.save(global_step, stopped, in_background=self.config.background_save and not is_awaited)
            if preempted and not ended:
                self._close(recorder, "preempted", global_step)
                raise Preempted(f"saved {self.board.last_checkpoint}; start again with run.resume=auto to go on")
            if is_awaited:
                self._export(global_step, ended)
            if ended:
                break
        self._close(recorder, "done", global_step)

    def _make(self, script: Script, global_step: int) -> MadeStep:
        """Make one step. This rank's report of it travels to rank 0 while the rank goes on."""
        self.board.set_step(global_step)
        self.controller.timeline.begin_step(global_step)
        start = time.perf_counter()
        calls, rows = self.data.run(global_step, partial(script, global_step))
        if not calls and not self.controller.call_stats:
            name = self.context.prepared.algorithm.__name__
            raise RuntimeError(f"{name}.step made no call in step {global_step}: nothing was computed and nothing learnt")
        seconds = time.perf_counter() - start
        own: dict[str, float] = defaultdict(float)
        for name, value in self.controller.timeline.phase_totals(global_step).items():
            if ":" not in name:
                own[f"timing_s/{name.rsplit('.', 1)[-1]}"] += value  # of a method the sum over roles
        own |= {"timing_s/step": seconds, "reshard/bytes": float(self._moved_bytes())}
        own["memory/peak_gb"] = peak_bytes(self.world.device) / 2**30
        self.controller.send_report([self.controller.values(*calls), own])
        told = {"data/epoch": self.data.epoch} | ({"data/bad_rows": self.num_bad} if self.num_bad else {})
        preempted = self.controller.any_async(self.board.preempted)
        return MadeStep(global_step, rows, self.controller.call_stats, len(calls), told, preempted)

    def _moved_bytes(self) -> int:
        """Return the bytes of weights that this rank has received since the last call; they may come between steps, too."""
        before, self._received = self._received, sum(RECORDER.received[label] for label in LABELS)
        return self._received - before

    def _receive(self, step: MadeStep) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return on rank 0 the metrics and samples of a step from the reports of all ranks; waits for ranks that have yet to
        end it. Other ranks return nothing.
        """
        if not self.is_first:
            return {}, []
        reports = self.controller.receive_reports()
        metrics, samples = merge_reports(step, reports, self._utilisation)
        metrics = {name: value for name, value in metrics.items() if name not in self.repeated}
        if "generation/idle_fraction" in metrics:
            idle = round(metrics["generation/idle_fraction"], 4)
            self.controller.timeline.instant("generation", of_step=step.global_step, idle_fraction=idle)
        return metrics, samples

    def _utilisation(self, calls: Sequence[CallStats], num_rows: int, num_tokens: float, seconds: float) -> dict[str, float]:
        """Return the share of all devices' arithmetic that the step's calls used: by their data sheet if it is known, and as measured.

        An update counts three forward passes in each epoch: one forward, and a backward of two. Half of the backward are the weights'
        gradients, which a role with adapters does not compute. With rows in flight, the tokens of the rows that a step trains on
        stand for the tokens that it generated.
        """
        prepared, mean = self.context.prepared, num_tokens / num_rows
        flops = 0.0
        for role, kind, rows, epochs in calls:
            plan = prepared.plans[role]
            if plan.spec is not None and kind in ("generate", "infer", "train"):
                passes = (2.0 if plan.config.lora.rank else 3.0) * epochs if kind == "train" else 1.0
                if kind == "generate" and in_flight(prepared.config):
                    rows = min(rows, prepared.config.data.train_batch_size * prepared.config.sampling.n)
                flops += forward_flops(plan.spec, rows * mean, mean) * passes
        rate = flops / seconds / self.world.size
        self.peak_flops = max(self.peak_flops, rate)
        measured = rate / self.peak_flops
        rated = None if self.rated_flops is None else rate / self.rated_flops
        return {"perf/mfu": measured} if rated is None else {"perf/mfu": rated, "perf/mfu_measured": measured}

    # Checkpoints

    def _state(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the roles that change."""
        roles = resume.role_states(self.controller, self.models)
        environment = resume.environment_digests(self.context.prepared.config)
        return {"data": self.data.state_dict(), "roles": roles, "kept": sorted(self.data.kept), "environment": environment}

    def save(self, global_step: int, stopped: bool = False, in_background: bool = False) -> None:
        """Wait for the checkpoint in flight, then write one of this step, or start to.

        Collective over the world: every rank of it must call, in program order. Raises CheckpointError on all of them.
        """
        with self.controller.timeline.span("save_checkpoint", category="io"):
            self.writer.wait()
            progress = self.controller.get(*(worker.progress() for worker in self.saved.values()))
            counts = dict(zip(self.saved, progress, strict=True))
            state = {"step": global_step, "stopped": stopped, "versions": self.controller.versions.state(), **self._state()}
            for key in ("optimizer_steps", "skipped_steps"):
                state[key] = {role: values[0][key] for role, values in counts.items()}
            state["best"] = self.exports.best
            state[ADAPTERS] = {role: asdict(it.config.lora) for role, it in self.saved.items() if it.config.lora.rank}
            held = {role: resume.role_state(worker) for role, worker in self.saved.items() if worker.member}
            held |= resume.rows_in_flight(self.saved) | resume.weights_ahead(self.saved)
            if self.is_first:
                run_lock.check_still_held(self.run_dir)
                run_dir.forget_exports(self.run_dir, step_directory(self.run_dir, global_step).name)
            keep = self.config.keep_checkpoints
            draft = prepare_checkpoint(self.run_dir, global_step, held, state, self.world.all, keep, self.damaged)
            (self.writer.start if in_background else self.writer.write)(draft)

    def resume(self) -> int:
        """Load the checkpoint that ``run.resume`` asks for. Returns its step, 0 for a new run.

        Collective over the world: every rank of it must call. Raises CheckpointError, and ValueError where the run would mix with the
        checkpoints of an older one, or resume another experiment.
        """
        # also beside a path that is given: what is damaged must not count as kept
        found = find_resumable(self.run_dir, self.world.all, resume.check_state)
        path, self.damaged = found.directory, found.damaged
        if self.config.resume not in RESUME:
            path = named_checkpoint(Path(self.config.resume))
        if self.config.resume == "never" and path is not None:
            raise ValueError(f"run.resume=never, but run.dir={self.config.dir} holds {path.name}; give another run.dir")
        if self.is_first:
            for warning in found.warnings:
                print(f"warning: {warning}", file=sys.stderr)
        if path is None:
            metrics = self.run_dir / run_dir.METRICS_FILE
            if self.is_first and metrics.is_file() and metrics.stat().st_size:
                print(f"no checkpoint in {self.run_dir}: it begins anew, what it had logged is in *.before", file=sys.stderr)
            return 0
        manifest = read_manifest(path)
        resume.check_state(manifest)
        state, lacking = manifest.state, sorted(self.saved.keys() - set(manifest.roles))
        told = resume.compare_runs(path, self.context.prepared.config, state, self._state(), lacking)
        if told and self.is_first:
            print(told, file=sys.stderr)
        configs = {role: self.context.prepared.plans[role].config for role in self.saved}
        resume.check_dtypes(path, configs, self.world.device)
        self.board.last_checkpoint = str(path)
        with resume.read_state(path):
            versions = state.get("versions", Versions().state())  # older checkpoints do not count them
            self.controller.versions.load_state(versions)
        for role, worker in self.saved.items():
            worker.model.version = self.controller.versions.newest(role)
            if worker.member:
                held = resume.role_state(worker)
                load_checkpoint(path, role, held, worker.mesh.pool)
                if worker.engine.optimizer is not None:
                    worker.engine.optimizer.take_states(held.optim)
                    with resume.read_state(path):
                        worker.engine.optimizer.step_count = int(state["optimizer_steps"][role])
                        # checkpoints of before skipped none
                        worker.engine.optimizer.skipped = int(state.get("skipped_steps", {}).get(role, 0))
        with resume.read_state(path):
            resume.restore(dict(state), self.data, self.models)
        resume.restore_rows_in_flight(path, self.saved)
        resume.restore_weights_ahead(path, self.saved)
        self.finished_before = bool(state["stopped"])
        own = path.resolve().parent == checkpoints_of(self.run_dir).resolve()
        self.exports.restore(state.get("best") if own else None)  # another run's best step is none of this one's
        if self.is_first:
            print(f"resumed from {path} (step {state['step']})", file=sys.stderr)
        return int(state["step"])

    def _close(self, recorder: Recorder | None, ended: str, global_step: int) -> None:
        self.controller.settle()
        payloads = self.world.all.gather_bytes(self.controller.timeline.to_bytes(), "control")
        if recorder is not None and payloads is not None:
            run_lock.check_still_held(self.run_dir)
            status = run_dir.ExitStatus(ended, step=global_step, last_checkpoint=self.board.last_checkpoint)
            for name, write in (
                (run_dir.TRACE_FILE, lambda: write_trace(self.run_dir / run_dir.TRACE_FILE, payloads)),
                (run_dir.REPORT_FILE, lambda: write_report(self.run_dir, status=status)),
            ):
                try:
                    write()
                except run_dir.WriteError:
                    run_dir.UNWRITTEN[name] += 1
            recorder.close()
            print(*artifact_lines(self.run_dir), *filter(None, [run_dir.unwritten_text()]), sep="\n", file=sys.stderr)

    def _export(self, global_step: int, ended: bool) -> None:
        if self.board.last_checkpoint is not None:
            self.exports.write(global_step, Path(self.board.last_checkpoint), ended)


def start_controller(context: ProgramContext[Any]) -> Controller:
    """Return a controller whose timeline has the pools that this rank is in. On GPUs a timed span ends when the work it started
    is done.

    It waits for the work of the present stream only: weights are sent to replicas from another one while the script goes on.
    """
    world, plans = context.world, context.prepared.plans.values()
    names = sorted({pool.name for plan in plans for pool in plan.pools if world.rank in pool.ranks})
    timeline = Timeline(world.rank, names, events_of_a_rank(world.size), partial(wait, world.device))
    config = context.prepared.config
    placement, limits = config.placement, config.algorithm.limits
    return Controller(
        world.all,
        context.board,
        timeline,
        config.run.seed,
        ahead=placement.max_staleness,
        speeds=placement.speeds,
        num_chunks=placement.rollout_chunks,
        limits=(limits.max_tokens, limits.rows or 0),
    )
