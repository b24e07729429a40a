"""Time that the controller adds to a call, in microseconds per call and rank, beside what gloo takes for the same bytes, and beside
the same calls through verl's single controller.

    python scripts/bench/control.py --ranks 8 --peer-python verl_env/bin/python --out control.json

Starts itself under torchrun. Roles are toys whose bodies do nothing, so what is measured is the controller: numbering, placing,
sending, receiving, keeping. Ranks start each repetition together; a repetition's time is that of its slowest rank. Start-up is from
the start of the program until the first call's values are on rank 0 (``control_start.py``), beside that of torch with gloo alone.

The peer (``control_verl.py``) needs Ray and verl, both from PyPI, in an environment of their own, with Python's name after
``--peer-python``; without it the table says so. verl's single controller imports a part of what verl asks for:

    pip install torch ray numpy omegaconf codetiming psutil "tensordict<=0.10" "transformers<5.11" && pip install --no-deps verl
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from measure import cpu_seconds, device_facts, machine_facts, on_ranks, run_case, save
from measure import table as markdown
from rlhf_spmd.controller import DP, ONE_TO_ALL, THREE_D, Controller, GroupShape, ResourcePool, Worker, register
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.parallel.collectives import RECORDER, wait_all
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.world import World, connect_store, init_world, read_launch
from rlhf_spmd.process.board import Board
from rlhf_spmd.process.ending import end_process

CHAIN = 16  # calls of one script, as many as a larger algorithm has
SIZES = ((64, 2), (512, 16))  # (rows, MiB moved), those of published measurements of single controllers
HERE = Path(__file__).parent
EMPTY = "empty call to all, no rows"


def moved(half: int, num_rows: int, mebibytes: int) -> str:
    return f"pool({half}) to pool({half}), {num_rows} rows, {mebibytes} MiB: script of 2 calls"


def flat(mebibytes: int) -> str:
    return f"  bare gloo: the same {mebibytes} MiB, flat"


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
        wall, cpu, every = np.zeros(repeats), np.zeros(repeats), np.zeros(repeats)
        profiled = self.profile is not None and self.profile in name and self.world.rank == 0
        profiler = cProfile.Profile(time.thread_time) if profiled else None
        for i in range(-2, repeats):  # two to warm up
            body = once()
            self.world.all.barrier("bench")
            if profiler and i >= 0:
                profiler.enable()
            begin, cpu_begin, every_begin = time.perf_counter_ns(), time.thread_time_ns(), time.process_time_ns()
            body()
            if i >= 0:
                wall[i], cpu[i] = time.perf_counter_ns() - begin, time.thread_time_ns() - cpu_begin
                every[i] = time.process_time_ns() - every_begin
            if profiler:
                profiler.disable()
        times = torch.stack(self.world.all.all_gather(torch.from_numpy(np.stack([wall, cpu, every]) / calls / 1e3), "bench"))
        slowest = times[:, 0].amax(0)
        self.results.append(
            {
                "case": name,
                "calls": calls * repeats,
                "median_us": round(float(slowest.median()), 1),
                "p90_us": round(float(slowest.quantile(0.9)), 1),
                "own_cpu_us": round(float(times[:, 1].median(1).values.mean()), 1),
                "all_cpu_us": round(float(times[:, 2].mean(1).sum()), 1),
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

        self.measure(EMPTY, CHAIN, once)
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

        before = RECORDER.received["batch"]
        self.measure(moved(half, num_rows, mebibytes), 1, once)
        self.results[-1]["received_by_rank_0"] = RECORDER.received["batch"] - before
        data = a.payload.view(torch.uint8).flatten()[: (mebibytes << 20) // half]
        self.measure(flat(mebibytes), 1, lambda: lambda: self.move_flat(half, data))

    def move_flat(self, half: int, data: Tensor) -> None:
        """As in the script, what is sent has been there before, and what is received comes into new memory."""
        world, rank = self.world.all, self.world.rank
        if rank < half:
            wait_all([world.isend(data, rank + half, "bench")])
        elif rank < 2 * half:
            wait_all([world.irecv(torch.empty_like(data), rank - half, "bench")])

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
    heads = ("case", "calls", "median, us", "90%, us", "own CPU, us", "CPU of all ranks, us")
    rows = [
        [r["case"], str(r["calls"]), *(f"{r[key]:.0f}" for key in ("median_us", "p90_us", "own_cpu_us", "all_cpu_us"))]
        for r in results
    ]
    return markdown(heads, rows, 1)


# Beside the peer


def start_up(kind: str, ranks: int, out: Path) -> dict[str, float]:
    """Wall seconds to the end of the first call, and CPU seconds of the whole program."""
    begun, cpu = time.time(), cpu_seconds()
    code = on_ranks(ranks, str(HERE / "control_start.py"), kind, str(begun), str(out))
    assert code == 0, f"control_start.py {kind} ended with status {code}"
    return json.loads(out.read_text(encoding="utf-8")) | {"cpu_s": cpu_seconds() - cpu}


def run_peer(python: str, ranks: int, repeats: int, serializer: str, directory: Path) -> dict[str, Any]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VERL_DATAPROTO_SERIALIZATION_METHOD": serializer}
    env.pop("PYTHONPATH", None)  # the peer's own packages only
    case, out = directory / "case.json", directory / "peer.json"
    begun = {"ranks": ranks, "repeats": repeats, "sizes": SIZES, "begun": time.time()}
    case.write_text(json.dumps(begun), encoding="utf-8")
    return run_case([python, str(HERE / "control_verl.py"), str(case), str(out)], env, out, 900)


def compare(report: dict[str, Any]) -> str:
    """Milliseconds, each beside the CPU milliseconds of all processes together (seconds for the start)."""
    cases = {case["case"]: case for case in report["cases"]}
    peers = {name: peer for name, peer in report["peer"].items() if "error" not in peer}

    def milli(case: dict[str, float] | None) -> str:
        return "" if case is None else f"{case['median_us'] / 1e3:.3g} / {case['all_cpu_us'] / 1e3:.3g}"

    def start(runs: list[dict[str, float]], key: str = "program_s") -> str:
        return f"{median(run[key] for run in runs):.1f} / {median(run['cpu_s'] for run in runs):.1f}" if runs else ""

    starts = [[peer["start"]] for peer in peers.values()]
    rows = [
        ["start to first call, s", start(report["start"]["bare"]), start(report["start"]["ours"]), *map(start, starts)],
        ["of that, the worker group, s", "", "", *(start(runs, "group_s") for runs in starts)],
        ["empty call to all", "", milli(cases[EMPTY]), *(milli(peer["empty"]) for peer in peers.values())],
    ]
    half = report["ranks"] // 2
    for num_rows, mebibytes in SIZES if half else ():
        for way in ("blocking", "futures"):
            found = [
                next(move for move in peer["moves"] if (move["mebibytes"], move["way"]) == (mebibytes, way))
                for peer in peers.values()
            ]
            own = [cases[flat(mebibytes)], cases[moved(half, num_rows, mebibytes)]] if way == "blocking" else [None, None]
            if found or own[0]:
                name = f"{mebibytes} MiB, {half} to {half}" + (", through the driver" if found and own[0] else "")
                rows.append([name if own[0] else "  as futures", *map(milli, [*own, *found])])
    heads = [f"{report['ranks']} processes, ms wall / ms CPU", "bare torch + gloo", "rlhf_spmd", *peers]
    notes = [f"{name}: {peer['error']}" for name, peer in report["peer"].items() if "error" in peer]
    return "\n".join([markdown(heads, rows, 1), *notes])


def measure_all(args: argparse.Namespace) -> int:
    """Start-up, the ranks' cases, the peer; one report. Returns the exit status."""
    machine = machine_facts() | device_facts("cpu")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        kinds = ("bare", "ours")
        begins = [{kind: start_up(kind, args.ranks, directory / "start.json") for kind in kinds} for _ in range(args.starts)]
        inner = directory / "cases.json"
        profile = ["--profile", args.profile] if args.profile else []
        status = on_ranks(args.ranks, __file__, "--repeats", str(args.repeats), "--out", str(inner), *profile)
        if status:
            return status
        report = {"bench": "control", "ranks": args.ranks, "machine": machine, "cases": json.loads(inner.read_text())}
        report["start"] = {kind: [begin[kind] for begin in begins] for kind in kinds}
        missing = {"error": "not measured, since no --peer-python was given; see control.py --help"}
        report["peer"] = {
            name: run_peer(args.peer_python, args.ranks, min(args.repeats, 60), name.split()[-1], directory)
            if args.peer_python
            else missing
            for name in ("verl", "verl numpy")
        }
    print(table(report["cases"]), compare(report), sep="\n\n")
    save(report, args.out)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=200, help="timed repetitions of each case; of the peer 60 at most")
    parser.add_argument(
        "--starts", type=int, default=3, help="start-ups of which the median is taken; of the peer one per serializer"
    )
    parser.add_argument("--peer-python", metavar="PYTHON", help="that of an environment with verl")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    parser.add_argument("--profile", metavar="TEXT", help="rank 0's CPU profile of the cases whose name has TEXT, on stderr")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(measure_all(args))
    launch = read_launch()
    store = connect_store(launch)
    board = Board(launch, store)
    board.start()
    bench = Bench(init_world(launch, store, device=torch.device("cpu")), board, args.repeats, args.profile)
    bench.run()
    board.finish()
    if launch.rank == 0:
        args.out.write_text(json.dumps(bench.results), encoding="utf-8")
    end_process(0)


if __name__ == "__main__":
    main()
