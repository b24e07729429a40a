"""The process boundary with real processes: each kind of failure ends every rank, with one line and its exit code.

Ranks are forked and nobody ends them but they themselves. Where the launcher or torchrun is the subject, each rank is a program.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from rlhf_spmd.process.launcher import start_ranks
from rlhf_spmd.process.messages import Messages
from rlhf_spmd.process.program import ProgramContext, ProgramSettings, run_program
from rlhf_spmd.telemetry.run_dir import EXIT_CODES
from tiers import tiers

PROGRAM = ROOT / "tests" / "started" / "failing.py"
PATIENCE_S = 300.0  # on a busy machine
LAUNCHER = """import pathlib, sys
from rlhf_spmd.process.launcher import start_ranks
size, run_dir, *program = sys.argv[1:]
sys.exit(start_ranks([sys.executable, *program], int(size), pathlib.Path(run_dir)))
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
PLACE = r"actor\.update_actor \(call 6, ppo\.py:32, step 2\)"
EARLY = "before the end of the program"


@dataclass(frozen=True)
class Failure:
    """A job of ``failing.py``. ``codes``: of its ranks, or of the launcher. ``line``: a pattern of the last line on standard error,
    which is the only one if ``is_alone``. ``rank``: which exit_status.json names."""

    kind: str
    ranks: int
    codes: tuple[int, ...]
    error_class: str
    line: str
    rank: int | None = None
    is_alone: bool = True
    lost_s: str = "20"


REFUSED = [
    Failure("bad_config", 2, (2, 2), "config", r"config error: .* = 7: dp\(2\) does not divide it; use 6 or 8 \[rank .*"),
    Failure("bad_data_on_one", 2, (2, 2), "data", r"data error.*/nowhere/prompts\.jsonl.* \[rank 1 on .*", 1),
    Failure(
        "bad_lr",
        2,
        (2, 2),
        "config",
        r"rank . on \S+ has another models\.actor\.optim\.lr than rank . on \S+ \(.*, not .*\): .*",
    ),
]
FORKED = [
    Failure("diverge", 2, (5, 5), "hang", r"call order differs: rank .* as call 5.*"),
    Failure("exit", 2, (9, 9), "lost", rf"rank 1 left in {PLACE}, {EARLY}: SystemExit: 0", 1, False),
    Failure("exit_beside", 2, (9, 9), "lost", rf"rank 1 left in {PLACE}, {EARLY}: SystemExit: 7", 1, False),
    Failure("forged", 2, (1, 1), "error", ".*without the signature of this job.*", None, False),
    Failure("kill", 3, (9, 9, -9), "lost", "rank 2 stopped answering.*", 2),
    Failure("kill_first", 2, (-9, 9), "lost", "rank 0 stopped answering.*", 0, lost_s="5"),
    Failure("stop", 3, (9, 9, -9), "lost", "rank 2 stopped answering.*", 2, lost_s="5"),
]
KILLED = f"was ended by SIGKILL {EARLY}, as the system does where memory runs out"
LAUNCHED = [
    Failure("raise", 2, (1,), "error", rf"rank 1 failed in {PLACE}: KeyError: 'no such column'", 1, False),
    Failure("kill", 2, (9,), "lost", rf"rank 1 \(process \d+\) {KILLED}: ranks 0, 1 in {PLACE}", 1),
    Failure("vanish", 2, (9,), "lost", rf"rank [01] \(process \d+\) left with exit code 0 {EARLY}: ranks 0, 1 in {PLACE}"),
]


