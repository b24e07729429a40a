"""The hybrid engines: how a rank gets its generation shard from training shards, each as a pure plan with its costs.

``zero_redundancy`` (HybridFlow): generation ranks are regrouped so that a training shard is part of its rank's generation shard;
one gather in the micro-DP group, and the training shard lives on inside the generation shard. Where the layouts do not allow it
(ZeRO-3 to any layout) each rank receives exactly what it lacks and keeps its training shard beside.
``full_gather`` (DeepSpeed-Chat): every rank gathers the whole model from all ranks, then cuts its generation shard out of it.
``naive_groups`` (HybridFlow-V): the same inside the training replica. These two are there to be measured against.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Protocol

from rlhf_spmd.parallel.boxes import Box, ParamShard, cover, intersect, zero_shards
from rlhf_spmd.parallel.layout import GenerationLayout, Layout
from rlhf_spmd.reshard.plan import Bucket, Holding, Home, Piece, Shards, ShardsAt, by_tensor, holdings, plan_gather, plan_homes
from rlhf_spmd.reshard.reallocation import RankPlan, plan_reallocation


@dataclass(frozen=True)
class Costs:
    """In multiples of M, the bytes of the tensors that the layout splits; the mean over ranks where stages differ.

    received: per rank and transition; None: it differs from rank to rank, see :func:`missing_elements`. peak: most parameter
    memory, buckets aside. twice: what is held a second time while generating.
    """

    received: Fraction | None
    peak: Fraction
    twice: Fraction


@dataclass(frozen=True)
class TransitionPlan:
    """Everything that one rank does to get from training to generation.

    ``me``: this rank's place in the gather group. buckets: in order. homes: where the training parameters lie in the
    generation shard, which then holds them; empty: the training shard stays beside it. whole: the buckets make these whole
    tensors (name -> shape), and only then ``cuts`` make the generation parameters of them. move: instead of buckets, what the
    rank sends and receives by itself.
    """

    me: int
    buckets: tuple[Bucket, ...] = ()
    homes: Mapping[str, Home] = field(default_factory=dict)
    whole: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    cuts: tuple[Piece, ...] = ()
    move: RankPlan | None = None

    @property
    def elements_received(self) -> int:
        if self.move is not None:
            return self.move.elements_received
        return sum(sum(bucket.sizes) - bucket.sizes[self.me] for bucket in self.buckets)

    def finished(self, train: Iterable[str]) -> list[list[str]]:
        """For each bucket the training parameters that no later one needs and whose values the generation storage then has."""
        if not self.buckets:
            return [list(train)]
        made = {target: i for i, bucket in enumerate(self.buckets) for target in bucket.targets}
        last = dict.fromkeys(train, 0)
        for name, home in self.homes.items():
            last[name] = max((made[piece.target] for piece in home.pieces), default=0)
        for i, bucket in enumerate(self.buckets):
            for piece in (*bucket.sent_by(self.me), *bucket.copies):
                last[piece.source] = max(last[piece.source], i)
        return [[name for name, at in last.items() if at == i] for i in range(len(self.buckets))]


class Engine(Protocol):
    """``consecutive``: generation ranks form a grid of their own. ``gather_ranks``: the group of a rank, as pool indices."""

    @property
    def consecutive(self) -> bool: ...

    def gather_ranks(self, layout: GenerationLayout, index: int) -> list[int]: ...

    def plan(self, layout: GenerationLayout, index: int, train: ShardsAt, wanted: ShardsAt, bucket: int) -> TransitionPlan:
        """``train``, ``wanted``: shards in the training and in the generation layout. ``bucket``: elements. Pure."""
        ...

    def costs(self, layout: GenerationLayout) -> Costs: ...


class InPlace:
    consecutive = False

    def gather_ranks(self, layout: GenerationLayout, index: int) -> list[int]:
        """The micro-DP group; with ZeRO that of every dp coordinate."""
        train = layout.train
        if not train.zero:
            return layout.micro_dp_group(index)
        pp, _, tp = train.coordinate(index)
        return sorted(rank for dp in range(train.dp) for rank in layout.micro_dp_group(train.index(pp, dp, tp)))

    def plan(self, layout: GenerationLayout, index: int, train: ShardsAt, wanted: ShardsAt, bucket: int) -> TransitionPlan:
        ranks = self.gather_ranks(layout, index)
        me, mine = ranks.index(index), generation_shards(layout, wanted, index)
        held, (own,) = holdings(layout.train, train, range(len(ranks)), ranks), held_by(layout.train, train, [index])
        return TransitionPlan(me, plan_gather(held, mine, me, bucket), plan_homes(own, mine))

    def costs(self, layout: GenerationLayout) -> Costs:
        """(tp - t_g p_g) / (t_g p_g t p) received without ZeRO."""
        part = Fraction(1, layout.pp * layout.tp)
        return Costs(part - Fraction(1, num_shards(layout)), part, Fraction(0))


@dataclass(frozen=True)
class WholeModel:
    """``everyone``: all ranks of the pool send equal shares, replicas of a shard a part of it each; else one training replica."""

    everyone: bool
    consecutive: bool = True

    def gather_ranks(self, layout: GenerationLayout, index: int) -> list[int]:
        train = layout.train
        return list(range(train.size)) if self.everyone or train.zero else sorted(train.replica_group(index))

    def plan(self, layout: GenerationLayout, index: int, train: ShardsAt, wanted: ShardsAt, bucket: int) -> TransitionPlan:
        ranks = self.gather_ranks(layout, index)
        held = holdings(layout.train, train, range(len(ranks)), ranks)
        if self.everyone and not layout.train.zero:
            held = [share for holding in held for share in _shares(holding)]
        boxes = {box.name: box.shape for holding in held for shard in holding.shards.values() for box in shard.boxes}
        whole = {name: ParamShard(shape, (_everything(name, shape),)) for name, shape in boxes.items()}
        me = ranks.index(index)
        cuts = []
        for target, shard in generation_shards(layout, wanted, index).items():
            for box in shard.boxes:
                ((_, source, place),), _ = cover(box, [whole[box.name].boxes[0]])
                cuts.append(Piece(box.name, source, target, place))
        return TransitionPlan(me, plan_gather(held, whole, me, bucket), whole=boxes, cuts=tuple(cuts))

    def costs(self, layout: GenerationLayout) -> Costs:
        twice = Fraction(1, num_shards(layout))
        own = Fraction(1, layout.train.size) if self.everyone else twice
        return Costs(1 - own, 1 + twice, twice)


@dataclass(frozen=True)
class Reallocation:
    """``host_of``: pool index -> its host, which is asked before others are."""

    host_of: Callable[[int], Hashable] = lambda index: 0
    consecutive: bool = True

    def gather_ranks(self, layout: GenerationLayout, index: int) -> list[int]:
        return list(range(layout.train.size))

    def plan(self, layout: GenerationLayout, index: int, train: ShardsAt, wanted: ShardsAt, bucket: int) -> TransitionPlan:
        ranks = range(layout.train.size)
        sides = holdings(layout.train, train, ranks), holdings(layout, wanted, ranks)
        return TransitionPlan(index, move=plan_reallocation(*sides, self.host_of, index))

    def costs(self, layout: GenerationLayout) -> Costs:
        twice = Fraction(1, num_shards(layout))
        return Costs(None, Fraction(1, layout.pp * layout.tp) + twice, twice)


ENGINES: dict[str, Engine] = {
    "zero_redundancy": InPlace(),
    "full_gather": WholeModel(everyone=True),
    "naive_groups": WholeModel(everyone=False),
}


def choose_engine(name: str, layout: GenerationLayout, host_of: Callable[[int], Hashable] = lambda index: 0) -> Engine:
    """The engine of a setting for a layout: ``zero_redundancy`` gathers in place where the layout was regrouped for it."""
    engine = ENGINES[name]
    return Reallocation(host_of) if layout.consecutive and not engine.consecutive else engine


def held_by(layout: Layout, shards: ShardsAt, ranks: Iterable[int]) -> list[Shards]:
    """The training shards of some ranks (pool indices), ZeRO's rows cut out."""
    shards, cut = cache(shards), layout.zero > 0 and layout.dp > 1
    at = [(layout.coordinate(rank)[1], shards(layout.coordinate(rank)[0], layout.coordinate(rank)[2])) for rank in ranks]
    return [zero_shards(whole, dp, layout.dp) if cut else whole for dp, whole in at]


