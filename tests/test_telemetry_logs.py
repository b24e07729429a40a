"""The files that a run writes line by line, its directory, its exit status, the progress bar."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from rlhf_spmd.telemetry.jsonl import JsonlLog, read_jsonl
from rlhf_spmd.telemetry.logger import LoggerConfig, MetricLogger
from rlhf_spmd.telemetry.progress import ProgressBar, format_seconds
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


def logger_at(run_dir: Path, resume_step: int | None = None) -> MetricLogger:
    return MetricLogger(run_dir, LoggerConfig(), "run", {}, resume_step)


def test_metrics_are_strict_json_one_object_per_step(tmp_path: Path) -> None:
    logger = logger_at(tmp_path)
    logger.log(1, {"a": 1.5, "b": float("nan"), "c": float("inf"), "d": np.float32(0.25), "e": 7, "f": np.array([1, 2])})
    logger.log(2, {"a": 2.5})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # before close: each step is flushed
    logger.close()

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    first, second = (json.loads(line, parse_constant=refuse) for line in lines)
    assert first == {"step": 1, "a": 1.5, "b": None, "c": None, "d": 0.25, "e": 7, "f": [1, 2]}
    assert second == {"step": 2, "a": 2.5}


def test_a_step_is_logged_once(tmp_path: Path) -> None:
    logger = logger_at(tmp_path)
    logger.log(3, {})
    with pytest.raises(AssertionError, match="step 3 after step 3"):
        logger.log(3, {})
    logger.close()


@pytest.mark.parametrize("torn", [b"", b'{"step": 5, "rew'])
def test_resume_drops_later_and_torn_lines_and_keeps_the_others_byte_for_byte(tmp_path: Path, torn: bytes) -> None:
    logger = logger_at(tmp_path)
    for step in (1, 2, 3, 4):
        logger.log(step, {"reward/mean": step / 3})
    logger.close()
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + torn)
    resumed = logger_at(tmp_path, resume_step=2)
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:2])
    for step in (3, 4):
        resumed.log(step, {"reward/mean": step / 3})
    resumed.close()
    assert path.read_bytes() == before


def test_a_new_run_puts_old_metrics_aside(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        logger = logger_at(tmp_path)
        logger.log(1, {"a": value})
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
    assert list(EXIT_CODES.values()) == [0, 1, 2, 3, 4, 5, 6, 7, 75]


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


def test_progress_bar_is_one_line_on_a_terminal_and_nothing_elsewhere() -> None:
    metrics = {"reward/mean": 0.5, "actor/kl": 0.0123, "perf/tokens_per_s": 12345.6}
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        bar = ProgressBar(4, stream)
        bar.update(1, metrics)
        bar.update(2, {"reward/mean": float("nan")})
        bar.close()
        bar.close()
    assert pipe.getvalue() == ""
    ProgressBar(4, pipe).note("resumed")
    assert pipe.getvalue() == "resumed\n"
    first, second = terminal.getvalue().rstrip("\n").split("\r")[1:]
    assert all(part in first for part in ("step 1/4", "reward 0.500", "KL 0.0123", "tokens/s 12,346"))
    assert "step 2/4" in second and "reward nan" in second
    assert terminal.getvalue().count("\n") == 1


def test_time_left_follows_the_recent_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("rlhf_spmd.telemetry.progress.time.monotonic", lambda: now[0])
    bar = ProgressBar(10, Terminal(), start_step=4)  # resumed at step 4
    now[0] += 6.0
    bar.update(6, {})
    assert bar.seconds_left(6) == pytest.approx(12.0)
    assert [format_seconds(seconds) for seconds in (9.4, 754, 7384)] == ["0:09", "12:34", "2:03:04"]