class Job:
    """``failing.py`` on forked ranks, or behind a forked launcher."""

    def __init__(self, run_dir: Path, kind: str, ranks: int, is_launched: bool = False, lost_s: str = "20") -> None:
        run_dir.mkdir(exist_ok=True)
        self.run_dir = run_dir
        self.output = run_dir.parent / f"{run_dir.name}_{kind}.txt"
        arguments = [str(run_dir), kind, lost_s]
        if is_launched:
            launcher = run_dir.parent / f"{run_dir.name}_launcher.py"
            launcher.write_text(LAUNCHER)
            command = [str(ranks), str(run_dir), str(PROGRAM), *arguments]
            self.program = Program(1, command, self.output, ENVIRONMENT, str(launcher))
        else:
            self.program = Program(ranks, arguments, self.output, ENVIRONMENT, str(PROGRAM))

    def send(self, number: signal.Signals) -> None:
        """To the launcher, or to rank 0."""
        os.kill(self.program.ranks[0], number)

    def wait(self) -> tuple[int, ...]:
        """Returns exit codes, of the launcher or of the ranks."""
        self.program.wait(PATIENCE_S)
        return tuple(code for _, code in sorted(self.program.codes.items()))

    @property
    def lines(self) -> list[str]:
        """Standard error without torch's warnings."""
        return [line for line in self.output.read_text().splitlines() if not re.match(r"\[?W\d{4} ", line)]

    @property
    def status(self) -> dict[str, Any]:
        return status_of(self.run_dir)


def status_of(run_dir: Path) -> dict[str, Any]:
    status: dict[str, Any] = json.loads((run_dir / "exit_status.json").read_text())
    return status


def await_file(path: Path) -> str:
    """Returns what the file holds as soon as it holds something, or at once where it is a mark without content."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or (path.name.startswith("pid_") and not path.read_text()):
        assert time.monotonic() < deadline, f"there is no {path}"
        time.sleep(0.1)
    return path.read_text()


def await_end(*pids: int) -> None:
    """Returns when the processes are gone, or are zombies."""
    deadline = time.monotonic() + PATIENCE_S
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, f"process {pid} lives on"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Job]:
    """By kind and whether there is a launcher. Side by side: most of their time is waiting."""
    directory = tmp_path_factory.mktemp("jobs")
    jobs = {}
    for group in (REFUSED, FORKED, LAUNCHED):
        is_launched = group is LAUNCHED
        for case in group:
            run_dir = directory / f"{case.kind}_{is_launched}"
            jobs[case.kind, is_launched] = Job(run_dir, case.kind, case.ranks, is_launched, case.lost_s)
        for case in group:
            jobs[case.kind, is_launched].wait()
    return jobs


@pytest.mark.parametrize(
    ("case", "is_launched"),
    [(case, group is LAUNCHED) for group in (REFUSED, FORKED, LAUNCHED) for case in group],
    ids=lambda value: value.kind if isinstance(value, Failure) else "launched" if value else "forked",
)
def test_a_failure_ends_every_rank_with_one_line_and_its_code(
    jobs: dict[tuple[str, bool], Job], case: Failure, is_launched: bool
) -> None:
    job = jobs[case.kind, is_launched]
    assert job.wait() == case.codes
    assert re.fullmatch(case.line, job.lines[-1]), job.lines
    assert len(job.lines) == 1 or not case.is_alone, job.lines
    assert (job.status["class"], job.status["code"]) == (case.error_class, EXIT_CODES[case.error_class])
    assert case.rank is None or job.status["rank"] == case.rank
    is_owner_gone = case.kind in ("kill_first", "vanish")
    assert is_owner_gone or not (job.run_dir / "run.lock").exists(), "the run directory is given up"


def test_what_is_written_of_a_failure(jobs: dict[tuple[str, bool], Job]) -> None:
    raising = jobs["raise", True]
    assert raising.lines[0].startswith("Traceback") and sum("failed in" in line for line in raising.lines) == 1
    place = {"call": "actor.update_actor", "step": 2, "last_checkpoint": None}
    assert raising.status == {"class": "error", "code": 1, "rank": 1, **place, "message": raising.lines[-1]}
    assert "KeyError" in (raising.run_dir / "logs" / "rank_1.err").read_text()
    vanished = jobs["vanish", True]
    assert vanished.status.items() >= {"call": "actor.update_actor", "step": 2, "message": vanished.lines[-1]}.items()
    diverging = jobs["diverge", False]
    assert {"critic.compute_values (ppo.py:31)", "reward.compute_reward (ppo.py:33)"} <= set(
        re.findall(r"\w+\.\w+ \(\S+\)", diverging.lines[0])
    )
    assert "failing.py" in (diverging.run_dir / "logs" / "rank_0.stack").read_text()
    for kind, call in (("exit", "os._exit(0)"), ("exit_beside", "os._exit(7)")):
        assert call in "\n".join(jobs[kind, False].lines), "the traceback says where"


def test_ranks_end_whose_groups_cannot_be_destroyed(tmp_path: Path) -> None:
    """As NCCL's, which may wait for ever."""
    begun = time.monotonic()
    assert Job(tmp_path / "run", "never_left", 2).wait() == (0, 0)
    assert time.monotonic() - begun < 60


