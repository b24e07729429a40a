"""Shards of every rank of a layout, and one wrong bit."""

from __future__ import annotations

from pathlib import Path

from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import ParamShard, shard_rows, zero_rows
from rlhf_spmd.parallel.layout import Layout


def rank_shards(spec: ModelSpec, head: str, layout: Layout, index: int) -> dict[str, ParamShard]:
    pp, dp, tp = layout.coordinate(index)
    shards = plan_params(spec, head, pp, layout.pp, tp, layout.tp)
    if layout.zero:
        shards = {name: shard_rows(s, *zero_rows(s.shape[0], dp, layout.dp)) for name, s in shards.items()}
    return shards


def flip_bit(path: Path, offset_from_end: int = 3) -> None:
    data = bytearray(path.read_bytes())
    data[-offset_from_end] ^= 4
    path.write_bytes(data)
