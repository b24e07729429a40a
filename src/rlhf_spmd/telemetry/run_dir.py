"""The run directory: names of its files, atomic writes, append-only JSON lines, ``exit_status.json``, and which samples it has."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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
LATEST_FILE = "latest"  # file in checkpoints/ with the name of the newest
EXPORT_DIR = "export"
EXPORTS_DIR = "exports"  # step_N every ``run.export_freq`` steps, and ``best``
EXPORTED_FILE = "checkpoint.txt"  # file in an export with the name of its checkpoint

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


UNWRITTEN: Counter[str] = Counter()  # lines of logs that could not be written, by file or stream; they end no run


def unwritten_text() -> str:
    """Return ``lines not written: 3 of rollouts.jsonl``, or ""."""
    parts = [f"{number} of {name}" for name, number in UNWRITTEN.items()]
    return f"lines not written: {', '.join(parts)}" if parts else ""


DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


class WriteError(OSError):
    """A file cannot be written; the message names it."""

    exit_class = "checkpoint"  # how the run ends: process/program.py

    def __str__(self) -> str:
        return f"cannot write {self.filename}: {self.strerror}; what was saved before is intact"


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise WriteError, which names ``path``, in place of any OSError: that of a full disk names no file."""
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        raise WriteError(error.errno, error.strerror or str(error), str(path)) from error


def create_run_dir(path: str | os.PathLike[str]) -> Path:
    """Make the directory and its parents if missing.

    Raises ValueError if the path is no writable directory, WriteError if its disk is full or broken.
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


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes, mode: int = 0o666) -> None:
    """Write a file so that readers see the old or the complete new one, even after a crash or on a full disk.

    It is written aside, synced and renamed. ``mode``: who may read and write it, within the umask. Raises WriteError.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid4().hex}.tmp")
    with writing(target):
        try:
            with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
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
    """Like :func:`atomic_write_bytes`, for UTF-8 text."""
    atomic_write_bytes(path, text.encode("utf-8", errors="replace"))


def atomic_write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Like :func:`atomic_write_bytes`, for indented JSON with a final newline. Raises ValueError for NaN and infinities."""
    atomic_write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make renames and new names in the directory durable, if its file system can; some network ones cannot."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # EINVAL on file systems that do not sync directories: the rename is still atomic
        pass
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class ExitStatus:
    """How a run ended.

    - class_: a key of :data:`EXIT_CODES`, whose value is ``code``
    - rank, call: what failed; None if the run ended as a whole
    - step: the last finished step
    - last_checkpoint: its directory
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
    """Write ``exit_status.json`` atomically; make the directory if missing. The message says what could not be written."""
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    values = {field.name: getattr(status, field.name) for field in fields(ExitStatus)}  # without those of a subclass
    values["message"] = "; ".join(filter(None, (status.message, unwritten_text())))
    atomic_write_json(Path(run_dir) / EXIT_STATUS_FILE, {"class": values.pop("class_"), "code": status.code, **values})


def read_exit_status(run_dir: str | os.PathLike[str]) -> ExitStatus | None:
    """Return the status, or None (still running, or killed before it could write)."""
    value = read_json(Path(run_dir) / EXIT_STATUS_FILE)
    if not isinstance(value, dict) or value.get("class") not in EXIT_CODES:
        return None
    keys = ("rank", "call", "step", "last_checkpoint")
    return ExitStatus(value["class"], str(value.get("message") or ""), **{key: value.get(key) for key in keys})


