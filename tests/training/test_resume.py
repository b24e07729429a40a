"""A run that was ended in the middle and started again is the run that never was: the same bits, in another layout the same numbers.

The runs that are ended are the program itself on 2 ranks of its own; those that end by a signal to torchrun run under it. Those
that nothing happens to run on a pool of ranks, which must not make a difference either.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tasks
from algorithm_cases import CASES
from overrides import FP64, STEADY, layout
from ranks import run_ranks
from tiers import tiers

STEPS = 6
SETTINGS = ("run.save_freq=2", "run.keep_checkpoints=3", *STEADY)
# ZeRO shards in the actor and tensor slices in the critic, so that both kinds are saved and read
LAYOUT = (*SETTINGS, *layout("actor", dp=2, zero=2), *layout("critic", tp=2))
OTHER_LAYOUTS = {
    "2 ranks": (2, (*layout("actor", tp=2), *layout("critic", pp=2))),
    "4 ranks": (4, (*layout("actor", pp=2, dp=2, zero=1), *layout("generation", pp=2), *layout("critic", dp=4, zero=3))),
    "1 rank": (1, ()),
}
TOLERANCES = {"fp64": (1e-10, 1e-9), "fp32": (1e-4, 4e-5)}  # of metrics, and of weights
PRECISIONS = {"fp64": FP64, "fp32": ()}
DELAY_S = 0.1  # of each reward in runs that are going to be ended: 8 of them in turn, so that a step takes about a second
MOMENTS = random.Random(20)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def uninterrupted(directory: Path) -> tasks.Run:
    return tasks.train(2, directory / "uninterrupted", STEPS, *LAYOUT)


def end(run_dir: Path, how: str, after: int) -> tuple[int, dict[str, Any]]:
    """Starts a run, or goes on with it, and ends it at a moment after the line of step ``after``. Returns how many steps were logged,
    and exit_status.json."""
    settings = tasks.settings(run_dir, STEPS, *LAYOUT)
    status = run_dir / "exit_status.json"
    status.unlink(missing_ok=True)
    if how in ("SIGTERM to torchrun", "Ctrl-C"):
        process = tasks.start_torchrun(run_dir, settings, *tasks.one_node(2), delay_s=DELAY_S)
    else:
        process = tasks.start_program(2, run_dir, settings, delay_s=DELAY_S)
    try:
        tasks.await_steps(process, run_dir, after)
        time.sleep(MOMENTS.uniform(0.0, 0.8))
        if how == "Ctrl-C":
            os.killpg(process.pid, signal.SIGINT)
        elif how != "kill":
            os.kill(process.pid if how == "SIGTERM to torchrun" else process.ranks[1], signal.SIGTERM)
        assert how == "kill" or tasks.finish(process, run_dir) != 0
    finally:
        tasks.kill(process)
    steps = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    return steps, json.loads(status.read_text()) if status.exists() else {}


def test_the_run_has_what_a_resume_could_lose(uninterrupted: tasks.Run) -> None:
    """A coefficient, a learning rate and a position in the data that differ at each checkpoint from those of a new run."""
    rows = uninterrupted.metrics
    assert all(len({row[key] for row in rows}) == STEPS for key in ("actor/kl_coef", "actor/lr", "critic/lr"))
    assert rows[0]["actor/lr"] < rows[1]["actor/lr"] > rows[2]["actor/lr"]  # warm-up ends in step 2
    # the checkpoints of steps 2 and 4 lie inside epochs, and steps 3 and 5 each end one
    assert [row["data/epoch"] for row in rows] == [0.4, 0.8, 1.2, 1.6, 2.0, 2.4]
    assert {kind for _, kind, _ in uninterrupted.weights} == {"param", "exp_avg", "exp_avg_sq"}


def check_preempted(run_dir: Path, steps: int, status: dict[str, Any]) -> None:
    assert 0 < steps < STEPS
    assert (status["class"], status["code"], status["step"]) == ("preempted", 75, steps)
    assert status["last_checkpoint"] == str(run_dir / "checkpoints" / f"step_{steps}")


def test_a_run_that_is_preempted_and_then_killed_goes_on_bit_for_bit(uninterrupted: tasks.Run, tmp_path: Path) -> None:
    saved, status = end(tmp_path, "SIGTERM to a rank", after=1)
    check_preempted(tmp_path, saved, status)
    first = (tmp_path / "metrics.jsonl").read_text()
    killed, status = end(tmp_path, "kill", after=saved + 1)
    assert saved < killed < STEPS and not status
    assert (tmp_path / "metrics.jsonl").read_text().startswith(first), "a step that was saved ran again"
    assert f"resumed from {tmp_path}/checkpoints/step_{saved}" in (tmp_path / "output.txt").read_text()
    tasks.assert_bit_equal(uninterrupted, tasks.train(2, tmp_path, STEPS, *LAYOUT))


def test_updates_that_are_skipped_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Two responses to the one prompt of a mini-batch often score alike: no gradient, on no rank. The schedule goes on."""
    case = CASES["dr_grpo"]
    more = *case.overrides(), "sampling.n=2", "algorithm.ppo_mini_batch_size=1", "algorithm.ppo_epochs=1", "run.save_freq=2"
    more = *more, "reward.function=tasks:coarse_share", "models.actor.optim.lr_scheduler_type=linear", *layout("actor", dp=2)
    run_ranks(2, tasks.train_here, case.file, tasks.settings(tmp_path / "one", 4, *more))
    one = tasks.read_run(tmp_path / "one")
    skipped = [row["actor/skipped_updates"] for row in one.metrics]
    assert all(0 < count < tasks.PROMPTS for count in skipped[1:]), skipped
    assert one.state["skipped_steps"] == {"actor": sum(skipped)}
    assert one.state["optimizer_steps"] == {"actor": 4 * tasks.PROMPTS}
    more = *more, f"run.resume={tmp_path / 'one' / 'checkpoints' / 'step_2'}"
    resumed = tasks.train(2, tmp_path / "resumed", 4, *more, config=case.file)
    assert [row["actor/lr"] for row in resumed.metrics] == [row["actor/lr"] for row in one.metrics[2:]]
    assert resumed.state["skipped_steps"] == one.state["skipped_steps"]
    assert tasks.worst_tensor(one, resumed, kinds=("param", "exp_avg", "exp_avg_sq"))[0] == 0.0


