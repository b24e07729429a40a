"""The files that a run writes line by line, its directory and who owns it, its exit status, its progress."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import resource
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore

from checkpoints import save_checkpoint
from rlhf_spmd.checkpoint.files import write_safetensors
from rlhf_spmd.checkpoint.manifest import CheckpointError
from rlhf_spmd.parallel.collectives import solo
from rlhf_spmd.parallel.launch import Launch
from rlhf_spmd.process.arguments import ignore_closed_pipes
from rlhf_spmd.process.board import Board, announce
from rlhf_spmd.process.program import _fail, classify
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.progress import Progress, say
from rlhf_spmd.telemetry.run_dir import (
    EXIT_CODES,
    UNWRITTEN,
    ExitStatus,
    JsonlLog,
    WriteError,
    atomic_write_json,
    atomic_write_text,
    create_run_dir,
    list_checkpoints,
    read_exit_status,
    read_jsonl,
    write_exit_status,
)
from rlhf_spmd.telemetry.summary import summarize
from rlhf_spmd.telemetry.trace import write_trace
from rlhf_spmd.telemetry.trackers import LoggerConfig
from rlhf_spmd.training.recorder import Recorder


def log_of(path: Path, *rows: dict[str, Any], resume_step: int | None = None) -> list[dict[str, Any]]:
    log = JsonlLog(path, resume_step)
    log.append(rows)
    lines = read_jsonl(path)  # before close: each step is flushed
    log.close()
    return lines


def test_metrics_are_strict_json_one_object_per_step(tmp_path: Path) -> None:
    odd = {"b": float("nan"), "c": float("inf"), "d": np.float32(0.25), "f": np.array([1, 2])}
    for value in ("\ud800 héé\n", 2.5):
        log_of(tmp_path / "metrics.jsonl", {"step": 1, "a": value, **odd}, {"step": 2, "a": 2.5})

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    lines = [line for name in ("metrics.jsonl.before", "metrics.jsonl") for line in (tmp_path / name).read_text().splitlines()]
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert rows[0].keys() == {"step", "a", *odd} and rows[0] | {"a": 2.5} == rows[2]
    assert rows[2] == {"step": 1, "a": 2.5, "b": None, "c": None, "d": 0.25, "f": [1, 2]} and rows[3] == {"step": 2, "a": 2.5}


@pytest.mark.parametrize("torn", [b"", b'{"step": 5, "rew'])
def test_resume_drops_later_and_torn_lines_and_keeps_the_others_byte_for_byte(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": step, "reward/mean": step / 3} for step in (1, 1, 2, 3, 4)]
    log_of(path, *rows)
    before = path.read_bytes()
    path.write_bytes(before + torn)
    JsonlLog(path, resume_step=2).close()
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:3])
    log_of(path, *rows[3:], resume_step=2)
    assert path.read_bytes() == before
    path.write_bytes(before[:-1])  # a last line that lacks only its end is kept
    assert log_of(path, {"step": 5}, resume_step=4)[-2:] == [rows[-1], {"step": 5}]


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    target = tmp_path / "value.json"
    atomic_write_json(target, {"a": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        atomic_write_json(target, {"a": float("nan")})
    atomic_write_text(tmp_path / "other", "x")
    assert json.loads(target.read_text()) == {"a": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "value.json"]
    assert target.stat().st_mode & 0o044, "readable like any file of the user"


def test_exit_status_has_the_agreed_keys(tmp_path: Path) -> None:
    assert read_exit_status(tmp_path) is None
    status = ExitStatus("hang", "no answer", rank=3, call="critic.update", step=7, last_checkpoint="c")
    write_exit_status(tmp_path / "run", status)
    keys = {"rank": 3, "call": "critic.update", "step": 7, "last_checkpoint": "c", "message": "no answer"}
    assert json.loads((tmp_path / "run" / "exit_status.json").read_text()) == {"class": "hang", "code": 5, **keys}
    assert read_exit_status(tmp_path / "run") == status
    assert list(EXIT_CODES.values()) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 75]


def test_run_directories(tmp_path: Path) -> None:
    """One that cannot be written is named, and checkpoints come by number."""
    assert create_run_dir(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run\.dir=.*file.*; give a directory"):
        create_run_dir(tmp_path / "file")
    for name in ("step_10", "step_9", "step_x", "latest"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_9", "step_10"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


STEP = {"reward/mean": 0.5, "actor/kl": 0.0123, "perf/tokens_per_s": 12345.6, "timing_s/step": 2.0}


def test_a_log_has_one_line_per_step_and_per_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time left follows the pace since the start, or since a resume."""
    now, log = [100.0], io.StringIO()
    monkeypatch.setattr("rlhf_spmd.telemetry.progress.time.monotonic", lambda: now[0])
    progress = Progress(1000, log, start_step=4)
    progress.update(4, {"val/reward_mean": 0.25})
    now[0] += 6.0
    progress.update(5, STEP)
    progress.update(6, {"actor/loss": float("nan"), "val/loss": 1.5, "val/reward_mean": 0.75})
    progress.close()
    progress.close()
    lines = log.getvalue().splitlines()
    assert lines[0].startswith("validation after step 4: val/reward_mean 0.2500")
    assert "step 5/1000  reward 0.500  KL 0.0123  12,346 tokens/s  2.00 s/step  00:06 elapsed  1:39:30 left" in lines[-3:]
    assert lines[-2:] == [
        "validation after step 6: val/loss 1.5000, val/reward_mean 0.7500",
        "step 6/1000  loss nan  00:06 elapsed  49:42 left",
    ]