def test_another_job_in_the_same_run_directory_is_refused(tmp_path: Path) -> None:
    first = Job(tmp_path / "run", "run", 2)
    await_file(tmp_path / "run" / "stepped")
    (tmp_path / "run" / "exit_status.json").write_text("{}")
    later = [Job(tmp_path / "run", kind, 2) for kind in ("raise", "bad_config")]
    assert [job.wait() for job in later] == [(2, 2)] * 2
    owner = rf"run\.dir={tmp_path}/run is in use by process {first.program.ranks[0]} on \S+"
    (line,) = later[0].lines
    assert re.fullmatch(rf"config error: {owner}; wait for its end, or give another run\.dir .*", line)
    assert (tmp_path / "run" / "exit_status.json").read_text() == "{}", "a refused job wrote over the other's"
    first.send(signal.SIGTERM)
    first.wait()
    assert first.status["class"] == "preempted" and not (tmp_path / "run" / "run.lock").exists()


# ---- signals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", tiers(["SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP"], ["SIGTERM"]))
def test_a_signal_to_the_launcher_alone_reaches_all_ranks_which_save(tmp_path: Path, number: str) -> None:
    job = Job(tmp_path / "run", "run", 2 if number == "SIGTERM" else 1, is_launched=True)
    await_file(tmp_path / "run" / "stepped")
    job.send(signal.Signals[number])
    assert job.wait() == (75,) and "preempted at step" in job.output.read_text()
    status = job.status
    assert (status["class"], status["last_checkpoint"]) == ("preempted", f"step_{status['step']}")


def test_a_signal_before_the_first_step_is_written_down(tmp_path: Path) -> None:
    """While ranks check their input, and before they can know of a signal."""
    checking = Job(tmp_path / "checking", "wait", 2, is_launched=True)
    (tmp_path / "importing").mkdir()
    (tmp_path / "importing" / "exit_status.json").write_text('{"class": "done", "code": 0}')  # of an earlier start
    importing = Job(tmp_path / "importing", "run", 1, is_launched=True)
    launcher = importing.program.ranks[0]
    while not Path(f"/proc/{launcher}/task/{launcher}/children").read_text():
        time.sleep(0.02)
    importing.send(signal.SIGTERM)
    for rank in range(2):
        await_file(tmp_path / "checking" / f"pid_{rank}")
    checking.send(signal.SIGTERM)
    for job in (checking, importing):
        assert job.wait() == (10,) and job.status["class"] == "signal" and "SIGTERM" in job.status["message"]
    assert re.fullmatch(r"ended by SIGTERM before the first step \[rank . on \S+\]", "\n".join(checking.lines))


def test_a_second_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", "save_slowly", 1, is_launched=True)
    await_file(tmp_path / "run" / "stepped")
    job.send(signal.SIGINT)
    await_file(tmp_path / "run" / "saving")  # for two minutes
    time.sleep(1.5)  # until a second interrupt is another press of the keys
    assert job.program.poll() is None
    job.send(signal.SIGINT)
    assert job.wait() == (1,) and job.status["class"] == "error" and job.status["message"].startswith("interrupted in ")


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", "run", 1, is_launched=True)
    await_file(tmp_path / "run" / "stepped")
    job.send(signal.SIGKILL)
    await_end(int(await_file(tmp_path / "run" / "pid_0")))
    assert "lost the store" not in job.output.read_text(), "the kernel ends them, before the board sees why"


