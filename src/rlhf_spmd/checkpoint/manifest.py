"""What a checkpoint holds: the manifest as data, its JSON lines, and who writes which box. Pure.

A checkpoint is the directory ``checkpoints/step_N``: safetensors files of boxes, ``manifest.jsonl`` (this module) and ``COMMIT``. A
stored box is one box of one global tensor (``parallel.boxes``) of one kind: the parameter itself, or a tensor of its optimizer. The
manifest's first line has everything but the boxes, and names the other lines in order. Each of these is ``[role, kind, file, [[name,
shape, start, size, dtype, sha256], ...]]``: the boxes of one kind in one file, made by the rank that wrote it. Lines are short, so that
Python's other threads, such as the heartbeat, can run between them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rlhf_spmd.config.json_input import parse_json
from rlhf_spmd.parallel.boxes import Box, ParamShard
from rlhf_spmd.parallel.collectives import RECORDER

FORMAT_VERSION = 2
PARAM = "param"

# safetensors' names of the dtypes that parameters and optimizer states may have
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

BoxKey = tuple[str, tuple[int, ...], tuple[int, ...]]  # name, start, size
LineKey = tuple[str, str, str]  # role, kind, file


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the file, and the box if one is concerned."""

    exit_class = "checkpoint"  # how the run ends: process/program.py


class StoredBox(NamedTuple):
    """The box ``name[start : start + size]`` of a global tensor of ``shape``, in ``file``. ``dtype`` is safetensors' name."""

    role: str
    kind: str
    file: str
    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    dtype: str
    sha256: str

    @property
    def key(self) -> str:
        """Return the name in its file."""
        return piece_key(self.kind, self.box)

    @property
    def box(self) -> Box:
        """Return the box, which lies at the origin of the stored tensor."""
        return Box(self.name, self.shape, self.start, self.size, (0,) * len(self.shape))


def piece_lines(pieces: Iterable[StoredBox]) -> dict[LineKey, str]:
    """Return the manifest's lines for all boxes in some files."""
    rows: dict[LineKey, list[Any]] = {}
    for piece in pieces:
        rows.setdefault(piece[:3], []).append(piece[3:])
    return {key: json.dumps([*key, boxes], separators=(",", ":")) + "\n" for key, boxes in rows.items()}


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.jsonl``.

    - files: file -> its size in bytes
    - lines: the lines of boxes as in the file. They are parsed when somebody asks for their boxes, of which there may be millions
    - state: the caller's plain JSON (loader position, counters)
    """

    step: int
    world_size: int
    files: dict[str, int]
    lines: dict[LineKey, bytes]
    state: dict[str, Any]

    def __post_init__(self) -> None:
        for name in self.files:
            if not re.fullmatch(r"[\w.-]+\.safetensors", name):
                raise ValueError(f"file name {name!r} is not a plain *.safetensors name")
        if others := {file for *_, file in self.lines} ^ set(self.files):
            raise ValueError(f"files without lines, or lines of other files: {sorted(others)}")

    @property
    def roles(self) -> list[str]:
        return sorted({role for role, *_ in self.lines})

    def pieces_of(self, role: str, kind: str) -> dict[str, list[StoredBox]]:
        """Return tensor name -> its boxes. Raises CheckpointError if the checkpoint has no such role or kind."""
        pieces: dict[str, list[StoredBox]] = {}
        for key in self._lines_of(role, kind):
            for piece in self.pieces_in(key):
                pieces.setdefault(piece.name, []).append(piece)
        return pieces

    def dtype_of(self, role: str) -> str:
        """Return the dtype of the role's first parameter. Raises CheckpointError as :meth:`pieces_of`."""
        return self.pieces_in(self._lines_of(role, PARAM)[0])[0].dtype

    def _lines_of(self, role: str, kind: str) -> list[LineKey]:
        where = f"checkpoint of step {self.step} holds no"
        if role not in self.roles:
            raise CheckpointError(f"{where} role '{role}'; it holds: {', '.join(self.roles)}")
        kinds = {key[1] for key in self.lines if key[0] == role}
        if kind not in kinds:
            raise CheckpointError(f"{where} '{kind}' of role '{role}'; it holds: {', '.join(sorted(kinds))}")
        return [key for key in self.lines if key[:2] == (role, kind)]

    def pieces_in(self, key: LineKey) -> list[StoredBox]:
        """Return the boxes of one line, at least one, every field checked. Raises CheckpointError."""
        RECORDER.tick()
        where = f"manifest of step {self.step}, line of '{key[1]}' in {key[2]}"
        try:
            *key_in_line, rows = json.loads(self.lines[key])
            pieces = [_read_piece(key, *row) for row in rows]
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{where}: not a line of boxes ({error})") from error
        if tuple(key_in_line) != key or not pieces:
            raise CheckpointError(f"{where}: it has {len(pieces)} boxes of {key_in_line}")
        return pieces

    def to_bytes(self) -> bytes:
        head = json.dumps({"format": FORMAT_VERSION, **vars(self), "lines": list(self.lines)}) + "\n"
        return b"".join([head.encode(), *self.lines.values()])

    @staticmethod
    def from_lines(lines: Sequence[bytes], where: str) -> Manifest:
        """Return the manifest. Only the first line is parsed and checked. Raises CheckpointError that names the file ``where``."""
        try:
            head = parse_json(lines[0])
            if head["format"] != FORMAT_VERSION:
                raise CheckpointError(f"{where}: format {head['format']!r}, but this program reads format {FORMAT_VERSION}")
            files = {name: int(size) for name, size in head["files"].items()}
            keys = [(str(role), str(kind), str(file)) for role, kind, file in head["lines"]]
            by_key = dict(zip(keys, lines[1:], strict=True))
            if len(by_key) < len(keys):
                raise ValueError("a line that is there twice")
            return Manifest(int(head["step"]), int(head["world_size"]), files, by_key, dict(head["state"]))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{where}: not a checkpoint manifest ({type(error).__name__}: {error})") from error


