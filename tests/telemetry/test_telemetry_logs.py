"""The files that a run writes line by line, its directory and who owns it, its exit status, its progress."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.jsonl import JsonlLog, read_jsonl
from rlhf_spmd.telemetry.progress import Progress
from rlhf_spmd.telemetry.run_dir import (
    EXIT_CODES,
    ExitStatus,
    atomic_write_json,
    atomic_write_text,
    create_run_dir,
    list_checkpoints,
    read_exit_status,
    write_exit_status,
)


def test_metrics_are_strict_json_one_object_per_step(tmp_path: Path) -> None:
    logger, odd = JsonlLog(tmp_path / "metrics.jsonl", None), {"b": float("nan"), "c": float("inf"), "d": np.float32(0.25)}
    logger.append([{"step": 1, "a": 1.5, **odd, "e": 7, "f": np.array([1, 2])}])
    logger.append([{"step": 2, "a": 2.5}])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close: each step is flushed
    logger.close()

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert first == {"step": 1, "a": 1.5, "b": None, "c": None, "d": 0.25, "e": 7, "f": [1, 2]}
    assert second == {"step": 2, "a": 2.5}


@pytest.mark.parametrize("torn", [b"", b'{"step": 5, "rew'])
def test_resume_drops_later_and_torn_lines_and_keeps_the_others_byte_for_byte(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLog(path, None)
    logger.append({"step": step, "reward/mean": step / 3} for step in (1, 2, 3, 4))
    logger.close()
    before = path.read_bytes()
    path.write_bytes(before + torn)
    resumed = JsonlLog(path, resume_step=2)
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:2])
    resumed.append({"step": step, "reward/mean": step / 3} for step in (3, 4))
    resumed.close()
    assert path.read_bytes() == before


def test_a_new_run_puts_old_metrics_aside(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        logger = JsonlLog(tmp_path / "metrics.jsonl", None)
        logger.append([{"step": 1, "a": value}])
        logger.close()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 2.0}]
    assert read_jsonl(tmp_path / "metrics.jsonl.before") == [{"step": 1, "a": 1.0}]


def test_samples_of_any_text_are_kept_and_cut_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    log = JsonlLog(path, None)
    for step in (1, 2):
        log.append({"step": step, "row_id": row, "response": "\ud800 héé\n", "score": float("nan")} for row in range(2))
    log.close()
    rows = read_jsonl(path)
    assert [(row["step"], row["row_id"]) for row in rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert rows[0]["score"] is None
    JsonlLog(path, resume_step=1).close()
    assert [row["step"] for row in read_jsonl(path)] == [1, 1]


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
    write_exit_status(
        tmp_path / "run", ExitStatus("hang", "no answer", rank=3, call="critic.update", step=7, last_checkpoint="c")
    )
    written = json.loads((tmp_path / "run" / "exit_status.json").read_text())
    assert written == {
        "class": "hang",
        "code": 5,
        "rank": 3,
        "call": "critic.update",
        "step": 7,
        "last_checkpoint": "c",
        "message": "no answer",
    }
    assert read_exit_status(tmp_path / "run") == ExitStatus("hang", "no answer", 3, "critic.update", 7, "c")
    assert list(EXIT_CODES.values()) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 75]


def test_run_dir_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    assert create_run_dir(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"run\.dir=.*file.*; give a directory"):
        create_run_dir(tmp_path / "file")


def test_checkpoints_come_by_number(tmp_path: Path) -> None:
    for name in ("step_10", "step_9", "step_x", "latest"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_9", "step_10"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


STEP = {"reward/mean": 0.5, "actor/kl": 0.0123, "perf/tokens_per_s": 12345.6, "timing_s/step": 2.0}


def test_a_log_has_one_line_per_step_and_per_validation() -> None:
    log = io.StringIO()
    progress = Progress(4, log)
    progress.update(0, {"val/reward_mean": 0.25})
    progress.update(1, STEP)
    progress.update(2, {"actor/loss": float("nan"), "val/loss": 1.5, "val/reward_mean": 0.75})
    progress.close()
    progress.close()
    first, *steps = log.getvalue().splitlines()
    assert first == "validation after step 0: val/reward_mean 0.2500"
    assert steps[0] == "step 1/4  reward 0.500  KL 0.0123  12,346 tokens/s  2.00 s/step  00:00 elapsed  00:00 left"
    assert steps[1:] == [
        "validation after step 2: val/loss 1.5000, val/reward_mean 0.7500",
        "step 2/4  loss nan  00:00 elapsed  00:00 left",
    ]


def test_a_terminal_has_a_bar_and_a_line_per_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    progress = Progress(4, terminal)
    monkeypatch.setattr(progress._bar, "mininterval", 0.0)
    progress.phase("actor.generate_sequences")
    progress.update(1, STEP)
    progress.phase("save_checkpoint")
    progress.update(2, {"actor/loss": 1.25, "val/loss": 1.5})
    progress.close()
    shown = terminal.getvalue().split("\r")
    assert any("1/4" in part and "reward 0.500, KL 0.0123, 12,346 tokens/s" in part for part in shown)
    assert any("actor.generate_sequences: " in part and "0/4 [00:00<?" in part for part in shown)
    assert any(part.startswith("save_checkpoint: ") and "1/4" in part for part in shown)
    assert any("2/4" in part and "loss 1.2500" in part for part in shown)
    assert "validation after step 2: val/loss 1.5000\n" in terminal.getvalue()
    assert terminal.getvalue().count("\n") == 2


def test_time_left_follows_the_pace_since_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = [100.0], io.StringIO()
    monkeypatch.setattr("rlhf_spmd.telemetry.progress.time.monotonic", lambda: now[0])
    progress = Progress(1000, log, start_step=4)  # resumed at step 4
    now[0] += 6.0
    progress.update(6, {})
    assert log.getvalue() == "step 6/1000  00:06 elapsed  49:42 left\n"


# -- who owns a run directory


HERE = run_lock.this_process()


def owned(run_dir: Path, **changes: Any) -> None:
    (run_dir / run_lock.LOCK_FILE).write_text(json.dumps({**asdict(HERE), **changes}))


@pytest.fixture
def ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_run_directory_has_one_owner_until_it_is_released(tmp_path: Path) -> None:
    script = f"from rlhf_spmd.telemetry import run_lock; run_lock.take({str(tmp_path)!r})"
    run_lock.take(tmp_path)
    assert run_lock.other_owner(tmp_path) is None
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    line = f"run.dir={tmp_path} is in use by process {HERE.pid} on {HERE.host}; wait for its end, or give another run.dir"
    assert other.stderr.splitlines()[-1] == f"ValueError: {line}"
    run_lock.release()
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    assert not (tmp_path / run_lock.LOCK_FILE).exists()


def test_of_jobs_that_start_at_once_one_is_the_owner(tmp_path: Path) -> None:
    owned(tmp_path, started="another process has its number")
    script = f"""
