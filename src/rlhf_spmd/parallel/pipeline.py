"""Pipeline parallelism: schedules as data (pure), and the loop that runs one on this rank's part of the model.

A rank of ``pp`` holds ``vpp`` chunks of layers (1: a plain pipeline). Chunk c on rank r is virtual stage c * pp + r of pp * vpp, so a
micro-batch goes around the ranks vpp times. A schedule is the list of one rank's forward and backward passes, in their order.
Activations and gradients go between neighbours of the ring in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.parallel.collectives import RECORDER, Group, wait_all
from rlhf_spmd.parallel.layout import Layout
from rlhf_spmd.parallel.mesh import Mesh


class Action(NamedTuple):
    """The forward ("F") or backward ("B") pass of one micro-batch through one chunk of this rank."""

    kind: Literal["F", "B"]
    micro_batch: int
    chunk: int = 0


def _rounds(num_micro_batches: int, pp: int) -> list[range]:
    """Return runs of micro-batches that pass one chunk before the next: as even as possible, of at least ``pp`` if there are so many.

    With pp of them, the first has gone around the ring when the last one leaves.
    """
    number = max(num_micro_batches // pp, 1)
    bounds = [num_micro_batches * k // number for k in range(number + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def _order(kind: Literal["F", "B"], num_micro_batches: int, pp: int, chunks: range) -> list[Action]:
    return [Action(kind, i, chunk) for run in _rounds(num_micro_batches, pp) for chunk in chunks for i in run]


def schedule_forward(num_micro_batches: int, pp: int, stage: int, vpp: int = 1) -> list[Action]:
    """Return the forward passes only; with several chunks, in the order of :func:`schedule_1f1b`. Pure."""
    assert 0 <= stage < pp, f"stage {stage} of {pp}"
    return _order("F", num_micro_batches, pp, range(vpp))


def schedule_1f1b(num_micro_batches: int, pp: int, stage: int, vpp: int = 1) -> list[Action]:
    """Return one forward, one backward (PipeDream-flush), interleaved over chunks where vpp > 1 (Narayanan et al. 2021). Pure.

    First come forwards that fill the pipeline, then one forward and one backward in turn, then the remaining backwards. With equal
    costs a rank idles (pp - 1) / (vpp * m) of its busy time, for any m >= pp micro-batches, divisible by pp or not.

    At most min(pp - stage, m) micro-batches are alive at once. With chunks, each is alive in one chunk's layers only (1/vpp of the
    rank's), and at most min(2 * (pp - 1 - stage) + (vpp - 1) * g + 1, m * vpp) are. The largest round has g micro-batches: pp if pp
    divides m, and never more than 2 * pp - 1.
    """
    assert 0 <= stage < pp, f"stage {stage} of {pp}"
    forwards = _order("F", num_micro_batches, pp, range(vpp))
    backwards = _order("B", num_micro_batches, pp, range(vpp)[::-1])
    ahead = pp - 1 - stage
    if vpp > 1:
        ahead = 2 * ahead + (vpp - 1) * max(len(run) for run in _rounds(num_micro_batches, pp))
    warmup = min(ahead, len(forwards))
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return [*forwards[:warmup], *steady, *backwards[len(forwards) - warmup :]]


Schedule = Callable[[int, int, int, int], list[Action]]  # arguments as of :func:`schedule_1f1b`


def simulate(schedules: Sequence[Sequence[Action]], vpp: int, backward: int = 1) -> dict[tuple[str, int, int], int]:
    """Return when each pass (kind, micro-batch, virtual stage) ends if it starts when its rank is free and its input is there. Pure.

    A forward through one chunk takes 1, a backward ``backward``. ``schedules``: those of all ranks. Asserts that all passes can run.
    """
    pp = len(schedules)
    ends: dict[tuple[str, int, int], int] = {}
    position = [0] * pp  # of each rank in its schedule
    free_at = [0] * pp
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedules):
            while position[rank] < len(actions):
                kind, index, chunk = actions[position[rank]]
                stage = chunk * pp + rank
                before = stage - 1 if kind == "F" else stage + 1
                if 0 <= before < pp * vpp and (kind, index, before) not in ends:
                    break
                assert kind == "F" or ("F", index, stage) in ends, f"no forward before {actions[position[rank]]} on rank {rank}"
                free_at[rank] = max(free_at[rank], ends.get((kind, index, before), 0)) + (1 if kind == "F" else backward)
                ends[kind, index, stage] = free_at[rank]
                position[rank] += 1
                moved = True
    assert position == [len(actions) for actions in schedules], f"deadlock at {position}"
    return ends


@cache
def plan_receives(schedule: Schedule, num_micro_batches: int, pp: int, stage: int, vpp: int) -> list[list[Action]]:
    """Return the passes whose receives a rank begins before each of its passes, and after the last. Pure.

    Their senders have ended their passes by then, if all passes take equally long. So a rank waits, even with its whole device, only
    for what ends earlier in this one order of all passes.
    """
    schedules = [schedule(num_micro_batches, pp, rank, vpp) for rank in range(pp)]
    ends = simulate(schedules, vpp)
    sender = {"F": -1, "B": 1}  # virtual stages from a pass to its sender
    sent = [(ends.get((a.kind, a.micro_batch, a.chunk * pp + stage + sender[a.kind])), a) for a in schedules[stage]]
    arrivals = deque(sorted((end, action) for end, action in sent if end is not None))
    receives: list[list[Action]] = []
    for kind, i, chunk in schedules[stage]:
        begin = ends[kind, i, chunk * pp + stage] - 1
        receives.append([])
        while arrivals and arrivals[0][0] <= begin:
            receives[-1].append(arrivals.popleft()[1])
    return [*receives, []]


Link = tuple[Group, int]  # a group and the index of a neighbour in it


class Channel:
    """One direction of travel: receives from one neighbour and sends to the other, numbered in the order of the schedule.

    ``max_sends``: the most sends in flight.
    """

    def __init__(self, source: Link, target: Link, label: str, max_sends: int) -> None:
        self.source, self.target = source, target
        self.label, self.max_sends = label, max_sends
        self.posted: deque[tuple[Tensor, dist.Work | None]] = deque()
        self.sent: deque[tuple[Tensor, dist.Work | None]] = deque()
        self.num_posted = self.num_sent = 0

    def post(self, buffer: Tensor) -> None:
        group, neighbour = self.source
        self.posted.append((buffer, group.irecv(buffer, neighbour, self.label, self.num_posted)))
        self.num_posted += 1

    def take(self) -> Tensor:
        buffer, work = self.posted.popleft()
        wait_all([work])
        return buffer

    def send(self, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        group, neighbour = self.target
        self.sent.append((tensor, group.isend(tensor, neighbour, self.label, self.num_sent)))
        self.num_sent += 1
        self.finish(self.max_sends)

    def finish(self, num_left: int = 0) -> None:
        """Wait for the oldest sends until ``num_left`` are in flight, and release their tensors."""
        while len(self.sent) > num_left:
            _, work = self.sent.popleft()
            wait_all([work])


def _channels(mesh: Mesh, around: bool, max_sends: int) -> dict[str, Channel]:
    """Return the channels "F", to the next stage and from the last stage around the ring to the first, and "B", the other way."""
    for group in (mesh.pp, mesh.pp_back, *((mesh.ring, mesh.ring_back) if around else ())):
        group.connect()
    stage = mesh.pp.rank
    last = mesh.pp.size - 1
    before: Link = (mesh.pp, stage - 1) if stage else (mesh.ring, 1)
    after: Link = (mesh.pp, stage + 1) if stage < last else (mesh.ring, 0)
    back_from: Link = (mesh.pp_back, stage + 1) if stage < last else (mesh.ring_back, 0)
    back_to: Link = (mesh.pp_back, stage - 1) if stage else (mesh.ring_back, 1)
    forward = Channel(before, after, "pipeline_forward", max_sends)
    return {"F": forward, "B": Channel(back_from, back_to, "pipeline_backward", max_sends)}


def connect_stages(mesh: Mesh, device: torch.device) -> None:
    """Pass a token forward, then backward through the stages (and around the ring if vpp > 1).

    NCCL connects two ranks in their first transfer and blocks the host until both are in it. In the middle of a schedule that could
    block a rank for which others wait; here each rank waits only for the one before. Each token has arrived before its sender connects
    to another rank: NCCL may deadlock if two ranks connect while they transfer to others.

    Collective over the pipeline group: every rank of it must call, in program order.
    """
    assert isinstance(mesh.layout, Layout), "a generation mesh has no training pipeline"

    def token(action: Action, received: Tensor | None) -> Tensor:
        return torch.zeros(1, device=device)

    run_pipeline(schedule_1f1b, mesh, [(1,)], torch.float32, device, token, token, max_sends=0)


def run_pipeline(
    schedule: Schedule,
    mesh: Mesh,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    forward: Callable[[Action, Tensor | None], Tensor | None],
    backward: Callable[[Action, Tensor | None], Tensor | None],
    max_sends: int | None = None,
) -> None:
    """Run one rank's part of a schedule. ``shapes[i]``: the shape of micro-batch i between stages, the same on every stage.

    ``forward(action, received)`` takes the activation of the previous virtual stage (None on the first) and returns its own (None
    on the last). ``backward(action, received)`` takes the gradient of what it sent (None on the last) and returns the gradient of
    what it received (None on the first).

    Forward, backward and the way around the ring have groups of their own, because NCCL runs the transfers of one communicator one
    after the other. In 1F1B a stage sends forward while its neighbour sends back: on one communicator each would wait for the other.
    On every communicator, the transfers of two ranks go one way, in one order.

    The host may wait for its device while it launches a pass: where CUDA loads a kernel at its first launch, or the allocator returns
    memory. Therefore nothing may be open then that waits for this pass, by way of other ranks: :func:`plan_receives` says when
    receives begin. They do right after a pass's send, into memory that was allocated before, so that the host does not wait between.
    A send is waited for when ``max_sends`` later ones (default 2 * pp) are in flight, or at the end. On NCCL, call
    :func:`connect_stages` before the first run.

    Collective over the pipeline group: every rank of it must call, in program order.
    """
    assert isinstance(mesh.layout, Layout), "a generation mesh has no training pipeline"
    stage, pp, vpp = mesh.pp.rank, mesh.pp.size, mesh.layout.vpp
    channels = _channels(mesh, vpp > 1, 2 * pp if max_sends is None else max_sends)
    passes = {"F": forward, "B": backward}
    first_stage_of = {"F": 0, "B": pp * vpp - 1}  # it receives nothing
    last_stage_of = {"F": pp * vpp - 1, "B": 0}  # it sends nothing
    receives = plan_receives(schedule, len(shapes), pp, stage, vpp)

    def receive_buffers(position: int) -> list[tuple[Action, Tensor]]:
        """Return memory for the receives before this action."""
        return [(action, torch.empty(shapes[action.micro_batch], dtype=dtype, device=device)) for action in receives[position]]

    next_buffers = receive_buffers(0)
    for position, action in enumerate(schedule(len(shapes), pp, stage, vpp)):
        for receive, buffer in next_buffers:
            channels[receive.kind].post(buffer)
        channel = channels[action.kind]
        virtual_stage = action.chunk * pp + stage
        received = channel.take() if virtual_stage != first_stage_of[action.kind] else None
        next_buffers = receive_buffers(position + 1)
        result = passes[action.kind](action, received)
        RECORDER.tick()  # a rank that sends nothing shows no other sign of life
        if virtual_stage != last_stage_of[action.kind]:
            assert result is not None, f"{channel.label}: stage {stage} has nothing to send after {action}"
            channel.send(result)
    for channel in channels.values():
        channel.finish()
