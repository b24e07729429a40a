"""What travels between the pipeline stages of a generation replica: hidden states to the next stage, and the drawn tokens from the
last stage to all others, each of which then plans the next step by itself.

No transfer waits where it is started. A rank waits for the hidden states of the step that it is about to compute, for the
tokens of a lane's last step before it plans the next, and for its oldest sends when many are under way. Nothing of that can wait in
a circle: number the steps of all lanes in the order in which every rank runs them. The hidden states of step k at stage s need
step k at stage s - 1; planning step k needs the tokens of an earlier step; a send waits for one of an earlier step. So each wait
is for a smaller (step, stage).

Hidden states take ``Mesh.pp`` and tokens ``Mesh.pp_back``: NCCL runs the transfers of one communicator one after the other, in the
order of each side. On each of these two, those of a pair of ranks go one way, in the order of the steps. NCCL also holds up the
host of the first transfer of a pair until both ranks are in it, and may lock if others are under way: :func:`connect_ways` comes first.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from rlhf_spmd.kernels import capabilities
from rlhf_spmd.parallel.mesh import Mesh
from rlhf_spmd.parallel.pipeline import Channel


class PipelineChannels:
    """This rank's ends of the ways of one call. ``waited``: seconds of this rank's host.

    Collective over ``mesh.pp``: every rank of it must call, in program order.
    """

    def __init__(self, mesh: Mesh) -> None:
        stage, last, keep = mesh.pp_rank, mesh.layout.pp - 1, 4 * mesh.layout.pp
        pp, back = mesh.pp, mesh.pp_back
        pp.connect()
        back.connect()
        self.hidden = Channel((pp, stage - 1), (pp, stage + 1), "generation:hidden", keep)
        others = range(last) if stage == last else [stage]
        self.tokens = [Channel((back, last), (back, other), "generation:tokens", keep) for other in others]
        self.waited = 0.0

    def receive_hidden(self, buffer: Tensor) -> Tensor:
        """``buffer``, filled by the stage before."""
        self.hidden.post(buffer)
        return self._take(self.hidden)

    def send_tokens(self, drawn: Tensor) -> None:
        """From the last stage to all others."""
        for channel in self.tokens:
            channel.send(drawn)

    def expect_tokens(self, number: int, device: torch.device) -> None:
        self.tokens[0].post(torch.empty(number, dtype=torch.int64, device=device))

    def take_tokens(self) -> Tensor:
        """Those that were expected first."""
        return self._take(self.tokens[0])

    def finish(self) -> None:
        """Wait for all sends."""
        for channel in (self.hidden, *self.tokens):
            channel.finish()

    def _take(self, channel: Channel) -> Tensor:
        begun = time.perf_counter()
        received = channel.take()
        self.waited += time.perf_counter() - begun
        return received


def connect_ways(mesh: Mesh, device: torch.device) -> None:
    """Let NCCL connect the ranks of all ways, one pair at a time. Collective over ``mesh.pp``: every rank of it must call, in program
    order."""
    last = mesh.layout.pp - 1
    if not last or not capabilities(device).nccl:
        return
    mesh.pp.meet(device)  # for the log-probs at the end of a call, which its last stage broadcasts
    stages, token = PipelineChannels(mesh), torch.zeros(1, dtype=torch.int64, device=device)
    if mesh.pp_rank:
        stages.receive_hidden(token.clone())
    if mesh.pp_rank < last:
        stages.hidden.send(token)
        stages.hidden.finish()
        stages.expect_tokens(1, device)
        stages.take_tokens()
        return
    for channel in stages.tokens:
        channel.send(token)
        channel.finish()
