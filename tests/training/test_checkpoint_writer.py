"""Checkpoints that are written while the next step runs: their bits, kills in the middle of them, and a full disk."""

from __future__ import annotations

import json
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import tasks
from overrides import STEADY, layout
from ranks import Program, run_ranks
from rlhf_spmd.checkpoint.directory import committed
from rlhf_spmd.checkpoint.load import verify_checkpoint
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.parallel.world import World
from rlhf_spmd.preflight.memory_estimate import estimate_memory, step_facts
from rlhf_spmd.preflight.step_graph import trace
from rlhf_spmd.train import prepare
from tiers import tiers

STEPS = 3
# ZeRO shards and tensor slices, and what replicas share: the reference's ranks write nothing
LAYOUT = (*layout("actor", dp=2, zero=2), *layout("critic", tp=2))
OFFLOADED = ("models.actor.optim.offload=true", "models.actor.offload=true", *LAYOUT)  # the critic's states are on its device
LORA = ("models.actor.lora.rank=4", *layout("critic", dp=2))


def settings(run_dir: Path, *more: str) -> list[str]:
    return tasks.settings(run_dir, STEPS, "run.save_freq=1", "run.keep_checkpoints=3", *STEADY, *more)


def train_and_write_late(world: World, overrides: list[str], metrics: str) -> list[int]:
    """Begin to write each checkpoint only when the weights have changed since: after the next step. Returns the steps written so."""
    import rlhf_spmd.checkpoint.save as save

    real, written = save.write_safetensors, list[int]()

    def late(path: Path, *args: Any) -> list[str]:
        if threading.current_thread() is not threading.main_thread():
            step, deadline = int(path.parent.name.removeprefix("step_").removesuffix(".tmp")), time.monotonic() + 300
            while Path(metrics).read_bytes().count(b"\n") <= step and time.monotonic() < deadline:
                time.sleep(0.01)
            written.append(step)
        return real(path, *args)

    save.write_safetensors = late
    try:
        tasks.train_here(world, str(tasks.task() / "ppo.json"), overrides)
    finally:
        save.write_safetensors = real
    return sorted(set(written))


def contents(run_dir: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in sorted(run_dir.glob("checkpoints/step_*/*"))}


