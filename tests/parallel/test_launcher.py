"""Ranks that are started without torchrun: signals, a rank that is killed, the job's exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from places import ROOT
from rlhf_spmd.parallel.launcher import start_ranks

PROGRAM = ROOT / "tests" / "started" / "failing.py"
START = "import sys; from rlhf_spmd.parallel.launcher import start_ranks; sys.exit(start_ranks(sys.argv[2:], int(sys.argv[1])))"
PATIENCE_S = 300.0  # on a busy machine


def start(run_dir: Path, kind: str, ranks: int) -> subprocess.Popen[str]:
    run_dir.mkdir()
    command = [sys.executable, "-c", START, str(ranks), sys.executable, str(PROGRAM), str(run_dir), kind]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)


def await_file(path: Path) -> None:
    since = time.monotonic()
    while not path.exists():
        assert time.monotonic() - since < PATIENCE_S, f"there is no {path}"
        time.sleep(0.1)


def status_of(run_dir: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run_dir / "exit_status.json").read_text())
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_how_a_rank_ends_is_how_the_job_ends(tmp_path: Path) -> None:
    """Three jobs side by side: one that fails, one of which a rank is killed, one with bad input."""
    jobs = {kind: start(tmp_path / kind, kind, ranks) for kind, ranks in {"raise": 2, "kill": 3, "bad_config": 2}.items()}
    said = {kind: job.communicate(timeout=PATIENCE_S)[1].splitlines() for kind, job in jobs.items()}
    assert {kind: job.returncode for kind, job in jobs.items()} == {"raise": 1, "kill": 5, "bad_config": 2}
    assert said["raise"][-1].startswith("rank 1 failed in actor.update_actor (call 6, ppo.py:32, step 2): KeyError")
    assert re.fullmatch(r"rank 2 \(process \d+\) was ended by SIGKILL; .* memory runs out", said["kill"][0])
    assert said["kill"][1].startswith("rank 2 stopped answering")
    assert len(said["kill"]) == 2
    (line,) = said["bad_config"]
    assert line.startswith("config error: data.train_batch_size = 7: dp(2) does not divide it; use 6 or 8 [rank ")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_the_launcher_alone_reaches_all_ranks_which_save(tmp_path: Path, number: signal.Signals) -> None:
    job = start(tmp_path / "run", "run", 2 if number == signal.SIGTERM else 1)
    await_file(tmp_path / "run" / "stepped")
    job.send_signal(number)
    assert "preempted at step" in job.communicate(timeout=PATIENCE_S)[1]
    status = status_of(tmp_path / "run")
    assert (job.returncode, status["class"], status["last_checkpoint"]) == (75, "preempted", f"step_{status['step']}")


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    job = start(tmp_path / "run", "run", 2)
    await_file(tmp_path / "run" / "stepped")
    ranks = [int((tmp_path / "run" / f"pid_{rank}").read_text()) for rank in range(2)]
    job.kill()
    since = time.monotonic()
    while not all(map(is_gone, ranks)):
        assert time.monotonic() - since < 60, "ranks live on without what started them"
        time.sleep(0.1)
    assert "lost the store" not in job.communicate()[1], "the kernel ends them, before the board sees why"


def test_a_launcher_that_is_process_1_of_a_container_is_alive(tmp_path: Path) -> None:
    inside = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    rank = tmp_path / "rank.py"  # a command line with "torch" in it would be taken for torchrun's
    rank.write_text("from rlhf_spmd.parallel.program import die_with_torchrun; die_with_torchrun()")
    command = [*inside, sys.executable, "-c", START, "2", sys.executable, str(rank)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    assert subprocess.run(command, env=environment, timeout=PATIENCE_S).returncode == 0


def test_a_second_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    job = start(tmp_path / "run", "save_slowly", 2)
    await_file(tmp_path / "run" / "stepped")
    job.send_signal(signal.SIGINT)
    await_file(tmp_path / "run" / "failed")  # it saves, for two minutes
    time.sleep(1.5)
    assert job.poll() is None
    job.send_signal(signal.SIGINT)
    since = time.monotonic()
    job.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - since < 25
    assert (job.returncode, status_of(tmp_path / "run")["class"]) == (1, "error")


def test_more_ranks_than_gpus_are_refused_before_any_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="--nproc-per-node=8, but this node has 4 GPUs"):
        start_ranks(["false"], 8)


def test_a_script_that_python_ends_is_not_aborted_by_gloo(tmp_path: Path) -> None:
    """Its threads ask for the interpreter to let go of tensors; with this switch interval they get it only if it is waited for."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch\n"
        "from rlhf_spmd.parallel.world import connect_store, init_world, read_launch\n"
        "launch = read_launch()\n"
        "world = init_world(launch, connect_store(launch), device=torch.device('cpu'))\n"
        "sys.setswitchinterval(1000)\n"
        "groups = [world.group(range(2), 'test', str(number)) for number in range(24)]\n"
        "for group in groups:\n"
        "    group.all_reduce(torch.ones(1000), 'test')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-2000:]
