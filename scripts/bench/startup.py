"""What a PPO run costs before its first step: counted for many ranks, timed on as many as this machine has room for.

    python scripts/bench/startup.py --counted 1024 --ranks 4 32 --out startup.json

Counted, without any process group: the communicators that a rank of actor, critic, reference and reward model makes, its gloo
connections and messages to the store (gloo: 2n + 1 of each rank in a group of n), and the seconds in which it plans them. Timed:
``rlhf_spmd.train`` under torchrun on a tiny model, one step; the wall and CPU seconds beside that step, with the launcher, the
checkpoint and the report. On a machine that others use too, trust CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from measure import cpu_seconds, machine_facts, median, save, table
from rlhf_spmd.parallel.layout import GenerationLayout, Layout, generation_layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import Launch, World
from rlhf_spmd.reshard import choose_method
from step import WORK, overrides, run_program, write_model, write_rows

FORWARD = ("tp", "pp", "pp_back", "dp")
CONNECTED = {  # by the first step, of each role's mesh
    "actor": (*FORWARD, "pool", "ends"),
    "critic": (*FORWARD, "pool"),
    "reference": FORWARD,
    "reward": (*FORWARD, "pool"),
}
GENERATION = ("tp", "pp", "pp_back", "replica")


@dataclass
class CountedWorld(World):
    """Writes down the communicators that it is asked for, and makes none."""

    asked: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)

    def _communicator(self, ranks: tuple[int, ...], channel: str) -> Any:
        self.asked.add((channel, ranks))


def plan(rank: int, size: int, pools: Sequence[range], tied: bool) -> tuple[set[tuple[str, tuple[int, ...]]], float]:
    """The communicators of one rank, and the seconds in which they are planned. ``pools``: of actor and reference, and of the rest."""
    begun = time.perf_counter()
    world = CountedWorld(Launch(rank, size), torch.device("cpu"), torch.distributed.HashStore(), 60.0)
    world.all.connect()
    for role, names in CONNECTED.items():
        pool = pools[role in ("critic", "reward")]
        layout = Layout(pp=4, tp=8, dp=len(pool) // 32)
        mesh = build_mesh(world, pool, layout)
        groups = [getattr(mesh, name) for name in names if name != "ends" or tied]
        if role == "actor":
            target = generation_layout(layout, 1, 2)
            generating = build_mesh(world, pool, target)
            groups += [getattr(generating, name) for name in GENERATION]
            groups += gathers(world, pool, target, mesh.index)
        for group in groups:
            group.connect()
    return world.asked, time.perf_counter() - begun


def gathers(world: World, pool: range, layout: GenerationLayout, index: int) -> list[Any]:
    if index < 0:
        return []
    ranks = choose_method("zero_redundancy", layout).gather_ranks(layout, index)
    return [world.group([pool[i] for i in ranks], "gather", channel="gather")]


def count(size: int) -> list[dict[str, Any]]:
    """Of the rank, among some of every pool, that has most of each; the median of their seconds."""
    rows = []
    for name, pools in (
        ("all roles on all ranks", [range(size)] * 2),
        ("two pools of half the ranks", [range(size // 2), range(size // 2, size)]),
    ):
        planned = [plan(rank, size, pools, True) for rank in range(0, size, size // 16)]
        sizes = [[len(ranks) for _, ranks in asked] for asked, _ in planned]
        rows.append(
            {
                "placement": name,
                "groups": max(map(len, sizes)),
                "connections": max(sum(n - 1 for n in own) for own in sizes),
                "store_messages": max(sum(2 * n + 1 for n in own) for own in sizes),
                "largest_groups": sorted(max(sizes, key=sum), reverse=True)[:4],
                "planning_s": round(median([seconds for _, seconds in planned]), 3),
            }
        )
    return rows


def time_ranks(ranks: int, repeats: int) -> dict[str, Any]:
    """Seconds beside the step: the least of ``repeats`` runs."""
    runs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as directory:
            root, work = Path(directory), WORK["tiny"]
            write_model(root / "model", work)
            write_rows(root / "ppo.jsonl", work, 2 * ranks, with_responses=False)
            settings = overrides("ppo", root, work, 1) | {
                "data.train_batch_size": ranks,
                "algorithm.ppo_mini_batch_size": ranks,
            }
            begun, cpu = time.perf_counter(), cpu_seconds()
            run_program("ppo", ranks, root, settings, [])
            wall, cpu = time.perf_counter() - begun, cpu_seconds() - cpu
            metrics = (root / f"ppo_{ranks}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            first = json.loads(metrics[0])
            runs.append((wall - first["timing_s/step"], cpu, first["timing_s/step"], first["memory/peak_gb"]))
    beside, cpu, step, peak = (min(column) for column in zip(*runs, strict=True))
    return {
        "ranks": ranks,
        "beside_step_s": round(beside, 2),
        "step_s": round(step, 2),
        "cpu_s": round(cpu, 2),
        "cpu_s_per_rank": round(cpu / ranks, 2),
        "peak_gb": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counted", type=int, default=1024, help="ranks, a multiple of 64")
    parser.add_argument("--ranks", type=int, nargs="*", default=[4], help="real ones, each with some 0.3 GB")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"facts": machine_facts(), "counted": count(options.counted), "timed": []}
    cells = [[str(value) for value in row.values()] for row in report["counted"]]
    print(table(list(report["counted"][0]), cells, 1))
    for ranks in options.ranks:
        report["timed"].append(time_ranks(ranks, options.repeats))
        print(json.dumps(report["timed"][-1]), file=sys.stderr)
    save(report, options.out)


if __name__ == "__main__":
    main()
