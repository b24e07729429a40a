"""Pipeline schedules as pure functions, and the loop that runs them on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import run_ranks
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.pipeline import Action, run_pipeline, schedule_1f1b, schedule_forward

CASES = [(m, pp) for pp in (1, 2, 3, 4, 7) for m in (0, 1, 2, 3, 5, 8, 16)]


def simulate(schedules: list[list[Action]]) -> int:
    """Run all stages together, each action as soon as its input is there; returns the number of time slots, fails if stuck."""
    pp = len(schedules)
    done: set[tuple[int, str, int]] = set()
    position = [0] * pp
    slots = 0
    while any(position[s] < len(schedules[s]) for s in range(pp)):
        ready = []
        for stage in range(pp):
            if position[stage] < len(schedules[stage]):
                kind, index = schedules[stage][position[stage]]
                neighbour = stage - 1 if kind == "F" else stage + 1
                if not 0 <= neighbour < pp or (neighbour, kind, index) in done:
                    ready.append((stage, kind, index))
        assert ready, f"deadlock at {[s[p] if p < len(s) else None for s, p in zip(schedules, position, strict=True)]}"
        for stage, kind, index in ready:
            done.add((stage, kind, index))
            position[stage] += 1
        slots += 1
    return slots


@pytest.mark.parametrize(("m", "pp"), CASES)
def test_1f1b_is_complete_bounded_and_free_of_deadlock(m: int, pp: int) -> None:
    schedules = [schedule_1f1b(m, pp, stage) for stage in range(pp)]
    for stage, actions in enumerate(schedules):
        for kind in ("F", "B"):
            assert [a.micro_batch for a in actions if a.kind == kind] == list(range(m))
        alive, most = 0, 0
        for action in actions:
            alive += 1 if action.kind == "F" else -1
            assert alive >= 0
            most = max(most, alive)
        assert most == min(pp - stage, m)
    assert simulate(schedules) == (2 * (m + pp - 1) if m else 0)


@pytest.mark.parametrize(("m", "pp"), CASES)
def test_forward_schedule_takes_m_plus_p_minus_1_slots(m: int, pp: int) -> None:
    schedules = [schedule_forward(m, pp, stage) for stage in range(pp)]
    assert all(actions == [Action("F", i) for i in range(m)] for actions in schedules)
    assert simulate(schedules) == (m + pp - 1 if m else 0)


def pipeline_on_ranks(world: Any, pp: int, dp: int, lengths: list[int], width: int) -> tuple[list[Tensor], Tensor | None]:
    """Stage s computes x -> sin(x) * (s + 2) on ``lengths[i]`` rows; returns the outputs and the gradient of its scale."""
    mesh = build_mesh(world, range(pp * dp), Layout(pp=pp, dp=dp))
    scale = torch.tensor(float(mesh.pp_rank + 2), dtype=torch.float64, requires_grad=True)
    saved: dict[int, tuple[Tensor | None, Tensor]] = {}
    outputs: list[Tensor] = []

    def forward(i: int, received: Tensor | None) -> Tensor | None:
        leaf = received.requires_grad_() if received is not None else None
        x = leaf if leaf is not None else source(i, lengths[i], width, mesh.dp_rank)
        out = torch.sin(x) * scale
        saved[i] = leaf, out
        if mesh.last_stage:
            outputs.append(out.detach())
            return None
        return out.detach()

    def backward(i: int, received: Tensor | None) -> Tensor | None:
        leaf, out = saved.pop(i)
        out.backward(received if received is not None else torch.full_like(out, i + 1.0))
        return leaf.grad if leaf is not None else None

    shapes = [(n, width) for n in lengths]
    actions = schedule_1f1b(len(lengths), pp, mesh.pp_rank)
    run_pipeline(actions, mesh.pp, mesh.pp_back, shapes, torch.float64, torch.device("cpu"), forward, backward)
    assert not saved
    return outputs, scale.grad


def source(i: int, rows: int, width: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * replica + i)
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("pp", "dp", "lengths"), [(1, 1, [3, 1]), (2, 1, [5, 1, 7, 2, 3]), (2, 2, [4, 9, 1]), (4, 1, [3, 2000, 1, 8, 5, 2])]
)
def test_pipeline_moves_activations_and_gradients(pp: int, dp: int, lengths: list[int]) -> None:
    width = 6
    results = run_ranks(pp * dp, pipeline_on_ranks, pp, dp, lengths, width)
    for replica in range(dp):
        scales = [torch.tensor(s + 2.0, dtype=torch.float64, requires_grad=True) for s in range(pp)]
        expected = []
        for i, rows in enumerate(lengths):
            x = source(i, rows, width, replica)
            for scale in scales:
                x = torch.sin(x) * scale
            x.backward(torch.full_like(x, i + 1.0))
            expected.append(x.detach())
        mine = [results[stage * dp + replica] for stage in range(pp)]
        for got, want in zip(mine[-1][0], expected, strict=True):
            assert torch.equal(got, want)
        for (_, gradient), scale in zip(mine, scales, strict=True):
            assert torch.allclose(gradient, scale.grad, rtol=1e-12, atol=0)


def failing_stage(world: Any) -> None:
    mesh = build_mesh(world, range(2), Layout(pp=2))

    def forward(i: int, received: Tensor | None) -> Tensor | None:
        return None

    def backward(i: int, received: Tensor | None) -> Tensor | None:
        return None

    if mesh.first_stage:
        run_pipeline([Action("F", 0)], mesh.pp, mesh.pp_back, [(1, 1)], torch.float32, torch.device("cpu"), forward, backward)


def test_a_stage_that_has_nothing_to_send_is_named() -> None:
    with pytest.raises(AssertionError, match="pipeline_forward: micro-batch 0 has nothing to send to stage 1"):
        run_ranks(2, failing_stage)
