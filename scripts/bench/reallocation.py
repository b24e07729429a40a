"""Reallocation of weights between any two layouts: bytes, messages, planning time, and time on ranks against plain sends.

    python scripts/bench/reallocation.py --out reallocation.json       on 4 gloo ranks, and plans up to 1024; about 2 minutes

On ranks: the median over repetitions of the slowest rank's time, beside one plain send of as many bytes for every pair of ranks
that exchanges any, all at once. ``lacks``: what ranks lack by their boxes, the lower bound of what they receive; ``buffers``: the
most that a rank's buffers hold beside the parameters. Plans (``--plans``: how many): process time (CPU) of one rank's part, the
median of three ranks; bf16 bytes; ``busiest``: the most that a rank sends over the mean of the ranks that hold the model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from measure import join_world, machine_facts, median, on_ranks, run_parts, save, slowest, table
from reshard import MODEL, describe
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import ParamShard, zero_shards
from rlhf_spmd.parallel.collectives import RECORDER, wait_all
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.world import World
from rlhf_spmd.reshard import Holding, holdings, missing_elements, plan_transfer, start_transfer, transfer_steps
from rlhf_spmd.reshard.bucketing import TransferContext, plan_steps
from rlhf_spmd.reshard.plan import TransferPlan
from rlhf_spmd.workers.rank_shards import rank_shards

Place = tuple[Layout, tuple[int, ...]]
PAIRS: list[tuple[Place, Place]] = [
    ((Layout(tp=2), (0, 1)), (Layout(pp=2), (2, 3))),
    ((Layout(), (0,)), (Layout(dp=3), (1, 2, 3))),
    ((Layout(dp=2), (0, 1)), (Layout(tp=2), (0, 1))),
    ((Layout(pp=2, tp=2), (0, 1, 2, 3)), (Layout(dp=4), (0, 1, 2, 3))),
    ((Layout(dp=4, zero=3), (0, 1, 2, 3)), (Layout(tp=4), (0, 1, 2, 3))),
    ((Layout(dp=3, zero=3), (0, 1, 2)), (Layout(tp=2), (2, 3))),
]
LLAMA_70B = ModelSpec("llama", 128256, 8192, 28672, 80, 64, 8, 128)
PLANS = [
    (Layout(2, 4, 1), Layout(1, 8, 1)),
    (Layout(4, 8, 2), Layout(2, 4, 8)),
    (Layout(4, 8, 8, 3), Layout(2, 8, 16)),
    (Layout(8, 8, 16), Layout(4, 4, 64)),
    (Layout(8, 8, 16, 3), Layout(4, 4, 64)),
    (Layout(4, 4, 64, 1), Layout(8, 8, 16, 3)),
    (Layout(1, 1, 64, 3), Layout(1, 8, 8)),
]


def holdings_of(spec: ModelSpec, layout: Layout, ranks: Sequence[int]) -> list[Holding]:
    return holdings(layout, partial(rank_shards, spec, "lm", layout), ranks)


def shards_of(side: list[Holding], rank: int) -> dict[str, ParamShard]:
    for holding in side:
        if rank in holding.ranks:
            at, of = holding.ranks.index(rank) % holding.parts, holding.parts
            return zero_shards(holding.shards, at, of) if of > 1 else dict(holding.shards)
    return {}


def move_between(world: World, number: int, source: Place, target: Place, repeats: int) -> dict[str, Any]:
    """The figures of one case. Collective over the world: every rank of it must call, in program order."""
    ranks = sorted({*source[1], *target[1]})
    group = world.group(ranks, "weight_sync", channel=f"bench{number}")
    if group is not None:
        group.connect()
    before, after = (holdings_of(MODEL, *place) for place in (source, target))
    held, wanted = shards_of(before, world.rank), shards_of(after, world.rank)
    sources = {name: torch.randn(shard.shape) for name, shard in held.items()}
    targets = {name: torch.empty(shard.shape) for name, shard in wanted.items()}
    plan = plan_transfer(before, after, lambda rank: 0, world.rank)
    sends = {to: torch.zeros(n) for (sender, to), n in plan.traffic.items() if sender == world.rank}
    receives = {sender: torch.zeros(n) for (sender, to), n in plan.traffic.items() if to == world.rank}
    start, buffers = RECORDER.received["weight_sync"], [0]
    steps = transfer_steps(plan, world.rank, sources, targets, ranks, torch.float32)

    def move() -> None:
        if group is not None:
            moving = start_transfer(steps, sources, targets, group, torch.float32)
            moving.wait()
            buffers.append(moving.peak_bytes)

    def plain() -> None:
        if group is not None:
            works = [group.irecv(flat, group.ranks.index(rank), "bench") for rank, flat in receives.items()]
            wait_all([*works, *(group.isend(flat, group.ranks.index(rank), "bench") for rank, flat in sends.items())])

    seconds, plain_seconds = slowest(world, [move, plain], repeats)
    mine = [(RECORDER.received["weight_sync"] - start) / (repeats + 1), 4 * missing_elements(held, wanted), len(receives)]
    received, lacked, pairs = world.all.all_reduce(torch.tensor(mine, dtype=torch.float64), "bench").tolist()
    peak = int(world.all.all_reduce(torch.tensor(max(buffers)), "bench", "max"))
    row: dict[str, Any] = {"pair": " -> ".join(f"{describe(layout)} on {list(ranks)}" for layout, ranks in (source, target))}
    row |= {"pairs_of_ranks": pairs, "received_bytes": received, "lacked_bytes": lacked, "buffer_bytes": peak}
    ratio = {"of_plain": seconds / plain_seconds} if received else {}
    return {**row, "seconds": seconds, "plain_seconds": plain_seconds, **ratio}


def moves(repeats: int) -> dict[str, Any]:
    world = join_world()
    rows = [move_between(world, number, *pair, repeats) for number, pair in enumerate(PAIRS)]
    world.all.barrier("bench")
    return {"rows": rows}


def plan_row(source: Layout, target: Layout) -> dict[str, Any]:
    """Both layouts on the same ranks, 8 to a host."""
    ranks = tuple(range(source.size))

    def host_of(rank: int) -> int:
        return rank // 8

    def timed(body: Callable[[], Any]) -> tuple[float, Any]:
        begin = time.process_time()
        result = body()
        return time.process_time() - begin, result

    described, sides = timed(lambda: [holdings_of(LLAMA_70B, layout, ranks) for layout in (source, target)])
    there, here = sides
    some = (0, source.size // 2 + 3, source.size - 1)
    parts = [timed(partial(plan_transfer, there, here, host_of, rank)) for rank in some]
    whole, traffic = timed(lambda: plan_transfer(there, here, host_of).traffic)
    sent: Counter[int] = Counter()
    for (sender, _), elements in traffic.items():
        sent[sender] += elements
    total = sum(sent.values())
    abroad = sum(n for (sender, receiver), n in traffic.items() if host_of(sender) != host_of(receiver))
    row: dict[str, Any] = {
        "ranks": source.size,
        "source": str(source),
        "target": str(target),
        "mean_received_bytes": 2 * total / source.size,
    }
    row |= {"from_other_hosts": abroad / max(total, 1)}
    row |= {"busiest": max(sent.values(), default=0) * source.size / max(total, 1)}
    row |= {"peers": max(len(plan.traffic) for _, plan in parts)}
    row |= {"messages": max(messages(sides, plan, rank) for rank, (_, plan) in zip(some, parts, strict=True))}
    return {**row, "holdings_s": described, "rank_s": median([seconds for seconds, _ in parts]), "whole_s": whole}


def messages(sides: Sequence[list[Holding]], plan: TransferPlan, rank: int) -> int:
    """Those that a rank sends and receives, of 32 MiB at most."""
    sources, targets = ({name: shard.shape for name, shard in shards_of(side, rank).items()} for side in sides)
    ranks = sorted({*chain.from_iterable(holding.ranks for side in sides for holding in side)})
    return sum(len(step.messages) for step in plan_steps(plan, TransferContext(rank, ranks, sources, targets, False, 16 << 20)))


def reallocation(repeats: int = 7, plans: int = len(PLANS), out: Path | None = None) -> None:
    rows = on_ranks(4, moves, repeats=repeats)["rows"]
    print(table(rows, "pair received_bytes lacked_bytes pairs_of_ranks buffer_bytes seconds plain_seconds of_plain"))
    planned = [plan_row(*pair) for pair in PLANS[:plans]]
    keys = "mean_received_bytes from_other_hosts busiest peers messages holdings_s rank_s whole_s"
    print("\n" + table(planned, f"source target ranks {keys}"))
    save({"bench": "reallocation", "machine": machine_facts(), "rows": rows, "plans": planned}, out)


if __name__ == "__main__":
    run_parts(reallocation)
