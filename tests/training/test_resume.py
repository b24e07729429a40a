"""A run that was ended in the middle and started again is the run that never was: the same bits, in another layout the same numbers.

The runs that are ended are the program itself on 2 ranks of its own, all at once: most of their time is waiting. Those that end by
a signal to torchrun run under it. Those that nothing happens to run on a pool of ranks, which must not make a difference either.
"""

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import tasks
from overrides import FP64, STEADY, layout
from ranks import run_ranks

STEPS = 6
# ZeRO shards in the actor and tensor slices in the critic, so that both kinds are saved and read
LAYOUT = (*layout("actor", dp=2, zero=2), *layout("critic", tp=2))
OTHER_LAYOUTS = {
    "1 rank": (1, ()),
    "2 ranks": (2, (*layout("actor", tp=2), *layout("critic", pp=2))),
    "4 ranks": (4, (*layout("actor", pp=2, dp=2, zero=1), *layout("generation", pp=2), *layout("critic", dp=4, zero=3))),
}
DELAY_S = 0.1  # of each reward in runs that are going to be ended: 8 of them in turn, so that a step takes about a second
MOMENTS = random.Random(20)


def overrides(run_dir: Path, *more: str) -> list[str]:
    return tasks.settings(run_dir, STEPS, "run.save_freq=2", "run.keep_checkpoints=3", *STEADY, *more)


def train(ranks: int, run_dir: Path, *more: str) -> tasks.Run:
    run_ranks(ranks, tasks.train_here, str(tasks.task() / "ppo.json"), overrides(run_dir, *more))
    return tasks.read_run(run_dir)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def uninterrupted(directory: Path) -> dict[str, tasks.Run]:
    return {name: train(2, directory / name, *LAYOUT, *more) for name, more in (("fp32", ()), ("fp64", FP64))}


@dataclass
class Ended:
    """A run that was ended: its directory, how many steps were logged, exit_status.json."""

    run_dir: Path
    steps: int
    status: dict[str, object]


def end(run_dir: Path, how: str, after: int, moment: float) -> Ended:
    """Start a run and end it ``moment`` seconds after the line of step ``after`` (0: after the ranks have started)."""
    ours = overrides(run_dir, *LAYOUT)
    if how in ("agent", "ctrl-c"):
        process = tasks.start_torchrun(run_dir, ours, *tasks.one_node(2), delay_s=DELAY_S)
    else:
        process = tasks.start_program(2, run_dir, ours, delay_s=DELAY_S)
    try:
        tasks.await_steps(process, run_dir, after)
        time.sleep(moment)
        if how == "kill":
            tasks.kill(process)
        else:
            if how == "ctrl-c":
                os.killpg(process.pid, signal.SIGINT)
            else:
                os.kill(process.pid if how == "agent" else process.ranks[1], signal.SIGTERM)
            assert tasks.finish(process, run_dir) != 0
    except BaseException:
        tasks.kill(process)
        raise
    status = run_dir / "exit_status.json"
    steps = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    return Ended(run_dir, steps, json.loads(status.read_text()) if status.exists() else {})


@pytest.fixture(scope="module")
def ended(directory: Path) -> dict[str, Ended]:
    tasks.task()
    plan = {
        "killed before the first checkpoint": ("kill", 1, MOMENTS.uniform(0.0, 0.5)),
        "killed": ("kill", 3, MOMENTS.uniform(0.0, 1.0)),
        "SIGTERM to torchrun": ("agent", 2, MOMENTS.uniform(0.0, 0.8)),
        "Ctrl-C": ("ctrl-c", 2, MOMENTS.uniform(0.0, 0.8)),
        "SIGTERM to a rank": ("rank", 3, MOMENTS.uniform(0.0, 0.8)),
    }
    with ThreadPoolExecutor(len(plan)) as threads:
        futures = {name: threads.submit(end, directory / name.replace(" ", "_"), *how) for name, how in plan.items()}
    return {name: future.result() for name, future in futures.items()}


