"""How a rank gets its generation shard from training shards. Each method is a choice of sides for the planner. Pure.

M: bytes of the model; g: ranks that share it in generation (pp * tp); n: ranks that share it in training; N: ranks of the pool.

- ``zero_redundancy`` (HybridFlow): receives M/g - M/n, peak M/g. Ranks that share a generation shard gather what they lack of it.
- ``naive_groups`` (HybridFlow-V): receives M - M/n, peak M + M/n. A rank gathers the whole model in its training replica, then cuts.
- ``full_gather`` (DeepSpeed-Chat): receives M - M/N, peak M + M/n. A rank gathers the whole model from the pool, then cuts.

To each peak one bucket is added. The last two methods are for comparison. They keep the training shard, M/n, beside the generation
shard; the first replaces it by views, because generation ranks are regrouped so that it is part of the generation shard. If the layouts
do not allow that (ZeRO-3 to any layout, or to whole experts), a rank receives only what it lacks, and keeps its training shard too:
peak M/g + M/n. Beside whole experts, training parameters that are parts of the generation shard become views at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rlhf_spmd.parallel.boxes import ParamShard, whole_shard
from rlhf_spmd.parallel.data_parallel import buckets
from rlhf_spmd.parallel.layout import GenerationLayout
from rlhf_spmd.reshard.cells import HostOf
from rlhf_spmd.reshard.holdings import Holding, Shards, ShardsAt, by_tensor, held_by, holdings
from rlhf_spmd.reshard.plan import SliceCopy, TransferPlan, plan_transfer

REMEDY = "generation.pp must divide layout.pp, generation.tp layout.tp, and layout.pp the number of layers"
ONE_HOST: HostOf = lambda index: 0  # noqa: E731


@dataclass(frozen=True)
class TransitionPlan:
    """Everything that one rank does to get from training to generation.

    - ``transfer``: what it sends, receives and copies; ranks are pool indices.
    - ``gathered``: the parameters that it fills: generation parameters, or whole tensors. ``buckets``: their names, bucket by bucket;
      empty: all at once, because each rank needs a part of its own.
    - ``locations``: training parameter -> where its parts are in the generation shard, which then holds them. Others stay beside the
      generation shard.
    - ``from_whole``: the copies from whole tensors into generation parameters, if ``gathered`` are whole tensors.
    """

    transfer: TransferPlan
    gathered: Shards
    buckets: Sequence[Sequence[str]] = ()
    locations: Mapping[str, Sequence[SliceCopy]] = field(default_factory=dict)
    from_whole: Sequence[SliceCopy] = ()

    def tensors(self, bucket: int) -> list[str]:
        """Return the global tensors of a bucket's parameters."""
        return list(dict.fromkeys(box.name for target in self.buckets[bucket] for box in self.gathered[target].boxes))

    def last_uses(self, train: Iterable[str]) -> list[list[str]]:
        """Return for each bucket the training parameters whose last use it is: no later bucket reads or sends them.

        The generation storage has their values then.
        """
        if not self.buckets:
            return [list(train)]
        bucket_of = {target: i for i, bucket in enumerate(self.buckets) for target in bucket}
        last_bucket = dict.fromkeys(train, 0)
        for piece in self.transfer.local_copies():
            name = piece.source.parameter
            last_bucket[name] = max(last_bucket[name], bucket_of[piece.target.parameter])
        return [[name for name, bucket in last_bucket.items() if bucket == i] for i in range(len(self.buckets))]


