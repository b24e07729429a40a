"""Idle time of pipeline schedules on real ranks against the formulas (p-1)/m and (p-1)/(v*m).

    python scripts/bench/pipeline.py --out pipeline.json

A pass through a stage is a sleep, so two cores carry any number of ranks; what is measured are the schedules and the loop that runs
them, with real transfers between the ranks. A rank's idle fraction is the time of the whole run that it does not spend in passes,
over the time that it does. A backward pass takes twice its forward pass, which takes ``--forward-ms`` for one micro-batch. Of
``--repeats`` runs of each case the median counts.

``replayed`` is what the schedule gives with transfers that cost nothing; with equal costs that is the formula. In the rows marked
ragged each micro-batch has its own number of tokens, its passes take as long as these ask for, and its tensors have its own shape.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import join_world, machine_facts, median, on_ranks, run_parts, save, table
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import Mesh, build_mesh
from rlhf_spmd.parallel.pipeline import Action, Schedule, connect_stages, run_pipeline, schedule_1f1b, schedule_forward
from rlhf_spmd.parallel.world import World

WIDTH, TOKENS = 64, 256  # of the tensors between stages; tokens of a micro-batch (the mean of the ragged ones)
FACTORS = (0.5, 1.75, 1.0, 0.25, 1.5, 0.75, 1.25, 1.0)  # tokens of ragged micro-batches, in turns


@dataclass(frozen=True)
class Case:
    schedule: str
    pp: int
    vpp: int
    num_micro_batches: int
    ragged: bool = False

    @property
    def formula(self) -> float:
        return (self.pp - 1) / (self.vpp * self.num_micro_batches)

    @property
    def tokens(self) -> list[int]:
        return [int(TOKENS * FACTORS[i % 8]) if self.ragged else TOKENS for i in range(self.num_micro_batches)]

    @property
    def plan(self) -> Schedule:
        return schedule_forward if self.schedule == "forward" else schedule_1f1b

    def actions(self, stage: int) -> list[Action]:
        return self.plan(self.num_micro_batches, self.pp, stage, self.vpp)

    def seconds(self, action: Action, forward_s: float) -> float:
        """Seconds of one pass. ``forward_s``: a forward pass of ``TOKENS`` tokens through all chunks of a rank."""
        return forward_s / self.vpp * (2 if action.kind == "B" else 1) * self.tokens[action.micro_batch] / TOKENS


def cases(ranks: int) -> list[Case]:
    found = []
    for pp in sorted({2, ranks}):
        for m in (2 * pp, 2 * pp + 1, 4 * pp):  # one that pp does not divide
            found += [Case("forward", pp, 1, m), *(Case("1F1B" if v == 1 else "interleaved", pp, v, m) for v in (1, 2, 3))]
        found += [Case(name, pp, v, 4 * pp, ragged=True) for name, v in (("forward", 1), ("1F1B", 1), ("interleaved", 2))]
    return found


def replay(case: Case, forward_s: float) -> float:
    """Idle fraction, mean over ranks, where every pass starts as soon as its rank is free and its input has been computed."""
    schedules = [case.actions(stage) for stage in range(case.pp)]
    done: dict[tuple[str, int, int], float] = {}
    free, position = [0.0] * case.pp, [0] * case.pp
    while any(position[rank] < len(actions) for rank, actions in enumerate(schedules)):
        for rank, actions in enumerate(schedules):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                stage = action.chunk * case.pp + rank
                before = stage - 1 if action.kind == "F" else stage + 1
                needed = action.kind, action.micro_batch, before
                if 0 <= before < case.pp * case.vpp and needed not in done:
                    break
                free[rank] = max(free[rank], done.get(needed, 0.0)) + case.seconds(action, forward_s)
                done[action.kind, action.micro_batch, stage] = free[rank]
                position[rank] += 1
    busy = sum(case.seconds(action, forward_s) for action in schedules[0])
    return max(free) / busy - 1


def run_once(case: Case, mesh: Mesh, forward_s: float) -> tuple[float, float, float]:
    """When this rank began, when it ended (seconds of a clock that all ranks share), and the time that it spent in passes."""
    busy = 0.0

    def compute(action: Action, received: Tensor | None) -> Tensor | None:
        nonlocal busy
        tokens = case.tokens[action.micro_batch]
        assert received is None or received.shape == (tokens, WIDTH)
        begin = time.monotonic()
        time.sleep(case.seconds(action, forward_s))
        busy += time.monotonic() - begin
        return torch.zeros(tokens, WIDTH)

    shapes = [(tokens, WIDTH) for tokens in case.tokens]
    mesh.pool.barrier("bench")
    begin = time.monotonic()
    run_pipeline(case.plan, mesh, shapes, torch.float32, torch.device("cpu"), compute, compute)
    return begin, time.monotonic(), busy


def measure(case: Case, world: World, forward_s: float, repeats: int) -> dict[str, Any] | None:
    """The case's row on rank 0. Collective over the world: every rank of it must call, in program order."""
    mesh = build_mesh(world, range(case.pp), Layout(pp=case.pp, vpp=case.vpp))
    row: dict[str, Any] | None = None
    if mesh.member:
        connect_stages(mesh, world.device)
        idle = []
        for _ in range(repeats):
            times = torch.tensor(run_once(case, mesh, forward_s), dtype=torch.float64)
            begins, ends, busy = torch.stack(mesh.pool.all_gather(times, "bench")).unbind(1)
            idle.append(float(((ends.max() - begins.min()) / busy - 1).mean()))
        row = {"schedule": case.schedule, "pp": case.pp, "vpp": case.vpp, "micro_batches": case.num_micro_batches}
        row |= {"ragged": case.ragged, "formula": round(case.formula, 4), "replayed": round(replay(case, forward_s), 4)}
        row |= {"measured": round(median(idle), 4)}
    world.all.barrier("bench")
    return row


def measure_cases(forward_s: float, repeats: int) -> dict[str, Any]:
    world = join_world()
    rows = [measure(case, world, forward_s, repeats) for case in cases(world.size)]
    return {"cases": [row for row in rows if row is not None]}


def pipeline(ranks: int = 4, forward_ms: float = 16.0, repeats: int = 3, out: Path | None = None) -> None:
    found = on_ranks(ranks, measure_cases, forward_s=forward_ms / 1e3, repeats=repeats)
    print(table(found["cases"], "schedule ragged pp vpp micro_batches formula replayed measured"))
    save({"bench": "pipeline", "ranks": ranks, "machine": machine_facts(), **found}, out)


if __name__ == "__main__":
    run_parts(pipeline)
