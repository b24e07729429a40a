"""Whatever goes wrong on one rank of a training run, every rank ends within 60 s, and one line says who and where.

The training program on ranks of its own, with algorithms and rewards of ``tests/outside`` that go wrong in step 2. There is no
torchrun that would end the other ranks: they do it themselves. Jobs go side by side: most of their time is waiting. A job's
seconds count from the end of its first step, or from the kill.
"""

import functools
import json
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tasks
from places import ROOT
from ranks import Program
from rlhf_spmd.telemetry.run_dir import EXIT_CODES
from tiers import tiers

LIMIT_S = 60.0
START_LIMIT_S = 600.0  # of a job until its first step has ended, on a busy machine
REWARD_S = 0.2  # each; a rank has 8 of them in a step
APART = ("placement.pools={a: [0, 1], b: [2]}", *(f"models.{role}.pool=a" for role in ("actor", "reference", "reward")))


@dataclass(frozen=True)
class Fault:
    """``call``: which the line and exit_status.json name. ``line``: a pattern of the line. ``rank``: to blame for it, if
    that is certain. ``tracebacks``: how many there are at most."""

    error_class: str
    call: str
    line: str
    overrides: tuple[str, ...]
    rank: int | None = None
    tracebacks: int = 0
    ranks: int = 2
    step: int = 2


def move(tensor: str, call: str, *overrides: str) -> Fault:
    """There is no room for a ``tensor`` of the weights that move for the call."""
    place = rf"rank 1 failed in {re.escape(call)} \(call \d+, [a-z_]+\.py:\d+, step 2\)"
    line = rf"{place}: MemoryError: no room for the second {tensor}( \(.*\))?; docs/troubleshooting\.md says what .*"
    return Fault("memory", call, line, ("algorithm.name=outside.transition", *overrides, f"algorithm.fault={tensor}"), 1)


PLACE = r"{} \(call \d+, [a-z_]+\.py:\d+, step 3\)"


def exhausted(phase: str, where: str, call: str) -> Fault:
    """Rank 1 gets no more memory in a phase."""
    line = rf"rank 1 failed in {where}: RuntimeError: .*can't allocate memory.*; docs/.*"
    overrides = "algorithm.name=outside.memory", f"algorithm.phase={phase}", "run.background_save=false"
    return Fault("memory", call, line, overrides, 1, step=0 if phase == "start" else 3)


SOURCE = (ROOT / "tests" / "outside" / "faulty.py").read_text().splitlines()
RAISED = next(number for number, line in enumerate(SOURCE, 1) if "raise KeyError" in line)
SITE = rf"\(algorithm 'outside\.faulty', \S+/faulty\.py:{RAISED}\)"
UPDATE = r"rank . failed in actor\.update_actor \(call \d+, faulty\.py:\d+, step 2\)"
FAULTY = "algorithm.name=outside.faulty"
NAN = FAULTY, "algorithm.fault=nan"
SPLIT = "models.actor.layout.tp=2", "models.critic.layout.zero=3"
CALL = "models.critic.calls.compute_values"
POOLS = "placement.pools={a: [1], b: [0]}", "models.critic.pool=a", f"{CALL}.pool=b"
OFTEN = "reward.function=outside.rewards:often_fails", "reward.max_failure_rate=0.2"
FAULTS = {
    "raise": Fault("error", "actor.update_actor", rf"{UPDATE}: KeyError: 'no such field' {SITE}", (FAULTY,), 1, 1),
    "transition": move("bucket", "actor.generate_sequences", *SPLIT),
    "nan": Fault("numerics", "actor.update_actor", f"{UPDATE}: FloatingPointError: .*nan.*", NAN),
    "reward": Fault("reward", "reward.compute_reward", ".*outside.rewards:often_fails.*no opinion.*", OFTEN, None, 2, step=1),
    "kill": Fault("lost", "", r"rank 2 stopped answering .*, step [23]\).*", (*APART, "models.critic.pool=b"), 2, 0, 3),
    "back": move("parameter", "actor.generate_sequences", *SPLIT),
    "whole": move("target", "actor.generate_sequences", *SPLIT, "models.actor.generation.reshard_method=full_gather"),
    "reallocation": move("message", "critic.compute_values", "models.critic.layout.tp=2", f"{CALL}.layout.dp=2"),
    "loan": move("small message", "critic.compute_values", "models.actor.layout.tp=2", *POOLS),
    "start": exhausted("start", "the start of the program", ""),
    "generation": exhausted("generation", PLACE.format(r"actor\.generate_sequences"), "actor.generate_sequences"),
    "update": exhausted("update", PLACE.format(r"(critic|actor)\.update_\w+"), "update_"),
    "save": exhausted("save", PLACE.format(r"controller\.get"), "controller.get"),
}
SHORT = ("raise", "transition")
LATER = tuple(name for name in FAULTS if name not in SHORT)
BATCHES = (SHORT, LATER[:4], LATER[4:7], LATER[7:])


