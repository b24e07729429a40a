"""The hybrid engines: how a rank gets its generation shard from training shards, each as a pure plan with its costs.

``zero_redundancy`` (HybridFlow): generation ranks are regrouped so that a training shard is part of its rank's generation shard;
one gather in the micro-DP group, and the training shard lives on inside the generation shard. Where the layouts do not allow it
(ZeRO-3 to any layout) each rank receives exactly what it lacks and keeps its training shard beside.
``full_gather`` (DeepSpeed-Chat): every rank gathers the whole model from all ranks, then cuts its generation shard out of it.
``naive_groups`` (HybridFlow-V): the same inside the training replica. These two are there to be measured against.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from rlhf_spmd.parallel.boxes import Box, ParamShard, cover, intersect
from rlhf_spmd.parallel.layout import GenerationLayout
from rlhf_spmd.reshard.plan import Bucket, Home, Piece, Shards, by_tensor, own_share, plan_gather, plan_homes
from rlhf_spmd.reshard.reallocation import Holding, RankPlan, plan_reallocation


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


Group = Sequence[Shards]  # of the ranks of a gather group, in its order


class Engine(Protocol):
    """``consecutive``: generation ranks form a grid of their own. ``gather_ranks``: the group of a rank, as pool indices."""

    @property
    def consecutive(self) -> bool: ...

    def gather_ranks(self, layout: GenerationLayout, index: int) -> list[int]: ...

    def plan(self, layout: GenerationLayout, index: int, train: Group, wanted: Group, bucket: int) -> TransitionPlan:
        """``train``, ``wanted``: training and generation shards of the gather group. ``bucket``: elements. Pure."""
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

    def plan(self, layout: GenerationLayout, index: int, train: Group, wanted: Group, bucket: int) -> TransitionPlan:
        me = self.gather_ranks(layout, index).index(index)
        return TransitionPlan(me, plan_gather(train, wanted[me], me, bucket), plan_homes(train[me], wanted[me]))

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

    def plan(self, layout: GenerationLayout, index: int, train: Group, wanted: Group, bucket: int) -> TransitionPlan:
        ranks = self.gather_ranks(layout, index)
        if self.everyone and not layout.train.zero:
            replicas = [layout.train.coordinate(rank)[1] for rank in ranks]
            train = [own_share(shards, dp, layout.train.dp) for shards, dp in zip(train, replicas, strict=True)]
        boxes = {box.name: box.shape for shards in train for shard in shards.values() for box in shard.boxes}
        whole = {name: ParamShard(shape, (_everything(name, shape),)) for name, shape in boxes.items()}
        me = ranks.index(index)
        cuts = []
        for target, shard in wanted[me].items():
            for box in shard.boxes:
                ((_, source, place),), _ = cover(box, [whole[box.name].boxes[0]])
                cuts.append(Piece(box.name, source, target, place))
        return TransitionPlan(me, plan_gather(train, whole, me, bucket), whole=boxes, cuts=tuple(cuts))

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

    def plan(self, layout: GenerationLayout, index: int, train: Group, wanted: Group, bucket: int) -> TransitionPlan:
        held, needed = ([Holding((member,), shards) for member, shards in enumerate(side)] for side in (train, wanted))
        return TransitionPlan(index, move=plan_reallocation(held, needed, self.host_of, index))

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


def num_shards(layout: GenerationLayout) -> int:
    """Distinct training shards: p * t, and with ZeRO p * t * d."""
    train = layout.train
    return train.pp * train.tp * (train.dp if train.zero else 1)


def missing_elements(held: Shards, wanted: Shards) -> int:
    """Elements of ``wanted`` that lie outside ``held``: what a rank has to receive at least."""
    index = by_tensor(held)
    return sum(
        box.numel - sum(common[0].numel for _, other in index.get(box.name, []) if (common := intersect(box, other)))
        for shard in wanted.values()
        for box in shard.boxes
    )


def _everything(name: str, shape: tuple[int, ...]) -> Box:
    zeros = (0,) * len(shape)
    return Box(name, shape, zeros, shape, zeros)
