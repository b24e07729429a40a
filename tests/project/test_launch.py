"""The launch scripts: torchrun on one and two nodes here, and the sbatch templates on a real SLURM where one can be started."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from places import ROOT
from ranks import run_command
from tasks import free_port

SLURM = ROOT.parent / "shared" / "slurm"
PROGRAM = ROOT / "tests" / "started" / "launched.py"
LIMIT_S = 300.0  # for a job to start or to end, on a busy machine


def environment(**variables: str) -> dict[str, str]:
    paths = {"PYTHON": sys.executable, "PROGRAM": str(PROGRAM), "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return os.environ | paths | variables


def torchrun(run_dir: Path, steps: int, **variables: str) -> subprocess.Popen[str]:
    config = ROOT / "pyproject.toml"  # any file: the program only checks that it exists
    command = ["bash", "launch/torchrun.sh", str(config), f"run.dir={run_dir}", f"run.steps={steps}", "run.resume=auto"]
    return subprocess.Popen(command, cwd=ROOT, env=environment(**variables), stderr=subprocess.PIPE, text=True)


def status_of(run_dir: Path) -> dict[str, object]:
    path = run_dir / "exit_status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def starts(run_dir: Path) -> list[str]:
    path = run_dir / "starts"
    return path.read_text().splitlines() if path.exists() else []


def await_file(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        log = path.parent / "out"
        assert time.monotonic() < deadline, log.read_text() if log.exists() else f"there is no {path}"
        time.sleep(0.1)


def test_scripts_parse() -> None:
    for script in [*(ROOT / "launch").iterdir(), *(ROOT / "scripts").glob("*.sh")]:
        subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.long
def test_everything_that_the_gpu_day_names_exists() -> None:
    script = (ROOT / "scripts" / "gpu_day.sh").read_text()
    benchmarks = re.findall(r"\$bench/(\w+\.py)\"(?: (\w+))?((?:[^\n]|\\\n)*)", script)
    assert len(benchmarks) == 6
    options = {(name, part): set[str]() for name, part, _ in benchmarks}
    for name, part, arguments in benchmarks:
        options[name, part].update(re.findall(r"--[\w-]+", arguments))
    for (name, part), wanted in options.items():
        command = [sys.executable, str(ROOT / "scripts" / "bench" / name), *([part] if part else []), "--help"]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        assert wanted <= set(re.findall(r"--[\w-]+", done.stdout.partition("\noptions:\n")[2])), (name, part)
    paths = re.findall(r"(?:configs|tests)/[\w/]+\.\w+", script)
    assert len(paths) == 8 and all((ROOT / path).is_file() for path in paths)


def test_every_part_of_the_gpu_day_starts_is_limited_and_leaves_its_log(tmp_path: Path) -> None:
    """Where there is no GPU too; a part that meets its limit does not stop the next one."""
    limited = environment(LIMIT="1", CUDA_VISIBLE_DEVICES="")
    subprocess.run(["bash", "scripts/gpu_day.sh", str(tmp_path), "first"], cwd=ROOT, env=limited, check=True, timeout=LIMIT_S)
    lines = [line.split() for line in (tmp_path / "summary.txt").read_text().splitlines() if not line.startswith("#")]
    names = ["kernels", "ranks_pp2", "ranks_ep2", "ranks_cp2", "ranks_tp2", "mixtures"]
    assert [(name, status) for name, status, _ in lines] == [(name, "124") for name in names]
    assert {path.name for path in tmp_path.iterdir()} == {"summary.txt", "results.json", *(f"{name}.log" for name in names)}
    assert json.loads((tmp_path / "results.json").read_text()) == {}
    refused = subprocess.run(["bash", "scripts/gpu_day.sh", str(tmp_path), "nanno"], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 2 and "no part 'nanno'; there are: kernels ranks_pp2" in refused.stderr


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("launch/torchrun.sh", "NPROC_PER_NODE"),
        ("launch/torchrun.sh configs/nope.yaml", "config error: configs/nope.yaml: no such file"),
        ("launch/slurm_run.sh configs/nope.yaml", "SLURM_JOB_ID is not set: this runs in a job"),
        ("scripts/gpu_day.sh --help", "What to run on a machine with a GPU"),
        ("reward-server --function nope", "--function nope: unknown reward.function 'nope'"),
        ("reward-server --function gsm8k --port 80000", "--port 80000: bind"),
        ("reward-server --function gsm8k --token-env NOT_THERE", "--token-env NOT_THERE: this variable is not set"),
    ],
)
def test_a_mistake_is_a_line_and_status_2(command: str, line: str) -> None:
    variables = {name: value for name, value in environment().items() if not name.startswith("SLURM")}
    if command.startswith("reward-server"):
        done = run_command("rlhf_spmd.__main__", command.split(), variables)
    else:
        done = subprocess.run(["bash", *command.split()], cwd=ROOT, env=variables, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 2 and line in output
    assert not any(text in output for text in ("set -euo", "Usage: mkdir", "Traceback"))


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def test_python_is_that_of_the_environment(tmp_path: Path) -> None:
    """Of python3 if it has the package, else of the repository; or the mistake is named."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    variables = {name: value for name, value in environment().items() if name != "PYTHON"}
    variables["PATH"] = f"{tmp_path / 'bin'}:{variables['PATH']}"
    outputs = []
    for has_it, has_venv in ((True, True), (False, True), (False, False)):
        script(tmp_path / "bin" / "python3", f'[[ $1 == -c ]] && exit {int(not has_it)}; echo "path $2"')
        script(tmp_path / ".venv" / "bin" / "python", 'echo "venv $2"')
        if not has_venv:
            shutil.rmtree(tmp_path / ".venv")
        command = ["bash", str(tmp_path / "launch" / "torchrun.sh"), "run.steps=1"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        outputs.append((done.returncode, done.stdout + done.stderr))
    line = f"config error: python3 has no rlhf_spmd, and there is no {tmp_path}/.venv/bin/python; activate the environment, or give "
    assert outputs == [(0, "path torch.distributed.run\n"), (0, "venv torch.distributed.run\n"), outputs[2]]
    assert outputs[2][0] == 2 and outputs[2][1].startswith(line)


@pytest.mark.parametrize("container", ["", "--container-image=a.sqsh --container-mounts=/x:/x", "apptainer exec --nv a.sif"])
def test_a_node_runs_in_the_container(container: str, tmp_path: Path) -> None:
    for name, text in (("srun", 'echo "srun $*"'), ("scontrol", "echo host0")):
        script(tmp_path / name, text)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host0", "SLURM_JOB_NUM_NODES": "1", "CONTAINER": container}
    variables = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_SUBMIT_DIR=str(ROOT), **job)
    command = ["bash", "launch/slurm_run.sh", f"run.dir={tmp_path}/run"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    words = f"--kill-on-bad-exit=1 {container} bash -c".replace("  ", " ")
    assert f"{words} NODE_RANK=$SLURM_NODEID exec bash launch/torchrun.sh" in done.stdout


def test_torchrun_may_open_as_many_files_as_the_system_allows(tmp_path: Path) -> None:
    """It holds the store of all ranks."""
    (tmp_path / "python").write_text("#!/bin/bash\nulimit -Sn\n")
    (tmp_path / "python").chmod(0o755)
    command = "ulimit -Sn 200; exec bash launch/torchrun.sh run.steps=1"
    variables = environment(PYTHON=str(tmp_path / "python"))
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=variables, capture_output=True, text=True, check=True)
    hard = subprocess.run(["bash", "-c", "ulimit -Hn"], capture_output=True, text=True, check=True).stdout
    assert done.stdout == hard != "200\n"


