"""Executes a plan: starts its steps in order, as many at a time as memory allows, and waits for them."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_spmd.kernels import capabilities
from rlhf_spmd.kernels.devices import side_stream
from rlhf_spmd.parallel.collectives import Group, Work, wait_all
from rlhf_spmd.reshard.bucketing import TransferContext, TransferMessage, TransferStep, plan_steps
from rlhf_spmd.reshard.delta import Delta, DeltaTransfer
from rlhf_spmd.reshard.plan import ParamSlice, SliceCopy, TransferPlan

LABEL = "weight_sync"
IN_FLIGHT = 1 << 27  # the most elements of messages in flight; each message may block a kernel or a socket

NamedTensors = Mapping[str, Tensor]


class _StartedStep(NamedTuple):
    """A step in flight. ``memories``: for each message, the memory that it reads or writes."""

    step: TransferStep
    works: Sequence[Work]
    buffer: Tensor | None
    memories: list[Tensor]


class BackgroundTask:
    """Runs ``work`` in a thread called ``name``. If it fails, the thread calls ``on_error`` at once, and :meth:`wait` raises the error.

    Threads are used again: where memory has run out, a new one may abort the process or never start.
    """

    def __init__(
        self, work: Callable[[], object], name: str, on_error: Callable[[BaseException], object] | None = None
    ) -> None:
        self.name = name
        self._work, self._on_error = work, on_error
        self._error: BaseException | None = None
        self._ended = threading.Event()
        try:
            thread = _IDLE.pop()
        except IndexError:
            thread = _TaskThread()
        thread.tasks.put(self)

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # the thread's boundary: wait() raises it
            self._error = error
            if self._on_error is not None:
                self._on_error(error)

    def end(self) -> None:
        del self._work  # and what it refers to
        self._ended.set()

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def join(self) -> None:
        self._ended.wait()

    def wait(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


class _TaskThread(threading.Thread):
    """Runs one task after the other; after each it is in ``_IDLE``."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.tasks: SimpleQueue[BackgroundTask] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            task = self.tasks.get()
            self.name = task.name
            with suppress(BaseException):  # of on_error: wait() raises the task's own
                task.run()
            _IDLE.append(self)
            task.end()
            del task


_IDLE: list[_TaskThread] = []


