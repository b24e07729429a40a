"""Messages from rank to rank: rows of a batch as flat bytes, without pickle.

A message is a header of four int64 (the producer's seq, the consumer's node, a hash of its name, payload bytes) and a payload that
describes itself. Its tag is (seq, node), so a rank may consume in another order than others produce. Batch data are small beside
weights (token ids, a number per token). They travel over gloo from host memory, on GPUs too.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.parallel.collectives import Group, wait_all

LENGTHS = 1023  # the node number under which row lengths travel
UNTRACED = 1022  # the node number of calls that the trace did not contain
REPORTS = 1021  # the node number under which reports for the first rank travel
_LABEL = "batch"


class CallOrderError(RuntimeError):
    """The ranks' scripts took different branches."""

    exit_class = "hang"


class Transport:
    """Messages between ranks of the world. Sends are asynchronous, and their tensors stay alive until :meth:`finish`."""

    def __init__(self, world: Group) -> None:
        self.world = world
        self._pending: list[tuple[dist.Work | None, Tensor]] = []
        self._earlier: deque[list[tuple[dist.Work | None, Tensor]]] = deque()  # sends of scripts that have ended

    def send(self, payload: Tensor, to: Sequence[int], seq: int, node: int, name: str) -> None:
        """Start to send uint8 ``payload`` of call ``seq`` to global ranks, for call ``name`` at ``node``.

        The payload must not change before :meth:`finish`.
        """
        header = torch.tensor([seq, node, zlib.crc32(name.encode()), payload.numel()])
        tag = _tag(seq, node)
        for rank in to:
            for tensor in (header, payload):
                self._pending.append((self.world.isend(tensor, rank, _LABEL, tag), tensor))

    def receive(self, sources: Sequence[int], seq: int, node: int, name: str) -> list[Tensor]:
        """Return a uint8 payload from each of these global ranks. Raises CallOrderError if one was sent for another call.

        All receives are posted before the first wait: one at a time, a thousand would take a second.
        """
        tag = _tag(seq, node)
        headers = [torch.empty(4, dtype=torch.int64) for _ in sources]
        wait_all([self.world.irecv(header, rank, _LABEL, tag) for header, rank in zip(headers, sources, strict=True)])
        payloads = []
        for header, rank in zip(headers, sources, strict=True):
            *sent_for, num_bytes = header.tolist()
            if sent_for != [seq, node, zlib.crc32(name.encode())]:
                raise CallOrderError(
                    f"call order differs: rank {rank} sent the result of call {sent_for[0]} to node {sent_for[1]}, but {name} "
                    f"(node {node}) expects call {seq}; a script may branch only on replicated values"
                )
            payloads.append(torch.empty(num_bytes, dtype=torch.uint8))
        wait_all([self.world.irecv(payload, rank, _LABEL, tag) for payload, rank in zip(payloads, sources, strict=True)])
        return payloads

    def finish(self, num_unfinished_scripts: int = 0) -> None:
        """End a script: wait until all sends have been received, except those of the last ``num_unfinished_scripts`` scripts."""
        self._earlier.append(self._pending)
        self._pending = []
        while len(self._earlier) > num_unfinished_scripts:
            wait_all([work for work, _ in self._earlier.popleft()])


def _tag(seq: int, node: int) -> int:
    return (seq & 0xFFFFF) << 10 | node