import sys
from rlhf_spmd.telemetry import run_lock
print("ready", flush=True), sys.stdin.readline()
try:
    run_lock.take({str(tmp_path)!r}), print("owner", flush=True), sys.stdin.readline()
except ValueError:
    print("refused", flush=True)
"""
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    jobs = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) for _ in range(4)]
    ready = [job.stdout.readline() for job in jobs if job.stdout]
    for job in jobs:
        assert job.stdin is not None
        job.stdin.write("\n")
    said = [job.stdout.readline() for job in jobs if job.stdout]
    for job in jobs:
        job.communicate()
    assert ready == 4 * ["ready\n"]
    assert sorted(said) == ["owner\n", "refused\n", "refused\n", "refused\n"]


@pytest.mark.parametrize(
    ("changes", "age_s", "held"),
    [
        ({"pid": 1, "started": run_lock._started(1), "job": "SLURM job 17"}, 0, "SLURM job 17, process 1 on"),
        ({"pid": 1, "started": run_lock._started(1), "job": "SLURM job 17"}, 9999, "SLURM job 17"),  # suspended, but there
        ({"pid": 1, "started": "a thousand years ago"}, 0, None),  # another process has its number
        ({"host": "far", "machine": "other"}, 200, r"process \d+ on far"),
        ({"host": "far", "machine": "other"}, 400, None),
    ],
)
def test_an_owner_that_is_gone_is_followed(tmp_path: Path, changes: dict[str, Any], age_s: float, held: str | None) -> None:
    owned(tmp_path, **changes)
    touched = (tmp_path / run_lock.LOCK_FILE).stat().st_mtime - age_s
    os.utime(tmp_path / run_lock.LOCK_FILE, (touched, touched))
    assert held is None or re.search(held, str(run_lock.other_owner(tmp_path)))
    if held is None:
        run_lock.take(tmp_path)
        run_lock.release()
        assert not (tmp_path / run_lock.LOCK_FILE).exists()
    else:
        with pytest.raises(ValueError, match=held):
            run_lock.take(tmp_path)
        assert json.loads((tmp_path / run_lock.LOCK_FILE).read_text())["pid"] == changes.get("pid", HERE.pid)


def test_a_dead_owner_and_an_earlier_start_of_the_same_slurm_job_are_followed(
    tmp_path: Path, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned(tmp_path, pid=ended, started="12345")
    run_lock.take(tmp_path)
    run_lock.release()
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    for restarts, held in (("0", True), ("1", False)):
        monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        owned(tmp_path, host="far", machine="other", job="SLURM job 17", requeues=0)
        assert (run_lock.other_owner(tmp_path) is not None) is held


def test_an_owner_touches_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "TOUCH_S", 0.01)
    run_lock.take(tmp_path)
    os.utime(tmp_path / run_lock.LOCK_FILE, (0, 0))
    deadline = time.monotonic() + 60
    while (tmp_path / run_lock.LOCK_FILE).stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run_lock.release()