@pytest.mark.long
def test_a_port_that_belongs_to_another_program_is_named_in_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        port = str(silent.getsockname()[1])
        shared = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_PORT": port, "START_SECONDS": "1"}
        nodes = [torchrun(tmp_path, 1, NODE_RANK=str(node), **shared) for node in range(2)]
        errors = [node.communicate(timeout=LIMIT_S)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 5]
    listener = f"another program listens on 127.0.0.1:{port}; give a port that is free on node 0"
    assert errors[0] == f"config error: MASTER_PORT={port}: {listener}\n"
    assert errors[1].startswith(f"node 1: no store at 127.0.0.1:{port} within 1 s; ") and errors[1].count("\n") == 1


@pytest.mark.long
def test_two_nodes_save_on_a_signal_to_one_of_them_and_one_node_resumes(tmp_path: Path) -> None:
    """Two agents on loopback; SIGTERM to the second stops both nodes after a save; then one node with two ranks goes on."""
    shared = {"NNODES": "2", "NPROC_PER_NODE": "1", "MASTER_PORT": str(free_port())}
    agents = [torchrun(tmp_path, 500, NODE_RANK=str(node), **shared) for node in range(2)]
    await_file(tmp_path / "last_step")
    agents[1].send_signal(signal.SIGTERM)
    for agent in agents:
        agent.communicate(timeout=LIMIT_S)
    status = status_of(tmp_path)
    assert (status["class"], status["code"]) == ("preempted", 75)
    assert starts(tmp_path) == ["ranks 2 step 1 nodes [0, 1]"]
    step = int((tmp_path / "last_step").read_text())
    assert status["last_checkpoint"] == f"step_{step}"

    again = torchrun(tmp_path, step + 2, NPROC_PER_NODE="2", MASTER_PORT=str(free_port()))
    again.communicate(timeout=LIMIT_S)
    assert again.returncode == 0
    ending = {"class": "done", "code": 0, "rank": None, "call": None, "last_checkpoint": f"step_{step + 2}", "step": step + 2}
    assert status_of(tmp_path).items() >= ending.items()
    assert starts(tmp_path)[1] == f"ranks 2 step {step + 1} nodes [0, 0]"