def test_the_run_has_what_a_resume_could_lose(uninterrupted):
    """A coefficient, a learning rate and a position in the data that differ at each checkpoint from those of a new run."""
    rows = uninterrupted["fp32"].metrics
    assert len({row["actor/kl_coef"] for row in rows}) == STEPS
    assert len({row["actor/lr"] for row in rows}) == len({row["critic/lr"] for row in rows}) == STEPS
    assert rows[0]["actor/lr"] < rows[1]["actor/lr"] > rows[2]["actor/lr"]  # warm-up ends in step 2
    # the checkpoints of steps 2 and 4 lie inside epochs, and steps 3 and 5 each end one
    assert [row["data/epoch"] for row in rows] == [0.4, 0.8, 1.2, 1.6, 2.0, 2.4]
    assert {kind for _, kind, _ in uninterrupted["fp32"].weights} == {"param", "exp_avg", "exp_avg_sq"}


@pytest.mark.long
def test_a_run_killed_before_its_first_checkpoint_starts_again(uninterrupted, ended):
    was = ended["killed before the first checkpoint"]
    assert 0 < was.steps < STEPS and not was.status
    tasks.assert_bit_equal(uninterrupted["fp32"], train(2, was.run_dir, *LAYOUT, "run.resume=auto"))


@pytest.mark.long
def test_a_killed_run_goes_on_bit_for_bit(uninterrupted, ended):
    was = ended["killed"]
    assert 2 <= was.steps < STEPS and not was.status
    program = tasks.start_program(2, was.run_dir, overrides(was.run_dir, *LAYOUT))
    assert tasks.finish(program, was.run_dir) == 0
    assert "resumed from" in (was.run_dir / "output.txt").read_text()
    assert json.loads((was.run_dir / "exit_status.json").read_text())["class"] == "done"
    tasks.assert_bit_equal(uninterrupted["fp32"], tasks.read_run(was.run_dir))


@pytest.mark.long
@pytest.mark.parametrize("name", ["SIGTERM to torchrun", "SIGTERM to a rank", "Ctrl-C"])
def test_a_preempted_run_saves_and_goes_on_bit_for_bit(uninterrupted, ended, name):
    was = ended[name]
    assert 0 < was.steps < STEPS
    assert (was.status["class"], was.status["code"], was.status["step"]) == ("preempted", 75, was.steps)
    assert was.status["last_checkpoint"] == str(was.run_dir / "checkpoints" / f"step_{was.steps}")
    first = (was.run_dir / "metrics.jsonl").read_text()
    resumed = train(2, was.run_dir, *LAYOUT)
    assert (was.run_dir / "metrics.jsonl").read_text().startswith(first), "a step that was saved ran again"
    tasks.assert_bit_equal(uninterrupted["fp32"], resumed)


@pytest.mark.parametrize(
    ("name", "precision", "tolerance", "of_weights"),
    [*((name, "fp64", 1e-10, 1e-9) for name in OTHER_LAYOUTS), ("2 ranks", "fp32", 1e-4, 4e-5)],
)
def test_another_layout_goes_on_with_the_same_numbers(directory, uninterrupted, name, precision, tolerance, of_weights):
    """Metrics, and final weights and optimizer states relative to the largest element of each tensor."""
    ranks, more = OTHER_LAYOUTS[name]
    checkpoint = directory / precision / "checkpoints" / "step_2"
    run_dir = directory / f"{precision}_{ranks}"
    resumed = train(ranks, run_dir, *more, *(FP64 if precision == "fp64" else ()), f"run.resume={checkpoint}")
    whole = uninterrupted[precision]
    rest = replace(
        whole, metrics=whole.metrics[2:], raw=whole.raw[2:], responses={k: v for k, v in whole.responses.items() if k[0] > 2}
    )
    difference, where = tasks.worst_metric(rest, resumed, floor=1e-2)
    weights, tensor = tasks.worst_tensor(rest, resumed, kinds=("param", "exp_avg", "exp_avg_sq"))
    print(f"from 2 ranks to {name}, {precision}: metrics {difference:.1e} ({where}), weights {weights:.1e} ({tensor})")
    assert resumed.responses == rest.responses
    assert difference < tolerance, where
    assert weights < of_weights, tensor