def _read_piece(key: LineKey, name: Any, shape: Any, start: Any, size: Any, dtype: Any, sha256: Any) -> StoredBox:
    """Return a stored box of these fields, once they are checked. Raises TypeError or ValueError."""
    shape, start, size = (tuple([int(n) for n in numbers]) for numbers in (shape, start, size))
    piece = StoredBox(*key, str(name), shape, start, size, str(dtype), str(sha256))
    inside = all(a >= 0 and n > 0 and a + n <= extent for a, n, extent in zip(start, size, shape, strict=True))
    if piece.dtype not in DTYPES or not inside:
        raise ValueError(f"piece {piece.key!r} is not possible: {piece}")
    return piece


def piece_key(kind: str, box: Box) -> str:
    """Return the name of a box in its safetensors file, with start and size: ``param/model.norm.weight@0+64``."""
    return f"{kind}/{box.name}@{','.join(map(str, box.start))}+{','.join(map(str, box.size))}"


def distinct_boxes(shards: Mapping[str, ParamShard]) -> dict[BoxKey, tuple[str, Box]]:
    """Return the distinct boxes of a rank's shards -> the first local parameter that holds each, and the box in it."""
    boxes: dict[BoxKey, tuple[str, Box]] = {}
    for parameter, shard in shards.items():
        for box in shard.boxes:
            if box.numel:
                boxes.setdefault((box.name, box.start, box.size), (parameter, box))
    return boxes


def plan_writes(boxes_by_rank: Sequence[Iterable[BoxKey]]) -> list[list[BoxKey]]:
    """Return the boxes that each rank writes. Each distinct box is written once, by the least loaded rank that holds it.

    ``boxes_by_rank[rank]``: the boxes of that rank, none for ranks outside the role. Load is counted in elements; a tie goes to the
    lowest rank. Deterministic: boxes are dealt in the order in which the lowest ranks list them.
    """
    holders: dict[BoxKey, list[int]] = {}
    for rank, boxes in enumerate(boxes_by_rank):
        for key in boxes:
            holders.setdefault(key, []).append(rank)
    load = [0] * len(boxes_by_rank)
    writes: list[list[BoxKey]] = [[] for _ in boxes_by_rank]
    for key, ranks in holders.items():
        owner = min(ranks, key=lambda rank: (load[rank], rank))
        load[owner] += math.prod(key[2])
        writes[owner].append(key)
    return writes
