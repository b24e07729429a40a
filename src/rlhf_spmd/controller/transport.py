"""Rank to rank: rows of a batch as flat bytes, without pickle, sent when they are made and received when they are needed.

A message is a header of four int64 (production, consumer node, hash of its name, payload bytes) and a payload that
describes itself. Messages between two ranks carry the tag of (production, consumer), so that the order in which a rank consumes
need not be the order in which others produce. Batch data are small beside weights (token ids, one number per token) and travel
over gloo from host memory, on GPUs too.
"""

from __future__ import annotations

import json
import zlib

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.data.batch import Batch, Field, Ragged
from rlhf_spmd.parallel.collectives import Group, wait_all

LENGTHS = 1023  # the node number under which row lengths travel
UNTRACED = 1022  # the node number of calls that no trace foresaw
_LABEL = "batch"
_ALIGN = 16  # bytes: every tensor of a message starts at a multiple, so that it is a view of what was received
_PADDING = torch.zeros(_ALIGN, dtype=torch.uint8)


class CallOrderError(RuntimeError):
    """The ranks' scripts took different branches."""

    exit_class = "hang"


def pack(batch: Batch) -> Tensor:
    """Batch -> uint8 [bytes]: 8 bytes of length, a JSON description, then the tensors one after the other, aligned."""
    parts: list[Tensor] = [batch.row_ids, batch.group_ids]
    description = []
    for name, field in batch.fields.items():
        values = field.values if isinstance(field, Ragged) else field
        if isinstance(field, Ragged):
            parts.append(field.lengths)
        parts.append(values.detach().cpu().contiguous())
        description.append([name, isinstance(field, Ragged), str(values.dtype).removeprefix("torch."), list(values.shape)])
    head = json.dumps([len(batch), description]).encode()
    flat = [torch.frombuffer(bytearray(len(head).to_bytes(8, "little") + head), dtype=torch.uint8)]
    flat += [part.reshape(-1).view(torch.uint8) for part in parts]
    return torch.cat([piece for part in flat for piece in (part, _PADDING[: -len(part) % _ALIGN])])


def unpack(data: Tensor) -> Batch:
    """Inverse of :func:`pack`; the tensors are views of ``data``."""
    head_size = int.from_bytes(bytes(data[:8].numpy()), "little")
    num_rows, description = json.loads(bytes(data[8 : 8 + head_size].numpy()))
    at = _aligned(8 + head_size)

    def take(dtype: torch.dtype, shape: list[int]) -> Tensor:
        nonlocal at
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        piece = data[at : at + num_bytes].view(dtype).view(shape)
        at = _aligned(at + num_bytes)
        return piece

    row_ids, group_ids = take(torch.int64, [num_rows]), take(torch.int64, [num_rows])
    fields: dict[str, Field] = {}
    for name, is_ragged, dtype_name, shape in description:
        lengths = take(torch.int64, [num_rows]) if is_ragged else None
        values = take(getattr(torch, dtype_name), shape)
        fields[name] = values if lengths is None else Ragged(values, lengths)
    return Batch(row_ids, group_ids, fields)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


class Transport:
    """Messages between ranks of the world; sends are asynchronous and kept alive until :meth:`finish`."""

    def __init__(self, world: Group) -> None:
        self.world = world
        self._pending: list[tuple[dist.Work | None, Tensor]] = []

    def send(self, payload: Tensor, to: int, production: int, node: int, name: str) -> None:
        """Start sending uint8 ``payload`` to a global rank, for call ``name`` at graph node ``node``."""
        header = torch.tensor([production, node, zlib.crc32(name.encode()), payload.numel()])
        tag = _tag(production, node)
        for tensor in (header, payload):
            self._pending.append((self.world.isend(tensor, to, _LABEL, tag), tensor))

    def receive(self, source: int, production: int, node: int, name: str) -> Tensor:
        """uint8 payload from a global rank. Raises CallOrderError if it was sent for another call."""
        header, tag = torch.empty(4, dtype=torch.int64), _tag(production, node)
        wait_all([self.world.irecv(header, source, _LABEL, tag)])
        *got, num_bytes = header.tolist()
        if got != [production, node, zlib.crc32(name.encode())]:
            raise CallOrderError(
                f"call order differs: rank {source} sent the result of call {got[0]} to node {got[1]}, but {name} "
                f"(node {node}) expects call {production}; a script may branch only on replicated values"
            )
        payload = torch.empty(num_bytes, dtype=torch.uint8)
        wait_all([self.world.irecv(payload, source, _LABEL, tag)])
        return payload

    def finish(self) -> None:
        """Wait until everything sent has been received."""
        wait_all([work for work, _ in self._pending])
        self._pending.clear()


def _tag(production: int, node: int) -> int:
    return (production & 0xFFFFF) << 10 | node
