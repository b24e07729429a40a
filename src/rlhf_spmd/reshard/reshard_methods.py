"""How a rank gets its generation shard from training shards. Each method is a choice of sides for the planner. Pure.

``zero_redundancy`` (HybridFlow): generation ranks are regrouped so that a training shard is part of its rank's generation shard. The
ranks of a micro-DP group exchange what they lack, in one all-gather if their parts are equal, and the training shard stays inside the
generation shard. If the layouts do not allow it (ZeRO-3 to any layout), each rank receives exactly what it lacks and keeps its training
shard beside it. ``full_gather`` (DeepSpeed-Chat): every rank gathers the whole model from all ranks and cuts out its generation shard.
``naive_groups`` (HybridFlow-V): the same inside the training replica. These two are for comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_spmd.parallel.boxes import ParamShard, whole_shard
from rlhf_spmd.parallel.data_parallel import buckets
from rlhf_spmd.parallel.layout import GenerationLayout
from rlhf_spmd.reshard.plan import (
    Holding,
    HostOf,
    Plan,
    Shards,
    ShardsAt,
    SliceCopy,
    by_tensor,
    held_by,
    holdings,
    plan_transfer,
)

REMEDY = "generation.pp must divide layout.pp, generation.tp layout.tp, and layout.pp the number of layers"
ONE_HOST: HostOf = lambda index: 0  # noqa: E731


@dataclass(frozen=True)
class TransitionPlan:
    """Everything that one rank does to get from training to generation.

    - ``transfer``: what it gives, takes and keeps; ranks are pool indices.
    - ``made``: the parameters that it makes. ``buckets``: their names, bucket by bucket; empty: all at once, each rank its own.
    - ``places``: training parameter -> where its parts lie in the generation shard, which then holds them. Empty: the training shard
      stays beside the generation shard.
    - ``cuts``: given if ``made`` are whole tensors: the copies from them into the generation parameters.
    """

    transfer: Plan
    made: Shards
    buckets: Sequence[Sequence[str]] = ()
    places: Mapping[str, Sequence[SliceCopy]] = field(default_factory=dict)
    cuts: Sequence[SliceCopy] = ()

    def tensors(self, bucket: int) -> list[str]:
        """The global tensors of a bucket's parameters."""
        return list(dict.fromkeys(box.name for target in self.buckets[bucket] for box in self.made[target].boxes))

    def finished(self, train: Iterable[str]) -> list[list[str]]:
        """For each bucket: the training parameters that no later bucket needs. The generation storage has their values then.

        A rank also keeps the parts of a bucket that it gives to others.
        """
        if not self.buckets:
            return [list(train)]
        made = {target: i for i, bucket in enumerate(self.buckets) for target in bucket}
        last = dict.fromkeys(train, 0)
        for piece in self.transfer.copies():
            last[piece.source.parameter] = max(last[piece.source.parameter], made[piece.target.parameter])
        return [[name for name, at in last.items() if at == i] for i in range(len(self.buckets))]


