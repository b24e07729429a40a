"""What the controller costs per call, and what it takes to the first one.

    python scripts/bench/controller.py --ranks 8 --verl-python PYTHON --out controller.json

Roles are toys whose bodies do nothing, so that what is measured is the controller itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import cpu_seconds, machine_facts, median, on_ranks, run_case, run_parts, save, table
from peers import torch_alone, verl
from rlhf_spmd.controller import DP, ONE_TO_ALL, THREE_D, Controller, GroupShape, ResourcePool, Worker, register
from rlhf_spmd.data.batch import Batch, ragged
from rlhf_spmd.parallel.collectives import RECORDER, wait_all
from rlhf_spmd.parallel.launch import connect_store, read_launch
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.world import World, init_world
from rlhf_spmd.process.board import Board

# Calls

CHAIN = 16  # calls of one script, as many as a larger algorithm has
SIZES = ((64, 2), (512, 16))  # (rows, MiB moved), those of published measurements of single controllers
EMPTY = "empty call to all, no rows"


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


def begin_controller() -> tuple[World, Board, Controller]:
    launch = read_launch()
    store = connect_store(launch)
    board = Board(launch, store)
    board.start()
    world = init_world(launch, store, device=torch.device("cpu"))
    return world, board, Controller(world.all, board)


def toy(controller: Controller, name: str, ranks: range) -> Toy:
    return Toy(controller, name, ResourcePool(name, tuple(ranks)), GroupShape(Layout(dp=len(ranks))))


def moved(half: int, num_rows: int, mebibytes: int) -> str:
    return f"pool({half}) to pool({half}), {num_rows} rows, {mebibytes} MiB: script of 2 calls"


def flat(mebibytes: int) -> str:
    return f"  bare gloo: the same {mebibytes} MiB, flat"


def make_rows(num_rows: int, field: str) -> Batch:
    """Rows in groups of eight, of 16 to 63 tokens."""
    ids = torch.arange(num_rows)
    lengths = (ids * 7919 % 48 + 16).tolist()
    return Batch(ids, ids // 8, {field: ragged([torch.zeros(n, dtype=torch.int64) for n in lengths], torch.int64)})


class CallCases:
    """This rank's side. ``results``: one entry per case."""

    def __init__(self, repeats: int) -> None:
        (self.world, self.board, self.controller), self.repeats = begin_controller(), repeats
        self.results: list[dict[str, Any]] = []

    def measure(self, name: str, calls: int, once: Callable[[], Callable[[], object]]) -> None:
        """``once()`` prepares a repetition, untimed, and returns what is timed: ``calls`` calls.

        Collective over the world: every rank of it must call, in program order.
        """
        clocks = (time.perf_counter_ns, time.thread_time_ns, time.process_time_ns)
        spent = torch.zeros(3, self.repeats, dtype=torch.float64)
        for i in range(-2, self.repeats):  # two to warm up
            body = once()
            self.world.all.barrier("bench")
            begins = [clock() for clock in clocks]
            body()
            if i >= 0:
                spent[:, i] = torch.tensor([clock() - begin for clock, begin in zip(clocks, begins, strict=True)])
        times = torch.stack(self.world.all.all_gather(spent / calls / 1e3, "bench"))
        slowest = times[:, 0].amax(0)
        figures = {"median_us": slowest.median(), "p90_us": slowest.quantile(0.9)}
        figures |= {"own_cpu_us": times[:, 1].median(1).values.mean(), "all_cpu_us": times[:, 2].mean(1).sum()}
        rounded = {key: round(float(value), 1) for key, value in figures.items()}
        self.results.append({"case": name, "calls": calls * self.repeats, **rounded})

    def calls_without_rows(self) -> None:
        every = toy(self.controller, "all", range(self.world.size))

        def script() -> None:
            for _ in range(CHAIN):
                every.nothing()

        def once() -> Callable[[], object]:
            self.controller.settle()
            return script

        self.measure(EMPTY, CHAIN, once)
        self.measure("the same, traced", CHAIN, lambda: lambda: self.controller.run(script))

    def chain_in_place(self, num_rows: int) -> None:
        every = toy(self.controller, "all", range(self.world.size))

        def script(rows: Any) -> None:
            for i in range(CHAIN):
                rows = rows.select().union(every.pass_on(rows) if i % 2 else every.pass_on_3d(rows))

        def once() -> Callable[[], object]:
            reference = self.controller.source(make_rows(num_rows, "x"))
            return lambda: self.controller.run(script, reference)

        self.measure(f"chain on one pool, {num_rows} rows, nothing moves", CHAIN, once)

    def between_pools(self, num_rows: int, mebibytes: int) -> None:
        half = self.world.size // 2
        a, b = toy(self.controller, "a", range(half)), toy(self.controller, "b", range(half, 2 * half))
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
        call, small = toy(self.controller, "all", range(self.world.size)).nothing(), torch.zeros(1)
        self.measure("controller.get of one call", 1, lambda: lambda: self.controller.get(call))
        self.measure("controller.any_rank", 1, lambda: lambda: self.controller.any_rank(False))
        self.measure("  bare gloo: all-reduce of 4 bytes", 1, lambda: lambda: self.world.all.all_reduce(small, "bench"))
        self.controller.settle()


