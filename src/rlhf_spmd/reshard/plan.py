"""The hybrid engine's plan: which member of a gather group sends which part of its training shard where. Pure.

A gather group is the ranks whose training shards together make up one generation shard: the micro-DP group, and with ZeRO its
union over dp. All of them need the same generation shard, so everything that one of them sends goes to all others. Parts that
every member holds already (norms that are replicated over tp) are copied locally and not sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rlhf_spmd.parallel.boxes import Box, ParamShard, cover
from rlhf_spmd.parallel.layout import GenerationLayout

REMEDY = "generation.pp must divide layout.pp, generation.tp layout.tp, and layout.pp the number of layers"

Shards = Mapping[str, ParamShard]


@dataclass(frozen=True)
class Piece:
    """``training[source][source_box]`` and ``generation[target][target_box]`` are the same part of one global tensor."""

    source: str
    source_box: Box
    target: str
    target_box: Box


@dataclass(frozen=True)
class Bucket:
    """Generation parameters that are made together. Both tuples have one entry per member of the group.

    sends: what the member sends to all others, in this order. copies: what it takes from its own shards without communication.
    """

    targets: tuple[str, ...]
    sends: tuple[tuple[Piece, ...], ...]
    copies: tuple[tuple[Piece, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements that each member sends."""
        return tuple(sum(piece.source_box.numel for piece in pieces) for pieces in self.sends)

    @property
    def balanced(self) -> bool:
        """All members send the same amount: one all-gather. Otherwise each sender broadcasts."""
        return len(set(self.sizes)) == 1


@dataclass(frozen=True)
class GatherPlan:
    buckets: tuple[Bucket, ...]

    def elements_received(self, member: int) -> int:
        """What the other members send: the plan's received bytes, in elements."""
        return sum(sum(bucket.sizes) - bucket.sizes[member] for bucket in self.buckets)


@dataclass(frozen=True)
class Home:
    """Where a training parameter's values are inside its rank's own generation shard.

    ``view``: the generation parameter and slices that are exactly the training parameter, or None if no single slice is.
    ``pieces``: the same box by box.
    """

    view: tuple[str, tuple[slice, ...]] | None
    pieces: tuple[Piece, ...]


def gather_ranks(layout: GenerationLayout, index: int) -> list[int]:
    """The gather group of a rank as pool indices, ascending: its micro-DP group; with ZeRO that of every dp coordinate."""
    train = layout.train
    if not train.zero:
        return layout.micro_dp_group(index)
    pp, _, tp = train.coordinate(index)
    return sorted(rank for dp in range(train.dp) for rank in layout.micro_dp_group(train.index(pp, dp, tp)))


def transition_bytes(model_bytes: int, layout: GenerationLayout) -> int:
    """Bytes that a rank receives when a model of ``model_bytes`` goes from training to generation (HybridFlow, table 2).

    The generation shard less the rank's own training shard; (tp - t_g p_g) / (t_g p_g t p) * M without ZeRO. Replicated tensors
    aside: ``model_bytes`` counts the tensors that the layout splits.
    """
    train = layout.train
    held = train.pp * train.tp * (train.dp if train.zero else 1)
    return model_bytes // (layout.pp * layout.tp) - model_bytes // held


def plan_gather(train: Sequence[Shards], generation: Shards, bucket_elements: int = 64 << 20) -> GatherPlan:
    """``train``: the training shards of every member, in group order. ``generation``: the shard that all of them will hold.

    Buckets hold generation parameters of at most ``bucket_elements`` together, unless a single unit is larger. Of members that
    share a part the first sends it. Raises ValueError where the members do not hold all of the generation shard.
    """
    holders = [_by_tensor(shards) for shards in train]
    units: dict[str, list[Bucket]] = {}
    for target, shard in generation.items():
        bucket = _fill(target, shard, holders)
        sources = [piece.source for pieces in (*bucket.sends, *bucket.copies) for piece in pieces]
        # targets from equally named training parameters (one layer of each stage) travel together: members send equal amounts
        units.setdefault(sources[0] if sources else target, []).append(bucket)
    buckets: list[Bucket] = []
    open_buckets: dict[str, tuple[Bucket, int]] = {}
    for parts in units.values():
        unit = _merge(parts)
        size = sum(box.numel for target in unit.targets for box in generation[target].boxes)
        kind = "local" if not any(unit.sizes) else "balanced" if unit.balanced else "uneven"
        before, used = open_buckets.pop(kind, (None, 0))
        if before is not None and used + size > bucket_elements:
            buckets.append(before)
            before, used = None, 0
        open_buckets[kind] = (_merge([before, unit]) if before else unit, used + size)
    return GatherPlan((*buckets, *(bucket for bucket, _ in open_buckets.values())))


