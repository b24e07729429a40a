"""The process boundary with real processes: each kind of failure ends every rank, with one line and its code. Under torchrun
where ranks
are lost or signals sent; else on ranks that nobody ends but they themselves."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tasks
from places import ROOT
from ranks import Program, run_command
from rlhf_spmd.parallel import device_setup
from rlhf_spmd.parallel.device_setup import choose_cpu_matmul
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.process import startup_checks
from rlhf_spmd.process.exit import Preempted, classify, lost_connection
from rlhf_spmd.process.messages import Messages
from rlhf_spmd.process.program import ProgramContext, ProgramSettings, run_program
from tasks import free_port

PROGRAM = ROOT / "tests" / "started" / "failing.py"
START_LIMIT_S = 300.0  # until all ranks are in their loop, on a busy machine
WARNING = r"\[?W\d{4} "  # of torch


@dataclass
class Ended:
    """A finished job: what its ranks wrote, their exit codes, exit_status.json; seconds from the failure and from the verdict
    on it until the end (or until an earlier job of the same test had ended, if that was later)."""

    run_dir: Path
    ours: list[str]
    codes: dict[int, int]
    status: dict[str, object]
    seconds: float
    after_verdict: float


def start(run_dir: Path, kind: str, ranks: int, *arguments: str) -> subprocess.Popen[str]:
    run_dir.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command += [str(PROGRAM), str(run_dir), kind, *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait(process: subprocess.Popen[str], run_dir: Path) -> Ended:
    _, errors = process.communicate(timeout=600)
    now, status_file = time.time(), run_dir / "exit_status.json"
    # torchrun's warnings stand between the ranks' lines and its report behind them; the report names each rank's exit code
    ranks_part = re.split(r"^E\d{4} ", errors, maxsplit=1, flags=re.M)[0]
    ours = [line for line in ranks_part.splitlines() if not re.match(WARNING, line)]
    codes = {int(r): int(c) for r, c in re.findall(r"rank\s+: (\d+).*?\n\s+exitcode\s+: (-?\d+)", errors)}
    assert status_file.exists() and (run_dir / "failed").exists(), errors
    seconds = [now - file.stat().st_mtime for file in (run_dir / "failed", status_file)]
    return Ended(run_dir, ours, codes, json.loads(status_file.read_text()), *seconds)


def fork(run_dir: Path, kind: str) -> Program:
    """Two ranks without torchrun, which write to a file beside ``run_dir``."""
    run_dir.mkdir(exist_ok=True)
    output, environment = run_dir.parent / f"{kind}.txt", os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return Program(2, [str(run_dir), kind], output, environment, str(PROGRAM))


def wait_for_ranks(ranks: Program, run_dir: Path, kind: str) -> Ended:
    ranks.wait()
    lines, now = (run_dir.parent / f"{kind}.txt").read_text().splitlines(), time.time()
    ours = [line for line in lines if not re.match(WARNING, line)]
    return Ended(run_dir, ours, ranks.codes, status_of(run_dir), now - (run_dir / "failed").stat().st_mtime, 0.0)


def run_refused(run_dir: Path, kind: str) -> Ended:
    return wait_for_ranks(fork(run_dir, kind), run_dir, kind)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    directory = tmp_path_factory.mktemp("refused")
    return {kind: run_refused(directory / kind, kind) for kind in ("bad_config", "bad_data_on_one", "bad_lr")}


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """Side by side: most of their time is waiting."""
    directory = tmp_path_factory.mktemp("failed")
    killed, others = start(directory / "kill", "kill", 3), {kind: fork(directory / kind, kind) for kind in ("raise", "diverge")}
    found = {kind: wait_for_ranks(ranks, directory / kind, kind) for kind, ranks in others.items()}
    return {**found, "kill": wait(killed, directory / "kill")}


def stepping(*run_dirs: Path) -> None:
    """Returns when the jobs of kind ``run`` are in their loop."""
    deadline = time.monotonic() + START_LIMIT_S
    while not all((run_dir / "stepped").exists() for run_dir in run_dirs):
        assert time.monotonic() < deadline, "the programs did not reach their first step"
        time.sleep(0.1)


def pids(run_dir: Path, ranks: int) -> list[int]:
    deadline = time.monotonic() + START_LIMIT_S
    while len(found := [p.read_text() for p in sorted(run_dir.glob("pid_*"))]) < ranks or not all(found):
        assert time.monotonic() < deadline, "the ranks did not start"
        time.sleep(0.1)
    return [int(pid) for pid in found]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_bad_input_is_one_line_and_exit_code_2_on_each_rank(refused):
    ended = refused["bad_config"]
    assert len(ended.ours) == 1
    assert ended.ours[0].startswith("config error: data.train_batch_size = 7: dp(2) does not divide it; use 6 or 8 [rank ")
    assert ended.codes == {0: 2, 1: 2}
    assert (ended.status["class"], ended.status["code"]) == ("config", 2)
    assert ended.seconds < 90


def test_a_file_that_one_rank_cannot_read_ends_all_ranks(refused):
    ended = refused["bad_data_on_one"]
    assert len(ended.ours) == 1 and "data error" in ended.ours[0] and "/nowhere/prompts.jsonl" in ended.ours[0]
    assert "[rank 1 on" in ended.ours[0]
    assert ended.codes == {0: 2, 1: 2}
    assert (ended.status["class"], ended.status["code"], ended.status["rank"]) == ("data", 3, 1)


def test_a_rank_with_another_setting_ends_all_ranks(refused):
    ended = refused["bad_lr"]
    assert len(ended.ours) == 1 and ended.codes == {0: 2, 1: 2}
    assert re.fullmatch(
        r"rank \d on \S+ has another models.actor.optim.lr than rank \d on \S+ \(.*, not .*\): .*", ended.ours[0]
    )


def test_a_rank_that_raises_is_the_one_named(failed):
    ended = failed["raise"]
    line = "rank 1 failed in actor.update_actor (call 6, ppo.py:32, step 2): KeyError: 'no such column'"
    assert ended.ours[-1] == line and ended.ours[0].startswith("Traceback")
    assert sum("failed in" in text for text in ended.ours) == 1
    assert ended.codes == {0: 1, 1: 1}
    assert ended.status == {
        "class": "error",
        "code": 1,
        "rank": 1,
        "call": "actor.update_actor",
        "step": 2,
        "last_checkpoint": None,
        "message": line,
    }
    assert "KeyError" in (ended.run_dir / "logs" / "rank_1.err").read_text()


def test_ranks_that_branch_differently_are_told_apart(failed):
    ended = failed["diverge"]
    assert len(ended.ours) == 1
    text = ended.ours[0]
    assert text.startswith("call order differs: rank ") and "as call 5" in text
    assert "critic.compute_values (ppo.py:31)" in text and "reward.compute_reward (ppo.py:33)" in text
    assert set(ended.codes.values()) == {5}
    assert ended.seconds < 50  # the ranks sleep for 60 s
    assert "failing.py" in (ended.run_dir / "logs" / "rank_0.stack").read_text()


def test_a_killed_rank_is_named_by_a_survivor(failed):
    ended = failed["kill"]
    assert len(ended.ours) == 1 and ended.ours[0].startswith("rank 2 stopped answering")
    assert ended.codes == {0: 9, 1: 9, 2: -9}
    assert (ended.status["class"], ended.status["rank"]) == ("lost", 2)
    assert ended.seconds < 60


def test_the_run_directory_is_given_up_in_every_ending(refused, failed):
    assert [name for name, ended in (refused | failed).items() if (ended.run_dir / "run.lock").exists()] == []


def test_killed_rank_0_is_named_as_well_and_a_stopped_one_is_killed(tmp_path):
    """Two jobs side by side: one loses the rank that watches the others, in the other a rank is stopped."""
    first = start(tmp_path / "first", "run", 2, "5")
    second = start(tmp_path / "second", "run", 2, "5")
    victims = pids(tmp_path / "first", 2)[0], pids(tmp_path / "second", 2)[1]
    stepping(tmp_path / "first", tmp_path / "second")
    time.sleep(1.0)  # two heartbeats
    for victim, name, number in zip(victims, ("first", "second"), (signal.SIGKILL, signal.SIGSTOP), strict=True):
        (tmp_path / name / "failed").touch()
        os.kill(victim, number)
    killed, stopped = wait(first, tmp_path / "first"), wait(second, tmp_path / "second")
    assert len(killed.ours) == 1 and killed.ours[0].startswith("rank 0 stopped answering")
    assert killed.codes == {0: -9, 1: 9} and killed.status["rank"] == 0
    assert len(stopped.ours) == 1 and stopped.ours[0].startswith("rank 1 stopped answering")
    assert stopped.codes == {0: 9, 1: -9} and stopped.status["rank"] == 1
    assert max(killed.after_verdict, stopped.after_verdict) < 28  # torchrun waits 30 s for a stopped process
    assert max(killed.seconds, stopped.seconds) < 60
    assert all(gone(pid) for pid in victims)


def test_sigterm_to_torchrun_saves_and_a_kill_of_torchrun_leaves_no_orphan(tmp_path):
    saving = start(tmp_path / "saving", "run", 2)
    orphaned = start(tmp_path / "orphaned", "run", 2)
    ranks = pids(tmp_path / "orphaned", 2)
    stepping(tmp_path / "saving", tmp_path / "orphaned")
    saving.send_signal(signal.SIGTERM)
    orphaned.kill()
    since = time.monotonic()
    while not all(gone(pid) for pid in ranks):
        assert time.monotonic() - since < 60, "ranks live on without torchrun"
        time.sleep(0.1)
    assert "lost the store" not in orphaned.communicate()[1]  # the kernel ended them, before the board saw why
    saving.communicate(timeout=300)
    status = json.loads((tmp_path / "saving" / "exit_status.json").read_text())
    assert (status["class"], status["code"]) == ("preempted", 75)
    assert status["last_checkpoint"] == f"step_{status['step']}"


def status_of(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "exit_status.json").read_text())


def test_the_first_interrupt_saves_and_the_second_ends_at_once(tmp_path):
    """Ctrl-C, as a terminal gives it to the process group of torchrun."""
    once, twice = start(tmp_path / "once", "run", 2), start(tmp_path / "twice", "save_slowly", 2)
    stepping(tmp_path / "once", tmp_path / "twice")
    for process in (once, twice):
        os.killpg(process.pid, signal.SIGINT)
    errors = once.communicate(timeout=300)[1]
    assert errors.count("interrupted: the run saves after the steps under way and ends; again: it ends at once\n") == 1
    status = status_of(tmp_path / "once")
    assert (status["class"], status["code"], status["last_checkpoint"]) == ("preempted", 75, f"step_{status['step']}")
    while not (tmp_path / "twice" / "failed").exists():  # it saves, for two minutes
        time.sleep(0.1)
    time.sleep(1.5)
    assert twice.poll() is None
    os.killpg(twice.pid, signal.SIGINT)
    since = time.monotonic()
    twice.communicate(timeout=300)
    assert time.monotonic() - since < 25  # torchrun itself would kill after 30 s
    status = status_of(tmp_path / "twice")
    assert status["class"] == "error" and str(status["message"]).startswith("interrupted in ")


def test_another_job_in_the_same_run_directory_is_refused(tmp_path):
    first = start(tmp_path / "run", "run", 2)
    stepping(tmp_path / "run")
    (tmp_path / "run" / "exit_status.json").write_text("{}")
    (owner,) = pids(tmp_path / "run", 2)[:1]
    for ranks in (later := {kind: fork(tmp_path / "run", kind) for kind in ("run_too", "bad_config")}).values():
        ranks.wait()
    second = (tmp_path / "run_too.txt").read_text()
    line = rf"config error: run\.dir={tmp_path}/run is in use by process {owner} on \S+; wait for its end, or give another run\.dir .*"
    assert len(re.findall(line, second)) == 1
    assert [ranks.codes for ranks in later.values()] == [{0: 2, 1: 2}] * 2
    assert (tmp_path / "run" / "exit_status.json").read_text() == "{}", "a refused job wrote over the other's"
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=300)
    assert status_of(tmp_path / "run")["class"] == "preempted"
    assert not (tmp_path / "run" / "run.lock").exists()


REALLY = os._exit
LEAVE = {"sys.exit": sys.exit, "os._exit": lambda code: os._exit(code)}  # as it is when the program runs


def body_of(kind: str):
    def body(context: ProgramContext[None]) -> None:
        context.board.set_step(1)
        assert (context.board.run_dir / "run.lock").exists()
        if kind == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        if kind.startswith("nan"):
            raise FloatingPointError("loss is nan")
        if kind in LEAVE:
            LEAVE[kind](0)

    return body


@pytest.mark.parametrize(
    ("kind", "code"), [("done", 0), ("nan", 6), ("sigterm", 75), ("nan, full disk", 6), ("sys.exit", 9), ("os._exit", 9)]
)
def test_a_single_process_needs_no_torchrun(tmp_path, kind, code):
    if "full disk" in kind:
        (tmp_path / "logs" / "rank_0.err").mkdir(parents=True)  # nothing can be written there
    handler = signal.getsignal(signal.SIGTERM)
    if code:
        with pytest.raises(SystemExit) as ending:
            run_program(lambda: None, body_of(kind), lambda _: ProgramSettings(tmp_path))
        assert ending.value.code == code
    else:
        run_program(lambda: None, body_of(kind), lambda _: ProgramSettings(tmp_path))
    status = json.loads((tmp_path / "exit_status.json").read_text())
    assert (status["code"], status["step"]) == (code, 1)
    assert os._exit is REALLY
    assert not (tmp_path / "run.lock").exists()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_thread_that_leaves_ends_the_program(tmp_path):
    """It ends its process, so in one of its own."""
    script = (
        "import os, pathlib, sys, threading, time\n"
        "from rlhf_spmd.process.program import ProgramSettings, run_program\n"
        "def body(context):\n"
        "    threading.Thread(target=os._exit, args=(0,)).start()\n"
        "    time.sleep(60)\n"
        "run_program(lambda: None, body, lambda _: ProgramSettings(pathlib.Path(sys.argv[1])))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=tasks.environment(), timeout=START_LIMIT_S)
    assert ended.returncode == 9 and status_of(tmp_path)["class"] == "lost"


@pytest.mark.parametrize(("kind", "code"), [("sys.exit", 9), ("os._exit", 9), ("sigterm", 10)])
def test_a_program_that_leaves_while_it_checks_its_input_has_a_status(tmp_path, kind, code, capsys):
    (tmp_path / "exit_status.json").write_text('{"class": "done", "code": 0}')  # of an earlier start
    ways = {**LEAVE, "sigterm": lambda _: os.kill(os.getpid(), signal.SIGTERM)}
    with pytest.raises(SystemExit) as ending:
        run_program(lambda: ways[kind](0), lambda _: None, run_dir_hint=tmp_path)
    assert ending.value.code == code and os._exit is REALLY
    status, line = status_of(tmp_path), capsys.readouterr().err.splitlines()[-1]
    assert (status["code"], status["message"]) == (code, line)
    assert line == "ended by SIGTERM before the first step" if code == 10 else "SystemExit: 0" in line


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK, MASTER_ADDR, MASTER_PORT are not set; start by torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost"}, "WORLD_SIZE=2, but MASTER_PORT is not set"),
        ({"RANK": "x"}, "RANK=x: must be a whole number, as torchrun sets it"),
    ],
)
def test_a_launcher_that_says_too_little_is_one_line(variables, line, tmp_path):
    own = {name: value for name, value in tasks.environment().items() if name not in ("RANK", "MASTER_ADDR", "MASTER_PORT")}
    arguments = ["train", "--config", str(tasks.task() / "ppo.json"), f"run.dir={tmp_path}"]
    ended = run_command("rlhf_spmd.__main__", arguments, own | variables)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and line in ended.stderr, ended.stderr


class OwnClass(RuntimeError):
    exit_class = "data"


def test_classes_of_exceptions():
    expected = {
        "data": OwnClass("x"),
        "checkpoint": OSError(28, "No space left on device"),
        "config": ValueError("x"),
        "numerics": FloatingPointError("x"),
        "error": KeyError("x"),
        "preempted": Preempted("x"),
    }
    assert {name: classify(error) for name, error in expected.items()} == {name: name for name in expected}
    assert lost_connection(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"))
    assert lost_connection(ConnectionResetError("reset"))
    assert not lost_connection(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))


class Unready(dist.HashStore):
    """A store in which ranks wait in vain ``times`` times; then all of them have succeeded. ``waited``: how long, in seconds."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.waited = times, []
        self.set("prepare/ok/0", "1")
        self.add("prepare/known", 1)  # rank 1 knows of the verdict, too

    def wait(self, keys, timeout):
        self.waited.append(timeout.total_seconds())
        if len(self.waited) <= self.times:
            raise RuntimeError("wait timeout")
        Messages(self, b"key").set("prepare/verdict", "ok")


