"""Time that the controller adds to a call, in microseconds per call and rank, beside what gloo takes for the same bytes.

    python scripts/bench/control.py --ranks 4 --out control.json

Starts itself under torchrun. Roles are toys whose bodies do nothing, so what is measured is the controller: numbering, placing,
sending, receiving, keeping. Ranks start each repetition together; a repetition's time is that of its slowest rank.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import device_facts, machine_facts, on_ranks, save

from rlhf_spmd.controller import DP, ONE_TO_ALL, THREE_D, Controller, GroupShape, ResourcePool, Worker, register
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.parallel.board import Board, end_process
from rlhf_spmd.parallel.collectives import wait_all
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.world import World, connect_store, init_world, read_launch

CHAIN = 16  # calls of one script, as many as a larger algorithm has
SIZES = ((64, 2), (512, 16))  # (rows, MiB moved), those of published measurements of single controllers


class Toy(Worker):
    payload = torch.zeros(0, 0)

    @register(ONE_TO_ALL)
    def nothing(self) -> None:
        pass

    @register(DP, inputs=("x",), outputs=("x",))
    def pass_on(self, batch: Batch) -> Batch:
        return batch.with_fields(x=batch["x"])

    @register(THREE_D, inputs=("x",), outputs=("x",))
    def pass_on_3d(self, batch: Batch) -> Batch:
        return batch.with_fields(x=batch["x"])

    @register(THREE_D, inputs=("prompt_ids",), outputs=("payload",))
    def produce(self, batch: Batch) -> Batch:
        return batch.with_fields(payload=self.payload[: len(batch)])

    @register(THREE_D, inputs=("payload",))
    def consume(self, batch: Batch) -> None:
        assert not len(batch) or batch["payload"].shape[1] == self.payload.shape[1]


class Bench:
    """This rank's side. ``results``: one entry per case, on rank 0."""

    def __init__(self, world: World, board: Board, repeats: int, profile: str | None) -> None:
        self.world, self.repeats, self.profile = world, repeats, profile
        self.controller = Controller(world.all, board)
        self.results: list[dict[str, Any]] = []

    def toy(self, name: str, ranks: range) -> Toy:
        return Toy(self.controller, name, ResourcePool(name, tuple(ranks)), GroupShape(Layout(dp=len(ranks))))

    def measure(self, name: str, calls: int, once: Callable[[], Callable[[], object]], repeats: int | None = None) -> None:
        """``once()`` prepares a repetition, untimed, and returns what is timed: ``calls`` calls.

        Collective over the world: every rank of it must call, in program order.
        """
        repeats = repeats or self.repeats
        wall, cpu = np.zeros(repeats), np.zeros(repeats)
        profiled = self.profile is not None and self.profile in name and self.world.rank == 0
        profiler = cProfile.Profile(time.thread_time) if profiled else None
        for i in range(-2, repeats):  # two to warm up
            body = once()
            self.world.all.barrier("bench")
            if profiler and i >= 0:
                profiler.enable()
            begin, cpu_begin = time.perf_counter_ns(), time.thread_time_ns()
            body()
            if i >= 0:
                wall[i], cpu[i] = time.perf_counter_ns() - begin, time.thread_time_ns() - cpu_begin
            if profiler:
                profiler.disable()
        times = torch.stack(self.world.all.all_gather(torch.from_numpy(np.stack([wall, cpu]) / calls / 1e3), "bench"))
        slowest = times[:, 0].amax(0)
        self.results.append(
            {
                "case": name,
                "calls": calls * repeats,
                "median_us": round(float(slowest.median()), 1),
                "p90_us": round(float(slowest.quantile(0.9)), 1),
                "own_cpu_us": round(float(times[:, 1].median(1).values.mean()), 1),
            }
        )
        if profiler:
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)

    # The cases

    def calls_without_rows(self) -> None:
        toy = self.toy("all", range(self.world.size))

        def once() -> Callable[[], object]:
            self.controller.settle()
            return lambda: [toy.nothing() for _ in range(CHAIN)]

        self.measure("empty call to all, no rows", CHAIN, once)
        script = lambda: [toy.nothing() for _ in range(CHAIN)]  # noqa: E731
        self.measure("the same, traced", CHAIN, lambda: lambda: self.controller.run(script))

    def chain_in_place(self, num_rows: int) -> None:
        toy = self.toy("all", range(self.world.size))

        def script(rows: Any) -> None:
            for i in range(CHAIN):
                rows = rows.select().union(toy.pass_on(rows) if i % 2 else toy.pass_on_3d(rows))

        def once() -> Callable[[], object]:
            reference = self.controller.source(make_rows(num_rows, "x"))
            return lambda: self.controller.run(script, reference)

        self.measure(f"chain on one pool, {num_rows} rows, nothing moves", CHAIN, once)

    def between_pools(self, num_rows: int, mebibytes: int) -> None:
        half = self.world.size // 2
        a, b = self.toy("a", range(half)), self.toy("b", range(half, 2 * half))
        a.payload = b.payload = torch.ones(num_rows, (mebibytes << 20) // 4 // num_rows)

        def script(rows: Any) -> None:
            b.consume(rows.union(a.produce(rows)))

        def once() -> Callable[[], object]:
            reference = self.controller.source(make_rows(num_rows, "prompt_ids"))
            return lambda: self.controller.run(script, reference)

        self.measure(f"pool({half}) to pool({half}), {num_rows} rows, {mebibytes} MiB: script of 2 calls", 1, once)
        self.measure(f"  bare gloo: the same {mebibytes} MiB, flat", 1, lambda: lambda: self.move_flat(half, mebibytes))

    def move_flat(self, half: int, mebibytes: int) -> None:
        world, rank = self.world.all, self.world.rank
        data = torch.empty((mebibytes << 20) // half, dtype=torch.uint8)
        if rank < half:
            wait_all([world.isend(data, rank + half, "bench")])
        elif rank < 2 * half:
            wait_all([world.irecv(data, rank - half, "bench")])

    def control_collectives(self) -> None:
        toy = self.toy("all", range(self.world.size))
        call = toy.nothing()
        small = torch.zeros(1)
        self.measure("controller.get of one call", 1, lambda: lambda: self.controller.get(call))
        self.measure("controller.decide", 1, lambda: lambda: self.controller.decide(False))
        self.measure("  bare gloo: all-reduce of 4 bytes", 1, lambda: lambda: self.world.all.all_reduce(small, "bench"))
        self.controller.settle()

    def run(self) -> None:
        self.calls_without_rows()
        for num_rows, _ in SIZES:
            self.chain_in_place(num_rows)
        if self.world.size >= 2:
            for num_rows, mebibytes in SIZES:
                self.between_pools(num_rows, mebibytes)
        self.control_collectives()


def make_rows(num_rows: int, field: str) -> Batch:
    """Rows in groups of eight, of 16 to 63 tokens."""
    ids = torch.arange(num_rows)
    lengths = (ids * 7919 % 48 + 16).tolist()
    return Batch(ids, ids // 8, {field: ragged([torch.zeros(n, dtype=torch.int64) for n in lengths], torch.int64)})


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| case | calls | median, us | 90%, us | own CPU, us |", "|---|--:|--:|--:|--:|"]
    for r in results:
        lines.append(f"| {r['case']} | {r['calls']} | {r['median_us']:.0f} | {r['p90_us']:.0f} | {r['own_cpu_us']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=200, help="timed repetitions of each case")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    parser.add_argument("--profile", metavar="TEXT", help="rank 0's CPU profile of the cases whose name has TEXT, on stderr")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(on_ranks(args.ranks, *sys.argv))
    launch = read_launch()
    store = connect_store(launch)
    board = Board(launch, store)
    board.start()
    bench = Bench(init_world(launch, store, device=torch.device("cpu")), board, args.repeats, args.profile)
    bench.run()
    board.finish(store)
    if launch.rank == 0:
        print(table(bench.results))
        machine = machine_facts() | device_facts("cpu")
        save({"bench": "control", "ranks": launch.size, "machine": machine, "cases": bench.results}, args.out)
    end_process(0)


if __name__ == "__main__":
    main()
