"""Pipeline parallelism: schedules as data (pure), and the loop that runs one of them on this rank's stage.

A schedule is the list of forward and backward passes of one stage, in the order in which it runs them. Activations and
gradients travel only between neighbouring stages, one channel per direction, each in the order of the micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.parallel.collectives import Group, wait_all


class Action(NamedTuple):
    """The forward ("F") or backward ("B") pass of one micro-batch through this stage."""

    kind: Literal["F", "B"]
    micro_batch: int


def schedule_forward(num_micro_batches: int, pp: int, stage: int) -> list[Action]:
    """Forward passes only: every stage takes the micro-batches in order. Pure."""
    assert 0 <= stage < pp, f"stage {stage} of {pp}"
    return [Action("F", i) for i in range(num_micro_batches)]


def schedule_1f1b(num_micro_batches: int, pp: int, stage: int) -> list[Action]:
    """One forward, one backward (PipeDream-flush, Narayanan et al. 2021): pp - 1 - stage forwards to fill the pipeline, then
    alternating, then the remaining backwards. At most min(pp - stage, num_micro_batches) micro-batches are alive at once. Pure.
    """
    assert 0 <= stage < pp, f"stage {stage} of {pp}"
    warmup = min(pp - 1 - stage, num_micro_batches)
    actions = [Action("F", i) for i in range(warmup)]
    for i in range(num_micro_batches - warmup):
        actions += [Action("F", warmup + i), Action("B", i)]
    actions += [Action("B", i) for i in range(num_micro_batches - warmup, num_micro_batches)]
    return actions


class _Channel:
    """Receives from one neighbour and sends to the other, in micro-batch order, for one direction of travel."""

    def __init__(self, group: Group, source: int | None, to: int | None, label: str) -> None:
        self.group, self.source, self.to, self.label = group, source, to, label
        self.posted: dict[int, tuple[Tensor, dist.Work | None]] = {}
        self.sent: deque[tuple[Tensor, dist.Work | None]] = deque()
        self.used = False

    def post(self, index: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, ahead: bool) -> None:
        """``ahead``: before the action that takes it. Not for the first transfer: NCCL connects two ranks in it, which blocks
        the host until the neighbour sends, and what the neighbour waits for may still have to be computed here."""
        if self.source is not None and index not in self.posted and (self.used or not ahead):
            buffer = torch.empty(shape, dtype=dtype, device=device)
            self.posted[index] = buffer, self.group.irecv(buffer, self.source, self.label, tag=index)

    def take(self, index: int) -> Tensor | None:
        if self.source is None:
            return None
        buffer, work = self.posted.pop(index)
        self.used = True
        wait_all([work])
        return buffer

    def send(self, index: int, tensor: Tensor | None) -> None:
        if self.to is None:
            return
        assert tensor is not None, f"{self.label}: micro-batch {index} has nothing to send to stage {self.to}"
        tensor = tensor.contiguous()
        self.sent.append((tensor, self.group.isend(tensor, self.to, self.label, tag=index)))
        self.finish(keep=self.group.size)  # what is older has been used by the neighbour: 1F1B has at most that many alive

    def finish(self, keep: int = 0) -> None:
        """Wait for the oldest sends until ``keep`` are left, and let go of their tensors."""
        while len(self.sent) > keep:
            _, work = self.sent.popleft()
            wait_all([work])


def run_pipeline(
    actions: Sequence[Action],
    forward_group: Group,
    backward_group: Group,
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    device: torch.device,
    forward: Callable[[int, Tensor | None], Tensor | None],
    backward: Callable[[int, Tensor | None], Tensor | None],
) -> None:
    """Run one stage's schedule; ``shapes[i]`` is the shape of micro-batch i between stages, the same on every stage.

    ``forward(i, received)`` takes the activation of the stage before (None on the first) and returns the one to pass on
    (None on the last); ``backward(i, received)`` takes the gradient of what it passed on (None on the last) and returns the
    gradient of what it received (None on the first).

    The two groups hold the same ranks in stage order. They are two because NCCL runs the transfers of one communicator one
    after the other: in 1F1B a stage sends forward while its neighbour sends back, and on one communicator each of the two
    transfers would wait for the other.

    The receive of the next action is posted before the current one computes, but for a channel's first; a send is waited for
    only when the neighbour has used it or at the end.
    Collective over the pipeline group: every rank of it must call, in program order.
    """
    stage, last = forward_group.rank, forward_group.size - 1
    before, after = (stage - 1 if stage > 0 else None), (stage + 1 if stage < last else None)
    channels = {
        "F": _Channel(forward_group, before, after, "pipeline_forward"),
        "B": _Channel(backward_group, after, before, "pipeline_backward"),
    }
    passes = {"F": forward, "B": backward}
    for position, (kind, index) in enumerate(actions):
        for ahead, posted in enumerate(actions[position : position + 2]):
            channels[posted.kind].post(posted.micro_batch, shapes[posted.micro_batch], dtype, device, ahead=ahead > 0)
        channels[kind].send(index, passes[kind](index, channels[kind].take(index)))
    for channel in channels.values():
        channel.finish()