def test_a_terminal_has_a_bar_and_a_line_per_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    progress = Progress(4, terminal)
    monkeypatch.setattr(progress._bar, "mininterval", 0.0)
    for call in ("actor.generate_sequences", "compute.apply", "reward.compute_reward", "actor.update_actor"):
        progress.phase(call)
    progress.update(1, STEP)
    progress.phase("save_checkpoint")
    progress.update(2, {"actor/loss": 1.25, "val/loss": 1.5})
    progress.close()
    parts = terminal.getvalue().split("\r")
    activities = [part.partition(":")[0] for part in parts if re.match("[a-z]+: ", part)]
    assert list(dict.fromkeys(activities)) == ["generating", "scoring", "updating", "saving"]
    bars = "generating: .*0/4 ", "1/4.*reward 0.500, KL 0.0123, 12,346 tokens/s", "saving: .*1/4", "2/4.*loss 1.2500"
    assert [bar for bar in bars if not any(re.search(bar, part) for part in parts)] == []
    assert "validation after step 2: val/loss 1.5000\n" in terminal.getvalue() and terminal.getvalue().count("\n") == 2


@pytest.mark.parametrize(("stream", "written"), [(io.StringIO, "one\ntwo\n"), (Terminal, "\r\x1b[Kone\n\r\x1b[Ktwo\n")])
def test_a_message_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO], written: str) -> None:
    """Also one of another process than that which draws the bar, and the last one of a run that fails."""
    monkeypatch.setattr(sys, "stderr", stream())
    say("one")
    announce("two")
    assert sys.stderr.getvalue() == written  # type: ignore[attr-defined]


# -- who owns a run directory


HERE = run_lock.this_process()


def owned(run_dir: Path, **changes: Any) -> None:
    (run_dir / run_lock.LOCK_FILE).write_text(json.dumps({**asdict(HERE), **changes}))


def test_of_jobs_that_start_at_once_one_is_the_owner(tmp_path: Path) -> None:
    """Until it has released the directory."""
    owned(tmp_path, started="another process has its number")
    script = f"""
import pathlib, sys
from rlhf_spmd.telemetry import run_lock
print("ready", flush=True), sys.stdin.readline()
try:
    run_lock.acquire(pathlib.Path({str(tmp_path)!r})), print("owner", flush=True), sys.stdin.readline()
except ValueError as refusal:
    print(refusal, flush=True)
"""
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    jobs = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) for _ in range(4)]
    assert [job.stdout.readline() for job in jobs if job.stdout] == 4 * ["ready\n"]
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("\n")
    answers = [job.stdout.readline() for job in jobs if job.stdout]
    owner = jobs[answers.index("owner\n")].pid
    with pytest.raises(ValueError, match=f"in use by process {owner}"):
        run_lock.acquire(tmp_path)
    for job in jobs:
        job.communicate()
    line = f"run.dir={tmp_path} is in use by process {owner} on {HERE.host}; wait for its end, or give another run.dir\n"
    assert sorted(answers) == ["owner\n", line, line, line]
    assert not (tmp_path / run_lock.LOCK_FILE).exists()
    run_lock.acquire(tmp_path)
    assert run_lock.other_owner(tmp_path) is None
    run_lock.release()


