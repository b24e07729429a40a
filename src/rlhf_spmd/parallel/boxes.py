"""Every parameter shard is a box in a global tensor. Pure.

A local parameter (possibly fused, as q, k and v in one matrix) is described by the boxes of the Hugging Face tensors that it
holds. Loading, checkpoints, the hybrid engine and reallocation are all intersections of such boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Box:
    """``name[start : start + size]`` of a global tensor of ``shape``, lying at ``local`` inside a local parameter.

    All tuples have one entry per tensor dim. ``local`` is the box's first element inside the local parameter.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    local: tuple[int, ...]

    @property
    def numel(self) -> int:
        n = 1
        for extent in self.size:
            n *= extent
        return n

    @property
    def global_slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))

    @property
    def local_slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.local, self.size, strict=True))


@dataclass(frozen=True)
class ParamShard:
    """One local parameter: its shape on this rank and the boxes that fill it.

    ``replicated`` is the mesh axes over which every rank holds the same values beyond dp: norms over "tp", for example.
    Several ranks may hold the same box; ``boxes`` is what this one holds.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    replicated: tuple[str, ...] = ()


def intersect(a: Box, b: Box) -> tuple[Box, Box] | None:
    """The common part of two boxes of one global tensor, as located in a's and in b's local parameter; None if disjoint."""
    if a.name != b.name:
        return None
    start = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    stop = tuple(min(x + n, y + m) for x, n, y, m in zip(a.start, a.size, b.start, b.size, strict=True))
    size = tuple(e - s for s, e in zip(start, stop, strict=True))
    if any(n <= 0 for n in size):
        return None

    def cut(box: Box) -> Box:
        local = tuple(at + s - o for at, s, o in zip(box.local, start, box.start, strict=True))
        return replace(box, start=start, size=size, local=local)

    return cut(a), cut(b)


def zero_rows(num_rows: int, dp_rank: int, dp: int) -> tuple[int, int]:
    """Rows [first, last) of a parameter that FSDP2 leaves on one rank: torch.chunk's ceil-sized chunks along dim 0."""
    chunk = -(-num_rows // dp)
    return min(dp_rank * chunk, num_rows), min((dp_rank + 1) * chunk, num_rows)


def shard_rows(shard: ParamShard, first: int, last: int) -> ParamShard:
    """The part of a local parameter's boxes that lies in its rows [first, last), located from row ``first`` on."""
    boxes = []
    for box in shard.boxes:
        a, b = max(box.local[0], first), min(box.local[0] + box.size[0], last)
        if a < b:
            offset = a - box.local[0]
            boxes.append(
                replace(
                    box,
                    start=(box.start[0] + offset, *box.start[1:]),
                    size=(b - a, *box.size[1:]),
                    local=(a - first, *box.local[1:]),
                )
            )
    return ParamShard((last - first, *shard.shape[1:]), tuple(boxes), shard.replicated)


def zero_shards(shards: Mapping[str, ParamShard], dp_rank: int, dp: int) -> dict[str, ParamShard]:
    """What ZeRO leaves of a rank's parameters on one of ``dp`` replicas."""
    return {name: shard_rows(shard, *zero_rows(shard.shape[0], dp_rank, dp)) for name, shard in shards.items()}


def subtract(a: Box, b: Box) -> list[Box]:
    """What of ``a`` lies outside ``b``, as disjoint boxes located in a's local parameter: at most two per tensor dim."""
    common = intersect(a, b)
    if common is None:
        return [a]
    inner, rest, outer = common[0], [], a
    for dim in range(len(a.shape)):
        first, last = inner.start[dim], inner.start[dim] + inner.size[dim]
        stop = outer.start[dim] + outer.size[dim]
        rest += [_narrow(outer, dim, x, y) for x, y in ((outer.start[dim], first), (last, stop)) if x < y]
        outer = _narrow(outer, dim, first, last)
    return rest


def cover(target: Box, sources: Sequence[Box]) -> tuple[list[tuple[int, Box, Box]], list[Box]]:
    """Fill ``target`` from overlapping or disjoint ``sources``, earlier ones first, every element exactly once.

    Returns (source index, part in the source's local parameter, part in the target's) and the parts that no source holds.
    """
    taken, missing = [], [target]
    for index, source in enumerate(sources):
        rest = []
        for box in missing:
            common = intersect(box, source)
            if common is None:
                rest.append(box)
            else:
                taken.append((index, common[1], common[0]))
                rest += subtract(box, source)
        missing = rest
        if not missing:
            break
    return taken, missing


def _narrow(box: Box, dim: int, first: int, last: int) -> Box:
    """The part of a box with global indices [first, last) along ``dim``."""

    def put(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    return replace(
        box,
        start=put(box.start, first),
        size=put(box.size, last - first),
        local=put(box.local, box.local[dim] + first - box.start[dim]),
    )
