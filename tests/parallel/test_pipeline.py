"""Pipeline schedules as pure functions, and the loop that runs them: in order-checking communicators, and on ranks."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks import run_ranks
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import build_mesh
from rlhf_spmd.parallel.pipeline import Action, connect_stages, run_pipeline, schedule_1f1b, schedule_forward

CASES = [
    (m, pp, vpp) for vpp in (1, 2, 3, 4) for pp in (1, 2, 3, 4, 7) for m in (0, 1, 2, 3, 5, 8, 13, 16) if pp > 1 or vpp == 1
]


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


# -- the loop on communicators that order transfers as nccl does


@dataclass
class Transfer:
    tensor: Tensor
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        assert self.done.wait(10), "deadlock"


class Wire:
    """What the ranks of one communicator share. Each rank's transfers run one after the other, in the order of their calls; the
    first one between two ranks holds up the caller until the other side calls too.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queues: dict[int, deque[tuple[str, int, Transfer]]] = {}
        self.met: set[tuple[int, int]] = set()

    def add(self, kind: str, me: int, peer: int, tensor: Tensor) -> Transfer:
        transfer, pair = Transfer(tensor), (min(me, peer), max(me, peer))
        with self.changed:
            self.queues.setdefault(me, deque()).append((kind, peer, transfer))
            if any(other == me for _, other, _ in self.queues.get(peer, ())):
                self.met.add(pair)
            while self._advance():
                pass
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: pair in self.met, 10), "deadlock in the first transfer of a pair"
        return transfer

    def _advance(self) -> bool:
        for me, queue in self.queues.items():
            if queue and queue[0][0] == "send":
                _, peer, sent = queue[0]
                other = self.queues.get(peer)
                if other and other[0][:2] == ("receive", me):
                    assert other[0][2].tensor.shape == sent.tensor.shape, "transfers of different micro-batches met"
                    other[0][2].tensor.copy_(sent.tensor)
                    for transfer in (queue.popleft()[2], other.popleft()[2]):
                        transfer.done.set()
                    return True
        return False


@dataclass(frozen=True, eq=False)
class OrderedGroup(Group):
    wire: Wire = field(default_factory=Wire)

    def connect(self) -> None:
        pass

    def isend(self, tensor: Tensor, to: int, label: str, tag: int = 0) -> Any:
        return self.wire.add("send", self.rank, to, tensor.clone())

    def irecv(self, tensor: Tensor, source: int, label: str, tag: int = 0) -> Any:
        return self.wire.add("receive", self.rank, source, tensor)


def run_on_threads(pp: int, vpp: int, schedule: Any, num_micro_batches: int) -> None:
    wires = {name: Wire() for name in ("pp", "pp_back", "ring", "ring_back")}
    failures: list[BaseException] = []

    def rank_main(rank: int) -> None:
        end = 0 if rank == 0 else 1
        mesh: Any = SimpleNamespace(layout=Layout(pp=pp, vpp=vpp))
        for name in ("pp", "pp_back"):
            setattr(mesh, name, OrderedGroup(name, tuple(range(pp)), rank, wire=wires[name]))
        for name in ("ring", "ring_back"):
            setattr(mesh, name, OrderedGroup(name, (0, pp - 1), end, wire=wires[name]))
        order = []

        def forward(action: Action, received: Tensor | None) -> Tensor | None:
            order.append(action)
            time.sleep(0.0002 * ((rank + action.micro_batch) % 3))
            stage = action.chunk * pp + rank
            assert received is None if stage == 0 else float(received[0]) == stage - 1 + 100 * action.micro_batch
            return None if stage == pp * vpp - 1 else torch.full((action.micro_batch + 1,), stage + 100.0 * action.micro_batch)

        def backward(action: Action, received: Tensor | None) -> Tensor | None:
            order.append(action)
            stage = action.chunk * pp + rank
            assert received is None if stage == pp * vpp - 1 else float(received[0]) == stage + 1 - 100 * action.micro_batch
            return None if stage == 0 else torch.full((action.micro_batch + 1,), stage - 100.0 * action.micro_batch)

        actions = schedule(num_micro_batches, pp, rank, vpp)
        shapes = [(i + 1,) for i in range(num_micro_batches)]
        try:
            connect_stages(mesh, torch.device("cpu"))
            run_pipeline(actions, mesh, shapes, torch.float32, torch.device("cpu"), forward, backward)
            assert order == actions
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(pp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert not any(queue for wire in wires.values() for queue in wire.queues.values()), "transfers are left over"


@pytest.mark.parametrize("schedule", [schedule_1f1b, schedule_forward])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (4, 1), (4, 2), (5, 3)])
def test_no_deadlock_where_transfers_are_ordered_and_first_ones_block(pp: int, vpp: int, schedule: Any) -> None:
    for num_micro_batches in (1, 2, 3, 4, 5, 9, 12):
        run_on_threads(pp, vpp, schedule, num_micro_batches)


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
        (Layout(pp=2), [5, 1, 7, 2, 3]),
        (Layout(pp=2, dp=2), [4, 9, 1]),
        (Layout(pp=4), [3, 2000, 1, 8, 5, 2]),
        (Layout(pp=2, vpp=2), [5, 1, 700, 2, 3]),
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