def plan_homes(train: Shards, generation: Shards) -> dict[str, Home]:
    """For each training parameter of one rank, its place in the rank's generation shard.

    Raises ValueError where a training parameter is not part of the generation shard.
    """
    index = _by_tensor(generation)
    homes = {}
    for name, shard in train.items():
        pieces = []
        for box in shard.boxes:
            candidates = index.get(box.name, [])
            taken, missing = cover(box, [candidate for _, candidate in candidates])
            if missing:
                raise ValueError(
                    f"training parameter {name} ({box.name} from {missing[0].start}) is not part of this rank's generation "
                    f"shard; {REMEDY}"
                )
            pieces += [Piece(name, part, candidates[i][0], place) for i, place, part in taken]
        homes[name] = Home(_single_slice(shard, pieces), tuple(pieces))
    return homes


def shards_to_json(shards: Shards) -> str:
    return json.dumps({name: asdict(shard) for name, shard in shards.items()})


def shards_from_json(text: str) -> dict[str, ParamShard]:
    def box(fields: Mapping[str, Any]) -> Box:
        numbers = {key: tuple(fields[key]) for key in ("shape", "start", "size", "local")}
        return Box(name=fields["name"], **numbers)

    return {
        name: ParamShard(tuple(row["shape"]), tuple(box(fields) for fields in row["boxes"]), tuple(row["replicated"]))
        for name, row in json.loads(text).items()
    }


def _by_tensor(shards: Shards) -> dict[str, list[tuple[str, Box]]]:
    """Global tensor name -> (local parameter, box)."""
    index: dict[str, list[tuple[str, Box]]] = {}
    for parameter, shard in shards.items():
        for box in shard.boxes:
            index.setdefault(box.name, []).append((parameter, box))
    return index


def _fill(target: str, shard: ParamShard, holders: Sequence[Mapping[str, list[tuple[str, Box]]]]) -> Bucket:
    """The pieces of one generation parameter."""
    sends: list[list[Piece]] = [[] for _ in holders]
    copies: list[list[Piece]] = [[] for _ in holders]
    for box in shard.boxes:
        held = [holder.get(box.name, []) for holder in holders]
        alone = [cover(box, [candidate for _, candidate in boxes]) for boxes in held]
        if not any(missing for _, missing in alone):
            for member, (taken, _) in enumerate(alone):
                copies[member] += [Piece(held[member][i][0], source, target, place) for i, source, place in taken]
            continue
        everyone = [(member, parameter, candidate) for member, boxes in enumerate(held) for parameter, candidate in boxes]
        taken, missing = cover(box, [candidate for _, _, candidate in everyone])
        if missing:
            raise ValueError(
                f"generation parameter {target}: no training shard of its group holds {box.name} from {missing[0].start} "
                f"of size {missing[0].size}; {REMEDY}"
            )
        for i, source, place in taken:
            member, parameter, _ = everyone[i]
            sends[member].append(Piece(parameter, source, target, place))
    return Bucket((target,), tuple(map(tuple, sends)), tuple(map(tuple, copies)))


def _merge(parts: Sequence[Bucket]) -> Bucket:
    first = parts[0]
    for part in parts[1:]:
        first = replace(
            first,
            targets=first.targets + part.targets,
            sends=tuple(a + b for a, b in zip(first.sends, part.sends, strict=True)),
            copies=tuple(a + b for a, b in zip(first.copies, part.copies, strict=True)),
        )
    return first


def _single_slice(shard: ParamShard, pieces: Sequence[Piece]) -> tuple[str, tuple[slice, ...]] | None:
    """The slice of a generation parameter that is the whole training parameter in the same order, if there is one."""
    targets = {piece.target for piece in pieces}
    offsets = {tuple(b - a for a, b in zip(p.source_box.local, p.target_box.local, strict=True)) for p in pieces}
    if len(targets) != 1 or len(offsets) != 1:
        return None
    (offset,) = offsets
    return targets.pop(), tuple(slice(a, a + n) for a, n in zip(offset, shard.shape, strict=True))
