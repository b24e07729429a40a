"""Whatever goes wrong on one rank of a training run, every rank ends within 60 s, and one line says who and where.

The training program on ranks of its own, with algorithms and rewards of ``tests/outside`` that go wrong in step 2. There is no
torchrun that would end the other ranks: they do it themselves. Jobs go side by side: most of their time is waiting. A job's
seconds count from the end of its first step, or from the kill.
"""

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tasks
from places import ROOT
from ranks import Program
from rlhf_spmd.algorithms import ppo

LIMIT_S = 60.0
START_LIMIT_S = 600.0  # of a job until its first step has ended, on a busy machine
REWARD_S = 0.2  # each; a rank has 8 of them in a step
APART = ("placement.pools={a: [0, 1], b: [2]}", *(f"models.{role}.pool=a" for role in ("actor", "reference", "reward")))
# name -> ranks and overrides
JOBS: dict[str, tuple[int, tuple[str, ...]]] = {
    "swapped": (2, ("algorithm.name=outside.diverging",)),
    "shorter": (2, ("algorithm.name=outside.shorter", "models.actor.generation.reuse_rollout_log_probs=false")),
    "raise": (2, ("algorithm.name=outside.raising",)),
    "nan": (2, ("algorithm.name=outside.raising", "algorithm.fault=nan")),
    "reward": (2, ("reward.function=outside.rewards:often_fails", "reward.max_failure_rate=0.2")),
    "kill": (3, (*APART, "models.critic.pool=b")),
}

TRANSITION = ("algorithm.name=outside.transition", "models.actor.layout.tp=2", "models.critic.layout.zero=3")
CALL = "models.critic.calls.compute_values"
# weights that do not get through: name -> what has no room, in which call, and overrides
MOVES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "transition": ("bucket", "actor.generate_sequences", TRANSITION),
    "overlap": ("bucket", "actor.generate_sequences", (*TRANSITION, "models.actor.generation.overlap=true")),
    "back": ("parameter", "actor.generate_sequences", TRANSITION),
    "whole": ("target", "actor.generate_sequences", (*TRANSITION, "models.actor.generation.reshard_method=full_gather")),
    "reallocation": ("message", "critic.compute_values", (TRANSITION[0], "models.critic.layout.tp=2", f"{CALL}.layout.dp=2")),
    "loan": (
        "small message",
        "critic.compute_values",
        (*TRANSITION[:2], "placement.pools={a: [1], b: [0]}", "models.critic.pool=a", f"{CALL}.pool=b"),
    ),
}
JOBS |= {name: (2, (*overrides, f"algorithm.fault={what}")) for name, (what, _, overrides) in MOVES.items()}


@dataclass
class Job:
    """A run that is meant to fail. ``seconds``: from the event until no rank was left. ``limit_s`` for them: a machine that takes
    longer than that to start the job is too busy to be judged by a clock alone."""

    name: str
    run_dir: Path
    process: Program
    since: float = 0.0
    seconds: float = 0.0
    limit_s: float = LIMIT_S
    began: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> str:
        return (self.run_dir / "output.txt").read_text()

    @property
    def lines(self) -> list[str]:
        """The lines that name a call."""
        return [line for line in self.output.splitlines() if re.search(r"\bcall \d+", line)]

    @property
    def codes(self) -> dict[int, int]:
        return self.process.codes

    @property
    def status(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "exit_status.json").read_text())


def start(directory: Path, name: str) -> Job:
    ranks, overrides = JOBS[name]
    run_dir = directory / name
    steps = 4  # those that are traced before a run, its last two, must not be the one that fails
    overrides = tuple(tasks.settings(run_dir, steps, "run.save_freq=1", *overrides))
    return Job(
        name,
        run_dir,
        tasks.start_program(ranks, run_dir, overrides, delay_s=REWARD_S if name == "kill" else 0.0),
    )


def await_event(job: Job) -> None:
    """Returns when a job is in the step in which it fails, having killed a rank where that is the failure."""
    step_1 = job.run_dir / "checkpoints" / "step_1" / "COMMIT"
    event = job.run_dir / "config.yaml" if job.name == "reward" else step_1  # written just before the step
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


def await_end(job: Job) -> None:
    while job.process.poll() is None:
        if time.monotonic() - job.since > 2 * job.limit_s:
            tasks.kill(job.process)
            raise AssertionError(f"{job.name} hangs:\n{job.output[-4000:]}")
        time.sleep(0.05)
    job.seconds = time.monotonic() - job.since


def run_together(directory: Path, *names: str) -> dict[str, Job]:
    jobs = [start(directory, name) for name in names]
    with ThreadPoolExecutor(len(jobs)) as watchers:
        list(watchers.map(follow, jobs))
    print(*(f"{job.name}: {job.seconds:.1f} s" for job in jobs), sep="\n")
    return {job.name: job for job in jobs}


def follow(job: Job) -> None:
    await_event(job)
    await_end(job)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    tasks.task()
    directory = tmp_path_factory.mktemp("no_hang")
    names = [*(name for name in JOBS if name not in MOVES), *MOVES]
    return {
        name: job
        for first in range(0, len(names), 5)
        for name, job in run_together(directory, *names[first : first + 5]).items()
    }


@pytest.mark.parametrize("name", JOBS)
def test_every_rank_has_ended_in_time(jobs: dict[str, Job], name: str) -> None:
    assert jobs[name].seconds < jobs[name].limit_s
    assert len(jobs[name].codes) == JOBS[name][0]