def test_ranks_that_come_late_to_the_agreement_are_named(capsys, monkeypatch, tmp_path):
    late = "ranks [1] did not finish checking their input within"
    startup_checks._await_verdict(Launch(rank=0, size=2), Messages(store := Unready(1), b"key"), 4200.0, None)
    assert store.waited == [300.0, 3900.0] and capsys.readouterr().err == f"{late} 300 s; the others wait for 4200 s\n"
    monkeypatch.setattr(startup_checks, "end_rank", lambda launch, code: sys.exit(code))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ending:
        startup_checks._await_verdict(Launch(rank=0, size=2), Messages(Unready(2), b"key"), 4200.0, tmp_path)
    *_, last = capsys.readouterr().err.splitlines()
    assert ending.value.code == 5 and last == f"{late} 4200 s"
    assert json.loads((tmp_path / "exit_status.json").read_text())["class"] == "hang"


@pytest.mark.parametrize(("device", "precision"), [("cuda", "highest"), ("cpu", choose_cpu_matmul())])
def test_products_of_gpus_keep_their_precision(device: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lets oneDNN in on CPUs would let TF32 in there."""
    found: list[str] = []
    monkeypatch.setattr(device_setup, "model_device", lambda: torch.device(device))
    torch.set_float32_matmul_precision("highest")
    with pytest.raises(SystemExit):
        run_program(lambda: found.append(torch.get_float32_matmul_precision()), lambda _: None, dry_run=lambda _: "good")
    assert found == [precision]
