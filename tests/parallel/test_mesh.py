"""Meshes on four real ranks: who makes which communicator, and when."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ranks import run_ranks
from rlhf_spmd.parallel.collectives import RECORDER, wait_all
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.world import World, init_world


def sum_of_ranks(world: World) -> dict[str, float]:
    """Pools of three and of two ranks that overlap, and members that are in different numbers of groups: each meets the others."""
    sums: dict[str, float] = {}
    before = len(world._communicators)
    first = build_mesh(world, [0, 1, 2], Layout(dp=3))
    second = build_mesh(world, [2, 3], Layout(tp=2))
    assert len(world._communicators) == before, "a mesh communicates nothing until it is asked to"
    if first.member:
        sums["dp"] = float(first.dp.all_reduce(torch.tensor([float(world.rank)]), "test"))
        assert first.pool.process_group is first.dp.process_group, "equal ranks share a communicator"
    if second.member:
        sums["tp"] = float(second.tp.all_reduce(torch.tensor([float(world.rank)]), "test"))
    sums["communicators"] = sum(("", ranks) in world._communicators for ranks in ((0, 1, 2), (2, 3)))
    return sums


def test_a_group_is_made_by_its_own_ranks_alone() -> None:
    assert run_ranks(4, sum_of_ranks) == [
        {"dp": 3.0, "communicators": 1},
        {"dp": 3.0, "communicators": 1},
        {"dp": 3.0, "tp": 5.0, "communicators": 2},
        {"tp": 5.0, "communicators": 1},
    ]


def first_transfers(world: World) -> float:
    mesh = build_mesh(world, range(4), Layout(pp=4))
    with pytest.raises(AssertionError, match=r"group pp_back: call connect\(\) first, where all of its ranks pass"):
        mesh.pp_back.irecv(torch.zeros(1), 0, "test")
    mesh.pp_back.connect()
    assert mesh.pp_back.process_group is not mesh.pp.process_group, "a channel of its own"
    received = torch.zeros(1)
    if world.rank == 1:
        wait_all([mesh.pp_back.irecv(received, 3, "test")])
    elif world.rank == 3:
        wait_all([mesh.pp_back.isend(torch.ones(1), 1, "test")])
    return float(received)


def test_a_transfer_between_some_ranks_wants_all_connected() -> None:
    assert run_ranks(4, first_transfers) == [0.0, 1.0, 0.0, 0.0]


def one_world_after_another(world: World) -> None:
    """As programs do that own the process group, or that run two of ours."""
    for each in (world, *(init_world(world.launch, world.store, world.timeout_s, world.device) for _ in range(2))):
        group = each.group(range(world.size), "test", channel="gather")
        assert group is not None
        assert float(group.all_reduce(torch.ones(1), "test")) == world.size


def test_worlds_follow_each_other_in_a_process() -> None:
    run_ranks(2, one_world_after_another)


def gathered(world: World) -> tuple[list[list[bytes] | None], list[int], float]:
    """What arrives twice in a row, the bytes received and sent, and a message between roles that waits for its receiver meanwhile."""
    group = world.all
    group.connect()
    early = group.isend(torch.tensor([7.0]), 0, "early") if world.rank == 3 else None
    before = Counter(RECORDER.received), Counter(RECORDER.sent)
    parts = [group.gather_bytes(bytes([world.rank]) * size * world.rank, "gathered") for size in (1 << 20, 1)]
    moved = [(RECORDER.received - before[0])["gathered"], (RECORDER.sent - before[1])["gathered"]]
    late = torch.zeros(1)
    if world.rank == 0:
        wait_all([group.irecv(late, 3, "early")])
    wait_all([early])
    return parts, moved, float(late)


def test_bytes_of_unequal_lengths_are_gathered_as_long_as_they_are() -> None:
    (parts, moved, late), *others = run_ranks(4, gathered)
    assert parts == [[bytes([rank]) * size * rank for rank in range(4)] for size in (1 << 20, 1)] and late == 7
    assert moved[0] < 6 * (1 << 20) + 200 and [sent // (1 << 20) for _, (_, sent), _ in others] == [1, 2, 3]
    assert all(nothing == [None, None] for nothing, _, _ in others)
