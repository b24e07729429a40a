"""Ranks on paper, up to 64: what they would launch is legal on NCCL. No processes, and nothing travels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from legality import check
from legality_events import Event, Launch, Machine
from paper_ranks import Paper, beside, on_paper
from rlhf_spmd.models.sharding import plan_params
from rlhf_spmd.models.spec import ModelSpec
from rlhf_spmd.parallel.boxes import ParamShard
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.pipeline import Action, connect_stages, run_pipeline, schedule_1f1b, schedule_forward
from rlhf_spmd.reshard import Holding, holdings, plan_transfer, start_transfer, transfer_steps
from rlhf_spmd.reshard.holdings import held_by

RANKS = 64
SPEC = ModelSpec("qwen3", 1024, 256, 512, 8, 16, 8, 16, qk_norm=True)
Side = tuple[Layout, Sequence[int]]
CPU, META = torch.device("cpu"), torch.device("meta")


def shards_at(layout: Layout) -> Callable[[int, int], dict[str, ParamShard]]:
    def at(pp: int, tp: int) -> dict[str, ParamShard]:
        return plan_params(SPEC, "lm", pp, layout.pp, tp, layout.tp)

    return at


def parameters(layout: Layout, pool: Sequence[int], rank: int) -> dict[str, Tensor]:
    if rank not in pool:
        return {}
    shards = held_by(layout, shards_at(layout), pool.index(rank))
    return {name: torch.empty(shard.shape, device=META) for name, shard in shards.items()}


def sides_of(side: Side) -> list[Holding]:
    layout, pool = side
    return holdings(layout, shards_at(layout), pool)


def reshard(paper: Paper, sides: tuple[Side, Side], held: tuple[list[Holding], list[Holding]], buffers: int) -> None:
    (source, here), (target, there) = sides
    group = paper.group(sorted({*here, *there}), "weight_sync", "weight_sync")
    assert group is not None
    plan = plan_transfer(*held, lambda rank: rank // 8, paper.rank)
    given, taken = parameters(source, here, paper.rank), parameters(target, there, paper.rank)
    steps = transfer_steps(plan, paper.rank, given, taken, group.ranks, torch.float32, message_bytes=1 << 18)
    group.connect(CPU)
    beside(paper, lambda: start_transfer(steps, given, taken, group, torch.float32, buffer_bytes=buffers))


@pytest.mark.parametrize(
    ("source", "here", "target", "there"),
    [
        (Layout(4, 2, 8, 3), range(64), Layout(1, 8, 8), range(64)),
        (Layout(2, 8, 2, 1), range(32), Layout(1, 4, 8), range(32, 64)),
        (Layout(8, 4, 1), range(32), Layout(2, 8, 3), range(16, 64)),
    ],
    ids=("all ranks", "apart", "overlapping"),
)
def test_weights_between_two_layouts(source: Layout, here: Sequence[int], target: Layout, there: Sequence[int]) -> None:
    sides = (source, here), (target, there)
    held = sides_of(sides[0]), sides_of(sides[1])
    records = on_paper(RANKS, lambda paper: reshard(paper, sides, held, 1 << 20))
    exchanged = sum(isinstance(event, Launch) and event.kind == "exchange" for event in records[63])
    assert exchanged > 3
    for machine in (Machine(), Machine(queue=True), Machine(allocator=True)):
        assert check(records, machine) == []


Schedule = Callable[[int, int, int, int], list[Action]]


def train(paper: Paper, layout: Layout, schedule: Schedule, num_micro_batches: int) -> None:
    """Two updates: forward and backward passes with sums over tp, then the sums over dp and the norm."""
    mesh = build_mesh(paper, range(layout.size), layout)  # type: ignore[arg-type]
    shapes = [(96 + i, 64) for i in range(num_micro_batches)]
    for group in (mesh.tp, mesh.dp, mesh.pool):
        group.meet(CPU)
    connect_stages(mesh, CPU)

    def compute(action: Action, received: Tensor | None) -> Tensor:
        for label in ("attention", "mlp"):
            mesh.tp.all_reduce(torch.empty(shapes[action.micro_batch], device=META), label)
        return torch.empty(shapes[action.micro_batch], dtype=torch.bfloat16, device=META)

    for _ in range(2):  # updates
        actions = schedule(num_micro_batches, layout.pp, mesh.pp_rank, layout.vpp)
        run_pipeline(actions, mesh, shapes, torch.bfloat16, META, compute, compute)
        mesh.dp.all_reduce(torch.empty(1000, device=META), "gradients")
        mesh.pool.all_reduce(torch.zeros(1), "grad_norm")


def records_of(layout: Layout, schedule: Schedule, num_micro_batches: int) -> dict[int, list[Event]]:
    return on_paper(layout.size, lambda paper: train(paper, layout, schedule, num_micro_batches))


@pytest.mark.parametrize("schedule", [schedule_1f1b, schedule_forward])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 2), (5, 3)])
def test_pipelines_do_not_lock(pp: int, vpp: int, schedule: Schedule) -> None:
    for num_micro_batches in (1, 2, 3, 5, 9):
        records = records_of(Layout(pp=pp, vpp=vpp), schedule, num_micro_batches)
        assert check(records) == [] == check(records, Machine(queue=True))


def test_interleaved_1f1b_of_64_ranks() -> None:
    records = records_of(Layout(8, 4, 2, vpp=2), schedule_1f1b, 16)
    assert check(records) == [] == check(records, Machine(queue=True))


def test_it_would_be_seen_that_ways_there_and_back_share_a_communicator() -> None:
    """Why ``Mesh.pp_back`` is there: in 1F1B a stage sends forward while its neighbour sends back."""
    records = records_of(Layout(4), schedule_1f1b, 6)
    one_way = {
        rank: [replace(event, comm=event.comm._replace(name="")) if isinstance(event, Launch) else event for event in events]
        for rank, events in records.items()
    }
    assert check(records) == [] and {finding.rule for finding in check(one_way)} == {"order"}
