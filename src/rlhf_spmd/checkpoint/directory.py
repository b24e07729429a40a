"""Checkpoints on disk: their names, which are committed, and in which order they were made.

``checkpoints/step_N`` is complete exactly if it has a COMMIT file with the hash of its manifest. It is prepared as ``step_N.tmp`` and
renamed when it is complete. ``step_N.old`` is a complete predecessor of the same step, which the new one is about to replace. Before a
removal a directory gets a name that ends in ``.tmp``. So a ``step_N`` without a COMMIT file was damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

from rlhf_spmd.checkpoint.manifest import FORMAT_VERSION, CheckpointError, Manifest
from rlhf_spmd.config.json_input import parse_json
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.telemetry import run_lock
from rlhf_spmd.telemetry.run_dir import CHECKPOINTS_DIR, LATEST_FILE, atomic_write_bytes, atomic_write_text, fsync_directory

FORMAT_1_MANIFEST = "manifest.json"
MANIFEST, COMMIT = "manifest.jsonl", "COMMIT"
_NAME = re.compile(r"step_(\d+)(\.old)?")
# manifests that were read and are still in use
_MANIFESTS_IN_USE: WeakValueDictionary[tuple[Any, ...], Manifest] = WeakValueDictionary()


@dataclass(frozen=True)
class SavedStep:
    """A complete checkpoint of one step: a directory with a COMMIT file.

    ``serial`` counts the saves of a run directory. It gives their order in time, whatever their steps, and a step that is saved again
    gets another one.
    """

    path: Path
    step: int
    serial: int


def checkpoints_of(run_dir: Path) -> Path:
    return Path(run_dir) / CHECKPOINTS_DIR


def step_directory(run_dir: Path, step: int) -> Path:
    return checkpoints_of(run_dir) / f"step_{step}"


def named_checkpoint(path: Path) -> Path:
    """Return ``path``; or, for the file ``latest``, the checkpoint that it names."""
    path = path.expanduser()
    if path.name != LATEST_FILE or not path.is_file():
        return path
    name = path.read_text(encoding="utf-8", errors="replace").strip()
    return path.parent / name if _NAME.fullmatch(name) else path


def check_place(run_dir: Path) -> None:
    """Raise CheckpointError if checkpoints cannot be written here: a save would find out only at its end."""
    root = checkpoints_of(run_dir)
    if root.is_symlink() and not root.exists():
        raise CheckpointError(f"{root} is a link to {os.readlink(root)}, which does not exist; make that directory")
    if root.exists() and not (root.is_dir() and os.access(root, os.W_OK)):
        raise CheckpointError(f"{root} is not a directory that this user can write to; move it away")
    if (root / LATEST_FILE).is_dir() and not (root / LATEST_FILE).is_symlink():
        raise CheckpointError(f"{root / LATEST_FILE} is a directory, and the run writes a file of that name; move it away")


def draft_directory(run_dir: Path, step: int) -> Path:
    """Return the directory in which a step's checkpoint is prepared."""
    return checkpoints_of(run_dir) / f"step_{step}.tmp"


def committed(run_dir: Path) -> list[SavedStep]:
    """Return the checkpoints that may be complete, newest first. Reads only the COMMIT files."""
    checkpoints = []
    for path in _step_directories(run_dir):
        with suppress(CheckpointError):
            commit_record = _read_commit(path)
            checkpoints.append(SavedStep(path, commit_record["step"], commit_record["serial"]))
    return sorted(checkpoints, key=lambda c: (c.serial, c.step), reverse=True)


def uncommitted(run_dir: Path) -> dict[Path, str]:
    """Return path -> what is wrong, for checkpoints whose COMMIT file is missing or damaged.

    No save leaves such checkpoints; they were damaged later.
    """
    reasons = {}
    for path in sorted(_step_directories(run_dir)):
        try:
            _read_commit(path)
        except CheckpointError as error:
            reasons[path] = str(error)
    return reasons


def _step_directories(run_dir: Path) -> list[Path]:
    root = checkpoints_of(run_dir)
    return [path for path in (root.iterdir() if root.is_dir() else ()) if _NAME.fullmatch(path.name) and path.is_dir()]


def _read_commit(path: Path) -> dict[str, Any]:
    """Return the contents of a checkpoint's COMMIT file: step, serial and the manifest's sha256. Raises CheckpointError."""
    where = path / COMMIT
    if not where.exists():
        raise CheckpointError(f"{path}: not a complete checkpoint, {COMMIT} is missing")
    try:
        record = parse_json(where.read_text(encoding="utf-8"))
        return {"step": int(record["step"]), "serial": int(record["serial"]), "manifest_sha256": str(record["manifest_sha256"])}
    except OSError as error:
        raise CheckpointError(f"{where}: {error.strerror}") from error
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{where}: damaged, not what a save writes ({type(error).__name__}: {error})") from error


