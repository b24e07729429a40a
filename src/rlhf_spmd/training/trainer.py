"""The loop of a run, from its first step to its last."""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlhf_spmd.config.load import to_yaml
from rlhf_spmd.controller import Controller, Reference
from rlhf_spmd.data.prompts import PromptDataset
from rlhf_spmd.kernels.devices import peak_bytes
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.process.exit import Preempted
from rlhf_spmd.process.program import ProgramContext
from rlhf_spmd.reshard import LABELS
from rlhf_spmd.rewards.eval_metrics import repeated_means
from rlhf_spmd.telemetry import run_dir, run_lock
from rlhf_spmd.telemetry.report import write_report
from rlhf_spmd.telemetry.summary import artifact_lines
from rlhf_spmd.telemetry.trace import write_trace
from rlhf_spmd.training.checkpoints import Checkpoints
from rlhf_spmd.training.exports import Exports
from rlhf_spmd.training.recorder import PendingStep, Recorder, Utilisation, merge_reports, start_facts
from rlhf_spmd.training.run_plan import RunPlan
from rlhf_spmd.training.streams import Data

GOAL_METRIC = "val/reward_mean"
Script = Callable[[int], list[Reference]]  # number of a step -> calls whose values are its metrics
Validate = Callable[[int], dict[str, float]]  # number of a step -> metrics


@dataclass(frozen=True)
class DueActions:
    """Actions that follow a step, by the settings of ``run``."""

    validation: bool
    save: bool
    export: bool
    end: bool


@dataclass
class StepOutcome:
    """Outcome of the steps that :meth:`Trainer._finish_steps` has finished.

    - preempted: a rank was signalled to end
    - is_best: no earlier validation gave a better ``run.keep_best``
    - reached_goal: the validation reached the algorithm's goal
    """

    preempted: bool = False
    is_best: bool = False
    reached_goal: bool = False


