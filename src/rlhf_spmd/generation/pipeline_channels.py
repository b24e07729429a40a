"""Transfers between the pipeline stages of a generation replica.

Hidden states go to the next stage. Drawn tokens go from the last stage to all others, each of which then plans the next step
itself.

Starting a transfer never waits. A rank waits for the hidden states of the step that it is about to compute, for the tokens of a
micro-batch's last step before it plans the next, and for its oldest sends when many are in flight. These waits cannot form a
circle. Number the steps of all micro-batches in the order in which every rank runs them. The hidden states of step k at stage s
need step k at stage s - 1. Planning step k needs the tokens of an earlier step. A send waits for a send of an earlier step. So
each wait is for a smaller (step, stage).

Hidden states use ``Mesh.pp`` and tokens ``Mesh.pp_back``. NCCL runs the transfers of one communicator one after the other, in the
order in which each side starts them; on each of the two, a pair of ranks transfers in one direction, in the order of the steps. The
first NCCL transfer of a pair blocks the host until both ranks are in it, and may deadlock while others are in flight. Hence
:func:`connect_channels` comes first.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from rlhf_spmd.kernels import capabilities
from rlhf_spmd.parallel.mesh import Mesh
from rlhf_spmd.parallel.pipeline import Channel


class PipelineChannels:
    """This rank's ends of the channels of one call. ``waited``: seconds for which this rank's host waited.

    Collective over ``mesh.pp``: every rank of it must call, in program order.
    """

    def __init__(self, mesh: Mesh) -> None:
        stage = mesh.pp_rank
        last = mesh.layout.pp - 1
        max_sends = 4 * mesh.layout.pp  # in flight at a time
        pp, back = mesh.pp, mesh.pp_back
        pp.connect()
        back.connect()
        self.hidden = Channel((pp, stage - 1), (pp, stage + 1), "generation:hidden", max_sends)
        others = range(last) if stage == last else [stage]
        self.tokens = [Channel((back, last), (back, other), "generation:tokens", max_sends) for other in others]
        self.waited = 0.0

    def receive_hidden(self, buffer: Tensor) -> Tensor:
        """Return ``buffer``, filled by the previous stage."""
        self.hidden.post(buffer)
        return self._take(self.hidden)

    def send_tokens(self, drawn: Tensor) -> None:
        """Send from the last stage to all others."""
        for channel in self.tokens:
            channel.send(drawn)

    def expect_tokens(self, number: int, device: torch.device) -> None:
        """Post the receipt of ``number`` tokens, on a stage that is not the last."""
        self.tokens[0].post(torch.empty(number, dtype=torch.int64, device=device))

    def take_tokens(self) -> Tensor:
        """Return the tokens whose receipt was posted first."""
        return self._take(self.tokens[0])

    def finish(self) -> None:
        """Wait for all sends."""
        for channel in (self.hidden, *self.tokens):
            channel.finish()

    def _take(self, channel: Channel) -> Tensor:
        started = time.perf_counter()
        received = channel.take()
        self.waited += time.perf_counter() - started
        return received


def connect_channels(mesh: Mesh, device: torch.device) -> None:
    """Let NCCL connect the ranks of all channels, one pair at a time.

    Collective over ``mesh.pp``: every rank of it must call, in program order.
    """
    last = mesh.layout.pp - 1
    if not last or not capabilities(device).nccl:
        return
    mesh.pp.connect_nccl(device)  # the last stage broadcasts log-probs at the end of a call
    channels, token = PipelineChannels(mesh), torch.zeros(1, dtype=torch.int64, device=device)
    if mesh.pp_rank:
        channels.receive_hidden(token.clone())
    if mesh.pp_rank < last:
        channels.hidden.send(token)
        channels.hidden.finish()
        channels.expect_tokens(1, device)
        channels.take_tokens()
        return
    for channel in channels.tokens:
        channel.send(token)
        channel.finish()