@dataclass(frozen=True)
class Method:
    """A way to get the generation shard.

    - ``consecutive``: generation ranks form a grid of their own, without regrouping.
    - ``gathers_from_pool``: all ranks of the pool send, each its share of what several hold. Otherwise the ranks of a training replica,
      or of a regrouping, send.
    - ``gathers_model``: gather the whole model, then cut out the generation shard.

    Under ZeRO and ep the ranks of a copy group exchange, with all their stages and slices if the grid differs. Nothing moves between
    copies of the model then, except with both ``gathers_from_pool`` and ``gathers_model``.
    """

    consecutive: bool = True
    gathers_from_pool: bool = False
    gathers_model: bool = False

    def gather_ranks(self, layout: GenerationLayout, index: int) -> list[int]:
        """Return the ranks that exchange weights with rank ``index``, as pool indices."""
        train = layout.train
        if self.gathers_from_pool and (self.gathers_model or train.model_copy_size == 1):
            return list(range(train.size))
        if self.gathers_model or self.gathers_from_pool:  # the ranks of all stages and slices that share one copy
            return sorted(rank for other in train.model_copy_group(index) for rank in train.replica_group(other))
        return sorted(rank for other in train.model_copy_group(index) for rank in layout.micro_dp_group(other))

    def plan(
        self, layout: GenerationLayout, index: int, train: ShardsAt, needed: ShardsAt, limit: int, host_of: HostOf = ONE_HOST
    ) -> TransitionPlan:
        """Return the plan of one rank's transition. Pure. Raises ValueError if the layouts do not fit.

        ``train``, ``needed``: shards in the training and in the generation layout. ``limit``: the most elements of a bucket.
        ``host_of``: pool index -> its host; a rank receives from its own host first.
        """
        ranks = self.gather_ranks(layout, index)
        own_shards = held_by(layout, needed, index)
        source = holdings(layout.train, train, ranks, ranks)
        if self.consecutive and not self.gathers_model:
            transfer = plan_transfer(source, holdings(layout, needed, ranks, ranks), host_of, index)
            train_shards = held_by(layout.train, train, index) if layout.expert_parallel_generation else {}
            return TransitionPlan(transfer, own_shards, locations=_locations(transfer, train_shards))
        gathered = own_shards
        if self.gathers_model:
            boxes = {box.name: box.shape for holding in source for shard in holding.shards.values() for box in shard.boxes}
            gathered = {name: whole_shard(name, shape) for name, shape in boxes.items()}
            if self.gathers_from_pool and layout.train.model_copy_size == 1:
                source = [share for holding in source for share in _shares(holding)]
        transfer = plan_transfer(source, [Holding(tuple(ranks), gathered)], host_of, index)
        parameter_buckets = plan_buckets(source, gathered, limit)
        if self.gathers_model:
            cut = plan_transfer([Holding((index,), gathered)], [Holding((index,), own_shards)], host_of, index)
            return TransitionPlan(transfer, gathered, parameter_buckets, from_whole=list(cut.local_copies()))
        train_shards = held_by(layout.train, train, index)
        locations = _locations(transfer, train_shards)
        for name in train_shards:
            if name not in locations:
                raise ValueError(f"training parameter {name} is not part of this rank's generation shard; {REMEDY}")
        return TransitionPlan(transfer, gathered, parameter_buckets, locations)


def _locations(transfer: TransferPlan, train_shards: Shards) -> dict[str, list[SliceCopy]]:
    """Return where the parts of each training parameter lie in the generation shard, for parameters that lie there completely."""
    pieces: dict[str, list[SliceCopy]] = {name: [] for name in train_shards}
    for piece in transfer.local_copies() if train_shards else ():
        pieces[piece.source.parameter].append(piece)
    sizes = {name: sum(box.numel for box in shard.boxes) for name, shard in train_shards.items()}
    return {name: parts for name, parts in pieces.items() if sum(piece.source.numel for piece in parts) == sizes[name]}


METHODS: dict[str, Method] = {
    "zero_redundancy": Method(consecutive=False),
    "full_gather": Method(gathers_from_pool=True, gathers_model=True),
    "naive_groups": Method(gathers_model=True),
}


def choose_method(name: str, layout: GenerationLayout) -> Method:
    """Return the method with this name. ``zero_redundancy`` gathers in place only if the layout was regrouped for it."""
    method = METHODS[name]
    return Method(gathers_from_pool=True) if layout.consecutive and not method.consecutive else method


def plan_buckets(source: Sequence[Holding], gathered: Shards, limit: int) -> list[list[str]]:
    """Return the parameters that a gather fills, in buckets; the same on every rank.

    A bucket consists of whole units: parameters that come from equally named training parameters, such as one layer of each stage, so
    all ranks send equal amounts. It has at most ``limit`` elements and at most half of the largest unit, unless it is one unit.
    """
    index = by_tensor(source)
    units: dict[str, list[str]] = {}
    for target, shard in gathered.items():
        boxes = index.get(shard.boxes[0].name, []) if shard.boxes else []
        units.setdefault(boxes[0].parameter if boxes else target, []).append(target)
    sizes = {name: sum(math.prod(gathered[target].shape) for target in unit) for name, unit in units.items()}
    limit = min(limit, max(sizes.values(), default=0) // 2)
    return [[target for name in names for target in units[name]] for names in buckets(sizes, max(limit, 1))]


def _shares(holding: Holding) -> list[Holding]:
    """Return holdings by which each of several ranks with the same shards sends some rows of each parameter.

    Parameters that more ranks hold are not divided: most ranks do not need to receive them.
    """
    sides: tuple[dict[str, ParamShard], dict[str, ParamShard]] = {}, {}
    for name, shard in holding.shards.items():
        sides[not shard.replicated_on_tp][name] = shard
    return [Holding(holding.ranks, sides[0]), Holding(holding.ranks, sides[1], len(holding.ranks), replicated=True)]


def single_slice(pieces: Sequence[SliceCopy], shape: Sequence[int]) -> tuple[str, tuple[slice, ...]] | None:
    """Return the slice of a generation parameter that equals the whole training parameter; None if there is none."""
    targets = {piece.target.parameter for piece in pieces}
    offsets = {tuple(b - a for a, b in zip(p.source.start, p.target.start, strict=True)) for p in pieces}
    if len(targets) != 1 or len(offsets) != 1:
        return None
    (offset,) = offsets
    return targets.pop(), tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))