class Trainer:
    """Runs the steps of a run on ``data``, and what follows each of them."""

    def __init__(self, context: ProgramContext[RunPlan], models: SimpleNamespace, data: Data) -> None:
        self.run_plan: RunPlan = context.prepared
        self.world, self.board = context.world, context.board
        self.data = data
        self.config = self.run_plan.config.run
        self.num_steps = self.run_plan.num_steps
        self.goal = self.run_plan.config.algorithm.goal
        self.controller: Controller = models.controller
        self.run_dir = Path(self.config.dir)
        self.is_first = self.world.rank == 0
        self.exports = Exports(self.run_plan, self.controller)
        self.checkpoints = Checkpoints(context, models, data, self.exports)
        self.utilisation = Utilisation(self.run_plan, self.world)
        self.recorder: Recorder | None = None  # on rank 0, once there is a step to run
        self.pending: deque[PendingStep] = deque()  # steps that other ranks may not have ended yet
        self._reported_bytes = 0  # bytes of weights that have been reported
        prompts = [
            row for rows in self.run_plan.training.values() if isinstance(rows, PromptDataset) for row in rows.examples()
        ]
        self.duplicate_metrics = repeated_means(self.run_plan.rewards, [prompts])  # they are not logged
        datasets = (*self.run_plan.training.values(), *self.run_plan.validation.values())
        self.num_bad_rows = sum(rows.tally.num_bad for rows in datasets)

    def run(self, script: Script, validate: Validate) -> None:
        """Run all steps after the checkpoint that the run resumes from, if there is one.

        ``validate`` returns the same on every rank. The run ends early when ``GOAL_METRIC`` reaches the algorithm's goal.

        Collective over the world: every rank of it must call.
        Raises Preempted, after saving, if any rank was signalled.
        """
        with self.checkpoints.writer:
            last_step = self.checkpoints.resume()
            if self.checkpoints.reached_goal or last_step >= self.num_steps:
                self._end_at_once(last_step)
                return
            if last_step:
                self._export(last_step, ended=False)
            self._start_recording(last_step)
            if self.config.test_freq and last_step == 0:
                self._log(0, self._validate(validate, 0, StepOutcome()), [])
            self._moved_bytes()  # bytes moved before the first step belong to no step
            self._run_steps(script, validate, last_step + 1)

    def _run_steps(self, script: Script, validate: Validate, first_step: int) -> None:
        for global_step in range(first_step, self.num_steps + 1):
            self.pending.append(self._run_step(script, global_step))
            self.checkpoints.writer.check()
            due = self._due_actions(global_step)
            outcome = self._finish_steps(due, validate)
            ended = due.end or outcome.reached_goal
            saves_in_foreground = ended or outcome.preempted or due.export or outcome.is_best
            if saves_in_foreground or due.save:
                self._save(global_step, outcome.reached_goal, saves_in_foreground)
            if outcome.preempted and not ended:
                self._close("preempted", global_step)
                raise Preempted(f"saved {self.board.last_checkpoint}; start again with run.resume=auto to go on")
            if saves_in_foreground:
                self._export(global_step, ended)
            if ended:
                self._close("done", global_step)
                return

    def _save(self, global_step: int, reached_goal: bool, in_foreground: bool) -> None:
        if self.recorder is not None:
            self.recorder.sync()  # the checkpoint must not be newer than the files of metrics
        self.checkpoints.save(global_step, reached_goal, self.config.background_save and not in_foreground)

    def _run_step(self, script: Script, global_step: int) -> PendingStep:
        """Run one step. The rank's report of the step travels to rank 0 while the rank goes on."""
        self.board.set_step(global_step)
        self.controller.timeline.begin_step(global_step)
        start = time.perf_counter()
        calls, rows = self.data.run(global_step, partial(script, global_step))
        if not calls and not self.controller.call_stats:
            name = self.run_plan.algorithm.__name__
            raise RuntimeError(f"{name}.step made no call in step {global_step}: nothing was computed and nothing learnt")
        rank_metrics = self._rank_metrics(global_step, time.perf_counter() - start)
        self.controller.send_report([self.controller.values(*calls), rank_metrics])
        step_metrics = {"data/epoch": self.data.epoch}
        if self.num_bad_rows:
            step_metrics["data/bad_rows"] = self.num_bad_rows
        is_preempted = self.controller.any_async(self.board.preempted)
        return PendingStep(global_step, rows, self.controller.call_stats, len(calls), step_metrics, is_preempted)

    def _rank_metrics(self, global_step: int, seconds: float) -> dict[str, float]:
        """Return metrics of which the largest of all ranks counts. ``seconds``: the time of the step."""
        metrics: dict[str, float] = defaultdict(float)
        for name, value in self.controller.timeline.phase_totals(global_step).items():
            if ":" not in name:
                metrics[f"timing_s/{name.rsplit('.', 1)[-1]}"] += value  # the sum over roles with this method
        metrics |= {"timing_s/step": seconds, "reshard/bytes": float(self._moved_bytes())}
        metrics["memory/peak_gb"] = peak_bytes(self.world.device) / 2**30
        return metrics

    def _due_actions(self, global_step: int) -> DueActions:
        is_last = global_step == self.num_steps
        return DueActions(
            validation=_divides(self.config.test_freq, global_step) or (bool(self.config.test_freq) and is_last),
            save=_divides(self.config.save_freq, global_step),
            export=_divides(self.config.export_freq, global_step),
            end=is_last,
        )

    def _finish_steps(self, due: DueActions, validate: Validate) -> StepOutcome:
        """Receive and log the steps that need not be pending any longer, and validate if it is due.

        As many steps may be pending as generation is ahead of training. Before a validation or a checkpoint, and after a signal, none
        may.
        """
        outcome = StepOutcome()
        waits_for_all = due.validation or due.save or due.export or due.end
        max_steps_in_flight = 0 if waits_for_all else self.controller.versions.ahead
        while len(self.pending) > max_steps_in_flight:
            step = self.pending.popleft()
            if step.is_preempted():
                outcome.preempted = True
                max_steps_in_flight = 0
            metrics, samples = self._receive(step)
            if due.validation and not self.pending:
                self.checkpoints.writer.wait()
                metrics |= self._validate(validate, step.global_step, outcome)
                self._moved_bytes()  # bytes of a validation belong to no step
            self._log(step.global_step, metrics, samples)
            if self.recorder is not None and outcome.reached_goal:
                reached = f"{GOAL_METRIC} {metrics[GOAL_METRIC]:.4g} >= {self.goal:g}"
                self.recorder.progress.say(f"target reached: {reached} at step {step.global_step}")
        return outcome

    def _validate(self, validate: Validate, global_step: int, outcome: StepOutcome) -> dict[str, float]:
        """Return the metrics of a validation. Note in ``outcome`` whether they are the best so far, and reach the goal."""
        metrics = validate(global_step)
        outcome.is_best = self.exports.is_best(global_step, metrics)
        outcome.reached_goal = self.goal is not None and metrics.get(GOAL_METRIC, -math.inf) >= self.goal
        return metrics

    def _receive(self, step: PendingStep) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return the metrics and samples of a step from the reports of all ranks. Empty on other ranks than rank 0.

        Rank 0 waits for ranks that have yet to end the step.
        """
        if not self.is_first:
            return {}, []
        metrics, samples = merge_reports(step, self.controller.receive_reports(), self.utilisation)
        metrics = {name: value for name, value in metrics.items() if name not in self.duplicate_metrics}
        if "generation/idle_fraction" in metrics:
            idle = round(metrics["generation/idle_fraction"], 4)
            self.controller.timeline.instant("generation", of_step=step.global_step, idle_fraction=idle)
        return metrics, samples

    def _log(self, global_step: int, metrics: dict[str, float], samples: list[dict[str, Any]]) -> None:
        shown = self.data.validation.take_shown()
        if self.recorder is not None:
            self.recorder.log(global_step, metrics, samples, shown)

    def _moved_bytes(self) -> int:
        """Return the bytes of weights that this rank has received since the last call of this method."""
        before = self._reported_bytes
        self._reported_bytes = sum(RECORDER.received[label] for label in LABELS)
        return self._reported_bytes - before

    # Beginning and end

    def _start_recording(self, last_step: int) -> None:
        if self.is_first:
            run_dir.atomic_write_text(self.run_dir / run_dir.CONFIG_FILE, to_yaml(self.run_plan.config))
            self.recorder = Recorder(self.run_dir, self.run_plan.config, last_step, start_facts(self.world))
            self.controller.timeline.listener = self.recorder.progress.phase

    def _end_at_once(self, last_step: int) -> None:
        """Print that nothing is left to do, and export what an earlier start did not."""
        self.board.set_step(last_step)
        if self.is_first:
            done, remedy = f"step {last_step} of {self.num_steps} is done", "raise run.steps or "
            if self.checkpoints.reached_goal:
                done, remedy = f"its goal was reached in step {last_step}", ""
            print(f"nothing to do: {done}; {remedy}give another run.dir", file=sys.stderr)
        self._export(last_step, ended=True)

    def _export(self, global_step: int, ended: bool) -> None:
        if self.board.last_checkpoint is not None:
            self.exports.write(global_step, Path(self.board.last_checkpoint), ended)

    def _close(self, ending: str, global_step: int) -> None:
        self.controller.settle()
        payloads = self.world.all.gather_bytes(self.controller.timeline.to_bytes(), "control")
        if self.recorder is None or payloads is None:
            return
        run_lock.check_still_held(self.run_dir)
        status = run_dir.ExitStatus(ending, step=global_step, last_checkpoint=self.board.last_checkpoint)
        writes = {
            run_dir.TRACE_FILE: lambda: write_trace(self.run_dir / run_dir.TRACE_FILE, payloads),
            run_dir.REPORT_FILE: lambda: write_report(self.run_dir, status=status),
        }
        for name, write in writes.items():
            try:
                write()
            except run_dir.WriteError:
                run_dir.UNWRITTEN[name] += 1
        self.recorder.close()
        print(*artifact_lines(self.run_dir), *filter(None, [run_dir.unwritten_text()]), sep="\n", file=sys.stderr)


def _divides(freq: int, global_step: int) -> bool:
    return freq > 0 and global_step % freq == 0