@dataclass
class Job:
    """A run that is meant to fail. ``since``: the time of the event. ``limit_s`` from there: a machine that takes longer than that to
    start the job is too busy to be judged by a clock alone."""

    name: str
    run_dir: Path
    process: Program
    since: float = 0.0
    limit_s: float = LIMIT_S
    began: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> str:
        return (self.run_dir / "output.txt").read_text()


def start(directory: Path, name: str) -> Job:
    fault, run_dir = FAULTS[name], directory / name
    steps = fault.step + 2  # those that are traced before a run, its last two, must not be the one that fails
    overrides = tasks.settings(run_dir, steps, "run.save_freq=1", *fault.overrides)
    delay_s = REWARD_S if name == "kill" else 0.0
    return Job(name, run_dir, tasks.start_program(fault.ranks, run_dir, overrides, delay_s=delay_s))


def await_event(job: Job) -> None:
    """Returns when a job is in the step in which it fails, having killed a rank where that is the failure."""
    step_1 = job.run_dir / "checkpoints" / "step_1" / "COMMIT"
    event = {"reward": job.run_dir / "config.yaml", "start": job.run_dir}.get(job.name, step_1)  # written just before the step
    deadline = time.monotonic() + START_LIMIT_S
    while not event.exists():
        assert time.monotonic() < deadline and job.process.poll() is None, f"{job.name} did not start:\n{job.output[-4000:]}"
        time.sleep(0.02)
    job.since = time.monotonic() - max(time.time() - event.stat().st_mtime, 0.0)
    job.limit_s = max(LIMIT_S, job.since - job.began)
    if job.name == "kill":
        time.sleep(1.0)  # two heartbeats into the step, whose rewards take longer than that
        job.since = time.monotonic()
        os.kill(job.process.ranks[2], signal.SIGKILL)


def follow(job: Job) -> None:
    await_event(job)
    while job.process.poll() is None:
        if time.monotonic() - job.since > job.limit_s:
            tasks.kill(job.process)
            raise AssertionError(f"{job.name} hangs:\n{job.output[-4000:]}")
        time.sleep(0.05)
    print(f"{job.name}: {time.monotonic() - job.since:.1f} s")


@pytest.fixture(scope="module")
def job_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Job]:
    """A job that has ended; those of a batch go side by side."""
    tasks.task()
    directory = tmp_path_factory.mktemp("no_hang")

    @functools.cache
    def ended(names: tuple[str, ...]) -> dict[str, Job]:
        jobs = [start(directory, name) for name in names]
        with ThreadPoolExecutor(len(jobs)) as watchers:
            list(watchers.map(follow, jobs))
        return {job.name: job for job in jobs}

    return lambda name: next(ended(names)[name] for names in BATCHES if name in names)


@pytest.mark.parametrize("name", tiers(FAULTS, SHORT))
def test_every_rank_ends_and_one_line_says_why(job_of: Callable[[str], Job], name: str) -> None:
    fault, job = FAULTS[name], job_of(name)
    (line,) = [line for line in job.output.splitlines() if re.search(r"\bcall \d+|the start of the program", line)]
    assert re.fullmatch(fault.line, line), job.output[-4000:]
    status: dict[str, Any] = json.loads((job.run_dir / "exit_status.json").read_text())
    code = EXIT_CODES[fault.error_class]
    assert (status["class"], status["code"], status["message"]) == (fault.error_class, code, line)
    assert (status["call"] or "") in line and fault.call in (status["call"] or "")
    assert fault.rank is None or status["rank"] == fault.rank
    assert [job.process.codes[rank] for rank in range(fault.ranks)] == [code] * 2 + [-signal.SIGKILL] * (fault.ranks - 2)
    assert job.output.count("Traceback") <= fault.tracebacks
    if name != "kill":
        assert status["step"] == fault.step
    if fault.error_class == "memory" and fault.step:
        saved = tasks.read_run(job.run_dir)  # verifies the hash of every piece
        assert Path(status["last_checkpoint"]).name in [f"step_{step}" for step in range(1, fault.step)]
        assert saved.weights and not any(tensor.isnan().any() for tensor in saved.weights.values())
    elif name == "raise":  # a defect of a program: its traceback, once
        assert 'raise KeyError("no such field")' in job.output
    elif name == "reward":
        assert "reward.max_failure_rate = 0.2" in line and "in often_fails" in job.output and "program.py" not in job.output
