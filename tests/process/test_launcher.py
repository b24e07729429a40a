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
from rlhf_spmd.process.launcher import start_ranks

PROGRAM = ROOT / "tests" / "started" / "failing.py"
START = (
    "import pathlib, sys; from rlhf_spmd.process.launcher import start_ranks; "
    "sys.exit(start_ranks(sys.argv[3:], int(sys.argv[1]), pathlib.Path(sys.argv[2])))"
)
PATIENCE_S = 300.0  # on a busy machine


def start(run_dir: Path, kind: str, ranks: int) -> subprocess.Popen[str]:
    run_dir.mkdir()
    command = [sys.executable, "-c", START, str(ranks), str(run_dir), sys.executable, str(PROGRAM), str(run_dir), kind]
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
    """Jobs side by side: one that fails, one of which a rank is killed, one of which a rank leaves, one that all ranks leave with 0
    without Python's knowledge, one in whose store somebody else writes that it is done, and one with bad input."""
    ranks = {"raise": 2, "kill": 3, "exit": 2, "vanish": 2, "forged": 2, "bad_config": 2}
    jobs = {kind: start(tmp_path / kind, kind, ranks) for kind, ranks in ranks.items()}
    said = {kind: job.communicate(timeout=PATIENCE_S)[1].splitlines() for kind, job in jobs.items()}
    codes = {"raise": 1, "kill": 9, "exit": 9, "vanish": 9, "forged": 1, "bad_config": 2}
    assert {kind: job.returncode for kind, job in jobs.items()} == codes
    assert said["raise"][-1].startswith("rank 1 failed in actor.update_actor (call 6, ppo.py:32, step 2): KeyError")
    where, early = re.escape("in actor.update_actor (call 6, ppo.py:32, step 2)"), "before the end of the program"
    killed = f"was ended by SIGKILL {early}, as the system does where memory runs out"
    lines = {
        "kill": rf"rank 2 \(process \d+\) {killed}: ranks 0, 1, 2 {where}",
        "exit": rf"rank 1 left {where}, {early}: SystemExit: 0",
        "vanish": rf"rank [01] \(process \d+\) left with exit code 0 {early}: ranks 0, 1 {where}",
    }
    for kind, line in lines.items():
        assert re.fullmatch(line, said[kind][-1]), said[kind]
        status = status_of(tmp_path / kind)
        assert (status["class"], status["code"], status["call"]) == ("lost", 9, "actor.update_actor")
        assert status["message"] == said[kind][-1] and status["step"] == 2
    assert len(said["kill"]) == len(said["vanish"]) == 1
    assert "os._exit(0)" in "\n".join(said["exit"]), "the traceback says where"
    assert "without the signature of this job" in said["forged"][-1] and status_of(tmp_path / "forged")["class"] == "error"
    (line,) = said["bad_config"]
    assert line.startswith("config error: data.train_batch_size = 7: dp(2) does not divide it; use 6 or 8 [rank ")


def test_a_signal_before_the_first_step_is_written_down(tmp_path: Path) -> None:
    """While ranks check their input, and before they can know of a signal."""
    checking, importing = start(tmp_path / "checking", "wait", 2), start(tmp_path / "importing", "run", 2)
    (tmp_path / "importing" / "exit_status.json").write_text('{"class": "done", "code": 0}')
    since = time.monotonic()
    while not Path(f"/proc/{importing.pid}/task/{importing.pid}/children").read_text():
        assert time.monotonic() - since < PATIENCE_S
        time.sleep(0.02)
    importing.send_signal(signal.SIGTERM)
    for rank in range(2):
        await_file(tmp_path / "checking" / f"pid_{rank}")
    checking.send_signal(signal.SIGTERM)
    said = [job.communicate(timeout=PATIENCE_S)[1] for job in (checking, importing)]
    assert [job.returncode for job in (checking, importing)] == [10, 10], said
    assert re.fullmatch(r"ended by SIGTERM before the first step \[rank . on \S+\]\n", said[0])
    for name in ("checking", "importing"):
        status = status_of(tmp_path / name)
        assert (status["class"], status["code"]) == ("signal", 10) and "SIGTERM" in str(status["message"])


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
    rank.write_text("from rlhf_spmd.process.program import run_program; run_program(lambda: None, lambda context: None)")
    command = [*inside, sys.executable, "-c", START, "2", str(tmp_path), sys.executable, str(rank)]
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
        "from rlhf_spmd.parallel.launch import connect_store, read_launch\n"
        "from rlhf_spmd.parallel.world import init_world\n"
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
