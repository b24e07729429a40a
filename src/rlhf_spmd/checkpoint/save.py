"""Writing a checkpoint: every rank writes its share of the boxes, rank 0 commits, and all see the same outcome."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.checkpoint.directory import SavedStep, commit, draft_directory, drop_draft, prepare_draft, step_directory
from rlhf_spmd.checkpoint.files import Spec, write_safetensors
from rlhf_spmd.checkpoint.manifest import (
    DTYPE_NAMES,
    PARAM,
    BoxKey,
    CheckpointError,
    Manifest,
    StoredBox,
    distinct_boxes,
    piece_key,
    piece_lines,
    plan_writes,
)
from rlhf_spmd.kernels.pinned_memory import copy_to_host
from rlhf_spmd.parallel.boxes import Box, ParamShard
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.telemetry.run_lock import LockLost

LABEL = "checkpoint"


@dataclass(frozen=True)
class RoleState:
    """What one rank holds of one role.

    - shards: local parameter name -> its boxes
    - tensors: local parameter name -> local values of the shard's shape
    - optim: local parameter name -> kind ("exp_avg", "exp_avg_sq", "master", ...) -> tensor of the same shape. Parameters may be
      absent or have different kinds (frozen parameters have no moments)
    """

    shards: Mapping[str, ParamShard]
    tensors: Mapping[str, Tensor]
    optim: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def kinds(self) -> dict[str, dict[str, Tensor]]:
        """Return kind -> parameter name -> tensor. The parameters themselves have the kind "param"."""
        kinds = {PARAM: dict(self.tensors)}
        for name, states in self.optim.items():
            for kind, tensor in states.items():
                kinds.setdefault(kind, {})[name] = tensor
        return kinds

    def check(self, role: str) -> None:
        """Assert that every tensor has the shape of its shard."""
        missing = sorted(set(self.shards) - set(self.tensors))
        assert not missing, f"role {role}: no tensor for parameters {missing}"
        for kind, tensors in self.kinds().items():
            for name, tensor in tensors.items():
                shape, expected = tuple(tensor.shape), self.shards[name].shape
                assert shape == expected, f"role {role}, {kind} of {name}: tensor of shape {shape}, shard of {expected}"


@dataclass(frozen=True)
class Draft:
    """A checkpoint whose boxes have been assigned to ranks, and which is not yet written.

    - pieces: role -> the boxes that this rank writes, as (kind, box, values)
    - wait: returns when the values are complete
    """

    run_dir: Path
    step: int
    state: Mapping[str, Any]
    keep: int | None
    damaged: Collection[SavedStep]
    pieces: Mapping[str, Sequence[tuple[str, Box, Tensor]]]
    wait: Callable[[], object] = lambda: None

    @torch.no_grad()
    def copied(self) -> Draft:
        """Return the draft with copies of the values in host memory.

        The next step may then change the tensors while the draft is written.
        """
        copies, wait = copy_to_host([values for boxes in self.pieces.values() for *_, values in boxes])
        remaining = iter(copies)
        pieces = {role: [(kind, box, next(remaining)) for kind, box, _ in boxes] for role, boxes in self.pieces.items()}
        return replace(self, pieces=pieces, wait=wait)

    def write(self, group: Group) -> Path:
        """Write this rank's boxes; the first rank commits when all have. Return the checkpoint's path.

        Raises CheckpointError on every rank if any rank fails. Earlier checkpoints are then untouched.

        Collective over ``group`` (the ranks that prepared it): every rank of it must call, in program order.
        """
        draft = draft_directory(self.run_dir, self.step)

        def write() -> list[Any]:
            with _explained(draft):
                self.wait()
                rank = group.ranks[group.rank]
                written = [_write_role(draft, role, rank, pieces) for role, pieces in self.pieces.items() if pieces]
                lines = piece_lines(piece for pieces in written for piece in pieces)
                files = {file: (draft / file).stat().st_size for *_, file in lines}
            return [files, [[*key, line] for key, line in lines.items()]]

        def commit_all(written: list[Any]) -> None:
            files = {name: size for sizes, _ in written for name, size in sizes.items()}
            lines = {(role, kind, file): line.encode() for _, rows in written for role, kind, file, line in rows}
            with _explained(draft):
                manifest = Manifest(self.step, group.size, files, lines, dict(self.state))
                commit(self.run_dir, manifest, self.keep, self.damaged)

        try:
            run_and_agree(group, write, commit_all)
        except CheckpointError:
            if group.rank == 0:
                drop_draft(self.run_dir, self.step)
            raise
        return step_directory(self.run_dir, self.step)


def prepare_checkpoint(
    run_dir: Path,
    step: int,
    role_states: Mapping[str, RoleState],
    state: Mapping[str, Any],
    group: Group,
    keep: int | None = 2,
    damaged: Collection[SavedStep] = (),
) -> Draft:
    """Make the directory of a checkpoint, and decide which rank writes which box.

    - role_states: the states of the roles of which this rank is a member
    - state: plain JSON; that of the group's first rank is stored
    - keep: number of newest checkpoints that stay (at least 2; None: all), beside that of the step ``state["best"]["step"]``;
      ``damaged`` ones do not count

    Drafts of earlier saves are removed, so they must have been written. Raises CheckpointError on every rank if any rank fails.

    Collective over ``group`` (the world): every rank of it must call, in program order.
    """
    if keep is not None and keep < 2:
        raise ValueError(f"keep={keep} must be at least 2: one checkpoint to fall back to")
    state_copy = json.loads(json.dumps(state))  # nobody changes it while it is written
    if state_copy != state:
        raise ValueError("checkpoint state must be plain JSON (string keys, lists instead of tuples)")
    for role, role_state in role_states.items():
        if not re.fullmatch(r"\w+", role):
            raise ValueError(f"role name {role!r} must consist of letters, digits and underscores")
        role_state.check(role)
    run_dir = Path(run_dir)
    boxes = {role: distinct_boxes(role_state.shards) for role, role_state in role_states.items()}
    writes = _assign(run_dir, step, {role: list(keys) for role, keys in boxes.items()}, group, damaged)
    pieces = {role: _pieces(role_states[role], [boxes[role][key] for key in keys]) for role, keys in writes.items()}
    return Draft(run_dir, step, state_copy, keep, damaged, pieces)


def _assign(
    run_dir: Path, step: int, boxes: dict[str, list[BoxKey]], group: Group, damaged: Collection[SavedStep]
) -> dict[str, list[BoxKey]]:
    """Return role -> the boxes that this rank writes. The first rank also prepares the directory.

    Collective over the group: every rank of it must call, in program order.
    """

    def plan_shares(boxes_by_rank: list[dict[str, Any]]) -> dict[str, list[list[int]]]:
        with _explained(draft_directory(run_dir, step)):
            prepare_draft(run_dir, step, damaged)
        plan = {}
        for role in sorted({role for each in boxes_by_rank for role in each}):
            rank_keys = [
                [(name, tuple(start), tuple(size)) for name, start, size in each.get(role, ())] for each in boxes_by_rank
            ]
            # sent back as positions in each rank's list: a few bytes per box
            positions = [{key: i for i, key in enumerate(keys)} for keys in rank_keys]
            plan[role] = [[positions[rank][key] for key in keys] for rank, keys in enumerate(plan_writes(rank_keys))]
        return plan

    plan = run_and_agree(group, lambda: boxes, plan_shares)
    return {role: [boxes[role][i] for i in plan[role][group.rank]] for role in sorted(boxes)}


def _pieces(state: RoleState, boxes: Sequence[tuple[str, Box]]) -> list[tuple[str, Box, Tensor]]:
    """Return (kind, box, values) for all kinds in these boxes of local parameters. Values are views."""
    kinds = state.kinds()
    return [
        (kind, box, tensors[parameter][box.local_slices])
        for parameter, box in boxes
        for kind, tensors in kinds.items()
        if parameter in tensors
    ]


def _write_role(draft: Path, role: str, rank: int, pieces: Sequence[tuple[str, Box, Tensor]]) -> list[StoredBox]:
    """Write boxes of one role to one file, and return what the manifest says of them."""
    views = {Spec(piece_key(kind, box), values.dtype, tuple(values.shape)): values for kind, box, values in pieces}
    path = draft / f"{role}.rank_{rank:05d}.safetensors"
    with torch.no_grad():
        hashes = write_safetensors(path, list(views), views.__getitem__)
    return [
        StoredBox(role, kind, path.name, box.name, box.shape, box.start, box.size, DTYPE_NAMES[spec.dtype], digest)
        for spec, (kind, box, _), digest in zip(views, pieces, hashes, strict=True)
    ]


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn OSError and LockLost into CheckpointError."""
    try:
        yield
    except LockLost as failure:
        raise CheckpointError(str(failure)) from failure
    except OSError as failure:
        if failure.errno == errno.ENOMEM:
            raise  # the machine's memory, not its disk
        raise CheckpointError(
            f"cannot write checkpoint {failure.filename or path}: {failure.strerror or failure}; "
            "earlier checkpoints are intact; free space there or choose another run.dir"
        ) from failure


def run_and_agree(group: Group, work: Callable[[], Any], decide: Callable[[list[Any]], Any] = lambda results: None) -> Any:
    """Run ``work`` on every rank, then ``decide`` on group index 0 with all results. Return its decision (JSON) on every rank.

    If ``work`` or ``decide`` raises CheckpointError on any rank, every rank raises that of the lowest rank, which the message names.

    Collective over the group: every rank of it must call, in program order.
    """
    result = error = decision = None
    try:
        result = work()
    except CheckpointError as failure:
        error = str(failure)
    outcomes = group.gather_json([error, result], LABEL)
    if outcomes is not None:
        failed = [(rank, error) for rank, (error, _) in zip(group.ranks, outcomes, strict=True) if error]
        if failed:
            more = f" ({len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
            error = f"rank {failed[0][0]}: {failed[0][1]}{more}"
        else:
            try:
                decision = decide([result for _, result in outcomes])
            except CheckpointError as failure:
                error = str(failure)
    decision, error = group.broadcast_json([decision, error], LABEL)
    if error:
        raise CheckpointError(error)
    return decision