def read_json(path: str | os.PathLike[str]) -> Any:
    """Return the parsed file, or None if it is missing or no JSON."""
    try:
        return parse_json(Path(path).read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return None


def read_config(run_dir: str | os.PathLike[str]) -> dict[str, str]:
    """Return ``config.yaml`` by dotted key; empty if missing."""
    path = Path(run_dir) / CONFIG_FILE
    return flatten_yaml(path.read_text(encoding="utf-8", errors="replace")) if path.is_file() else {}


def exported_checkpoint(run_dir: str | os.PathLike[str], export: str = EXPORT_DIR) -> str | None:
    """Return the name of the checkpoint of the run's export, or None if there is no export or it does not say."""
    mark = Path(run_dir) / export / EXPORTED_FILE
    return mark.read_text(encoding="utf-8", errors="replace").strip() if mark.is_file() else None


def forget_exports(run_dir: str | os.PathLike[str], checkpoint: str) -> None:
    """Remove the mark from exports of ``checkpoint``, which a new one of the same name is about to replace."""
    for mark in Path(run_dir).glob(f"{EXPORT_DIR}*/**/{EXPORTED_FILE}"):
        if mark.read_text(encoding="utf-8", errors="replace").strip() == checkpoint:
            mark.unlink()


def newest_checkpoint(run_dir: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint that was saved last, whatever its step: a run may have gone on from an older one."""
    root = Path(run_dir) / CHECKPOINTS_DIR
    latest = root / LATEST_FILE
    path = root / latest.read_text(encoding="utf-8", errors="replace").strip() if latest.is_file() else root
    return path if path.parent == root and path.is_dir() else next(iter(list_checkpoints(run_dir)[::-1]), None)


def list_checkpoints(run_dir: str | os.PathLike[str]) -> list[Path]:
    """Return ``checkpoints/step_N`` directories by rising step."""
    paths = (Path(run_dir) / CHECKPOINTS_DIR).glob("step_*")
    by_number = {path.name.removeprefix("step_"): path for path in paths if path.is_dir()}
    return [by_number[number] for number in sorted(filter(str.isdigit, by_number), key=int)]


class JsonlLog:
    """An append-only file of one JSON object per line, with one writer. Every object has an integer ``step``.

    Readers ignore a line torn by a kill. ``resume_step``: lines of later steps are removed first, so a resumed run has
    each step once. Without it the run is new, and an existing file is moved to ``<name>.before``. Only the start raises
    WriteError: later, lines that cannot be written are counted in ``UNWRITTEN`` and dropped.
    """

    def __init__(self, path: str | os.PathLike[str], resume_step: int | None) -> None:
        self.path = Path(path)
        with writing(self.path):
            if self.path.exists():
                if resume_step is None:
                    os.replace(self.path, self.path.with_name(self.path.name + ".before"))
                else:
                    self._truncate_after(resume_step)
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by close)

    def append(self, objects: Iterable[Mapping[str, Any]]) -> None:
        """Write all lines, which then survive a kill of this process, or none."""
        lines = [json.dumps(json_value(value), allow_nan=False, ensure_ascii=False) + "\n" for value in objects]
        data = memoryview("".join(lines).encode(errors="replace"))
        end = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            UNWRITTEN[self.path.name] += len(lines)
            with suppress(OSError):
                self._file.truncate(end)

    def sync(self) -> None:
        """Make the lines survive a crash of this machine too, if its disk can."""
        with suppress(OSError):
            os.fsync(self._file.fileno())
            fsync_directory(self.path.parent)

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()

    def _truncate_after(self, step: int) -> None:
        """Keep the lines up to ``step``, byte for byte, and end the last one. The file is replaced atomically."""
        data = self.path.read_bytes()
        lines = b"".join(line for line in data.splitlines(keepends=True) if _step_of(line) <= step)
        lines += b"\n" * bool(lines and not lines.endswith(b"\n"))
        if lines != data:
            atomic_write_bytes(self.path, lines)


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the objects of the file in order; none if it is missing. Lines torn by a kill are left out."""
    try:
        data = Path(path).read_bytes()
    except OSError:
        return []
    return [value for line in data.splitlines() if (value := _parse(line)) is not None]


def json_value(value: Any) -> Any:
    """Return the value as strict JSON can hold it: dicts, lists, text, booleans, null, finite numbers.

    Other numbers become null, arrays and tensors lists and numbers, anything else its text.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars and arrays
        return json_value(value.tolist())
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def finite_number(value: Any) -> float | None:
    """Return a finite number, or None for null, text and NaN."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def pick_samples(groups: Iterable[Hashable], limit: int) -> list[int]:
    """Return at most ``limit`` row positions, ascending: every group's first row precedes any group's second.

    ``groups``: the prompt or group of each row.
    """
    counts: Counter[Hashable] = Counter()
    order = []
    for position, group in enumerate(groups):
        order.append((counts[group], position))
        counts[group] += 1
    return sorted(position for _, position in sorted(order)[:limit])


def equal_runs(mask: Sequence[bool]) -> list[tuple[bool, int, int]]:
    """Return value, begin and end of each maximal run of equal values."""
    ends = [index for index in range(1, len(mask)) if mask[index] != mask[index - 1]]
    return [(mask[begin], begin, end) for begin, end in zip([0, *ends], [*ends, len(mask)], strict=True) if end > begin]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _step_of(line: bytes) -> float:
    step = (_parse(line) or {}).get("step")
    return step if isinstance(step, (int, float)) else math.inf
