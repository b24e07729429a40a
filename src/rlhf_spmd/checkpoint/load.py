"""Reading a checkpoint into the current layout: any number of ranks, any layout, every box verified before it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_spmd.checkpoint.directory import SavedStep, check_place, committed, is_of_format_1, read_manifest, uncommitted
from rlhf_spmd.checkpoint.files import Spec, hash_tensor
from rlhf_spmd.checkpoint.manifest import DTYPE_NAMES, DTYPES, PARAM, CheckpointError, Manifest, StoredBox
from rlhf_spmd.checkpoint.save import RoleState, run_and_agree
from rlhf_spmd.parallel.boxes import Box, cover, whole_shard
from rlhf_spmd.parallel.collectives import Group


@dataclass(frozen=True)
class Resumable:
    """What a run can resume from.

    - directory: the newest undamaged checkpoint; None if there is none
    - damaged: newer checkpoints, which are damaged
    - warnings: lines about these, and about checkpoints without a readable COMMIT file
    """

    directory: Path | None
    damaged: tuple[SavedStep, ...] = ()
    warnings: tuple[str, ...] = ()


def read_pieces(directory: Path, pieces: Sequence[StoredBox]) -> Iterator[tuple[StoredBox, Tensor]]:
    """Yield the stored boxes and their values, file by file, each verified. Raises CheckpointError that names file and box."""
    by_file: dict[str, list[StoredBox]] = {}
    for piece in pieces:
        by_file.setdefault(piece.file, []).append(piece)
    for name, pieces_in_file in by_file.items():
        path = Path(directory) / name
        try:
            with safe_open(path, framework="pt") as file:
                for piece in pieces_in_file:
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


def fill(directory: Path, targets: Sequence[tuple[str, Tensor, Box, Sequence[StoredBox]]]) -> None:
    """Fill boxes of local tensors from stored boxes. Raises CheckpointError.

    ``targets``: for each box a label for messages, the local tensor, the box in it, and the stored boxes to fill it from.
    """
    copies: dict[StoredBox, list[tuple[Tensor, Box]]] = {}  # stored box -> the views that receive its parts, and these parts
    for label, tensor, box, pieces in targets:
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
    """Fill this rank's tensors in place. Return the names of the role's tensors in the checkpoint. No communication.

    Raises CheckpointError if a tensor is missing, incomplete, or has another shape or dtype.
    """
    target.check(role)
    where = f"checkpoint of step {manifest.step}, role '{role}'"
    names: set[str] = set()
    for kind, tensors in target.kinds().items():
        pieces = manifest.pieces_of(role, kind) if tensors or kind == PARAM else {}
        names |= pieces.keys()
        targets = []
        for parameter, tensor in tensors.items():
            for box in target.shards[parameter].boxes:
                stored = pieces.get(box.name, [])
                label = f"{where}: {kind} of {box.name}"
                for piece in stored:
                    if piece.shape != box.shape:
                        raise CheckpointError(f"{label} is {piece.shape}, the model's is {box.shape}")
                    if piece.dtype != DTYPE_NAMES.get(tensor.dtype):
                        raise CheckpointError(
                            f"{label} is {piece.dtype}, the model's is {DTYPE_NAMES.get(tensor.dtype)}; "
                            f"resume with the dtype of the run that saved it"
                        )
                targets.append((label, tensor, box, stored))
        fill(directory, targets)
    return names


def load_checkpoint(directory: Path, role: str, target: RoleState, group: Group, without: frozenset[str] = frozenset()) -> None:
    """Fill the tensors of ``target`` in place from a checkpoint of any layout.

    Every tensor of the role in the checkpoint must be in some rank's ``target``, except those in ``without``. Kinds that
    ``target.optim`` does not name are not read. Raises CheckpointError on every rank if any rank fails; the tensors are undefined then.

    Collective over ``group`` (the role's pool): every rank of it must call, in program order.
    """
    directory = Path(directory)

    def read() -> list[str]:
        names = read_role(directory, read_manifest(directory), role, target)
        filled = {box.name for shard in target.shards.values() for box in shard.boxes}
        return sorted(names - filled - without)

    def compare(unread_by_rank: list[list[str]]) -> None:
        if surplus := sorted(set(unread_by_rank[0]).intersection(*unread_by_rank)):
            raise CheckpointError(
                f"{directory}: role '{role}' has {len(surplus)} tensors that the model lacks, such as {surplus[0]}"
            )

    run_and_agree(group, read, compare)


def verify_checkpoint(directory: Path, group: Group, check: Callable[[Manifest], None] = lambda manifest: None) -> None:
    """Read and hash every box once, shared among the ranks, and ``check`` the manifest. Raises CheckpointError on every rank.

    Collective over the group: every rank of it must call, in program order.
    """

    def read() -> None:
        manifest = read_manifest(directory)
        check(manifest)
        keys = sorted(manifest.lines)  # each rank gets equally many of a role and kind
        num_lines = max(1, len(keys))
        first = group.rank % num_lines
        ranks_per_line = len(range(first, group.size, num_lines))
        for key in keys[first :: group.size]:
            for _ in read_pieces(directory, manifest.pieces_in(key)[group.rank // num_lines :: ranks_per_line]):
                pass

    run_and_agree(group, read)


def find_resumable(run_dir: Path, group: Group, check: Callable[[Manifest], None] = lambda manifest: None) -> Resumable:
    """Return the newest undamaged checkpoint of a run directory.

    ``check``: raises CheckpointError for a state that the run cannot resume.

    Damaged checkpoints are skipped with a warning, remains of an interrupted save silently. Raises CheckpointError if the next
    candidate has format 1, if no save could succeed, or if all are damaged: a new run would in time delete them.

    Collective over the group: every rank of it must call, in program order.
    """

    def list_checkpoints(_: list[None]) -> Any:
        try:
            check_place(run_dir)
            checkpoints = [[str(each.path), each.step, each.serial] for each in committed(run_dir)]
            return checkpoints, [f"passing over {path}: {why}" for path, why in uncommitted(run_dir).items()]
        except OSError as error:
            raise CheckpointError(f"{error.filename or run_dir}: {error.strerror}") from error

    run_dir = Path(run_dir)
    checkpoints, warnings = run_and_agree(group, lambda: None, list_checkpoints)
    candidates = [SavedStep(Path(path), step, serial) for path, step, serial in checkpoints]
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