@pytest.mark.long
@pytest.mark.parametrize("how", ["SIGTERM to torchrun", "Ctrl-C", "kill"])
def test_a_run_that_was_ended_in_its_first_steps_goes_on_bit_for_bit(
    uninterrupted: tasks.Run, tmp_path: Path, how: str
) -> None:
    """A kill comes before the first checkpoint, and the run starts again."""
    steps, status = end(tmp_path, how, after=1)
    if how != "kill":
        check_preempted(tmp_path, steps, status)
    tasks.assert_bit_equal(uninterrupted, tasks.train(2, tmp_path, STEPS, *LAYOUT, "run.resume=auto"))


@pytest.mark.parametrize(
    "case", tiers([*((name, "fp64") for name in OTHER_LAYOUTS), ("2 ranks", "fp32")], [("2 ranks", "fp64")])
)
def test_another_layout_goes_on_with_the_same_numbers(directory: Path, case: tuple[str, str]) -> None:
    """Metrics, and final weights and optimizer states relative to the largest element of each tensor."""
    name, precision = case
    run_dir = directory / precision
    if not run_dir.exists():
        settings = tasks.settings(run_dir, STEPS, *LAYOUT, *PRECISIONS[precision])
        run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), settings)
    run = tasks.read_run(run_dir)
    ranks, more = OTHER_LAYOUTS[name]
    more = *SETTINGS, *more, *PRECISIONS[precision], f"run.resume={run_dir}/checkpoints/step_2"
    resumed = tasks.train(ranks, directory / f"{precision}_{ranks}", STEPS, *more)
    later = {key: ids for key, ids in run.responses.items() if key[0] > 2}
    rest = replace(run, metrics=run.metrics[2:], raw=run.raw[2:], responses=later)
    difference, where = tasks.worst_metric(rest, resumed, floor=1e-2)
    weights, tensor = tasks.worst_tensor(rest, resumed, kinds=("param", "exp_avg", "exp_avg_sq"))
    print(f"from 2 ranks to {name}, {precision}: metrics {difference:.1e} ({where}), weights {weights:.1e} ({tensor})")
    of_metrics, of_weights = TOLERANCES[precision]
    assert resumed.responses == rest.responses
    assert difference < of_metrics, where
    assert weights < of_weights, tensor