# ---- SLURM ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A private SLURM of two nodes; yields the environment for its commands."""
    if not (SLURM / "start-slurm.sh").exists():
        pytest.skip("no script to start a SLURM")
    if shutil.which("sbatch") is None and (os.getuid() != 0 or shutil.which("apt-get") is None):
        pytest.skip("SLURM is not installed and cannot be")
    sandbox = tmp_path_factory.mktemp("slurm")
    for directory in (sandbox, *sandbox.parents):  # slurmd walks it as another user
        if directory.stat().st_uid == os.getuid():
            directory.chmod(directory.stat().st_mode | 0o011)
    variables = os.environ | {"SLURM_SANDBOX": str(sandbox), "SLURM_PORT": str(free_port())}
    started = subprocess.run([str(SLURM / "start-slurm.sh")], env=variables, capture_output=True, text=True, timeout=180)
    if started.returncode:
        subprocess.run([str(SLURM / "stop-slurm.sh"), "--purge"], env=variables, capture_output=True)
        pytest.skip(f"SLURM does not start: {started.stderr[-300:]}")
    conf = re.search(r"SLURM_CONF=(\S+)", started.stdout)
    assert conf is not None, started.stdout
    yield environment(SLURM_CONF=conf[1])
    subprocess.run([str(SLURM / "stop-slurm.sh"), "--purge"], env=variables, capture_output=True)


def submit(slurm: dict[str, str], template: str, run_dir: Path, steps: int, ranks: int, **variables: str) -> str:
    """Returns the job's number. The templates' settings for a cluster are overridden on the command line, as users may."""
    run_dir.mkdir()
    command = ["sbatch", "--parsable", "--gpus-per-node=2", "--cpus-per-task=2", f"--output={run_dir}/out"]
    command += [f"launch/{template}", "pyproject.toml", f"run.dir={run_dir}", f"run.steps={steps}"]
    shared = slurm | {"NPROC_PER_NODE": str(ranks)} | variables
    return subprocess.run(command, cwd=ROOT, env=shared, capture_output=True, text=True, check=True).stdout.strip()


def job_state(slurm: dict[str, str], job: str) -> str:
    shown = subprocess.run(["scontrol", "show", "job", job], env=slurm, capture_output=True, text=True, check=True).stdout
    return re.findall(r"JobState=(\w+)", shown)[0]


def await_end(slurm: dict[str, str], job: str, run_dir: Path) -> str:
    deadline = time.monotonic() + LIMIT_S
    while (state := job_state(slurm, job)) in ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "REQUEUED"):
        assert time.monotonic() < deadline, f"{state}\n{(run_dir / 'out').read_text()}"
        time.sleep(0.3)
    return state


@pytest.mark.long
def test_slurm_one_and_two_nodes_save_requeue_and_resume(slurm: dict[str, str], tmp_path: Path) -> None:
    """A job on one node gets the signal that warns of its time limit; another runs on two nodes."""
    one, two = tmp_path / "one", tmp_path / "two"
    first = submit(slurm, "slurm_one_node.sbatch", one, 100, 2)
    second = submit(slurm, "slurm_multi_node.sbatch", two, 15, 1)
    await_file(one / "last_step")
    subprocess.run(["scancel", "--batch", "--signal=USR1", first], env=slurm, check=True)  # what --signal=B:USR1@300 sends
    assert await_end(slurm, first, one) == "COMPLETED", (one / "out").read_text()
    assert status_of(one)["class"] == "done"
    assert (one / "last_step").read_text() == "100"
    assert [line.split(" step ")[0] for line in starts(one)] == ["ranks 2", "ranks 2"]
    assert int(starts(one)[1].split()[3]) > 1, "the second start resumed"
    assert "requeued" in (one / "out").read_text()

    assert await_end(slurm, second, two) == "COMPLETED", (two / "out").read_text()
    assert starts(two) == ["ranks 2 step 1 nodes [0, 1]"]
    assert status_of(two)["class"] == "done"


@pytest.mark.long
def test_slurm_bad_input_and_cancelled_jobs_are_not_requeued(slurm: dict[str, str], tmp_path: Path) -> None:
    cancelled, refused = tmp_path / "cancelled", tmp_path / "refused"
    job = submit(slurm, "slurm_one_node.sbatch", cancelled, 500, 1)
    refusing = submit(slurm, "slurm_one_node.sbatch", refused, -1, 1, PROGRAM="json.tool")
    await_file(cancelled / "last_step")
    subprocess.run(["scancel", job], env=slurm, check=True)
    assert await_end(slurm, job, cancelled) == "CANCELLED"
    assert await_end(slurm, refusing, refused) == "FAILED"
    time.sleep(1.0)
    assert job_state(slurm, job) == "CANCELLED"
    assert status_of(cancelled)["class"] == "preempted"