@dataclass(frozen=True)
class Method:
    """A way to get the generation shard.

    - ``consecutive``: generation ranks form a grid of their own, without regrouping.
    - ``everyone``: all ranks of the pool give, each its share of what several hold. Otherwise the ranks of a training replica, or of a
      regrouping, give.
    - ``whole``: gather the whole model, then cut.

    Under ZeRO the ranks of a shard group exchange, with all their stages and slices if the grid differs. Nothing moves between copies
    of the model then, except with both ``everyone`` and ``whole``.
    """

    consecutive: bool = True
    everyone: bool = False
    whole: bool = False

    def gather_ranks(self, layout: GenerationLayout, index: int) -> list[int]:
        """The ranks that exchange weights with rank ``index``, as pool indices."""
        train = layout.train
        if self.everyone and (self.whole or train.dp_shard == 1):
            return list(range(train.size))
        if self.whole or self.everyone:  # the ranks of all stages and slices that share one copy
            return sorted(rank for other in train.shard_group(index) for rank in train.replica_group(other))
        return sorted(rank for other in train.shard_group(index) for rank in layout.micro_dp_group(other))

    def plan(
        self, layout: GenerationLayout, index: int, train: ShardsAt, wanted: ShardsAt, bucket: int, host_of: HostOf = ONE_HOST
    ) -> TransitionPlan:
        """Plan the transition of one rank. Pure. Raises ValueError if the layouts do not fit.

        ``train``, ``wanted``: shards in the training and in the generation layout. ``bucket``: the most elements of one. ``host_of``:
        pool index -> its host; a rank takes from its own host first.
        """
        ranks, mine = self.gather_ranks(layout, index), held_by(layout, wanted, index)
        source = holdings(layout.train, train, ranks, ranks)
        if self.consecutive and not self.whole:
            transfer = plan_transfer(source, holdings(layout, wanted, ranks, ranks), host_of, index)
            return TransitionPlan(transfer, mine)
        made = mine
        if self.whole:
            boxes = {box.name: box.shape for holding in source for shard in holding.shards.values() for box in shard.boxes}
            made = {name: whole_shard(name, shape) for name, shape in boxes.items()}
            if self.everyone and layout.train.dp_shard == 1:
                source = [share for holding in source for share in _shares(holding)]
        transfer = plan_transfer(source, [Holding(tuple(ranks), made)], host_of, index)
        together = plan_buckets(source, made, bucket)
        if self.whole:
            cuts = plan_transfer([Holding((index,), made)], [Holding((index,), mine)], host_of, index).copies()
            return TransitionPlan(transfer, made, together, cuts=list(cuts))
        places: dict[str, list[SliceCopy]] = {name: [] for name in held_by(layout.train, train, index)}
        for piece in transfer.copies():
            places[piece.source.parameter].append(piece)
        for name, shard in held_by(layout.train, train, index).items():
            if sum(piece.source.numel for piece in places[name]) != sum(box.numel for box in shard.boxes):
                raise ValueError(f"training parameter {name} is not part of this rank's generation shard; {REMEDY}")
        return TransitionPlan(transfer, made, together, places)


METHODS: dict[str, Method] = {
    "zero_redundancy": Method(consecutive=False),
    "full_gather": Method(everyone=True, whole=True),
    "naive_groups": Method(whole=True),
}


def choose_method(name: str, layout: GenerationLayout) -> Method:
    """The method with this name, for a layout. ``zero_redundancy`` gathers in place only if the layout was regrouped for it."""
    method = METHODS[name]
    return Method(everyone=True) if layout.consecutive and not method.consecutive else method


def plan_buckets(source: Sequence[Holding], made: Shards, limit: int) -> list[list[str]]:
    """The parameters that a gather makes, in buckets; the same on every rank.

    A bucket consists of whole units: parameters that come from equally named training parameters, such as one layer of each stage, so
    the members give equal amounts. It has at most ``limit`` elements and at most half of the largest unit, unless it is one unit.
    """
    index, units = by_tensor(source), dict[str, list[str]]()
    for target, shard in made.items():
        held = index.get(shard.boxes[0].name, []) if shard.boxes else []
        units.setdefault(held[0].parameter if held else target, []).append(target)
    sizes = {name: sum(math.prod(made[target].shape) for target in unit) for name, unit in units.items()}
    limit = min(limit, max(sizes.values(), default=0) // 2)
    return [[target for name in names for target in units[name]] for names in buckets(sizes, max(limit, 1))]


def _shares(holding: Holding) -> list[Holding]:
    """Let each of several ranks with the same shards give some rows of each parameter.

    Parameters that more ranks hold stay whole: most ranks do not need to receive them.
    """
    sides: tuple[dict[str, ParamShard], dict[str, ParamShard]] = {}, {}
    for name, shard in holding.shards.items():
        sides[not shard.whole_on_tp][name] = shard
    return [Holding(holding.ranks, sides[0]), Holding(holding.ranks, sides[1], len(holding.ranks), whole=True)]
