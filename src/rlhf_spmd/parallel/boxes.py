"""Parameter shards as boxes in global tensors. Pure.

A local parameter (possibly fused, such as q, k and v in one matrix) is described by the boxes of the Hugging Face tensors that it
holds. Loading, checkpoints, resharding and reallocation are all intersections of such boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Box(NamedTuple):
    """``name[start : start + size]`` of a global tensor of ``shape``. ``local``: its first element inside the local parameter.

    All tuples have one entry per tensor dim.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    local: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def global_slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.local, self.size, strict=True))


@dataclass(frozen=True)
class ParamShard:
    """One local parameter: its shape on this rank, and the boxes that fill it. Several ranks may hold the same box.

    ``replicated_on_tp``: every tp rank holds all of it, such as norms. ``by_expert``: its rows are those of one expert after the other;
    expert parallelism divides them.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    replicated_on_tp: bool = False
    by_expert: bool = False


def whole_shard(name: str, shape: tuple[int, ...]) -> ParamShard:
    """Return the shard of a rank that holds a whole tensor."""
    start = (0,) * len(shape)
    return ParamShard(shape, (Box(name, shape, start, shape, start),))


def intersect(a: Box, b: Box) -> tuple[Box, Box] | None:
    """Return the common part of two boxes, located in a's and in b's local parameter; None if they are disjoint."""
    if a.name != b.name:
        return None
    start = tuple(map(max, a.start, b.start))
    size = tuple([min(x + n, y + m) - s for x, n, y, m, s in zip(a.start, a.size, b.start, b.size, start, strict=True)])
    if min(size, default=1) <= 0:
        return None
    return _part(a, start, size), _part(b, start, size)


def _part(box: Box, start: tuple[int, ...], size: tuple[int, ...]) -> Box:
    """Return the part of a box that is ``[start : start + size]`` of the global tensor."""
    if size == box.size:
        return box
    local = tuple([offset + s - o for offset, s, o in zip(box.local, start, box.start, strict=True)])
    return Box(box.name, box.shape, start, size, local)


def zero_rows(num_rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the rows [first, last) that FSDP2 leaves on one of ``ranks`` ranks: torch.chunk's ceil-sized chunks along dim 0."""
    chunk = -(-num_rows // ranks)
    return min(rank * chunk, num_rows), min((rank + 1) * chunk, num_rows)


def box_rows(box: Box, first: int, last: int) -> Box | None:
    """Return the part of a box in rows [first, last) of its local parameter; None if there is none."""
    offset = box.start[0] - box.local[0]
    a, b = max(box.local[0], first), min(box.local[0] + box.size[0], last)
    return narrow(box, 0, a + offset, b + offset) if a < b else None


def shard_rows(shard: ParamShard, first: int, last: int) -> ParamShard:
    """Return rows [first, last) of a local parameter, as a local parameter of their own."""
    parts = [part for box in shard.boxes if (part := box_rows(box, first, last))]
    boxes = tuple(part._replace(local=(part.local[0] - first, *part.local[1:])) for part in parts)
    return replace(shard, shape=(last - first, *shard.shape[1:]), boxes=boxes)


def zero_shards(shards: Mapping[str, ParamShard], rank: int, ranks: int, ep: tuple[int, int] = (0, 1)) -> dict[str, ParamShard]:
    """Return what ZeRO leaves on one of ``ranks`` replicas.

    ``ep``: this rank's index and the number of the ranks that share the experts. Several divide the experts, and ZeRO the rest.
    """
    divided = {True: ep if ep[1] > 1 else (rank, ranks), False: (rank, ranks)}
    return {name: shard_rows(shard, *zero_rows(shard.shape[0], *divided[shard.by_expert])) for name, shard in shards.items()}


def cover(target: Box, sources: Sequence[Box]) -> tuple[list[tuple[int, Box, Box]], list[Box]]:
    """Return how to fill ``target`` from overlapping or disjoint ``sources``, earlier ones first, every element exactly once.

    That is a list of (source index, part in the source's local parameter, part in the target's), and the parts that no source has.
    """
    parts, missing = [], [target]
    for index, source in enumerate(sources):
        rest = []
        for box in missing:
            common = intersect(box, source)
            if common is None:
                rest.append(box)
            else:
                parts.append((index, common[1], common[0]))
                rest += _around(box, common[0])
        missing = rest
        if not missing:
            break
    return parts, missing


def _around(outer: Box, inner: Box) -> Iterator[Box]:
    """Return the rest of a box around a part of it, as disjoint boxes: at most two per tensor dim."""
    for dim, (first, n) in enumerate(zip(inner.start, inner.size, strict=True)):
        start = outer.start[dim]
        stop = start + outer.size[dim]
        last = first + n
        if start < first:
            yield narrow(outer, dim, start, first)
        if last < stop:
            yield narrow(outer, dim, last, stop)
        outer = narrow(outer, dim, first, last)


def narrow(box: Box, dim: int, first: int, last: int) -> Box:
    """Return the part of a box with global indices [first, last) along ``dim``."""
    return _part(box, (*box.start[:dim], first, *box.start[dim + 1 :]), (*box.size[:dim], last - first, *box.size[dim + 1 :]))
