"""Pipeline schedules as pure functions, and the loop that runs them on ranks. ``test_legality_plans`` has its order of transfers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import run_ranks
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.pipeline import Action, run_pipeline, schedule_1f1b, schedule_forward

CASES = [(m, pp, vpp) for vpp in (1, 2, 3) for pp in (1, 2, 3, 4, 7) for m in (0, 1, 2, 3, 5, 8, 13) if pp > 1 or vpp == 1]


def simulate(schedules: list[list[Action]], vpp: int, backward: int = 1) -> int:
    """The time of a run in which each action starts when its rank is free and its input there. A forward through one chunk takes
    1, a backward ``backward``. Fails where the ranks would wait for each other.
    """
    pp = len(schedules)
    done: dict[tuple[str, int, int], int] = {}
    position, free = [0] * pp, [0] * pp
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedules):
            while position[rank] < len(actions):
                kind, index, chunk = actions[position[rank]]
                stage = chunk * pp + rank
                before = stage - 1 if kind == "F" else stage + 1
                if 0 <= before < pp * vpp and (kind, index, before) not in done:
                    break
                assert kind == "F" or ("F", index, stage) in done
                free[rank] = max(free[rank], done.get((kind, index, before), 0)) + (1 if kind == "F" else backward)
                done[kind, index, stage] = free[rank]
                position[rank] += 1
                moved = True
    assert position == [len(actions) for actions in schedules], f"deadlock at {position}"
    return max(free)


@pytest.mark.parametrize(("m", "pp", "vpp"), CASES)
def test_1f1b_is_complete_bounded_and_as_short_as_the_formula(m: int, pp: int, vpp: int) -> None:
    schedules = [schedule_1f1b(m, pp, rank, vpp) for rank in range(pp)]
    longest_round = 0 if not m else m if m < 2 * pp else -(-m // (m // pp))
    assert longest_round < 2 * pp and (m % pp or longest_round == min(m, pp))
    for rank, actions in enumerate(schedules):
        for kind in ("F", "B"):
            for chunk in range(vpp):
                assert [a.micro_batch for a in actions if (a.kind, a.chunk) == (kind, chunk)] == list(range(m))
        alive = most = 0
        for action in actions:
            alive += 1 if action.kind == "F" else -1
            most = max(most, alive)
        limit = pp - rank if vpp == 1 else 2 * (pp - 1 - rank) + (vpp - 1) * longest_round + 1
        assert most == min(limit, m * vpp)
    for backward in (1, 2):
        length = simulate(schedules, vpp, backward)
        if m >= pp or vpp == 1:
            assert length == ((1 + backward) * (m * vpp + pp - 1) if m else 0)


@pytest.mark.parametrize(("m", "pp", "vpp"), CASES)
def test_forward_schedule_takes_vm_plus_p_minus_1_slots(m: int, pp: int, vpp: int) -> None:
    schedules = [schedule_forward(m, pp, rank, vpp) for rank in range(pp)]
    for actions in schedules:
        for chunk in range(vpp):
            assert [a for a in actions if a.chunk == chunk] == [Action("F", i, chunk) for i in range(m)]
    length = simulate(schedules, vpp)
    if m >= pp or vpp == 1:
        assert length == (m * vpp + pp - 1 if m else 0)


# -- on ranks


def pipeline_on_ranks(world: Any, layout: Layout, lengths: list[int], width: int) -> tuple[list[Tensor], list[Tensor | None]]:
    """Virtual stage s computes x -> sin(x) * (s + 2) on ``lengths[i]`` rows; the outputs, the gradient of each chunk's scale."""
    mesh = build_mesh(world, range(layout.size), layout)
    scales = [torch.tensor(s + 2.0, dtype=torch.float64, requires_grad=True) for s in layout.stages(mesh.pp_rank)]
    saved: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
    outputs: list[Tensor] = []

    def forward(action: Action, received: Tensor | None) -> Tensor | None:
        i, chunk = action.micro_batch, action.chunk
        leaf = received.requires_grad_() if received is not None else None
        x = leaf if leaf is not None else source(i, lengths[i], width, mesh.dp_rank)
        out = torch.sin(x) * scales[chunk]
        saved[i, chunk] = leaf, out
        if mesh.last_stage and chunk == layout.vpp - 1:
            outputs.append(out.detach())
            return None
        return out.detach()

    def backward(action: Action, received: Tensor | None) -> Tensor | None:
        leaf, out = saved.pop((action.micro_batch, action.chunk))
        out.backward(received if received is not None else torch.full_like(out, action.micro_batch + 1.0))
        return leaf.grad if leaf is not None else None

    shapes = [(n, width) for n in lengths]
    actions = schedule_1f1b(len(lengths), layout.pp, mesh.pp_rank, layout.vpp)
    run_pipeline(actions, mesh, shapes, torch.float64, torch.device("cpu"), forward, backward)
    assert not saved
    return outputs, [scale.grad for scale in scales]


def source(i: int, rows: int, width: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * replica + i)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("layout", "lengths"),
    [
        (Layout(), [3, 1]),
        (Layout(pp=2, dp=2), [4, 9, 1]),
        (Layout(pp=4), [3, 2000, 1, 8, 5, 2]),
        (Layout(pp=2, dp=2, vpp=3), [4, 9]),
        (Layout(pp=4, vpp=2), [3, 2000, 1, 8, 5, 2, 4, 7, 6]),
        (Layout(pp=4, vpp=2), [3]),
    ],
    ids=str,
)
def test_pipeline_moves_activations_and_gradients(layout: Layout, lengths: list[int]) -> None:
    width = 6
    results = run_ranks(layout.size, pipeline_on_ranks, layout, lengths, width)
    for replica in range(layout.dp):
        scales = [torch.tensor(s + 2.0, dtype=torch.float64, requires_grad=True) for s in range(layout.pp * layout.vpp)]
        expected = []
        for i, rows in enumerate(lengths):
            x = source(i, rows, width, replica)
            for scale in scales:
                x = torch.sin(x) * scale
            x.backward(torch.full_like(x, i + 1.0))
            expected.append(x.detach())
        mine = [results[layout.index(rank, replica, 0, 0)] for rank in range(layout.pp)]
        for got, want in zip(mine[-1][0], expected, strict=True):
            assert torch.equal(got, want)
        for rank, (_, gradients) in enumerate(mine):
            for stage, gradient in zip(layout.stages(rank), gradients, strict=True):
                assert torch.allclose(gradient, scales[stage].grad, rtol=1e-12, atol=0)


def failing_stage(world: Any) -> None:
    mesh = build_mesh(world, range(2), Layout(pp=2))

    def nothing(action: Action, received: Tensor | None) -> Tensor | None:
        return None

    if mesh.first_stage:
        run_pipeline([Action("F", 0)], mesh, [(1, 1)], torch.float32, torch.device("cpu"), nothing, nothing)


def test_a_stage_that_has_nothing_to_send_is_named() -> None:
    with pytest.raises(AssertionError, match="pipeline_forward: stage 0 has nothing to send after Action"):
        run_ranks(2, failing_stage)
