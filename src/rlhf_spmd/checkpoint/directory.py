"""Checkpoints on disk: names, what is committed, and the order in which they were made.

``checkpoints/step_N`` is complete exactly if it has a COMMIT file, whose hash fits its manifest. It is prepared as
``step_N.tmp`` and renamed when it is complete. ``step_N.old`` is a complete predecessor of the same step that the new one
is about to replace. What is removed gets a name that ends in ``.tmp`` first: a ``step_N`` without a COMMIT file was damaged.
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
from rlhf_spmd.telemetry.run_dir import CHECKPOINTS_DIR, LATEST, atomic_write_bytes, atomic_write_text, fsync_directory

FORMAT_1 = "manifest.json"  # what format 1 had in its place
MANIFEST, COMMIT = "manifest.jsonl", "COMMIT"
_NAME = re.compile(r"step_(\d+)(\.old)?")
# those that were read, as long as they are in use
_HELD: WeakValueDictionary[tuple[Any, ...], Manifest] = WeakValueDictionary()


@dataclass(frozen=True)
class Committed:
    """A checkpoint that has its COMMIT file. ``serial`` counts the saves of a run directory: their order in time, whatever their
    steps, so that a step that is saved again is another one."""

    path: Path
    step: int
    serial: int


def checkpoints_of(run_dir: Path) -> Path:
    return Path(run_dir) / CHECKPOINTS_DIR


def step_directory(run_dir: Path, step: int) -> Path:
    return checkpoints_of(run_dir) / f"step_{step}"


def named_checkpoint(path: Path) -> Path:
    """``path``, or the checkpoint that the file ``latest`` there names, where it names one."""
    path = path.expanduser()
    if path.name != LATEST or not path.is_file():
        return path
    name = path.read_text(encoding="utf-8", errors="replace").strip()
    return path.parent / name if _NAME.fullmatch(name) else path


def check_place(run_dir: Path) -> None:
    """Raises CheckpointError where something lies in the way of checkpoints, which a save would meet only when it ends."""
    root = checkpoints_of(run_dir)
    if root.is_symlink() and not root.exists():
        raise CheckpointError(f"{root} is a link to {os.readlink(root)}, which is not there; make that directory")
    if root.exists() and not (root.is_dir() and os.access(root, os.W_OK)):
        raise CheckpointError(f"{root} is not a directory that this user can write to; move it away")
    if (root / LATEST).is_dir() and not (root / LATEST).is_symlink():
        raise CheckpointError(f"{root / LATEST} is a directory, and the run writes a file of that name; move it away")


def draft_directory(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step is prepared."""
    return checkpoints_of(run_dir) / f"step_{step}.tmp"


def committed(run_dir: Path) -> list[Committed]:
    """Checkpoints that can be complete, newest first. Reads only the COMMIT files."""
    found = []
    for path in _step_directories(run_dir):
        with suppress(CheckpointError):
            mark = _read_commit(path)
            found.append(Committed(path, mark["step"], mark["serial"]))
    return sorted(found, key=lambda c: (c.serial, c.step), reverse=True)


def uncommitted(run_dir: Path) -> dict[Path, str]:
    """Checkpoints whose COMMIT file is missing or damaged, and what is wrong: no save leaves them behind, they were damaged later."""
    found = {}
    for path in sorted(_step_directories(run_dir)):
        try:
            _read_commit(path)
        except CheckpointError as error:
            found[path] = str(error)
    return found


def _step_directories(run_dir: Path) -> list[Path]:
    root = checkpoints_of(run_dir)
    return [path for path in (root.iterdir() if root.is_dir() else ()) if _NAME.fullmatch(path.name) and path.is_dir()]


def _read_commit(path: Path) -> dict[str, Any]:
    """What the COMMIT file of a checkpoint says: step, serial and the manifest's sha256. Raises CheckpointError."""
    where = path / COMMIT
    if not where.exists():
        raise CheckpointError(f"{path}: not a complete checkpoint, {COMMIT} is missing")
    try:
        mark = parse_json(where.read_text(encoding="utf-8"))
        return {"step": int(mark["step"]), "serial": int(mark["serial"]), "manifest_sha256": str(mark["manifest_sha256"])}
    except OSError as error:
        raise CheckpointError(f"{where}: {error.strerror}") from error
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"{where}: damaged, not what a save writes ({type(error).__name__}: {error})") from error