@pytest.mark.parametrize("more", tiers([OFFLOADED, LAYOUT, LORA], [OFFLOADED]), ids=["offloaded", "sharded", "adapters"])
def test_a_checkpoint_has_the_bits_of_its_step(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Also where a step ends before the last checkpoint is written. The last one is not written beside a step."""
    at_once, late = tmp_path / "at_once", tmp_path / "late"
    ppo = str(tasks.task() / "ppo.json")
    run_ranks(2, tasks.train_here, ppo, settings(at_once, "run.background_save=false", *more))
    written = run_ranks(2, train_and_write_late, settings(late, *more), str(late / "metrics.jsonl"))
    assert written == [[1, 2]] * 2
    expected, files = contents(at_once), contents(late)
    assert expected.keys() == files.keys() and len([name for name in files if name.endswith("COMMIT")]) == STEPS
    assert [name for name in files if files[name] != expected[name]] == []
    ready = prepare(ppo, settings(late, *more), 2, local_size=2)
    report = estimate_memory(ready.roles, step_facts(ready, trace(ready), torch.device("cpu")))
    for role, rank in product(("actor", "critic"), range(2)):
        file = files[f"checkpoints/step_1/{role}.rank_{rank:05d}.safetensors"]
        num_bytes = len(file) - 8 - int.from_bytes(file[:8], "little")  # behind the header
        (kind,) = (kind for kind, ranks in enumerate(report.ranks) if rank in ranks)
        assert report.resident[f"{role} checkpoint copy"][kind] == pytest.approx(num_bytes, rel=0.1)


# SIGKILL for this rank, or for all, at the NUMBER-th event of a kind in the thread that writes checkpoints
KILLS = """
import os, shutil, signal, sys, threading
from pathlib import Path

import rlhf_spmd.checkpoint.files as files
from rlhf_spmd.train import main

run_dir, own = Path(os.environ["KILL_DIR"]), os.environ["RANK"]
ranks, rank, kind, number = os.environ["KILL"].split()
(run_dir / f"pid_{own}").write_text(str(os.getpid()))
left = int(number)

def counted(real):
    def call(*args, **kwargs):
        global left
        if threading.current_thread().name == "checkpoint":
            left -= 1
            if left == 0:
                (run_dir / "killed").write_text(f"{kind} {args}"[:200])
                others = [int(path.read_text()) for path in run_dir.glob("pid_*")] if ranks == "all" else []
                for pid in (*(pid for pid in others if pid != os.getpid()), os.getpid()):
                    os.kill(pid, signal.SIGKILL)
        return real(*args, **kwargs)
    return call

place = {"rmtree": shutil, "hash_tensor": files}.get(kind, os)
if own == rank:
    setattr(place, kind, counted(getattr(place, kind)))
main(sys.argv[1:])
"""
MOMENTS = (  # of one run, which is started again after each
    "all 0 rename 2",  # the second checkpoint has COMMIT and not its name
    "all 0 hash_tensor 1",
    "one 1 hash_tensor 40",
    "one 0 fsync 1",
    "one 1 fsync 2",  # its part is complete
    "all 0 replace 1",  # the manifest
    "one 0 replace 2",  # COMMIT
    "one 0 replace 3",  # the name of the newest
    "all 0 rmtree 1",  # an older one
)


@pytest.mark.long
def test_a_run_that_is_killed_at_any_moment_of_a_save_goes_on_bit_for_bit(tmp_path: Path) -> None:
    steps, script, run_dir = ("run.steps=7", "run.keep_checkpoints=2"), tmp_path / "kills.py", tmp_path / "killed"
    script.write_text(KILLS)
    run_dir.mkdir()
    for moment in MOMENTS:
        (run_dir / "killed").unlink(missing_ok=True)
        environment = tasks.environment() | {"KILL_DIR": str(run_dir), "KILL": moment}
        arguments = ["--config", str(tasks.task() / "ppo.json"), *settings(run_dir, *LAYOUT, *steps)]
        program = Program(2, arguments, run_dir / "output.txt", environment, str(script))
        assert tasks.finish(program, run_dir) != 0
        checkpoints = committed(run_dir)
        print(f"{moment}: {(run_dir / 'killed').read_text()}; there: {[each.path.name for each in checkpoints]}")
        for checkpoint in checkpoints:
            verify_checkpoint(checkpoint.path, solo())
        assert checkpoints
    run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), settings(run_dir, *LAYOUT, *steps))
    uninterrupted = tmp_path / "uninterrupted"
    run_ranks(2, tasks.train_here, str(tasks.task() / "ppo.json"), settings(uninterrupted, *LAYOUT, *steps))
    tasks.assert_bit_equal(tasks.read_run(uninterrupted), tasks.read_run(run_dir))


# WHEN the thread of rank 1 has begun to write step 2: what happens to it
TROUBLES = """
import errno, os, sys, threading, time
from pathlib import Path

import rlhf_spmd.checkpoint.save as save
from rlhf_spmd.train import main

real = save.write_safetensors

def troubled(path, *args):
    if os.environ["RANK"] == "1" and path.parent.name == "step_2.tmp":
        assert threading.current_thread().name == "checkpoint"
        if os.environ["TROUBLE"] == "full":
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        while not Path(os.environ["TROUBLE"]).exists():  # the next step has failed
            time.sleep(0.01)
        time.sleep(1.0)
    return real(path, *args)

save.write_safetensors = troubled
main(sys.argv[1:])
"""


def troubled(tmp_path: Path, trouble: str, *more: str) -> dict[str, Any]:
    """Returns exit_status.json of a run of two ranks."""
    (tmp_path / "troubles.py").write_text(TROUBLES)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    arguments = ["--config", str(tasks.task() / "ppo.json"), *settings(run_dir, *LAYOUT, *more)]
    environment = tasks.environment() | {"TROUBLE": trouble}
    program = Program(2, arguments, run_dir / "output.txt", environment, str(tmp_path / "troubles.py"))
    tasks.finish(program, run_dir)
    status: dict[str, Any] = json.loads((run_dir / "exit_status.json").read_text())
    assert program.codes == dict.fromkeys(range(2), status["code"])
    return status


def test_a_disk_that_is_full_for_one_rank_ends_the_run(tmp_path: Path) -> None:
    status = troubled(tmp_path, "full")
    assert (status["class"], status["code"]) == ("checkpoint", 4)
    assert "rank 1: cannot write checkpoint" in status["message"] and "No space left on device" in status["message"]
    assert status["step"] in (2, 3) and status["last_checkpoint"].endswith("step_1")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["latest", "step_1"]


@pytest.mark.long
def test_a_step_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    """Its score is beyond float32, and the write goes on a second longer than the step."""
    failed = tmp_path / "failed"
    (tmp_path / "rewards.py").write_text(f"""
from pathlib import Path

def score(prompt, response):
    if len(Path({str(tmp_path / "run" / "metrics.jsonl")!r}).read_text().splitlines()) == 2:
        Path({str(failed)!r}).touch()
        return 10.0
    return 0.0
""")
    status = troubled(tmp_path, str(failed), f"reward.function={tmp_path}/rewards.py:score", "reward.weight=1e38")
    assert (status["class"], status["step"]) == ("reward", 3), status
    assert status["last_checkpoint"].endswith("step_2")
    assert [each.step for each in committed(tmp_path / "run")] == [2, 1]