def test_ctrl_c_to_torchrun_saves(tmp_path: Path) -> None:
    """As a terminal gives it to the process group of torchrun."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    where = ["--nproc-per-node", "2", "--master-port", str(tasks.free_port())]
    command = [sys.executable, "-m", "torch.distributed.run", *where, str(PROGRAM), str(run_dir), "run"]
    job = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    await_file(run_dir / "stepped")
    os.killpg(job.pid, signal.SIGINT)
    errors = job.communicate(timeout=PATIENCE_S)[1]
    assert errors.count("interrupted: the run saves after the steps under way and ends; again: it ends at once\n") == 1
    status = status_of(run_dir)
    assert (status["class"], status["code"], status["last_checkpoint"]) == ("preempted", 75, f"step_{status['step']}")


@pytest.mark.long
def test_a_launcher_that_is_process_1_of_a_container_is_alive(tmp_path: Path) -> None:
    inside = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    rank = tmp_path / "rank.py"  # a command line with "torch" in it would be taken for torchrun's
    rank.write_text("from rlhf_spmd.process.program import run_program; run_program(lambda: None, lambda context: None)")
    command = [*inside, sys.executable, "-c", LAUNCHER, "2", str(tmp_path), str(rank)]
    assert subprocess.run(command, env=ENVIRONMENT, timeout=PATIENCE_S).returncode == 0


@pytest.mark.long
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
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_a_rank_has_forked_ends_with_it(tmp_path: Path) -> None:
    """As an environment of the user's does."""
    script = "import os, pathlib, sys, time\nchild = os.fork()\nif child: pathlib.Path(sys.argv[1]).write_text(str(child))\n"
    command = [sys.executable, "-c", f"{script}else: time.sleep(600)\n", str(tmp_path / "child")]
    assert start_ranks(command, 1) == EXIT_CODES["lost"]
    await_end(int((tmp_path / "child").read_text()))


def test_more_ranks_than_gpus_are_refused_before_any_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(ValueError, match="--nproc-per-node=8, but this node has 4 GPUs"):
        start_ranks(["false"], 8)


# ---- a single process -----------------------------------------------------------------------------------------------------

OS_EXIT = os._exit
LEAVE = {"sys.exit": sys.exit, "os._exit": lambda code: os._exit(code)}  # as it is when the program runs


def body_of(kind: str) -> Any:
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
    ("kind", "code"), [("done", None), ("nan", 6), ("sigterm", 75), ("nan, full disk", 6), ("sys.exit", 9), ("os._exit", 9)]
)
def test_a_single_process_needs_no_torchrun(tmp_path: Path, kind: str, code: int | None) -> None:
    if "full disk" in kind:
        (tmp_path / "logs" / "rank_0.err").mkdir(parents=True)  # nothing can be written there
    handler = signal.getsignal(signal.SIGTERM)
    try:
        run_program(lambda: None, body_of(kind), lambda _: ProgramSettings(tmp_path))
        ending = None
    except SystemExit as leaving:
        ending = leaving.code
    status = status_of(tmp_path)
    assert (ending, status["code"], status["step"]) == (code, code or 0, 1)
    assert os._exit is OS_EXIT and signal.getsignal(signal.SIGTERM) is handler
    assert not (tmp_path / "run.lock").exists()


