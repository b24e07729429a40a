"""The run directory: names of its files, atomic writes, and ``exit_status.json``, which says how a run ended."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from uuid import uuid4

from rlhf_spmd.config.json_input import parse_json
from rlhf_spmd.config.load import flatten_yaml

METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
VALIDATION_FILE = "validation.jsonl"
CONFIG_FILE = "config.yaml"
STARTS_FILE = "starts.jsonl"
TRACE_FILE = "trace.json"
REPORT_FILE = "report.html"
EXIT_STATUS_FILE = "exit_status.json"
CHECKPOINTS_DIR = "checkpoints"
LATEST = "latest"  # in it, the name of the one that was saved last
EXPORT_DIR = "export"
EXPORTS_DIR = "exports"  # step_N of every ``run.export_freq`` steps, and ``best``
EXPORTED_FILE = "checkpoint.txt"  # in the export: the name of the checkpoint that it was made of

# class of an ending -> exit code of every rank's process (torchrun itself reports 1 whatever its workers return)
EXIT_CODES = {
    "done": 0,
    "error": 1,
    "config": 2,
    "data": 3,
    "checkpoint": 4,
    "hang": 5,
    "numerics": 6,
    "reward": 7,
    "memory": 8,
    "lost": 9,
    "signal": 10,
    "preempted": 75,
}


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class WriteError(OSError):
    """A file cannot be written; the message names it."""

    exit_class = "checkpoint"  # how the run ends: process/program.py

    def __str__(self) -> str:
        return f"cannot write {self.filename}: {self.strerror}; what was saved before is intact"


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises WriteError, which names ``path``, for any other OSError: that of a full disk names no file."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error


def create_run_dir(path: str | os.PathLike[str]) -> Path:
    """Make the directory, parents too, if it is not there.

    Raises ValueError where the path is not a directory that can be written to, WriteError where its disk is full or broken.
    """
    run_dir = Path(path)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        if error.errno in DISK_ERRORS:
            raise WriteError(error.errno, error.strerror, str(run_dir)) from error
        reason = f"run.dir={run_dir}: cannot write there ({error.strerror or error})"
        raise ValueError(f"{reason}; give a directory that this user can write to") from error
    return run_dir


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Readers see the old file or the whole new one, also after a crash or on a full disk (write, fsync, rename). Raises WriteError."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
    with writing(target):
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        fsync_directory(target.parent)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """As :func:`atomic_write_bytes`, UTF-8."""
    atomic_write_bytes(path, text.encode("utf-8", errors="replace"))


def atomic_write_json(path: str | os.PathLike[str], value: Any) -> None:
    """As :func:`atomic_write_bytes`, indented JSON with a final newline. NaN and infinities are refused (ValueError)."""
    atomic_write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Makes renames and new names in the directory durable; file systems without it (some network ones) are left alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # EINVAL on file systems that do not sync directories: the rename is still atomic
        pass
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class ExitStatus:
    """How a run ended. ``class_`` is a key of :data:`EXIT_CODES`, ``code`` its value.

    ``rank`` and ``call`` name the culprit (None where the whole run ended), ``step`` is the last finished step,
    ``last_checkpoint`` a directory or None.
    """

    class_: str
    message: str = ""
    rank: int | None = None
    call: str | None = None
    step: int | None = None
    last_checkpoint: str | None = None

    @property
    def code(self) -> int:
        return EXIT_CODES[self.class_]


def write_exit_status(run_dir: str | os.PathLike[str], status: ExitStatus) -> None:
    """Write ``exit_status.json`` atomically; the directory is made if it is missing."""
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    told = {field.name: getattr(status, field.name) for field in fields(ExitStatus)}  # and not those of a subclass
    atomic_write_json(Path(run_dir) / EXIT_STATUS_FILE, {"class": told.pop("class_"), "code": status.code, **told})


def read_exit_status(run_dir: str | os.PathLike[str]) -> ExitStatus | None:
    """The status that was written, or None (still running, or killed before it could write)."""
    value = read_json(Path(run_dir) / EXIT_STATUS_FILE)
    if not isinstance(value, dict) or value.get("class") not in EXIT_CODES:
        return None
    keys = ("rank", "call", "step", "last_checkpoint")
    return ExitStatus(value["class"], str(value.get("message") or ""), **{key: value.get(key) for key in keys})


def read_json(path: str | os.PathLike[str]) -> Any:
    """The parsed file, or None where it is missing or not JSON."""
    try:
        return parse_json(Path(path).read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return None


def read_config(run_dir: str | os.PathLike[str]) -> dict[str, str]:
    """``config.yaml`` by dotted key; empty where there is none."""
    path = Path(run_dir) / CONFIG_FILE
    return flatten_yaml(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}


def exported_checkpoint(run_dir: str | os.PathLike[str], export: str = EXPORT_DIR) -> str | None:
    """The name of the checkpoint that the run's export was made of; None where there is no export or it does not say."""
    mark = Path(run_dir) / export / EXPORTED_FILE
    return mark.read_text(encoding="utf-8", errors="replace").strip() if mark.is_file() else None


def forget_exports(run_dir: str | os.PathLike[str], checkpoint: str) -> None:
    """Take the mark off exports of a checkpoint that another one of the same name is about to replace."""
    for mark in Path(run_dir).glob(f"{EXPORT_DIR}*/**/{EXPORTED_FILE}"):
        if mark.read_text(encoding="utf-8", errors="replace").strip() == checkpoint:
            mark.unlink()


def newest_checkpoint(run_dir: str | os.PathLike[str]) -> Path | None:
    """The one that was saved last, whatever its step: a run may have gone on from an older one."""
    root = Path(run_dir) / CHECKPOINTS_DIR
    named = root / (root / LATEST).read_text(encoding="utf-8", errors="replace").strip() if (root / LATEST).is_file() else root
    return named if named.parent == root and named.is_dir() else next(iter(list_checkpoints(run_dir)[::-1]), None)


def list_checkpoints(run_dir: str | os.PathLike[str]) -> list[Path]:
    """``checkpoints/step_N`` directories by rising step."""
    named = {
        path.name.removeprefix("step_"): path for path in (Path(run_dir) / CHECKPOINTS_DIR).glob("step_*") if path.is_dir()
    }
    return [named[number] for number in sorted(filter(str.isdigit, named), key=int)]