@pytest.mark.parametrize(
    ("changes", "age_s", "owner"),
    [
        ({"pid": 1, "started": run_lock._started(1), "job": "SLURM job 17"}, 0, "SLURM job 17, process 1 on"),
        ({"pid": 1, "started": run_lock._started(1), "job": "SLURM job 17"}, 9999, "SLURM job 17"),  # suspended, but there
        ({"pid": 1, "started": "a thousand years ago"}, 0, None),  # another process has its number
        ({"pid": 0x7FFFFFFF, "started": "12345"}, 0, None),  # it has ended
        ({"host": "far", "machine": "other"}, 200, r"process \d+ on far"),
        ({"host": "far", "machine": "other"}, 400, None),
    ],
)
def test_an_owner_that_is_gone_is_followed(tmp_path: Path, changes: dict[str, Any], age_s: float, owner: str | None) -> None:
    owned(tmp_path, **changes)
    touched = (tmp_path / run_lock.LOCK_FILE).stat().st_mtime - age_s
    os.utime(tmp_path / run_lock.LOCK_FILE, (touched, touched))
    if owner is None:
        run_lock.acquire(tmp_path)
        run_lock.release()
        assert not (tmp_path / run_lock.LOCK_FILE).exists()
    else:
        with pytest.raises(ValueError, match=owner):
            run_lock.acquire(tmp_path)
        assert json.loads((tmp_path / run_lock.LOCK_FILE).read_text())["pid"] == changes.get("pid", HERE.pid)


def test_an_earlier_start_of_the_same_slurm_job_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    for restarts, is_owned in (("0", True), ("1", False)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        owned(tmp_path, host="far", machine="other", job="SLURM job 17", requeues=0)
        assert (run_lock.other_owner(tmp_path) is not None) is is_owned


def lose(run_dir: Path, how: str) -> str:
    """The lock of this process, as it lies there after a suspension; returns what the error says of it."""
    lock = run_dir / run_lock.LOCK_FILE
    if how == "taken":
        owned(run_dir, host="far", machine="other", pid=4711, job="SLURM job 17")
        return "it is in use by SLURM job 17, process 4711 on far"
    lock.unlink() if how == "removed" else lock.write_text("garbage")
    return f"{lock} was removed or written over"


def contents(run_dir: Path) -> dict[Path, bytes]:
    """Of all files but logs/, to which any job may append."""
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.parent.name != "logs"}


@pytest.mark.parametrize("how", ["taken", "removed", "garbage"])
def test_a_job_that_lost_its_lock_writes_nothing_more(tmp_path: Path, how: str) -> None:
    run_lock.check_still_held(tmp_path)  # of a directory that was never taken
    run_lock.acquire(tmp_path)
    config = SimpleNamespace(run=SimpleNamespace(steps=3, name="x", log_samples=1), logger=LoggerConfig())
    recorder = Recorder(tmp_path, config, 0, {})
    recorder.log(1, {"a": 1.0}, [], [])
    save_checkpoint(tmp_path, 1, {}, {}, solo())
    loss = lose(tmp_path, how)
    (tmp_path / "checkpoints" / "step_2.tmp").mkdir()  # the other one is writing it
    (tmp_path / "exit_status.json").write_text("{}")  # and has ended, where the lock is gone
    before = contents(tmp_path)
    job = rf"this job \(process {HERE.pid} on {HERE.host}\)"
    line = f"^run.dir={tmp_path} was taken from {job}: {loss}; this job writes nothing"
    with pytest.raises(run_lock.LockLost, match=line):
        recorder.log(2, {"a": 2.0}, [], [])
    with pytest.raises(CheckpointError, match=line):
        save_checkpoint(tmp_path, 2, {}, {}, solo())
    board = Board(Launch(), HashStore())
    board.run_dir = tmp_path
    board.post_error("error", "that of the job that lost it")
    with pytest.raises(SystemExit) as ending:
        _fail(board, run_lock.LockLost("lost"), saves_on_signal=True)
    run_lock.release()
    assert ending.value.code == 1  # the job's first failure
    assert contents(tmp_path) == before
    assert (tmp_path / "checkpoints" / "step_2.tmp").is_dir(), "the draft of the other job was removed"
    assert classify(run_lock.LockLost()) == "checkpoint"