def is_of_format_1(directory: Path) -> bool:
    return (directory / FORMAT_1).is_file() and not (directory / MANIFEST).is_file()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a complete checkpoint, with its files present in full. Raises CheckpointError naming what is wrong.

    Pieces are parsed where they are asked for, and their contents verified where they are read. What somebody still holds is not read
    again: with a thousand ranks it has hundreds of megabytes, and a run that goes on asks for it with every role.
    """
    directory = Path(directory)
    try:
        stats = [(directory / name).stat() for name in (MANIFEST, COMMIT)]
    except OSError:  # told in the words of who reads it
        return _read_manifest(directory)
    seen = str(directory), *((s.st_ino, s.st_size, s.st_mtime_ns) for s in stats)
    held = _HELD.get(seen)
    if held is None:
        held = _HELD[seen] = _read_manifest(directory)
    return held


def _read_manifest(directory: Path) -> Manifest:
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    where, lines, digest = str(directory / MANIFEST), [], hashlib.sha256()
    if is_of_format_1(directory):
        raise CheckpointError(f"{directory}: format 1, but this program reads format {FORMAT_VERSION}")
    mark = _read_commit(directory)
    try:
        with open(where, "rb") as file:
            for line in file:
                RECORDER.tick()
                digest.update(line)
                lines.append(line)
        if digest.hexdigest() != mark["manifest_sha256"]:
            raise CheckpointError(f"{where}: damaged, its hash is not the one in {COMMIT}")
        manifest = Manifest.from_lines(lines, where)
        if manifest.step != mark["step"]:
            raise CheckpointError(f"{where}: of step {manifest.step}, which is not the one in {COMMIT}")
        for name, size in manifest.files.items():
            found = (directory / name).stat().st_size
            if found != size:
                raise CheckpointError(f"{directory / name}: damaged, {found} bytes instead of {size}")
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    return manifest


def prepare_draft(run_dir: Path, step: int, damaged: Collection[Committed] = ()) -> Path:
    """An empty directory to write a checkpoint into. Removes what interrupted saves left. Raises OSError, LockLost.

    A ``step_N.old`` stays where ``step_N`` is not complete or one of the ``damaged``: the run may stand on it.
    """
    run_lock.check_still_held(run_dir)
    root = checkpoints_of(run_dir)
    root.mkdir(parents=True, exist_ok=True)
    good = {found.path for found in committed(run_dir) if found not in damaged}
    for path in list(root.iterdir()):
        superseded = path.name.endswith(".old") and path.with_suffix("") in good
        if path.name.endswith(".tmp") or (_NAME.fullmatch(path.name) and superseded):
            _remove(path)
    draft = draft_directory(run_dir, step)
    draft.mkdir()
    return draft


def commit(run_dir: Path, manifest: Manifest, keep: int, damaged: Collection[Committed] = ()) -> Path:
    """Make a written draft the newest checkpoint, then delete the ones beyond ``keep`` but that of the step ``state["best"]["step"]``;
    those that are known as ``damaged`` do not count.

    Raises OSError, CheckpointError, LockLost. Every rank must have written and synced its files before.
    """
    run_lock.check_still_held(run_dir)
    draft, final = draft_directory(run_dir, manifest.step), step_directory(run_dir, manifest.step)
    for name, size in manifest.files.items():
        found = (draft / name).stat().st_size if (draft / name).is_file() else None
        if found != size:
            raise CheckpointError(
                f"{draft / name}: {'not here' if found is None else f'{found} bytes'}, but its rank wrote {size} bytes; "
                "run.dir must be on a file system that all nodes share"
            )
    text = manifest.to_bytes()
    serial = max((c.serial for c in committed(run_dir)), default=0) + 1
    mark = {"step": manifest.step, "serial": serial, "manifest_sha256": hashlib.sha256(text).hexdigest()}
    atomic_write_bytes(draft / MANIFEST, text)
    atomic_write_text(draft / COMMIT, json.dumps(mark))
    old = final.with_name(final.name + ".old")
    if old.is_dir() and final.exists():  # prepare_draft left it, so what lies in the new one's place is damaged
        _remove(final)
    elif final.exists():
        os.rename(final, old)
    os.rename(draft, final)
    fsync_directory(final.parent)
    atomic_write_text(checkpoints_of(run_dir) / LATEST, final.name)
    if old.exists():
        _remove(old)
    best = manifest.state.get("best") or {}
    for expired in [found for found in committed(run_dir) if found not in damaged][max(keep, 1) :]:
        if expired.step != best.get("step"):
            _remove(expired.path)
    return final


def drop_draft(run_dir: Path, step: int) -> None:
    """After a save that failed, for its space, unless the run directory is another job's by now. What stays, the next save removes."""
    with suppress(OSError, run_lock.LockLost):
        run_lock.check_still_held(run_dir)
        shutil.rmtree(draft_directory(run_dir, step))


def _remove(path: Path) -> None:
    """It is renamed first: a removal that is interrupted must leave neither what looks complete nor what looks damaged. Of a
    symbolic link only the link goes."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    if path.suffix != ".tmp":
        path = path.rename(path.with_name(f"{path.name}.{uuid4().hex}.tmp"))
    shutil.rmtree(path)