def generation_shards(layout: GenerationLayout, shards: ShardsAt, index: int) -> Shards:
    pp, _, tp = layout.coordinate(index)
    return shards(pp, tp)


def num_shards(layout: GenerationLayout) -> int:
    """Distinct training shards: p * t, and with ZeRO p * t * d."""
    train = layout.train
    return train.pp * train.tp * (train.dp if train.zero else 1)


def missing_elements(held: Shards, wanted: Shards) -> int:
    """Elements of ``wanted`` that lie outside ``held``: what a rank has to receive at least."""
    index = by_tensor([Holding((0,), held)])
    return sum(
        box.numel - sum(common[0].numel for other in index.get(box.name, []) if (common := intersect(box, other.box)))
        for shard in wanted.values()
        for box in shard.boxes
    )


def _shares(holding: Holding) -> list[Holding]:
    """Ranks with the same shards answer for some rows of each parameter. Those that are replicated beyond these ranks stay whole:
    most ranks need not receive them at all."""
    sides: tuple[dict[str, ParamShard], dict[str, ParamShard]] = {}, {}
    for name, shard in holding.shards.items():
        sides[not shard.replicated][name] = shard
    return [Holding(holding.ranks, sides[0]), Holding(holding.ranks, sides[1], len(holding.ranks) > 1, whole=True)]


def _everything(name: str, shape: tuple[int, ...]) -> Box:
    zeros = (0,) * len(shape)
    return Box(name, shape, zeros, shape, zeros)