def test_an_owner_touches_its_lock_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that woke up would keep the lock of its dead successor alive."""
    monkeypatch.setattr(run_lock, "TOUCH_S", 0.01)
    lock = tmp_path / run_lock.LOCK_FILE
    run_lock.acquire(tmp_path)
    os.utime(lock, (0, 0))
    deadline = time.monotonic() + 60
    while lock.stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lose(tmp_path, "taken")
    os.utime(lock, (0, 0))
    time.sleep(0.2)
    assert lock.stat().st_mtime == 0
    run_lock.release()


def test_other_ranks_tell_an_ending_of_their_own_job_only(tmp_path: Path) -> None:
    owned(tmp_path, pid=1, started=run_lock._started(1))
    run_lock.note_owner(tmp_path)
    assert run_lock.may_write_status(tmp_path)
    (tmp_path / run_lock.LOCK_FILE).unlink()
    assert run_lock.may_write_status(tmp_path)  # rank 0 has left before
    lose(tmp_path, "taken")
    assert not run_lock.may_write_status(tmp_path)
    run_lock.release()


# -- files that cannot be written


def test_a_log_that_cannot_be_written_is_counted_and_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that the disk takes half of is not left there. What must last is still refused."""
    UNWRITTEN.clear()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True))  # type: ignore[arg-type]
    ignore_closed_pipes()
    print("step 1/3\nstep 2/3", file=sys.stderr, flush=True)
    log = JsonlLog(tmp_path / "metrics.jsonl", None)
    log.append([{"step": 1}])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
        log.append([{"step": 2}, {"step": 3}])
        with pytest.raises(WriteError, match=r"metrics\.jsonl: File too large; what was saved before is intact$"):
            atomic_write_json(log.path, ["x" * 20])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log.append([{"step": 4}])
    log.sync(), log.close()
    assert log.path.read_text() == '{"step": 1}\n{"step": 4}\n'
    write_exit_status(tmp_path, ExitStatus("done"))
    line = "lines not written: 2 of standard error, 2 of metrics.jsonl"
    assert json.loads((tmp_path / "exit_status.json").read_text())["message"] == line and line in summarize(tmp_path)
    UNWRITTEN.clear()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_file_that_cannot_be_written_is_named_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    writers = {
        "a.json": lambda path: atomic_write_json(path, {"a": 2}),
        "trace.json": lambda path: write_trace(path, []),
        "step_1.safetensors": lambda path: write_safetensors(path, [], lambda _: None),  # type: ignore[arg-type, return-value]
        "run.lock": lambda path: run_lock.acquire(path.parent),
    }
    atomic_write_json(tmp_path / "a.json", {"a": 1})

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        patch.setattr(run_lock, "_owner", refuse)
        for name, write in writers.items():
            with pytest.raises(WriteError, match=rf"^cannot write {tmp_path}/{name}: {os.strerror(code)}; ") as caught:
                write(tmp_path / name)
            assert classify(caught.value) == "checkpoint"
        patch.setattr("tempfile.TemporaryFile", refuse)
        with pytest.raises((WriteError, ValueError), match=re.escape(os.strerror(code))) as caught:
            create_run_dir(tmp_path)
        assert classify(caught.value) == ("config" if code == errno.EACCES else "checkpoint")
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": 1} and not list(tmp_path.glob(".*.tmp"))