class Transfer:
    """Copies ``sources`` into ``targets`` in steps. Until :meth:`wait`, nobody may write the sources or read the targets.

    - ``num_steps``: the number of steps. ``step(i)`` makes each when it starts, in the same order on all ranks.
    - ``dtype``: the dtype of the messages and the targets.
    - ``limit``: the most elements of buffers, and of other memory that steps hold, at a time. One step runs in any case.
    - ``before_step(i)`` runs before step i starts, ``after_step(i)`` when it has ended. ``measure()``: bytes held beside buffers then.
    - ``on_side_stream``: on a GPU, use another stream, so that waiting for a peer does not delay this rank's computation: ``stream``,
      or the side stream that all such transfers of this rank share.

    ``peak_bytes``: the most bytes that buffers have held so far, plus what ``measure`` returned.
    """

    def __init__(
        self,
        num_steps: int,
        step: Callable[[int], TransferStep],
        sources: NamedTensors,
        targets: NamedTensors,
        group: Group,
        dtype: torch.dtype,
        limit: int,
        label: str,
        *,
        before_step: Callable[[int], object] = lambda number: None,
        after_step: Callable[[int], object] = lambda number: None,
        measure: Callable[[], int] = lambda: 0,
        on_side_stream: bool = False,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._num_steps, self._step = num_steps, step
        self._sources, self._targets = sources, targets
        self._group, self._label = group, label
        self._dtype, self._limit = dtype, limit
        self._before_step, self._after_step, self._measure = before_step, after_step, measure
        self._device = next((tensor.device for tensor in chain(sources.values(), targets.values())), torch.device("cpu"))
        self._stream = (stream or side_stream()) if on_side_stream and capabilities(self._device).streams else None
        self._started: deque[_StartedStep] = deque()
        self._allocated = self._exchanged = self._buffer_bytes = 0  # of the steps in flight; the first two are elements
        self.num_done = self.peak_bytes = 0
        self._thread: BackgroundTask | None = None
        self._arrived: torch.cuda.Event | None = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), self._on_stream():
            self._start_some()

    def wait(self) -> None:
        """Wait until this rank has sent and received everything."""
        if self._thread is not None:
            self._thread.wait()
            self._thread = None
        self.advance(self._num_steps)
        if self._arrived is not None:  # wait for the event, not the stream: later transfers may be waiting there
            torch.cuda.current_stream().wait_event(self._arrived)
        elif self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def proceed(self, on_error: Callable[[BaseException], object] | None = None) -> None:
        """Go on in the background while this rank does something else that does not change the sources; :meth:`wait` ends it.

        A failure calls ``on_error`` at once, in another thread; :meth:`wait` raises it.
        """
        if self._stream is not None:
            self.advance(self._num_steps)  # only the stream waits
            self._arrived = self._stream.record_event()
        elif self.num_done < self._num_steps and self._thread is None:
            self._thread = BackgroundTask(lambda: self.advance(self._num_steps), "reshard", on_error)

    @torch.no_grad()
    def advance(self, upto: int) -> None:
        """Wait until the first ``upto`` steps have ended. Later steps start as far as there is room."""
        with self._on_stream():
            while self.num_done < upto:
                self._finish(self._started[0])
                self.peak_bytes = max(self.peak_bytes, self._buffer_bytes + self._measure())
                self._count(self._started.popleft(), -1)
                self.num_done += 1
                self._after_step(self.num_done - 1)
                self._start_some()

    def _start_some(self) -> None:
        while (number := self.num_done + len(self._started)) < self._num_steps:
            step = self._step(number)
            allocated = self._allocated + step.buffer + step.temporary_elements
            exchanged = self._exchanged + step.exchanged
            if self._started and (allocated > self._limit or exchanged > IN_FLIGHT):
                return
            self._before_step(number)
            self._started.append(self._start(step))
            self._count(self._started[-1], 1)

    def _count(self, started: _StartedStep, sign: int) -> None:
        step = started.step
        self._allocated += sign * (step.buffer + step.temporary_elements)
        self._exchanged += sign * step.exchanged
        self._buffer_bytes += sign * (0 if started.buffer is None else started.buffer.nbytes)

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _start(self, step: TransferStep) -> _StartedStep:
        if step.gathered_parameter:  # an all-gather in place reads this rank's part from there
            self._copy(step.copies)
            target = self._targets[step.gathered_parameter].view(-1)
            return _StartedStep(step, [self._group.start_all_gather(target, self._label)], None, [])
        buffer = torch.empty(step.buffer, dtype=self._dtype, device=self._device) if step.buffer else None
        memories = [self._memory(message, buffer) for message in step.messages]
        for message, memory in zip(step.messages, memories, strict=True):
            if message.sends and message.offset is not None:
                for part, values in self._packed(message, memory):
                    values.copy_(part)
        if step.gathers:
            assert buffer is not None, "an all-gather moves a buffer or a parameter"
            works = [self._group.start_all_gather(buffer, self._label)]
        else:
            outward, inward = list[tuple[int, Tensor]](), list[tuple[int, Tensor]]()
            for number, peer in step.transfers:
                (outward if step.messages[number].sends else inward).append((peer, memories[number]))
            works = self._group.start_exchange(outward, inward, self._label) if memories else []
        if works:
            self._copy(step.copies)
        return _StartedStep(step, works, buffer, memories)

    def _finish(self, started: _StartedStep) -> None:
        """Wait for a step, then copy what its buffer has received to its targets."""
        wait_all(started.works)
        if not started.works:  # copies inside the rank delay no message
            self._copy(started.step.copies)
        if started.buffer is not None:
            for message, memory in zip(started.step.messages, started.memories, strict=True):
                if not message.sends and message.offset is not None:
                    for part, values in self._packed(message, memory):
                        part.copy_(values)

    def _memory(self, message: TransferMessage, buffer: Tensor | None) -> Tensor:
        """Return the memory that a message reads or writes: a part of its step's buffer, or the parameter itself."""
        if message.offset is None:
            return self._slice(message.sends, message.parts[0]).view(-1)
        assert buffer is not None, "a packed message has a buffer"
        return buffer[message.offset : message.offset + message.numel]

    def _packed(self, message: TransferMessage, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each part of a message its memory in the parameter, and its values in a flat tensor."""
        for part_slice, values in zip(message.parts, flat.split_with_sizes(message.sizes), strict=True):
            yield self._slice(message.sends, part_slice), values.view(part_slice.size)

    def _slice(self, sends: bool, part_slice: ParamSlice) -> Tensor:
        return (self._sources if sends else self._targets)[part_slice.parameter][part_slice.slices]

    def _copy(self, pieces: Sequence[SliceCopy]) -> None:
        for piece in pieces:
            self._slice(False, piece.target).copy_(self._slice(True, piece.source))


def transfer_steps(
    plan: TransferPlan,
    rank: int,
    sources: NamedTensors,
    targets: NamedTensors,
    members: Sequence[int],
    dtype: torch.dtype,
    message_bytes: int = 32 << 20,
) -> list[TransferStep]:
    """Return the steps of ``rank`` in a plan of global ranks, for all transfers of tensors of these shapes and dtypes.

    ``sources``: its parameters on the source side; ``targets``: those on the target side, of ``dtype``; {} if it has none. Making the
    steps takes a second if a thousand ranks take part. All ``members``, the ranks of both sides, must pass the same ``message_bytes``.
    """
    source_shapes, target_shapes = ({name: tuple(tensor.shape) for name, tensor in side.items()} for side in (sources, targets))
    converted = any(tensor.dtype != dtype for tensor in sources.values())
    limit = max(message_bytes // dtype.itemsize, 1)
    return plan_steps(plan, TransferContext(rank, members, source_shapes, target_shapes, converted, limit))


def start_transfer(
    steps: Sequence[TransferStep],
    sources: NamedTensors,
    targets: NamedTensors,
    group: Group,
    dtype: torch.dtype,
    buffer_bytes: int = 256 << 20,
    delta: Delta | None = None,
    stream: torch.cuda.Stream | None = None,
) -> Transfer:
    """Start this rank's part of a transfer. :func:`transfer_steps` made ``steps`` from the same tensors and ``dtype``.

    ``buffer_bytes``: the most that buffers hold. ``delta``: what earlier transfers of this plan have sent. Then only elements that have
    changed since are sent, and the targets must hold the values of the last transfer.

    Collective over ``group``, the ranks of both sides: every rank of it must call, in program order.
    """
    assert all(target.dtype == dtype for target in targets.values()), f"targets are not all {dtype}"
    if delta is not None and delta.has_sent:
        changes = DeltaTransfer(delta, steps, sources, targets, dtype, buffer_bytes)
        args = changes.num_steps, changes.step, changes.sources, changes.targets, group, torch.uint8, buffer_bytes, LABEL
        hooks: dict[str, Any] = {"before_step": changes.before_step, "after_step": changes.after_step}
        return Transfer(*args, **hooks, on_side_stream=True, stream=stream)
    if delta is not None:
        delta.begin(steps, sources, dtype)
    limit = buffer_bytes // dtype.itemsize
    return Transfer(
        len(steps), steps.__getitem__, sources, targets, group, dtype, limit, LABEL, on_side_stream=True, stream=stream
    )
