"""Reading a checkpoint into the current layout: any number of ranks, any layout, every box verified before it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_spmd.checkpoint.directory import Committed, check_place, committed, is_of_format_1, read_manifest, uncommitted
from rlhf_spmd.checkpoint.files import Spec, hash_tensor
from rlhf_spmd.checkpoint.manifest import DTYPE_NAMES, DTYPES, PARAM, CheckpointError, Manifest, StoredBox
from rlhf_spmd.checkpoint.save import RoleState, agree
from rlhf_spmd.parallel.boxes import Box, cover, whole_shard
from rlhf_spmd.parallel.collectives import Group


@dataclass(frozen=True)
class Resumable:
    """The newest undamaged checkpoint; None if there is none.

    ``damaged``: newer ones that are damaged. ``warnings``: about these, and about others without a readable COMMIT file.
    """

    directory: Path | None
    damaged: tuple[Committed, ...] = ()
    warnings: tuple[str, ...] = ()


def read_pieces(directory: Path, pieces: Sequence[StoredBox]) -> Iterator[tuple[StoredBox, Tensor]]:
    """Yield the boxes one after the other, file by file, each verified. Raises CheckpointError that names file and box."""
    by_file: dict[str, list[StoredBox]] = {}
    for piece in pieces:
        by_file.setdefault(piece.file, []).append(piece)
    for name, wanted in by_file.items():
        path = Path(directory) / name
        try:
            with safe_open(path, framework="pt") as file:
                for piece in wanted:
                    tensor = file.get_tensor(piece.key)
                    if tuple(tensor.shape) != piece.size or DTYPE_NAMES.get(tensor.dtype) != piece.dtype:
                        raise CheckpointError(f"{path}: piece {piece.key} has another shape or dtype than in the manifest")
                    if hash_tensor(tensor) != piece.sha256:
                        raise CheckpointError(f"{path}: piece {piece.key} is damaged: its hash is not the one in the manifest")
                    yield piece, tensor
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: unreadable ({error})") from error


def read_whole(directory: Path, pieces: Sequence[StoredBox], spec: Spec) -> Tensor:
    """Return a whole tensor from its boxes, in the dtype of ``spec``."""
    (box,) = whole_shard(spec.key, spec.shape).boxes
    tensor = torch.empty(spec.shape, dtype=DTYPES[pieces[0].dtype])
    fill(directory, [(f"{directory}: {spec.key}", tensor, box, pieces)])
    return tensor.to(spec.dtype)


def fill(directory: Path, wanted: Sequence[tuple[str, Tensor, Box, Sequence[StoredBox]]]) -> None:
    """Fill boxes of local tensors from stored boxes. Raises CheckpointError.

    ``wanted``: for each box a label for messages, the local tensor, the box in it, and the stored boxes to fill it from.
    """
    copies: dict[StoredBox, list[tuple[Tensor, Box]]] = {}  # stored box -> the views that receive its parts, and these parts
    for label, tensor, box, pieces in wanted:
        parts, missing = cover(box, [piece.box for piece in pieces])
        if missing:
            raise CheckpointError(f"{label} lacks the part from {missing[0].start} of size {missing[0].size}")
        for i, source, part in parts:
            copies.setdefault(pieces[i], []).append((tensor[part.local_slices], source))
    for piece, values in read_pieces(directory, list(copies)):
        for local, source in copies[piece]:
            local.copy_(values[source.local_slices])


@torch.no_grad()
def read_role(directory: Path, manifest: Manifest, role: str, target: RoleState) -> set[str]:
    """Fill this rank's tensors in place. Returns the names of the role's tensors in the checkpoint. No communication.

    Raises CheckpointError if a tensor is missing, incomplete, or has another shape or dtype.
    """
    target.check(role)
    where = f"checkpoint of step {manifest.step}, role '{role}'"
    names: set[str] = set()
    for kind, tensors in target.kinds().items():
        pieces = manifest.pieces_of(role, kind) if tensors or kind == PARAM else {}
        names, wanted = names | pieces.keys(), []
        for parameter, tensor in tensors.items():
            for box in target.shards[parameter].boxes:
                stored, what = pieces.get(box.name, []), f"{where}: {kind} of {box.name}"
                for piece in stored:
                    if piece.shape != box.shape:
                        raise CheckpointError(f"{what} is {piece.shape}, the model's is {box.shape}")
                    if piece.dtype != DTYPE_NAMES.get(tensor.dtype):
                        raise CheckpointError(
                            f"{what} is {piece.dtype}, the model's is {DTYPE_NAMES.get(tensor.dtype)}; "
                            f"resume with the dtype of the run that saved it"
                        )
                wanted.append((what, tensor, box, stored))
        fill(directory, wanted)
    return names


def load_checkpoint(directory: Path, role: str, target: RoleState, group: Group, without: frozenset[str] = frozenset()) -> None:
    """Fill the tensors of ``target`` in place from a checkpoint of any layout.

    Together the ranks must take every tensor of the role in the checkpoint, except those in ``without``. Kinds that ``target.optim``
    does not name are not read. Raises CheckpointError on every rank if any rank fails; the tensors are undefined then.

    Collective over ``group`` (the role's pool): every rank of it must call, in program order.
    """
    directory = Path(directory)

    def read() -> list[str]:
        names = read_role(directory, read_manifest(directory), role, target)
        filled = {box.name for shard in target.shards.values() for box in shard.boxes}
        return sorted(names - filled - without)

    def compare(left_by_rank: list[list[str]]) -> None:
        if surplus := sorted(set(left_by_rank[0]).intersection(*left_by_rank)):
            raise CheckpointError(
                f"{directory}: role '{role}' has {len(surplus)} tensors that the model lacks, such as {surplus[0]}"
            )

    agree(group, read, compare)


def verify_checkpoint(directory: Path, group: Group, check: Callable[[Manifest], None] = lambda manifest: None) -> None:
    """Read and hash every box once, shared among the ranks, and ``check`` the manifest. Raises CheckpointError on every rank.

    Collective over the group: every rank of it must call, in program order.
    """

    def read() -> None:
        manifest = read_manifest(directory)
        check(manifest)
        keys = sorted(manifest.lines)  # each rank gets equally many of a role and kind
        num = max(1, len(keys))
        first, sharing = group.rank % num, len(range(group.rank % num, group.size, num))  # how many ranks share a line
        for key in keys[first :: group.size]:
            for _ in read_pieces(directory, manifest.pieces_in(key)[group.rank // num :: sharing]):
                pass

    agree(group, read)


def find_resumable(run_dir: Path, group: Group, check: Callable[[Manifest], None] = lambda manifest: None) -> Resumable:
    """Return the newest undamaged checkpoint of a run directory.

    ``check``: raises CheckpointError for a state that the run cannot resume.

    Damaged checkpoints are skipped with a warning, remains of an interrupted save silently. Raises CheckpointError if the next
    candidate has format 1, if no save could succeed, or if all are damaged: a new run beside them would eventually delete them.

    Collective over the group: every rank of it must call, in program order.
    """

    def look(everyone: list[None]) -> Any:
        try:
            check_place(run_dir)
            checkpoints = [[str(mark.path), mark.step, mark.serial] for mark in committed(run_dir)]
            return checkpoints, [f"passing over {path}: {why}" for path, why in uncommitted(run_dir).items()]
        except OSError as error:
            raise CheckpointError(f"{error.filename or run_dir}: {error.strerror}") from error

    run_dir = Path(run_dir)
    checkpoints, warnings = agree(group, lambda: None, look)
    candidates = [Committed(Path(path), step, serial) for path, step, serial in checkpoints]
    for number, candidate in enumerate(candidates):
        if is_of_format_1(candidate.path):
            raise CheckpointError(
                f"{candidate.path} is of format 1, which this program does not read; begin anew in another run.dir"
            )
        try:
            verify_checkpoint(candidate.path, group, check)
        except CheckpointError as failure:
            warnings.append(f"passing over {candidate.path}: {failure}")
            continue
        return Resumable(candidate.path, tuple(candidates[:number]), tuple(warnings))
    if warnings:
        raise CheckpointError(f"no checkpoint of {run_dir} can be read: {'; '.join(warnings)}; begin anew in another run.dir")
    return Resumable(None)