def test_a_thread_that_leaves_ends_the_program(tmp_path: Path) -> None:
    """It ends its process, so in one of its own."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, sys, threading, time\n"
        "from rlhf_spmd.process.program import ProgramSettings, run_program\n"
        "def body(context):\n"
        "    threading.Thread(target=os._exit, args=(0,)).start()\n"
        "    time.sleep(60)\n"
        "run_program(lambda: None, body, lambda _: ProgramSettings(pathlib.Path(sys.argv[1])))\n"
    )
    assert Program(1, [str(tmp_path)], tmp_path / "output.txt", ENVIRONMENT, str(script)).wait() == 9
    assert status_of(tmp_path)["class"] == "lost"


@pytest.mark.parametrize(("kind", "code"), [("sys.exit", 9), ("os._exit", 9), ("sigterm", 10)])
def test_a_program_that_leaves_while_it_checks_its_input_has_a_status(
    tmp_path: Path, kind: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "exit_status.json").write_text('{"class": "done", "code": 0}')  # of an earlier start
    ways = {**LEAVE, "sigterm": lambda _: os.kill(os.getpid(), signal.SIGTERM)}
    with pytest.raises(SystemExit) as ending:
        run_program(lambda: ways[kind](0), lambda _: None, run_dir_hint=tmp_path)
    assert ending.value.code == code and os._exit is OS_EXIT
    status, line = status_of(tmp_path), capsys.readouterr().err.splitlines()[-1]
    assert (status["code"], status["message"]) == (code, line)
    assert line == "ended by SIGTERM before the first step" if code == 10 else "SystemExit: 0" in line


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2, but RANK, MASTER_ADDR, MASTER_PORT are not set; start by torchrun"),
        ({"RANK": "x"}, "RANK=x: must be a whole number, as torchrun sets it"),
    ],
)
def test_a_launcher_that_says_too_little_is_one_line(variables: dict[str, str], line: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in tasks.environment().items() if not name.startswith(("RANK", "MASTER_"))}
    arguments = ["train", "--config", str(tasks.task() / "ppo.json"), f"run.dir={tmp_path}"]
    ended = run_command("rlhf_spmd.__main__", arguments, environment | variables)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1 and line in ended.stderr, ended.stderr


class OwnClass(RuntimeError):
    exit_class = "data"


def test_classes_of_exceptions() -> None:
    expected = {
        "data": OwnClass("x"),
        "checkpoint": OSError(28, "No space left on device"),
        "config": ValueError("x"),
        "numerics": FloatingPointError("x"),
        "error": KeyError("x"),
        "preempted": Preempted("x"),
        "memory": RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    }
    assert {name: classify(error) for name, error in expected.items()} == {name: name for name in expected}
    assert classify(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))) == "memory"
    assert lost_connection(RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"))
    assert lost_connection(ConnectionResetError("reset"))
    assert not lost_connection(RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"))


class Unready(dist.HashStore):
    """A store in which ranks wait in vain ``times`` times; then all of them have succeeded."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.set("prepare/ok/0", "1")
        self.add("prepare/known", 1)  # rank 1 knows of the verdict, too

    def await_key(self, key: str, limit_s: float, on_wait: object) -> bool:
        self.times -= 1
        if self.times < 0:
            Messages(self, b"key").set("prepare/verdict", "ok")
        return self.times < 0


def test_ranks_that_come_late_to_the_agreement_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(startup_checks, "await_key", Unready.await_key)
    early = startup_checks.EarlySignals()
    late = "ranks [1] did not finish checking their input within"
    startup_checks._await_verdict(Launch(rank=0, size=2), Messages(Unready(1), b"key"), 4200.0, None, early)
    assert capsys.readouterr().err == f"{late} 300 s; the others wait for 4200 s\n"
    monkeypatch.setattr(startup_checks, "end_rank", lambda launch, code: sys.exit(code))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ending:
        startup_checks._await_verdict(Launch(rank=0, size=2), Messages(Unready(2), b"key"), 4200.0, tmp_path, early)
    assert ending.value.code == 5 and capsys.readouterr().err.splitlines()[-1] == f"{late} 4200 s"
    assert status_of(tmp_path)["class"] == "hang"


@pytest.mark.parametrize(("device", "precision"), [("cuda", "highest"), ("cpu", choose_cpu_matmul())])
def test_products_of_gpus_keep_their_precision(device: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lets oneDNN in on CPUs would let TF32 in there."""
    precisions: list[str] = []
    monkeypatch.setattr(device_setup, "model_device", lambda: torch.device(device))
    torch.set_float32_matmul_precision("highest")
    with pytest.raises(SystemExit):
        run_program(lambda: precisions.append(torch.get_float32_matmul_precision()), lambda _: None, dry_run=lambda _: "good")
    assert precisions == [precision]
