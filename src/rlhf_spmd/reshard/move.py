"""Reallocation at work: parts packed into flat buckets, sent and received without blocking; and host memory as a place to rest.

What lies in one piece in memory travels without a buffer. Memory is bounded: a rank has at most ``buffer_bytes`` of buffers at a
time, beside the parameters, and uses them again and again. All ranks start and await their messages in one global order (distance
between the ranks, bucket, sender), so the first message that is not done is always started at both ends: no order of arrival and no
limit can lock ranks into waiting for each other.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.reshard.reallocation import Part, RankPlan

LABEL = "loan"  # weights on loan, which may move beside a transition
ALONE = 1 << 16  # elements from which a part is worth a message of its own


Place = tuple[str, tuple[slice, ...], int]  # parameter, where in it, elements


class _Message(NamedTuple):
    """One bucket between this rank and the group's rank ``peer``. The first three are its place in the global order."""

    distance: int
    bucket: int
    sender: int
    peer: int
    sends: bool
    numel: int
    parts: list[Place]


class Schedule(NamedTuple):
    """A rank's part of a plan, for any number of moves: messages in the order of their start, and what stays on the rank."""

    messages: list[_Message]
    copies: list[tuple[Place, Place]]


class Move:
    """A reallocation that has been started. Until :meth:`wait` the source tensors must not change, nor the targets be read.

    ``peak_bytes``: the most that buffers held so far, beside the tensors.
    """

    def __init__(
        self,
        messages: Sequence[_Message],
        tensors: Mapping[bool, Mapping[str, Tensor]],
        group: Group,
        dtype: torch.dtype,
        limits: tuple[int, int],
        label: str,
    ) -> None:
        """``tensors[True]``: what is sent from, ``tensors[False]``: what is received into. ``dtype``: what travels. ``limits``:
        elements in flight, and in buffers."""
        self._tensors, self._group, self._dtype, self._label = tensors, group, dtype, label
        self._todo = deque((message, self._in_place(message)) for message in messages)
        self._running: deque[tuple[_Message, Tensor | None, dist.Work | None]] = deque()  # with their buffers
        self._in_flight, self._most = 0, limits[0]
        self._size = max((message.numel for message, place in self._todo if place is None), default=1)
        self._allowed = max(limits[1] // self._size, 1)  # as many buffers, each large enough for every message
        self._free: list[Tensor] = []
        self.peak_bytes = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        on_gpu = any(tensor.is_cuda for side in tensors.values() for tensor in side.values())
        self._stream = _move_stream() if on_gpu else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with self._beside():
            self._start_some()

    def wait(self) -> None:
        """Returns when everything of this rank has been sent and received."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            if self._error is not None:
                raise self._error
        self._finish()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def proceed(self, on_error: Callable[[BaseException], object] | None = None) -> None:
        """Go on while this rank does something else, in which the sources stay as they are; :meth:`wait` ends it.

        ``on_error`` is told of a failure at once, in another thread; :meth:`wait` raises it.
        """
        if self._stream is not None:
            self._finish()  # only the stream waits
        elif self._todo and self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(on_error,), name="reshard", daemon=True)
            self._thread.start()

    def _beside(self) -> contextlib.AbstractContextManager[object]:
        """On a GPU a stream of its own, so that waiting for a peer does not hold up this rank's computation."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _run(self, on_error: Callable[[BaseException], object] | None) -> None:
        try:
            self._finish()
        except BaseException as error:  # the thread's boundary: wait() raises it
            self._error = error
            if on_error is not None:
                on_error(error)

    def _finish(self) -> None:
        with self._beside():
            while self._running:
                message, buffer, work = self._running.popleft()
                if work is not None:
                    work.wait()
                self._in_flight -= message.numel
                if buffer is not None:
                    if not message.sends:
                        _copy(message, self._places(message), buffer[: message.numel])
                    self._free.append(buffer)  # on a GPU used again in the order of the stream
                del buffer
                self._start_some()
            self._free.clear()

    def _start_some(self) -> None:
        """Start the next messages, in order, as far as the limits allow; if nothing is running, one in any case."""
        while self._todo:
            (message, flat), buffer = self._todo[0], None
            if self._running and self._in_flight + message.numel > self._most:
                return
            if flat is None:
                if not self._free and not self._allowed:
                    return
                buffer = self._free.pop() if self._free else self._another(message)
                flat = buffer[: message.numel]
                if message.sends:
                    _copy(message, self._places(message), flat)
            self._todo.popleft()
            self._in_flight += message.numel
            transfer = self._group.isend if message.sends else self._group.irecv
            self._running.append((message, buffer, transfer(flat, message.peer, self._label)))

    def _another(self, message: _Message) -> Tensor:
        like = self._tensors[message.sends][message.parts[0][0]]
        buffer = like.new_empty(self._size, dtype=self._dtype)
        self._allowed -= 1
        self.peak_bytes += buffer.nbytes
        return buffer

    def _places(self, message: _Message) -> list[Tensor]:
        tensors = self._tensors[message.sends]
        return [tensors[name].detach()[slices] for name, slices, _ in message.parts]

    def _in_place(self, message: _Message) -> Tensor | None:
        """The message where it lies in one piece in this rank's memory, as it travels, and needs no buffer."""
        if len(message.parts) > 1:
            return None
        (place,) = self._places(message)
        return place.view(-1) if place.dtype == self._dtype and place.is_contiguous() else None


@cache
def _move_stream() -> torch.cuda.Stream:
    """One for all moves of the process: torch's allocator keeps the blocks of each stream for itself."""
    return torch.cuda.Stream()


@torch.no_grad()
def _copy(message: _Message, places: Sequence[Tensor], flat: Tensor) -> None:
    """From the parts of a message into its flat buffer, or from there into the parts."""
    for place, values in zip(places, flat.split([numel for _, _, numel in message.parts]), strict=True):
        values = values.view(place.shape)
        _ = values.copy_(place) if message.sends else place.copy_(values)


def schedule(plan: RankPlan, group: Group, bucket_elements: int) -> Schedule:
    """Every rank must pass the same ``bucket_elements``: the most that one message has. Pure."""

    def place(part: Part) -> Place:
        return part.parameter, part.slices, part.numel

    me = group.rank
    messages = [
        _Message((peer - me if sends else me - peer) % group.size, bucket, me if sends else peer, peer, sends, numel, parts)
        for sends, by_rank in ((True, plan.sends), (False, plan.receives))
        for peer, all_parts in ((group.ranks.index(rank), parts) for rank, parts in by_rank.items())
        for bucket, (numel, cut) in enumerate(_buckets(all_parts, max(bucket_elements, 1)))
        for parts in [[place(part) for part in cut]]
    ]
    return Schedule(sorted(messages, key=lambda m: m[:3]), [(place(source), place(target)) for source, target in plan.copies])


@torch.no_grad()
def execute_reallocation(
    plan: RankPlan | Schedule,
    sources: Mapping[str, Tensor],
    targets: Mapping[str, Tensor],
    group: Group,
    bucket_bytes: int = 32 << 20,
    in_flight_bytes: int = 256 << 20,
    buffer_bytes: int | None = None,
    label: str = LABEL,
    dtype: torch.dtype | None = None,
) -> Move:
    """Start this rank's part of a plan: from ``sources`` (its parameters on the source side) into ``targets``; {} where it has none.

    Collective over ``group``, which holds all ranks of both sides: every rank of it must call with its part of one plan, the same
    ``bucket_bytes`` (a schedule has its own), and moves of one group in program order. ``buffer_bytes``: the most that buffers
    hold, by default ``in_flight_bytes``. ``dtype``: the targets', where sources have another one; else all tensors have one.
    Bytes are counted under ``label``.
    """
    given = [*sources.values(), *targets.values()]
    dtypes = {tensor.dtype for tensor in given}
    assert len(dtypes) <= 1 or dtype, f"reallocation converts nothing, but there are {sorted(map(str, dtypes))}"
    dtype = dtype or next(iter(dtypes), torch.float32)
    sizes = [num_bytes // dtype.itemsize for num_bytes in (bucket_bytes, in_flight_bytes, buffer_bytes or in_flight_bytes)]
    if isinstance(plan, RankPlan):
        plan = schedule(plan, group, sizes[0])
    move = Move(plan.messages, {True: sources, False: targets}, group, dtype, (sizes[1], sizes[2]), label)
    for (source, here, _), (target, there, _) in plan.copies:  # while the first messages are on their way
        targets[target][there].copy_(sources[source][here])
    return move


def _buckets(parts: Iterable[Part], limit: int) -> Iterator[tuple[int, list[Part]]]:
    """Runs of parts of at most half of ``limit`` elements. Large parts go by themselves, cut to ``limit`` along their rows as far as
    a row is smaller: where they are contiguous in memory they need no buffer."""
    bucket: list[Part] = []
    used = 0
    for part in parts:
        numel = part.numel
        if numel >= min(ALONE, limit // 4 + 1):
            rows = max(limit // (numel // part.size[0]), 1)
            for first in range(0, part.size[0], rows):
                size = min(rows, part.size[0] - first), *part.size[1:]
                cut = Part(part.parameter, (part.start[0] + first, *part.start[1:]), size)
                yield cut.numel, [cut]
            continue
        if used and used + numel > limit // 2:
            yield used, bucket
            bucket, used = [], 0
        bucket.append(part)
        used += numel
    if bucket:
        yield used, bucket


class Storages:
    """The storages of some tensors, which can be given up for a while: whoever holds the tensors finds them again later.

    Values are lost (:meth:`free`, :meth:`allocate`) or rest in host memory, pinned where the tensors are on a GPU
    (:meth:`offload`, :meth:`reload`). While a storage is given up the tensors must not be touched.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._storages: list[torch.UntypedStorage] = []
        self._sizes: list[int] = []
        self._host: list[Tensor] = []
        self.include(tensors)

    def include(self, tensors: Iterable[Tensor]) -> None:
        """More tensors, with storages of their own."""
        more = _distinct(tensors)
        self._storages += more
        self._sizes += [storage.nbytes() for storage in more]

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """The same tensors, some of which may have got other storages of the same sizes."""
        self._storages = _distinct(tensors)

    @property
    def nbytes(self) -> int:
        """What they hold now."""
        return sum(storage.nbytes() for storage in self._storages)

    def free(self) -> None:
        for storage in self._storages:
            storage.resize_(0)

    def allocate(self) -> None:
        """Storage again, zeros in it: FSDP pads shards, and what it pads with is summed."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
            _bytes(storage).zero_()

    def offload(self) -> None:
        """Copy to host memory, which is kept for the next time, and give up the storages."""
        if not self._host:
            pin = any(storage.device.type == "cuda" for storage in self._storages)
            self._host = [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for size in self._sizes]
        for host, storage in zip(self._host, self._storages, strict=True):
            host.copy_(_bytes(storage), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        self.free()

    def reload(self) -> None:
        for host, storage, size in zip(self._host, self._storages, self._sizes, strict=True):
            storage.resize_(size)
            _bytes(storage).copy_(host, non_blocking=True)

    def on_host(self, tensor: Tensor) -> Tensor:
        """Where the values of one of the tensors lie after :meth:`offload`: writing there changes what :meth:`reload` brings."""
        (host,) = (h for h, s in zip(self._host, self._storages, strict=True) if s._cdata == tensor.untyped_storage()._cdata)
        return host.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _distinct(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    return list({tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
