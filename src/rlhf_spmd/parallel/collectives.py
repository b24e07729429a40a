"""The only module that calls collectives. Each has a name, a group and a sequence number, and is recorded for the post-mortem.

Everything in rlhf_spmd that moves bytes between ranks goes through a :class:`Group`. A group of one rank communicates nothing, so code
for many ranks runs unchanged on one.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.kernels import capabilities


@dataclass
class FlightRecorder:
    """The last collectives of this process, and the bytes that it sent and received per label."""

    entries: deque[tuple[int, str, str, int, float]] = field(default_factory=lambda: deque(maxlen=64))
    received: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    sequence: int = 0
    ticks: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)  # weights are sent to replicas from a thread of their own

    def note(self, operation: str, group: str, num_bytes: int, label: str = "", sent: int = 0, received: int = 0) -> None:
        with self._lock:
            self.sequence += 1
            self.entries.append((self.sequence, operation, group, num_bytes, time.time()))
            self.sent[label] += sent
            self.received[label] += received

    def tick(self) -> None:
        """Count progress other than collectives: a call that starts or ends, a part of a long call or of a file."""
        self.ticks += 1

    def dump(self, last: int = 8) -> str:
        now = time.time()
        rows = list(self.entries)[-last:]
        return "; ".join(f"#{n} {op} on {group} ({size} B, {now - then:.1f} s ago)" for n, op, group, size, then in rows)


RECORDER = FlightRecorder()  # per process, for diagnostics only: results never depend on it

# torch 2.13 renamed them; 2.11 has only the older names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Work = dist.Work  # what an asynchronous transfer returns
Message = tuple[int, Tensor]  # index in a group, and the tensor that goes there or comes from there

_GATHER_TAG = 1 << 30  # above the tags of messages between roles, some of which wait for their receiver meanwhile
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, eq=False)
class Group:
    """Some ranks of the world. ``ranks``: global ranks, ascending. ``rank``: this process's index in the group.

    The ranks connect in their first collective. Call :meth:`connect` before, where all of them pass, if only some take part in that;
    and :meth:`connect_nccl` if other transfers may be in flight then.
    """

    name: str
    ranks: tuple[int, ...]
    rank: int
    communicator: Callable[[], dist.ProcessGroup] | None = None  # returns the process group, which groups of equal ranks share

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def process_group(self) -> dist.ProcessGroup:
        """Torch's group. Collective over the group, the first time: every rank of it must call, in program order."""
        assert self.communicator is not None, f"group {self.name} does not communicate"
        RECORDER.note("connect", self.name, 0)
        return self.communicator()

    def connect(self, exchanges: torch.device | None = None) -> None:
        """Connect the ranks now. Call it before transfers in which only some of the ranks take part.

        ``exchanges``: the device of tensors that some of the ranks will exchange. NCCL connects all ranks of a group in their first
        exchange; with this argument it does so here.

        Collective over the group: every rank of it must call, in program order.
        """
        if self.size > 1 and not self.connected:
            _ = self.process_group
            if exchanges is not None:
                self.connect_nccl(exchanges)

    def connect_nccl(self, device: torch.device, pairs: bool = False) -> None:
        """Let NCCL connect all ranks now. Call it while no transfer is in flight, before operations during which some may be.

        A first operation among other transfers would connect the ranks then, and two of them could each wait for the other
        (nccl#1082). ``pairs``: also connect each rank with each other, for all-to-alls.

        Collective over the group: every rank of it must call, in program order.
        """
        if self.size > 1 and capabilities(device).nccl:
            self.all_reduce(torch.zeros(1, device=device), "meet")
            if pairs:
                self.all_to_all(torch.zeros(self.size, 1, device=device), "meet")

    @property
    def connected(self) -> bool:
        return "process_group" in self.__dict__

    def _connected(self) -> dist.ProcessGroup:
        assert self.connected, f"group {self.name}: call connect() first, where all of its ranks pass"
        return self.process_group

    def all_reduce(self, tensor: Tensor, label: str, op: str = "sum") -> Tensor:
        """Reduce in place. Collective over the group: every rank of it must call, in program order."""
        if self.size > 1:
            self._note("all_reduce", label, tensor.nbytes)
            dist.all_reduce(tensor, _OPS[op], self.process_group)
        return tensor

    def start_all_reduce(self, tensor: Tensor, label: str, op: str = "sum") -> dist.Work | None:
        """Reduce in place, asynchronously. Collective over the group: every rank of it must call, in program order."""
        if self.size == 1:
            return None
        self._note("all_reduce", label, tensor.nbytes)
        return dist.all_reduce(tensor, _OPS[op], self.process_group, async_op=True)

    def all_gather_into(self, output: Tensor, tensor: Tensor, label: str) -> Tensor:
        """Fill ``output`` [size * n, ...] with every rank's ``tensor`` [n, ...] in group order.

        Collective over the group: every rank of it must call, in program order.
        """
        if self.size == 1:
            output.copy_(tensor.view_as(output))
        else:
            self._note("all_gather", label, tensor.nbytes, received=output.nbytes - tensor.nbytes)
            _all_gather(output, tensor.contiguous(), self.process_group)
        return output

    def reduce_scatter_into(self, output: Tensor, tensor: Tensor, label: str) -> Tensor:
        """Fill ``output`` [n, ...] with this rank's part of the sum over the group of ``tensor`` [size * n, ...].

        Collective over the group: every rank of it must call, in program order.
        """
        if self.size == 1:
            output.copy_(tensor.view_as(output))
        else:
            self._note("reduce_scatter", label, tensor.nbytes, *[tensor.nbytes - output.nbytes] * 2)
            _reduce_scatter(output, tensor, dist.ReduceOp.SUM, self.process_group)
        return output

    def start_all_gather(self, flat: Tensor, label: str) -> dist.Work:
        """Gather in place, asynchronously. ``flat``: equal parts in group order, of which this rank has filled its own.

        Collective over the group: every rank of it must call, in program order.
        """
        own_part = flat.chunk(self.size)[self.rank]
        self._note("all_gather", label, own_part.nbytes, *[flat.nbytes - own_part.nbytes] * 2)
        work = _all_gather(flat, own_part, self.process_group, True)
        assert work is not None
        return work

    def start_exchange(self, sends: Sequence[Message], receives: Sequence[Message], label: str) -> list[dist.Work]:
        """Start many transfers at once. Keep the tensors, which are contiguous, alive and unchanged until they are done.

        On NCCL all of them use one communicator; transfers outside an exchange would make one for each pair of ranks. Collective over
        the ranks that take part: a rank must receive in the order in which the other sends.
        """
        num_bytes = [sum(tensor.nbytes for _, tensor in messages) for messages in (sends, receives)]
        peers = [",".join(str(self.ranks[member]) for member, _ in messages[:8]) for messages in (sends, receives)]
        self._note("exchange", label, sum(num_bytes), *num_bytes, way=f"->{peers[0]}<-{peers[1]}")
        if not sends and not receives:
            return []
        pg = self._connected()
        if not capabilities((receives or sends)[0][1].device).nccl:  # all tensors are on one device; gloo does not batch
            works = [pg.recv([tensor], member, 0) for member, tensor in receives]
            return works + [pg.send([tensor], member, 0) for member, tensor in sends]
        operations = [(dist.irecv, message) for message in receives] + [(dist.isend, message) for message in sends]
        return dist.batch_isend_irecv([dist.P2POp(op, tensor, self.ranks[member], pg) for op, (member, tensor) in operations])

    def all_gather(self, tensor: Tensor, label: str) -> list[Tensor]:
        """Return every rank's tensor, of one shape. Collective over the group: every rank of it must call, in program order."""
        flat = tensor.reshape(-1)
        output = flat.new_empty(self.size * len(flat))
        self.all_gather_into(output, flat, label)
        return list(output.view(self.size, *tensor.shape))

    def all_to_all(self, tensor: Tensor, label: str) -> Tensor:
        """Send part i of ``tensor`` [size, ...] to group index i. Return [size, ...], whose part i came from group index i.

        Collective over the group: every rank of it must call, in program order.
        """
        if self.size == 1:
            return tensor
        self._note("all_to_all", label, tensor.nbytes, *[tensor.nbytes // self.size * (self.size - 1)] * 2)
        output = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.all_to_all_single(output, tensor.contiguous(), group=self.process_group)
        return output

    def all_to_all_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int], label: str) -> Tensor:
        """Send the first ``sent[0]`` of ``rows`` [sum(sent), ...] to group index 0, and so on. Return [sum(received), ...], of which
        the first ``received[0]`` came from group index 0.

        Collective over the group: every rank of it must call, in program order.
        """
        if self.size == 1:
            return rows
        row = rows[:1].nbytes if len(rows) else rows.new_empty(1, *rows.shape[1:]).nbytes
        counted = [row * (sum(numbers) - numbers[self.rank]) for numbers in (sent, received)]
        self._note("all_to_all_rows", label, rows.nbytes, *counted)
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), [*received], [*sent], group=self.process_group)
        return output

    def broadcast(self, tensor: Tensor, source: int, label: str) -> Tensor:
        """Broadcast in place from group index ``source``. Collective over the group: every rank of it must call, in program order."""
        if self.size > 1:
            self._note("broadcast", label, tensor.nbytes, received=0 if self.rank == source else tensor.nbytes)
            dist.broadcast(tensor, self.ranks[source], self.process_group)
        return tensor

    def gather_bytes(self, payload: bytes, label: str) -> list[bytes] | None:
        """Return every rank's bytes on group index 0, and None on other ranks. Lengths are exchanged first.

        Collective over the group: every rank of it must call, in program order.
        """
        if self.size == 1:
            return [payload]
        lengths = [int(n) for n in self.all_gather(torch.tensor([len(payload)]), label)]
        if self.rank:
            if payload:
                data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
                wait_all([self.isend(data, 0, label, _GATHER_TAG)])
            return None
        parts = [torch.empty(n if member else 0, dtype=torch.uint8) for member, n in enumerate(lengths)]
        wait_all([self.irecv(part, member, label, _GATHER_TAG) for member, part in enumerate(parts) if len(part)])
        return [payload, *(bytes(part.numpy()) for part in parts[1:])]

    def broadcast_bytes(self, payload: bytes | None, label: str, source: int = 0) -> bytes:
        """Return group index ``source``'s bytes. Collective over the group: every rank of it must call, in program order."""
        if self.size == 1:
            return payload or b""
        length = torch.tensor([len(payload or b"")])
        self.broadcast(length, source, label)
        if not int(length):
            return b""
        data = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == source and payload:
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        return bytes(self.broadcast(data, source, label).numpy())

    def gather_json(self, value: Any, label: str) -> list[Any] | None:
        """Gather as :meth:`gather_bytes` does, JSON values. Collective over the group: every rank of it must call, in program order."""
        parts = self.gather_bytes(json.dumps(value).encode(), label)
        return None if parts is None else [json.loads(part) for part in parts]

    def broadcast_json(self, value: Any, label: str) -> Any:
        """Broadcast as :meth:`broadcast_bytes` does, the JSON ``value`` of group index 0.

        Collective over the group: every rank of it must call, in program order.
        """
        return json.loads(self.broadcast_bytes(json.dumps(value).encode() if self.rank == 0 else None, label))

    def barrier(self, label: str) -> None:
        """Wait for all ranks. Collective over the group: every rank of it must call, in program order."""
        self.all_reduce(torch.zeros(1), label)

    def isend(self, tensor: Tensor, to: int, label: str, tag: int = 0) -> dist.Work | None:
        """Send to group index ``to``, asynchronously. Keep ``tensor`` alive until the work is done."""
        self._note("isend", label, tensor.nbytes, received=0, way=f"->{self.ranks[to]}")
        return self._connected().send([tensor], to, tag)

    def irecv(self, tensor: Tensor, source: int, label: str, tag: int = 0) -> dist.Work | None:
        """Receive from group index ``source``, asynchronously."""
        self._note("irecv", label, tensor.nbytes, sent=0, way=f"<-{self.ranks[source]}")
        return self._connected().recv([tensor], source, tag)

    def _note(
        self, operation: str, label: str, size: int, sent: int | None = None, received: int | None = None, *, way: str = ""
    ) -> None:
        """Record an operation of ``size`` bytes. ``sent``, ``received``: bytes; by default ``size``."""
        moved_bytes = [size if num_bytes is None else num_bytes for num_bytes in (sent, received)]
        RECORDER.note(f"{operation}:{label}{way}", self.name, size, label, *moved_bytes)


def solo(rank: int = 0) -> Group:
    """Return the group of one rank, which communicates nothing."""
    return Group("solo", (rank,), 0)


def wait_all(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
