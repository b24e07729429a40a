"""Checkpoints on disk: names, what is committed, and the order in which they were made.

``checkpoints/step_N`` is complete exactly if it has a COMMIT file, whose hash fits its manifest. It is prepared as
``step_N.tmp`` and renamed when it is complete. ``step_N.old`` is a complete predecessor of the same step that the new one
is about to replace.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from rlhf_spmd.checkpoint.manifest import FORMAT_VERSION, CheckpointError, Manifest
from rlhf_spmd.parallel.collectives import RECORDER
from rlhf_spmd.telemetry.run_dir import CHECKPOINTS_DIR, LATEST, atomic_write_bytes, atomic_write_text, fsync_directory

FORMAT_1 = "manifest.json"  # what format 1 had in its place
MANIFEST, COMMIT = "manifest.jsonl", "COMMIT"
_NAME = re.compile(r"step_(\d+)(\.old)?")
# those that were read, as long as they are in use
_HELD: WeakValueDictionary[tuple[Any, ...], Manifest] = WeakValueDictionary()


@dataclass(frozen=True)
class Committed:
    """A complete checkpoint. ``serial`` counts the saves of a run directory: their order in time, whatever their steps."""

    path: Path
    step: int
    serial: int


def checkpoints_of(run_dir: Path) -> Path:
    return Path(run_dir) / CHECKPOINTS_DIR


def step_directory(run_dir: Path, step: int) -> Path:
    return checkpoints_of(run_dir) / f"step_{step}"


def named_checkpoint(path: Path) -> Path:
    """``path``, or the checkpoint that the file ``latest`` there names."""
    path = path.expanduser()
    return path.parent / path.read_text(encoding="utf-8").strip() if path.name == LATEST and path.is_file() else path


def draft_directory(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step is prepared."""
    return checkpoints_of(run_dir) / f"step_{step}.tmp"


def committed(run_dir: Path) -> list[Committed]:
    """Complete checkpoints, newest first. Reads only the COMMIT files."""
    found = []
    root = checkpoints_of(run_dir)
    for path in root.iterdir() if root.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / COMMIT).is_file():
            serial = _read_commit(path).get("serial", 0)
            found.append(Committed(path, int(match[1]), serial if isinstance(serial, int) else 0))
    return sorted(found, key=lambda c: (c.serial, c.step), reverse=True)


def lost_checkpoint(run_dir: Path) -> list[Path]:
    """The one that ``latest`` names, if it is there and not complete: no save leaves that behind, it was damaged later."""
    latest = checkpoints_of(run_dir) / LATEST
    path = named_checkpoint(latest)
    return [path] if path != latest and path.is_dir() and not (path / COMMIT).is_file() else []


def _read_commit(path: Path) -> dict[str, object]:
    """The COMMIT file's content; empty where it is damaged, which :func:`read_manifest` reports."""
    try:
        body = json.loads((path / COMMIT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return body if isinstance(body, dict) else {}


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
    if not (directory / COMMIT).is_file():
        what = "an interrupted save" if directory.is_dir() else "no such directory"
        raise CheckpointError(f"{directory}: not a complete checkpoint, {COMMIT} is missing ({what})")
    where, lines, digest = str(directory / MANIFEST), [], hashlib.sha256()
    if (directory / FORMAT_1).is_file():
        raise CheckpointError(f"{directory}: format 1, but this program reads format {FORMAT_VERSION}")
    try:
        with open(where, "rb") as file:
            for line in file:
                RECORDER.tick()
                digest.update(line)
                lines.append(line)
        mark = _read_commit(directory)
        if digest.hexdigest() != mark.get("manifest_sha256"):
            raise CheckpointError(f"{where}: damaged, its hash is not the one in {COMMIT}")
        manifest = Manifest.from_lines(lines, where)
        if manifest.step != mark.get("step"):
            raise CheckpointError(f"{where}: of step {manifest.step}, which is not the one in {COMMIT}")
        for name, size in manifest.files.items():
            found = (directory / name).stat().st_size
            if found != size:
                raise CheckpointError(f"{directory / name}: damaged, {found} bytes instead of {size}")
    except OSError as error:
        raise CheckpointError(f"{error.filename}: {error.strerror}") from error
    return manifest


def prepare_draft(run_dir: Path, step: int) -> Path:
    """An empty directory to write a checkpoint into. Removes what interrupted saves left. Raises OSError."""
    root = checkpoints_of(run_dir)
    root.mkdir(parents=True, exist_ok=True)
    for path in list(root.iterdir()):
        complete = (path / COMMIT).is_file()
        superseded = path.name.endswith(".old") and (path.with_suffix("") / COMMIT).is_file()
        if path.name.endswith(".tmp") or (_NAME.fullmatch(path.name) and (superseded or not complete)):
            _remove(path)
    draft = draft_directory(run_dir, step)
    draft.mkdir()
    return draft


def commit(run_dir: Path, manifest: Manifest, keep: int, damaged: Collection[Path] = ()) -> Path:
    """Make a written draft the newest checkpoint, then delete the ones beyond ``keep`` but that of the step ``state["best"]["step"]``;
    those that are known as ``damaged`` do not count.

    Raises OSError, CheckpointError. Every rank must have written and synced its files before.
    """
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
    if final.exists():
        os.rename(final, old)
    os.rename(draft, final)
    fsync_directory(final.parent)
    atomic_write_text(checkpoints_of(run_dir) / LATEST, final.name)
    if old.exists():
        _remove(old)
    best = manifest.state.get("best") or {}
    for expired in [found for found in committed(run_dir) if found.path not in damaged][max(keep, 1) :]:
        if expired.step != best.get("step"):
            _remove(expired.path)
    return final


def _remove(path: Path) -> None:
    """COMMIT goes first: a removal that is interrupted must not leave something that looks complete."""
    if path.is_dir():
        (path / COMMIT).unlink(missing_ok=True)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
