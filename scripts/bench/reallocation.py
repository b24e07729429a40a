"""Reallocation of weights between any two layouts: bytes, messages, planning time, and time on ranks against plain sends.

    python scripts/bench/reallocation.py --out reallocation.json       on 4 gloo ranks, and plans up to 1024; about 2 minutes

On ranks: the median over repetitions of the slowest rank's time, beside one plain send of as many bytes for every pair of ranks
that exchanges any, all at once. ``lacks``: what ranks lack by their boxes, the lower bound of what they receive; ``buffers``: the
most that a rank's buffers hold beside the parameters. Plans: process time (CPU) of one rank's part, the median of three ranks;
bf16 bytes; ``busiest``: the most that a rank sends over the mean of the ranks that hold the model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from measure import MIB, machine_facts, median, on_ranks, table
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import ParamShard, zero_shards
from rlhf_spmd.parallel.collectives import RECORDER, wait_all
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.world import World, connect_store, init_world, read_launch
from rlhf_spmd.process.ending import end_process
from rlhf_spmd.reshard import Holding, holdings, missing_elements, plan_transfer, start_transfer, transfer_steps
from rlhf_spmd.reshard.messages import TransferContext, plan_steps
from rlhf_spmd.reshard.plan import Plan
from rlhf_spmd.workers.engine import rank_shards

MODEL = ModelSpec("llama", 4096, 512, 1536, 4, 8, 8, 64)  # 17.8 M parameters, fp32
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


def measure(world: World, number: int, source: Place, target: Place, repeats: int) -> dict[str, Any]:
    """One row. Collective over the world: every rank of it must call, in program order."""
    ranks = sorted({*source[1], *target[1]})
    group = world.group(ranks, "weight_sync", channel=f"bench{number}")
    if group is not None:
        group.connect()
    before, after = (holdings_of(MODEL, *place) for place in (source, target))
    held, wanted = shards_of(before, world.rank), shards_of(after, world.rank)
    sources = {name: torch.randn(shard.shape) for name, shard in held.items()}
    targets = {name: torch.empty(shard.shape) for name, shard in wanted.items()}
    plan = plan_transfer(before, after, lambda rank: 0, world.rank)
    sends = {to: n for (giver, to), n in plan.traffic.items() if giver == world.rank}
    receives = {giver: n for (giver, to), n in plan.traffic.items() if to == world.rank}
    flats = [{rank: torch.zeros(n) for rank, n in side.items()} for side in (sends, receives)]
    start, buffers = RECORDER.received["weight_sync"], [0]

    steps = transfer_steps(plan, world.rank, sources, targets, ranks, torch.float32)

    def move() -> None:
        if group is not None:
            moving = start_transfer(steps, sources, targets, group, torch.float32)
            moving.wait()
            buffers.append(moving.peak_bytes)

    def plain() -> None:
        if group is not None:
            works = [group.irecv(flat, group.ranks.index(rank), "bench") for rank, flat in flats[1].items()]
            wait_all([*works, *(group.isend(flat, group.ranks.index(rank), "bench") for rank, flat in flats[0].items())])

    seconds = [slowest(world, body, repeats) for body in (move, plain)]
    mine = [(RECORDER.received["weight_sync"] - start) / (repeats + 1), 4 * missing_elements(held, wanted), len(receives)]
    received, lacked, pairs = world.all.all_reduce(torch.tensor(mine, dtype=torch.float64), "bench").tolist()
    peak = int(world.all.all_reduce(torch.tensor(max(buffers)), "bench", "max"))
    names = [
        f"{layout.pp}-{layout.tp}-{layout.dp}" + (f" z{layout.zero}" if layout.zero else "") for layout, _ in (source, target)
    ]
    return {
        "pair": " -> ".join(f"{name} on {list(place[1])}" for name, place in zip(names, (source, target), strict=True)),
        "pairs_of_ranks": pairs,
        "received_bytes": received,
        "lacked_bytes": lacked,
        "buffer_bytes": peak,
        "seconds": seconds[0],
        "plain_seconds": seconds[1],
    }


def slowest(world: World, body: Callable[[], None], repeats: int) -> float:
    times = []
    for repeat in range(repeats + 1):
        world.all.barrier("bench")
        begin = time.perf_counter()
        body()
        elapsed = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        if repeat:  # the first one connects
            times.append(float(world.all.all_reduce(elapsed, "bench", "max")))
        else:
            world.all.all_reduce(elapsed, "bench", "max")
    return median(times)


def run_rank(out: Path, repeats: int) -> None:
    launch = read_launch()
    world = init_world(launch, connect_store(launch), device=torch.device("cpu"))
    rows = [measure(world, number, *pair, repeats) for number, pair in enumerate(PAIRS)]
    if world.rank == 0:
        out.write_text(json.dumps(rows), encoding="utf-8")
    world.all.barrier("bench")
    end_process(0)


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
    for (giver, _), elements in traffic.items():
        sent[giver] += elements
    total = sum(sent.values())
    abroad = sum(n for (giver, taker), n in traffic.items() if host_of(giver) != host_of(taker))
    return {
        "ranks": source.size,
        "source": str(source),
        "target": str(target),
        "mean_received_bytes": 2 * total / source.size,
        "from_other_hosts": abroad / max(total, 1),
        "busiest": max(sent.values(), default=0) * source.size / max(total, 1),
        "peers": max(len(plan.traffic) for _, plan in parts),
        "messages": max(messages(sides, plan, rank) for rank, (_, plan) in zip(some, parts, strict=True)),
        "holdings_s": described,
        "rank_s": median([seconds for seconds, _ in parts]),
        "whole_s": whole,
    }


def messages(sides: Sequence[list[Holding]], plan: Plan, rank: int) -> int:
    """Those that a rank sends and receives, of 32 MiB at most."""
    sources, targets = ({name: shard.shape for name, shard in shards_of(side, rank).items()} for side in sides)
    ranks = sorted({*chain.from_iterable(holding.ranks for side in sides for holding in side)})
    return sum(len(step.messages) for step in plan_steps(plan, TransferContext(rank, ranks, sources, targets, False, 16 << 20)))


def row_cells(row: dict[str, Any]) -> list[str]:
    cells = [
        row["pair"],
        f"{row['received_bytes'] / MIB:.2f}",
        f"{row['lacked_bytes'] / MIB:.2f}",
        f"{row['pairs_of_ranks']:.0f}",
        f"{row['buffer_bytes'] / MIB:.2f}",
    ]
    ratio = f"{row['seconds'] / row['plain_seconds']:.2f}x" if row["received_bytes"] else "-"
    return [*cells, f"{row['seconds'] * 1e3:.1f}", f"{row['plain_seconds'] * 1e3:.1f}", ratio]


def plan_cells(row: dict[str, Any]) -> list[str]:
    cells = [f"{row['source']} -> {row['target']}", str(row["ranks"]), f"{row['mean_received_bytes'] / 1e9:.2f}"]
    cells += [f"{row['from_other_hosts']:.0%}", f"{row['busiest']:.2f}x", str(row["peers"]), str(row["messages"])]
    return [*cells, *(f"{row[key] * 1e3:.0f}" for key in ("holdings_s", "rank_s", "whole_s"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--plans", type=int, default=len(PLANS), help="how many of the large plans")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(args.out, args.repeats)
        return
    facts = machine_facts() | {"torch": torch.__version__}
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "rows.json"
        if code := on_ranks(4, __file__, "--repeats", str(args.repeats), "--out", str(out)):
            sys.exit(code)
        rows = json.loads(out.read_text(encoding="utf-8"))
    heads = ["17.8 M parameters", "received MiB", "lacks", "pairs", "buffers MiB", "ms", "plain sends ms", "of plain"]
    print(table(heads, [row_cells(row) for row in rows], 1))
    plans = [plan_row(*pair) for pair in PLANS[: args.plans]]
    heads = [
        "Llama 70B",
        "ranks",
        "received GB",
        "other hosts",
        "busiest",
        "peers",
        "messages",
        "holdings ms",
        "one rank ms",
        "whole ms",
    ]
    print("\n" + table(heads, [plan_cells(row) for row in plans], 1))
    if args.out:
        report = {"bench": "reallocation", "machine": facts, "rows": rows, "plans": plans}
        args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