def is_of_format_1(directory: Path) -> bool:
    return (directory / FORMAT_1_MANIFEST).is_file() and not (directory / MANIFEST).is_file()


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a complete checkpoint whose files have their full size.

    Boxes are parsed when somebody asks for them, and verified when they are read. A manifest that is still in use is not read again:
    with a thousand ranks it has hundreds of megabytes, and a resuming run asks for it once per role.

    Raises CheckpointError that says what is wrong.
    """
    directory = Path(directory)
    try:
        stats = [(directory / name).stat() for name in (MANIFEST, COMMIT)]
    except OSError:  # the reader says what is wrong
        return _read_manifest(directory)
    key = str(directory), *((s.st_ino, s.st_size, s.st_mtime_ns) for s in stats)
    manifest = _MANIFESTS_IN_USE.get(key)
    if manifest is None:
        manifest = _MANIFESTS_IN_USE[key] = _read_manifest(directory)
    return manifest


def _read_manifest(directory: Path) -> Manifest:
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    where = str(directory / MANIFEST)
    if is_of_format_1(directory):
        raise CheckpointError(f"{directory}: format 1, but this program reads format {FORMAT_VERSION}")
    commit_record = _read_commit(directory)
    digest = hashlib.sha256()
    lines = []
    try:
        with open(where, "rb") as file:
            for line in file:
                RECORDER.tick()
                digest.update(line)
                lines.append(line)
        if digest.hexdigest() != commit_record["manifest_sha256"]:
            raise CheckpointError(f"{where}: damaged, its hash is not the one in {COMMIT}")
        manifest = Manifest.from_lines(lines, where)
        if manifest.step != commit_record["step"]:
            raise CheckpointError(f"{where}: of step {manifest.step}, which is not the one in {COMMIT}")
        for name, size in manifest.files.items():
            actual = (directory / name).stat().st_size
            if actual != size:
                raise CheckpointError(f"{directory / name}: damaged, {actual} bytes instead of {size}")
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    return manifest


def prepare_draft(run_dir: Path, step: int, damaged: Collection[SavedStep] = ()) -> Path:
    """Make an empty directory for a new checkpoint, and return it. Remove remains of interrupted saves.

    A ``step_N.old`` stays if ``step_N`` is incomplete or ``damaged``: the run may depend on it. Raises OSError, LockLost.
    """
    run_lock.check_still_held(run_dir)
    root = checkpoints_of(run_dir)
    root.mkdir(parents=True, exist_ok=True)
    intact = {checkpoint.path for checkpoint in committed(run_dir) if checkpoint not in damaged}
    for path in list(root.iterdir()):
        superseded = path.name.endswith(".old") and path.with_suffix("") in intact
        if path.name.endswith(".tmp") or (_NAME.fullmatch(path.name) and superseded):
            _remove(path)
    draft = draft_directory(run_dir, step)
    draft.mkdir()
    return draft


def commit(run_dir: Path, manifest: Manifest, keep: int | None, damaged: Collection[SavedStep] = ()) -> Path:
    """Make a written draft the newest checkpoint, delete old ones, and return the new one's path.

    The ``keep`` newest stay (None: all), and that of the step ``state["best"]["step"]``. ``damaged`` checkpoints do not count. Every
    rank must have written and synced its files before. Raises OSError, CheckpointError, LockLost.
    """
    run_lock.check_still_held(run_dir)
    draft, final = draft_directory(run_dir, manifest.step), step_directory(run_dir, manifest.step)
    for name, size in manifest.files.items():
        actual = (draft / name).stat().st_size if (draft / name).is_file() else None
        if actual != size:
            raise CheckpointError(
                f"{draft / name}: {'not here' if actual is None else f'{actual} bytes'}, but its rank wrote {size} bytes; "
                "run.dir must be on a file system that all nodes share"
            )
    text = manifest.to_bytes()
    serial = max((c.serial for c in committed(run_dir)), default=0) + 1
    commit_record = {"step": manifest.step, "serial": serial, "manifest_sha256": hashlib.sha256(text).hexdigest()}
    atomic_write_bytes(draft / MANIFEST, text)
    atomic_write_text(draft / COMMIT, json.dumps(commit_record))
    previous = final.with_name(final.name + ".old")
    if previous.is_dir() and final.exists():  # prepare_draft kept it, so the present step_N is damaged
        _remove(final)
    elif final.exists():
        os.rename(final, previous)
    os.rename(draft, final)
    fsync_directory(final.parent)
    atomic_write_text(checkpoints_of(run_dir) / LATEST_FILE, final.name)
    if previous.exists():
        _remove(previous)
    best = manifest.state.get("best") or {}
    intact = [checkpoint for checkpoint in committed(run_dir) if checkpoint not in damaged]
    for expired in [] if keep is None else intact[max(keep, 1) :]:
        if expired.step != best.get("step"):
            _remove(expired.path)
    return final


def drop_draft(run_dir: Path, step: int) -> None:
    """Remove the draft of a failed save, to free space, unless another job owns the run directory by now.

    The next save removes whatever stays.
    """
    with suppress(OSError, run_lock.LockLost):
        run_lock.check_still_held(run_dir)
        shutil.rmtree(draft_directory(run_dir, step))


def _remove(path: Path) -> None:
    """Rename, then remove: an interrupted removal must leave nothing that looks complete or damaged. A link itself is removed."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if path.suffix != ".tmp":
        path = path.rename(path.with_name(f"{path.name}.{uuid4().hex}.tmp"))
    shutil.rmtree(path)
