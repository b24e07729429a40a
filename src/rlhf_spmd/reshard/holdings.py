"""Holdings: which ranks hold which shards of a model. A side of a move, source or target, is a list of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rlhf_spmd.parallel.boxes import Box, ParamShard, intersect, zero_shards
from rlhf_spmd.parallel.layout import GenerationLayout, Layout

Shards = Mapping[str, ParamShard]
# (pp, tp) coordinate in a layout -> the shards there, with all rows that ZeRO and ep divide
ShardsAt = Callable[[int, int], Shards]


@dataclass(frozen=True)
class Holding:
    """``ranks``, and the shards that each of them holds; no element twice on one rank.

    - ``parts``: this many neighbouring ranks share one copy, each with its rows of every parameter (ZeRO: ``zero_rows``). It divides
      the number of ranks. 1: each rank holds all rows.
    - ``replicated``: each rank holds all rows, but sends only its share of ``parts``.
    """

    ranks: tuple[int, ...]
    shards: Shards
    parts: int = 1
    replicated: bool = False

    def __post_init__(self) -> None:
        assert len(self.ranks) % self.parts == 0, f"{len(self.ranks)} ranks do not hold whole copies of {self.parts} parts"


def holdings(
    layout: Layout | GenerationLayout, shards: ShardsAt, ranks: Sequence[int], group: Iterable[int] | None = None
) -> list[Holding]:
    """Return what ``ranks`` hold of a model in a layout. ``group``: their pool indices, by default 0, 1, ...

    The ranks of a copy group follow each other in ``group``, which has all of them or none.
    """
    ranks_at: dict[tuple[int, int], list[int]] = {}
    for index, rank in zip(range(len(ranks)) if group is None else group, ranks, strict=True):
        pp, _, _, tp = layout.coordinate(index)
        ranks_at.setdefault((pp, tp), []).append(rank)
    if layout.ep == 1:
        return [Holding(tuple(holders), shards(*coordinate), layout.dp_shard) for coordinate, holders in ranks_at.items()]
    return [
        side for coordinate, holders in ranks_at.items() for side in _by_expert(layout, shards(*coordinate), tuple(holders))
    ]


def _by_expert(layout: Layout | GenerationLayout, shards: Shards, ranks: tuple[int, ...]) -> Iterator[Holding]:
    """Yield what ZeRO divides, and the experts, which ep divides."""
    for parts, is_expert in ((layout.dp_shard, False), (layout.ep, True)):
        yield Holding(ranks, {name: shard for name, shard in shards.items() if shard.by_expert == is_expert}, parts)


def held_by(layout: Layout | GenerationLayout, shards: ShardsAt, index: int) -> Shards:
    """Return the shards of one rank (a pool index), with only its rows under ZeRO and its experts under ep."""
    pp, _, _, tp = layout.coordinate(index)
    groups = layout.shard_group(index), layout.ep_group(index)
    (rank, size), ep = ((group.index(index), len(group)) for group in groups)
    return zero_shards(shards(pp, tp), rank, size, ep) if layout.model_copy_size > 1 else shards(pp, tp)


class HeldBox(NamedTuple):
    """One box of a tensor in one holding: the parameter that has it, and that parameter's rows (0: not split)."""

    holding: int
    parameter: str
    rows: int
    box: Box

    @property
    def key(self) -> tuple[object, ...]:
        """Return what is equal for tensors that a holding holds in the same way."""
        return self.holding, self.rows, self.box[1:]


def by_tensor(side: Sequence[Holding]) -> dict[str, list[HeldBox]]:
    """Return the boxes of each tensor in all holdings, by its name."""
    index: dict[str, list[HeldBox]] = {}
    for number, holding in enumerate(side):
        for parameter, shard in holding.shards.items():
            rows = shard.shape[0] if holding.parts > 1 else 0
            for box in shard.boxes:
                index.setdefault(box.name, []).append(HeldBox(number, parameter, rows, box))
    return index


def missing_elements(present: Shards, needed: Shards) -> int:
    """Return how many elements of ``needed`` are outside ``present``: the least that a rank has to receive."""
    index = by_tensor([Holding((0,), present)])
    return sum(
        box.numel - sum(common[0].numel for other in index.get(box.name, []) if (common := intersect(box, other.box)))
        for shard in needed.values()
        for box in shard.boxes
    )
