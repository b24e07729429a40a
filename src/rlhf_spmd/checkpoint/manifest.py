"""What a checkpoint holds: the manifest as data, its JSON form, and who writes which piece. Pure.

A checkpoint is the directory ``checkpoints/step_N``: safetensors files of pieces, ``manifest.json`` (this module) and
``COMMIT``. A piece is one box of one global tensor (``parallel.boxes``) of one kind: the parameter itself or a tensor of its
optimizer.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_spmd.parallel.boxes import Box, ParamShard

FORMAT_VERSION = 1
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


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file, and the piece where there is one."""

    exit_class = "checkpoint"  # how the run ends: parallel/program.py


@dataclass(frozen=True)
class Piece:
    """``name[start : start + size]`` of a global tensor of ``shape``, under ``key`` in ``file``; safetensors' dtype names."""

    file: str
    key: str
    role: str
    kind: str
    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    dtype: str
    sha256: str

    @property
    def box(self) -> Box:
        """As a box that lies at the origin of the stored tensor."""
        return Box(self.name, self.shape, self.start, self.size, (0,) * len(self.shape))


@dataclass(frozen=True)
class Manifest:
    """``files`` maps each file to its size in bytes; ``state`` is the caller's plain JSON (loader position, counters)."""

    step: int
    world_size: int
    files: dict[str, int]
    pieces: tuple[Piece, ...]
    state: dict[str, Any]

    @property
    def roles(self) -> list[str]:
        return sorted({piece.role for piece in self.pieces})

    def pieces_of(self, role: str, kind: str) -> dict[str, list[Piece]]:
        """Tensor name -> its pieces. Raises CheckpointError where the checkpoint has no such role or kind."""
        if role not in self.roles:
            raise CheckpointError(f"checkpoint of step {self.step} holds no role '{role}'; it holds: {', '.join(self.roles)}")
        found: dict[str, list[Piece]] = {}
        for piece in self.pieces:
            if piece.role == role and piece.kind == kind:
                found.setdefault(piece.name, []).append(piece)
        if not found:
            kinds = ", ".join(sorted({piece.kind for piece in self.pieces if piece.role == role}))
            raise CheckpointError(f"checkpoint of step {self.step} holds no '{kind}' of role '{role}'; it holds: {kinds}")
        return found

    def to_json(self) -> str:
        pieces = [vars(piece) for piece in self.pieces]
        return json.dumps({"format": FORMAT_VERSION, **vars(self), "pieces": pieces})

    @staticmethod
    def from_json(text: str, where: str) -> Manifest:
        """Every field is checked: a manifest is input. ``where`` names its file in the CheckpointError."""
        try:
            body = json.loads(text)
            if body["format"] != FORMAT_VERSION:
                raise CheckpointError(f"{where}: format {body['format']!r}, but this program reads format {FORMAT_VERSION}")
            files = {name: int(size) for name, size in body["files"].items()}
            for name in files:
                if not re.fullmatch(r"[\w.-]+\.safetensors", name):
                    raise CheckpointError(f"{where}: file name {name!r} is not a plain *.safetensors name")
            pieces = tuple(_read_piece(row, files, where) for row in body["pieces"])
            return Manifest(int(body["step"]), int(body["world_size"]), files, pieces, dict(body["state"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where}: not a checkpoint manifest ({type(error).__name__}: {error})") from error


def _read_piece(row: Mapping[str, Any], files: Mapping[str, int], where: str) -> Piece:
    piece = piece_from_json(row)
    inside = len(piece.shape) == len(piece.start) == len(piece.size) and all(
        start >= 0 and size > 0 and start + size <= extent
        for start, size, extent in zip(piece.start, piece.size, piece.shape, strict=True)
    )
    if piece.file not in files or piece.dtype not in DTYPES or not inside:
        raise CheckpointError(f"{where}: piece {piece.key!r} of {piece.file!r} is not possible: {dict(row)}")
    return piece


def piece_from_json(row: Mapping[str, Any]) -> Piece:
    """The inverse of ``vars`` through JSON. Raises KeyError, TypeError or ValueError where a field is missing or unfit."""
    text: dict[str, Any] = {field: str(row[field]) for field in ("file", "key", "role", "kind", "name", "dtype", "sha256")}
    numbers: dict[str, Any] = {field: tuple(int(n) for n in row[field]) for field in ("shape", "start", "size")}
    return Piece(**text, **numbers)


def piece_key(kind: str, box: Box) -> str:
    """The name of a piece in its safetensors file, start and size after it: ``param/model.norm.weight@0+64``."""
    return f"{kind}/{box.name}@{','.join(map(str, box.start))}+{','.join(map(str, box.size))}"


def held_boxes(shards: Mapping[str, ParamShard]) -> dict[BoxKey, tuple[str, Box]]:
    """The distinct boxes of a rank's shards -> the local parameter that holds each (the first one), and the box in it."""
    found: dict[BoxKey, tuple[str, Box]] = {}
    for parameter, shard in shards.items():
        for box in shard.boxes:
            if box.numel:
                found.setdefault((box.name, box.start, box.size), (parameter, box))
    return found


def plan_writes(boxes_by_rank: Sequence[Iterable[BoxKey]]) -> list[list[BoxKey]]:
    """Each distinct box is written once. Replicas share the work: of the ranks that hold a box, the least loaded takes it.

    ``boxes_by_rank[rank]`` is what that rank holds (nothing for ranks outside the role). Load is counted in elements; a tie
    goes to the lowest rank. Deterministic: boxes are dealt in the order in which the lowest ranks list them.
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