def check(job: Job, exit_class: str, code: int, calls: tuple[str, ...], step: int) -> str:
    """The one line, which exit_status.json holds as well; its class, code, step and call (one of ``calls``)."""
    assert len(job.lines) == 1, job.output[-4000:]
    (line,) = job.lines
    status = job.status
    assert (status["class"], status["code"], status["step"], status["message"]) == (exit_class, code, step, line)
    assert status["call"] in calls and status["call"] in line
    assert set(job.codes.values()) == {code}
    return line


def differs(line: str, calls: dict[int, str]) -> int:
    """The rank that the line about two calls blames: with two ranks either may be the odd one."""
    found = re.fullmatch(
        r"call order differs: rank (\d) entered (\S+ \(\S+\)) as call \d+, rank (\d) entered (\S+ \(\S+\)); "
        r"a script may branch only on replicated values",
        line,
    )
    assert found, line
    assert {int(found[1]): found[2], int(found[3]): found[4]} == calls
    return int(found[1])


def test_a_script_that_branches_on_what_one_rank_knows(jobs: dict[str, Job]) -> None:
    job = jobs["swapped"]
    line = check(job, "hang", 5, ("reward.compute_reward", "critic.compute_values"), 2)
    sites = [
        site_of("diverging.py", f"{call}(batch)", which) for call, which in ((".compute_reward", 1), (".compute_values", 0))
    ]
    blamed = differs(line, {0: f"reward.compute_reward ({sites[0]})", 1: f"critic.compute_values ({sites[1]})"})
    assert (job.status["rank"], job.status["call"]) == (blamed, ("reward.compute_reward", "critic.compute_values")[blamed])


def test_a_rank_that_leaves_out_a_call(jobs: dict[str, Job]) -> None:
    line = check(jobs["shorter"], "hang", 5, ("actor.update_actor", "controller.settle"), 2)
    update = f"actor.update_actor ({site_of(ppo.__file__, 'models.actor.update(', -1)})"
    assert update in line
    assert re.search(r"rank 1 entered controller\.settle \(end of the script after ppo\.py:\d+\)", line)
    assert f"rank 0 entered {update}" in line


def site_of(file: str, text: str, which: int) -> str:
    """``file.py:line`` of the ``which``-th line that holds ``text``."""
    path = ROOT / "tests" / "outside" / file
    lines = [number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line]
    return f"{path.name}:{lines[which]}"


def test_a_loss_that_raises_on_one_rank(jobs: dict[str, Job]) -> None:
    job = jobs["raise"]
    line = check(job, "error", 1, ("actor.update_actor",), 2)
    assert re.fullmatch(
        r"rank 1 failed in actor\.update_actor \(call \d+, raising\.py:\d+, step 2\): KeyError: 'no such field' "
        rf"\(algorithm 'outside\.raising', \S+/{re.escape(site_of('raising.py', 'raise KeyError', 0))}\)",
        line,
    )
    assert job.status["rank"] == 1
    assert Path(job.status["last_checkpoint"]).name == "step_1"
    assert 'raise KeyError("no such field")' in job.output  # a defect of a program: its traceback, once
    assert job.output.count("Traceback") == 1


@pytest.mark.parametrize("name", MOVES)
def test_weights_that_fail_to_move_on_one_rank(jobs: dict[str, Job], name: str) -> None:
    what, call, _ = MOVES[name]
    job = jobs[name]
    line = check(job, "memory", 8, (call,), 2)
    failed = rf"rank 1 failed in {re.escape(call)} \(call \d+, [a-z_]+\.py:\d+, step 2\)"
    assert re.fullmatch(
        rf"{failed}: MemoryError: no room for the second {what}( \(.*\))?; docs/troubleshooting\.md says what .*", line
    )
    assert job.status["rank"] == 1 and Path(job.status["last_checkpoint"]).name == "step_1"
    saved = tasks.read_run(job.run_dir)  # verifies the hash of every piece
    assert saved.weights and not any(tensor.isnan().any() for tensor in saved.weights.values())


def test_a_loss_that_is_not_a_number(jobs: dict[str, Job]) -> None:
    job = jobs["nan"]
    line = check(job, "numerics", 6, ("actor.update_actor",), 2)
    assert re.fullmatch(
        r"rank [01] failed in actor\.update_actor \(call \d+, raising\.py:\d+, step 2\): FloatingPointError: .*nan.*", line
    )
    assert "Traceback" not in job.output


def test_a_reward_that_fails_too_often(jobs: dict[str, Job]) -> None:
    job = jobs["reward"]
    line = check(job, "reward", 7, ("reward.compute_reward",), 1)
    assert "outside.rewards:often_fails" in line and "reward.max_failure_rate = 0.2" in line and "no opinion" in line
    assert job.output.count("Traceback") <= 2, "of the function, once for each rank's worker, and no other"
    assert "in often_fails" in job.output and "program.py" not in job.output


def test_a_rank_that_is_killed_in_a_step(jobs: dict[str, Job]) -> None:
    job = jobs["kill"]
    assert re.search(r"^rank 2 stopped answering .*\(call \d+, [a-z_]+\.py:\d+, step [23]\)", job.lines[0])
    status = job.status
    assert (status["class"], status["code"], status["rank"]) == ("lost", 9, 2)
    assert re.fullmatch(r"\w+\.\w+", status["call"]) and status["call"] in job.lines[0]
    assert job.codes == {0: 9, 1: 9, 2: -signal.SIGKILL}