def measure_calls(repeats: int) -> dict[str, Any]:
    cases = CallCases(repeats)
    cases.calls_without_rows()
    for num_rows, _ in SIZES:
        cases.chain_in_place(num_rows)
    for num_rows, mebibytes in SIZES if cases.world.size >= 2 else ():
        cases.between_pools(num_rows, mebibytes)
    cases.control_collectives()
    cases.board.finish()
    return {"cases": cases.results}


def first_call(begun: float) -> dict[str, float]:
    """Seconds from ``begun`` until the values of a call to all are on rank 0 and every rank is done."""
    world, board, controller = begin_controller()
    assert len(controller.get(toy(controller, "toy", range(world.size)).nothing())[0]) == world.size
    slowest = world.all.all_reduce(torch.tensor([time.time() - begun], dtype=torch.float64), "bench", "max")
    board.finish()
    return {"program_s": float(slowest)}


def start(body: Callable[..., Any], ranks: int) -> dict[str, float]:
    """Wall seconds to the end of the first call, and CPU seconds of the whole program."""
    cpu = cpu_seconds()
    found = on_ranks(ranks, body, begun=time.time())
    return {**found, "cpu_s": cpu_seconds() - cpu}


def beside(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of milliseconds, each wall / CPU of all processes together; seconds for the start."""
    cases, half = {case["case"]: case for case in report["cases"]}, report["ranks"] // 2
    peers = {name: peer for name, peer in report["peer"].items() if "error" not in peer}

    def milli(case: dict[str, float]) -> str:
        return f"{case['median_us'] / 1e3:.3g} / {case['all_cpu_us'] / 1e3:.3g}"

    starts = {**report["start"], **{name: [peer["start"]] for name, peer in peers.items()}}
    middle = {
        (name, key): median([run[key] for run in runs]) for name, runs in starts.items() for key in ("program_s", "cpu_s")
    }
    rows = [
        {"case": "start to first call, s", **{n: f"{middle[n, 'program_s']:.1f} / {middle[n, 'cpu_s']:.1f}" for n in starts}}
    ]
    rows += [{"case": "of that, the worker group, s", **{n: f"{peer['start']['group_s']:.1f}" for n, peer in peers.items()}}]
    rows += [{"case": EMPTY, "ours": milli(cases[EMPTY]), **{name: milli(peer["empty"]) for name, peer in peers.items()}}]
    for num_rows, mebibytes in SIZES if half else ():
        own = {"bare": milli(cases[flat(mebibytes)]), "ours": milli(cases[moved(half, num_rows, mebibytes)])}
        rows += [{"case": f"{mebibytes} MiB, {half} to {half}", **own}, {"case": "  as futures"}]
        for name, peer in peers.items():
            for move in peer["moves"]:
                if move["mebibytes"] == mebibytes:
                    rows[-2 if move["way"] == "blocking" else -1][name] = milli(move)
    return rows


def calls(ranks: int = 4, repeats: int = 200, starts: int = 3, verl_python: str = "", out: Path | None = None) -> None:
    """Time that the controller adds to a call, in microseconds per call and rank, beside what gloo takes for the same bytes, and
    beside the same calls through verl's single controller.

    Roles are toys whose bodies do nothing, so what is measured is the controller: numbering, placing, sending, receiving,
    keeping. Ranks start each repetition together; a repetition's time is that of its slowest rank. Start-up is from the start of
    the program until the first call's values are on rank 0, beside that of torch with gloo alone; the median of ``--starts``, of
    the peer one per serializer. The peer needs Ray and verl in an environment of their own (peers.py), whose Python
    ``--verl-python`` names; without it the table says so. It has 60 repetitions at most.
    """
    machine, kinds = machine_facts(), {"bare": torch_alone, "ours": first_call}
    begun = [{kind: start(body, ranks) for kind, body in kinds.items()} for _ in range(starts)]
    report = {"bench": "controller", "ranks": ranks, "machine": machine, **on_ranks(ranks, measure_calls, repeats=repeats)}
    report["start"] = {kind: [each[kind] for each in begun] for kind in kinds}
    report["peer"] = {}
    for name, serializer in {"verl": "", "verl_numpy": "numpy"}.items():
        case = {"ranks": ranks, "repeats": min(repeats, 60), "sizes": SIZES, "begun": time.time()}
        how = {"VERL_DATAPROTO_SERIALIZATION_METHOD": serializer}
        missing = {"error": "not measured, since no --verl-python was given; see controller.py --help"}
        report["peer"][name] = run_case(verl, case, 1, verl_python, 900, False, **how) if verl_python else missing
    print(table(report["cases"], "case calls median_us p90_us own_cpu_us all_cpu_us"), end="\n\n")
    print(table(beside(report), "case bare ours verl verl_numpy"))
    print(*(f"{name}: {peer['error']}" for name, peer in report["peer"].items() if "error" in peer), sep="\n")
    save(report, out)


if __name__ == "__main__":
    run_parts(calls)
