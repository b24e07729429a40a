"""Muon (Jordan 2024; Liu et al. 2025, arXiv 2502.16982), which needs whole matrices, from the slices that ranks hold.

Each matrix of a bucket has an owner among the ranks of dp and tp, so all of them compute at the same time. Slices go to the owner over
tp, and then over its shard group if ZeRO has cut rows. The result goes to the owner's peers in the other copies of the model, and in
every copy back the same way. Messages are bfloat16, in which torch's Muon computes anyway, so no bit is lost.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_spmd.data.balance import greedy_partition
from rlhf_spmd.parallel.boxes import Box, ParamShard, zero_shards
from rlhf_spmd.parallel.collectives import Group, wait_all
from rlhf_spmd.parallel.data_parallel import MATRIX_ELEMENTS
from rlhf_spmd.parallel.mesh import Mesh
from rlhf_spmd.workers.optim_config import OptimConfig, StateForms, States, Tensors

LABEL = "muon_matrices"


class Slice(NamedTuple):
    """The part of a matrix that a rank holds."""

    shard: int  # the rank's place in its shard group
    tp: int
    box: Box


class MatrixOwner(NamedTuple):
    """The rank that orthogonalizes a matrix, as its indices in the groups ``dp_replicate``, ``dp_shard`` and ``tp``."""

    copy: int
    shard: int
    tp: int


MatrixOwners = Mapping[str, MatrixOwner]  # by the matrix's Hugging Face name
Route = tuple[Slice, int, int]  # a slice, and the group indices of its sender and receiver


class Muon:
    """Updates the matrices of a stage's layers as Hugging Face stores them: fused q, k and v are three. Not embeddings and heads.

    - copies: the ranks that hold the same rows
    - shard: the ranks that share one copy
    - shards_of_tp: tp rank -> its parameters, before rows are cut out
    - experts: whether to update the matrices that ep divides, or the others; None: all
    - sizes: parameter name -> the most elements of it that a rank handles at a time: its shard, or its share of the complete matrices
    """

    bucket = MATRIX_ELEMENTS

    def __init__(
        self,
        copies: Group,
        shard: Group,
        tp: Group,
        shards_of_tp: Callable[[int], Mapping[str, ParamShard]],
        experts: bool | None = None,
    ) -> None:
        self._copies = copies
        self._shard = shard
        self._tp = tp
        self._shards_of_tp = cache(shards_of_tp)
        self._boxes = cache(self._find_boxes)
        first = {name: x for name, x in self._shards_of_tp(0).items() if "layers." in name and len(x.shape) == 2}
        first = {name: x for name, x in first.items() if experts in (None, x.by_expert)}
        self._shapes = {name: {box.name: box.shape for box in planned.boxes} for name, planned in first.items()}
        num_ranks = copies.size * shard.size * tp.size
        numels = {name: sum(rows * columns for rows, columns in shapes.values()) for name, shapes in self._shapes.items()}
        self.sizes = {
            name: max(-(-numels[name] // num_ranks), first[name].shape[0] * first[name].shape[1] // shard.size)
            for name in first
        }

    def state_forms(self, shape: Sequence[int], dtype: torch.dtype) -> StateForms:
        """Return the states of a parameter."""
        return {"momentum_buffer": (shape, dtype)}

    def update(self, config: OptimConfig, params: Tensors, grads: list[Tensor], states: States, step: int, lr: float) -> None:
        """Update parameters and states in place. Collective over dp and tp: every rank of them must call, in program order."""
        momenta = [state["momentum_buffer"] for state in states]
        torch._foreach_lerp_(momenta, grads, 1 - config.momentum)
        pairs = zip(params, zip(grads, momenta, strict=True), strict=True)
        steps = {name: torch.lerp(*pair, config.momentum).bfloat16() for name, pair in pairs}  # Nesterov's
        self._orthogonalize(steps)
        torch._foreach_mul_(list(params.values()), 1 - lr * config.weight_decay)
        for name, orthogonal_step in steps.items():
            for box in self._boxes(name, self._shard.rank, self._tp.rank):
                local = box.local_slices
                # steps of the size of AdamW's: section 2.2 of Liu et al.
                params[name][local].add_(orthogonal_step[local], alpha=-lr * 0.2 * max(box.shape) ** 0.5)

    def _find_boxes(self, name: str, shard: int, tp: int) -> tuple[Box, ...]:
        return zero_shards({name: self._shards_of_tp(tp)[name]}, shard, self._shard.size)[name].boxes

    def _orthogonalize(self, steps: Tensors) -> None:
        """Replace this rank's part of each step by its orthogonalized values, in place."""
        copies = self._copies
        shard = self._shard
        tp = self._tp
        device = next(iter(steps.values())).device
        names = {tensor: name for name in steps for tensor in self._shapes[name]}
        shapes = {tensor: self._shapes[name][tensor] for tensor, name in names.items()}
        owners = self._owners(shapes)
        local_slices = [Slice(shard.rank, tp.rank, box) for name in steps for box in self._boxes(name, shard.rank, tp.rank)]
        parts = {piece: steps[names[piece.box.name]][piece.box.local_slices] for piece in local_slices}
        owners_in_copy = {tensor: owner for tensor, owner in owners.items() if owner.copy == copies.rank}
        parts = exchange(tp, self._over_tp(names, owners_in_copy), parts, device)
        parts = exchange(shard, self._over_shard(names, owners_in_copy), parts, device)
        tensors = [tensor for tensor, owner in owners_in_copy.items() if owner[1:] == (shard.rank, tp.rank)]
        matrices = {tensor: torch.empty(shapes[tensor], dtype=torch.bfloat16, device=device) for tensor in tensors}
        for piece, part in parts.items():
            matrices[piece.box.name][piece.box.global_slices] = part
        matrices = {tensor: orthogonal(matrix) for tensor, matrix in matrices.items()}
        if copies.size > 1:
            for tensor, owner in owners.items():
                if owner[1:] == (shard.rank, tp.rank):
                    empty = torch.empty(shapes[tensor], dtype=torch.bfloat16, device=device)
                    matrices[tensor] = copies.broadcast(matrices.get(tensor, empty), owner.copy, LABEL)
        over_shard = list(self._over_shard(names, owners))
        over_tp = self._over_tp(names, owners)
        results = {
            piece: matrices[piece.box.name][piece.box.global_slices] for piece, _, owner in over_shard if owner == shard.rank
        }
        results = exchange(shard, [(piece, owner, holder) for piece, holder, owner in over_shard], results, device)
        for piece, part in exchange(tp, [(piece, owner, holder) for piece, holder, owner in over_tp], results, device).items():
            steps[names[piece.box.name]][piece.box.local_slices] = part

    def _owners(self, shapes: Mapping[str, tuple[int, ...]]) -> MatrixOwners:
        shards, slices = self._shard.size, self._tp.size
        shared = assign_matrices(shapes, self._copies.size * shards * slices)
        return {
            tensor: MatrixOwner(rank // (shards * slices), rank // slices % shards, rank % slices)
            for tensor, rank in shared.items()
        }

    def _over_tp(self, names: Mapping[str, str], owners: MatrixOwners) -> Iterator[Route]:
        """Yield the slices in this rank's tp group that it sends or receives: from their holders to the owner's tp rank."""
        tp = self._tp
        for tensor, owner in owners.items():
            for holder in range(tp.size) if owner.tp == tp.rank else [tp.rank]:
                yield from ((piece, holder, owner.tp) for piece in self._slices(names, tensor, self._shard.rank, holder))

    def _over_shard(self, names: Mapping[str, str], owners: MatrixOwners) -> Iterator[Route]:
        """Yield the slices of all tp ranks that then go to the owner's rank in the shard group."""
        shard, tp = self._shard, self._tp
        for tensor, owner in owners.items():
            if owner.tp == tp.rank:
                for holder in range(shard.size) if owner.shard == shard.rank else [shard.rank]:
                    slices = (piece for rank in range(tp.size) for piece in self._slices(names, tensor, holder, rank))
                    yield from ((piece, holder, owner.shard) for piece in slices)

    def _slices(self, names: Mapping[str, str], tensor: str, shard: int, tp: int) -> list[Slice]:
        return [Slice(shard, tp, box) for box in self._boxes(names[tensor], shard, tp) if box.name == tensor]


def muons_of(mesh: Mesh, shards_of_tp: Callable[[int], Mapping[str, ParamShard]]) -> list[Muon]:
    """Return one :class:`Muon` for all matrices of a mesh. With experts in parallel: one for what ZeRO divides, one for the experts.

    ``shards_of_tp``: as for :class:`Muon`.
    """
    if mesh.ep.size == 1:
        return [Muon(mesh.dp_replicate, mesh.dp_shard, mesh.tp, shards_of_tp)]
    groups = (mesh.dp_replicate, mesh.dp_shard, False), (mesh.ep_copies, mesh.ep, True)
    return [Muon(copies, shard, mesh.tp, shards_of_tp, experts) for copies, shard, experts in groups]


def assign_matrices(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> dict[str, int]:
    """Return matrix -> the rank that orthogonalizes it: the most expensive first, each to the least loaded rank. Pure."""
    work = {tensor: math.prod(shape) * min(shape) for tensor, shape in shapes.items()}
    order = sorted(work, key=lambda tensor: -work[tensor])
    ranks_of = dict(zip(order, greedy_partition([work[tensor] for tensor in order], ranks), strict=True))
    return {tensor: ranks_of[tensor] for tensor in shapes}


def exchange(
    group: Group, routes: Iterable[Route], local_parts: Mapping[Slice, Tensor], device: torch.device
) -> dict[Slice, Tensor]:
    """Move slices along ``routes``, in one bfloat16 message per pair of ranks. Return the slices of this rank afterwards.

    Collective over the ranks that take part. Two ranks must list what goes between them in the same order.
    """
    arrived: dict[Slice, Tensor] = {}
    to_send = defaultdict[int, list[Tensor]](list)
    to_receive = defaultdict[int, list[Slice]](list)
    for piece, sender, receiver in routes:
        if sender == receiver == group.rank:
            arrived[piece] = local_parts[piece]
        elif sender == group.rank:
            to_send[receiver].append(local_parts[piece].reshape(-1))
        elif receiver == group.rank:
            to_receive[sender].append(piece)
    sizes = {sender: [piece.box.numel for piece in pieces] for sender, pieces in to_receive.items()}
    buffers = {sender: torch.empty(sum(numels), dtype=torch.bfloat16, device=device) for sender, numels in sizes.items()}
    messages = [(receiver, torch.cat(parts)) for receiver, parts in to_send.items()]
    wait_all(group.start_exchange(messages, [*buffers.items()], LABEL))
    for sender, pieces in to_receive.items():
        parts = buffers[sender].split(sizes[sender])
        arrived |= {piece: part.view(piece.box.size) for piece, part in zip(pieces, parts, strict=True)}
    return arrived


def orthogonal(matrix: Tensor) -> Tensor:
    """Return approximately the nearest matrix [m, n] with orthonormal rows or columns: torch's Muon step without momentum and scale."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    param = torch.nn.Parameter(torch.zeros(wide.shape, dtype=torch.float32, device=matrix.device))
    param.grad = wide.float().contiguous()
    torch.optim.Muon([param], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    step = -param.detach()
    return (step if wide is matrix else step.T).bfloat16().contiguous()
