"""Gradients across ranks: sums over data-parallel replicas in flat buckets, and the norm of the whole model's gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlhf_spmd.kernels import capabilities
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.collectives import Group

BUCKET_ELEMENTS = 1 << 24  # 64 MB in fp32: large enough for full bandwidth, small beside a model
MATRIX_ELEMENTS = 1 << 29  # the most elements of Muon's matrices that a rank handles at a time, in bfloat16


def sum_in_buckets(grads: Mapping[str, Tensor], group: Group, label: str) -> None:
    """Sum equally named and shaped gradients over the group, in place, one flat bucket at a time.

    Collective over the group: every rank of it must call, in program order.
    """
    if group.size == 1:
        return
    for names in buckets({name: grad.numel() for name, grad in grads.items()}):
        flat = torch.cat([grads[name].reshape(-1) for name in names])
        group.all_reduce(flat, label)
        for name, part in zip(names, flat.split([grads[name].numel() for name in names]), strict=True):
            grads[name].copy_(part.view(grads[name].shape))


def buckets(sizes: Mapping[str, int], limit: int | None = None) -> Iterator[list[str]]:
    """Return runs of names with at most ``limit`` elements together (default BUCKET_ELEMENTS), unless a single one has more. Pure."""
    limit = limit or BUCKET_ELEMENTS
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > limit:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names


def _box_keys(plan: Mapping[str, ParamShard]) -> set[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    return {(box.name, box.start, box.size) for shard in plan.values() for box in shard.boxes}


def owned_boxes(plan: Mapping[str, ParamShard], before: Iterable[Mapping[str, ParamShard]]) -> dict[str, ParamShard]:
    """Return ``plan`` without the boxes that a plan in ``before`` holds too, so each part of a model has one owner. Pure.

    Copies (norms over tp, KV heads that several tp ranks share, tied embeddings) are equal boxes.
    """
    seen = {key for other in before for key in _box_keys(other)}
    return {
        name: replace(shard, boxes=tuple(box for box in shard.boxes if (box.name, box.start, box.size) not in seen))
        for name, shard in plan.items()
    }


def partial_boxes(
    plan: Mapping[str, ParamShard], others: Iterable[Mapping[str, ParamShard]], scattered: Collection[str] = ()
) -> dict[str, ParamShard]:
    """Return the boxes of ``plan`` that other tp ranks hold too, if each rank has only a part of their gradient. Pure.

    These are KV heads that several ranks share: each rank sees the gradient from its own query heads, and the sum is the true one. For
    fully replicated parameters every rank has the whole gradient, so they are left out. Those in ``scattered`` are not, because each
    rank applies them to its own tokens only (sequence parallelism).
    """
    seen = {key for other in others for key in _box_keys(other)}
    shared = {
        name: replace(shard, boxes=tuple(box for box in shard.boxes if (box.name, box.start, box.size) in seen))
        for name, shard in plan.items()
        if not shard.replicated_on_tp or name in scattered
    }
    return {name: shard for name, shard in shared.items() if shard.boxes}


def sum_partial(grads: Mapping[str, Tensor], partial: Mapping[str, ParamShard], tp: Group) -> None:
    """Sum the gradients of :func:`partial_boxes` over the ranks that share them, in place.

    Every rank puts its part into a zeroed copy of the whole Hugging Face tensor, and reads back the part that it holds. Each rank of
    the group must hold boxes of the same tensors. Collective over tp: every rank of it must call, in program order.
    """
    if not partial:
        return
    views = [(grads[name][box.local_slices], box) for name, shard in partial.items() for box in shard.boxes]
    tensors = {box.name: part.new_zeros(box.shape) for part, box in views}
    for part, box in views:
        tensors[box.name][box.global_slices] = part
    sum_in_buckets(tensors, tp, "partial_gradients")
    for part, box in views:
        part.copy_(tensors[box.name][box.global_slices])


def squared_norm(grads: Mapping[str, Tensor], owned: Mapping[str, ParamShard]) -> Tensor:
    """Return the sum of squares of the gradients inside the owned boxes of the local shards, float64 []."""
    norms = []
    for name, grad in grads.items():
        boxes = owned[name].boxes
        owns_all = sum(box.numel for box in boxes) == grad.numel()
        parts = [grad] if owns_all else [grad[box.local_slices] for box in boxes]
        # the norm makes a copy, which on CPUs should stay in the cache
        size = BUCKET_ELEMENTS if capabilities(grad.device).streams else 1 << 16
        pieces = [piece for part in parts for piece in part.reshape(-1).split(size) if piece.numel()]
        norms += [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    device = next(iter(grads.values())).device
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
