"""What a rank launches, recorded for ``legality``: torch's process groups, works and threads are wrapped while a function runs.

``record_ranks(4, fn, *args)`` is ``run_ranks`` with a record of each rank. Ranks take the branches that GPUs take for exchanges and
reductions: batches of messages, reduce-scatter, all-gathers in place. gloo carries them out.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from legality_events import MAIN, Communicator, Connect, Event, Follow, Fork, Join, Launch, Part, Pass, Wait
from ranks import close_pool, run_ranks

SIDE = "side"  # the stream of transfers beside a computation
ARRIVALS = "arrivals"  # on which weights come
# of tensors that are on the host on GPUs too
HOST_LABELS = (
    *("batch", "control", "checkpoint", "exact_rollouts", "profile", "serve:", "generate:", "score:"),
    *(f"generation:{what}" for what in ("moves", "environments", "limits", "pages", "graphs")),
)
ON_DEVICE = {"_checkpointing"}  # functions whose "control" is on the device
COLLECTIVES = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "alltoall": "all_to_all",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "barrier": "barrier",
}


def on_host(label: str) -> bool:
    return label.startswith(HOST_LABELS)


class Recording:
    """The events of this rank, in their order. ``world`` knows the communicators."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.events: list[Event] = []
        self._lock = threading.Lock()
        self._local = threading.local()
        self._works: dict[int, tuple[Any, int]] = {}  # by identity, which lasts as long as the work is here
        self._number = self._threads = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        from rlhf_spmd.parallel.collectives import FlightRecorder, Group
        from rlhf_spmd.reshard.transfer import BackgroundTask, Transfer
        from rlhf_spmd.workers.weight_sync import _Arrival

        with contextlib.ExitStack() as stack:

            def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, _wrapped(getattr(owner, name), wrapper)))

            for name in COLLECTIVES:
                wrap(dist.ProcessGroup, name, functools.partial(self._collective, COLLECTIVES[name]))
            wrap(dist.ProcessGroup, "send", functools.partial(self._message, True))
            wrap(dist.ProcessGroup, "recv", functools.partial(self._message, False))
            wrap(dist.Work, "wait", self._wait)
            wrap(distributed_c10d, "_new_process_group_helper", self._connect)
            wrap(Group, "_note", self._note)
            wrap(FlightRecorder, "tick", self._tick)
            wrap(Group, "start_exchange", self._exchange)
            wrap(BackgroundTask, "__init__", self._start)
            wrap(BackgroundTask, "run", self._run_task)
            wrap(BackgroundTask, "join", self._join)
            wrap(Transfer, "__init__", self._begin_transfer)
            wrap(Transfer, "_on_stream", self._on_stream)
            wrap(Transfer, "wait", self._end_transfer)
            wrap(_Arrival, "start_receiving", self._begin_arrival)
            wrap(_Arrival, "wait", self._await_arrival)
            yield

    # -- where a thread is

    @property
    def thread(self) -> str:
        return getattr(threading.current_thread(), "recorded_as", MAIN)

    @property
    def stream(self) -> str:
        usual = ARRIVALS if self.thread.startswith("weights") else MAIN
        return getattr(self._local, "stream", None) or usual

    @contextlib.contextmanager
    def _in_stream(self, stream: str) -> Iterator[None]:
        before, self._local.stream = getattr(self._local, "stream", None), stream
        try:
            yield
        finally:
            self._local.stream = before

    def _add(self, event: Event) -> None:
        with self._lock:
            self.events.append(event)

    # -- operations

    def _note(self, original: Callable[..., Any], group: Any, operation: str, label: str, *args: Any, **more: Any) -> Any:
        self._local.label = label
        frame, callers = sys._getframe(2), set[str]()
        for _ in range(4):
            callers.add(frame.f_code.co_name)
            assert frame.f_back is not None
            frame = frame.f_back
        self._local.on_device = not on_host(label) or bool(callers & ON_DEVICE)
        return original(group, operation, label, *args, **more)

    def _communicator(self, group: Any) -> Communicator:
        on_device = getattr(self._local, "on_device", True)
        for (channel, ranks), made in self.world._communicators.items():
            if made is group:
                return Communicator(channel, ranks, on_device)
        raise AssertionError(f"a communicator that no World has made: {group}")

    def _next(self) -> int:
        with self._lock:
            self._number += 1
            return self._number

    def _collective(self, kind: str, original: Callable[..., Any], group: Any, *args: Any, **more: Any) -> Any:
        import torch
        import torch.distributed as dist

        tensors = [each[0] if isinstance(each, list) and each else each for each in args]  # split sizes are empty lists
        tensors = [each for each in tensors if isinstance(each, torch.Tensor)]
        tensor = tensors[-1] if kind in ("all_gather", "reduce_scatter", "all_to_all") and tensors else (tensors or [None])[0]
        options = next((each for each in args if type(each).__name__.endswith("Options")), more.get("opts"))
        detail = f"from {options.rootRank}" if options is not None and hasattr(options, "rootRank") else ""
        if kind in ("all_reduce", "reduce_scatter") and options is not None:
            detail = next(name for name in ("SUM", "MAX", "MIN", "AVG") if options.reduceOp == getattr(dist.ReduceOp, name))
        splits = tuple(tuple(each) for each in args if isinstance(each, list) and each and isinstance(each[0], int))
        if splits:  # rows received, rows sent
            tensor, detail, splits = None, f"rows of {_dtype(tensors[-1])}", splits[::-1]
        self._launch(group, kind, tensor, bool(getattr(options, "asyncOp", True)), detail, splits=splits)
        return self._made(original(group, *args, **more))

    def _launch(
        self,
        group: Any,
        kind: str,
        tensor: Any,
        asynchronous: bool,
        detail: str,
        parts: tuple[Part, ...] = (),
        splits: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        comm, label = self._communicator(group), getattr(self._local, "label", "")
        numel, dtype = (0, "") if tensor is None or parts else (tensor.numel(), _dtype(tensor))
        self._local.number = number = self._next()
        where = number, self.thread, self.stream, asynchronous
        self._add(Launch(comm, kind, label, *where, numel, dtype, detail, parts, splits))

    def _message(self, sends: bool, original: Callable[..., Any], group: Any, tensors: list[Any], peer: int, tag: int) -> Any:
        ranks = self._communicator(group).ranks
        part = Part(ranks[peer], sends, tensors[0].numel(), _dtype(tensors[0]), tag)
        if getattr(self._local, "batch", None) is not None:
            return self._made(original(group, tensors, peer, tag))
        self._launch(group, "message", None, True, "", (part,))
        return self._made(original(group, tensors, peer, tag))

    def _exchange(self, original: Callable[..., Any], group: Any, sends: Any, receives: Any, label: str) -> Any:
        if not sends and not receives:
            return original(group, sends, receives, label)
        ways = [(True, message) for message in sends] + [(False, message) for message in receives]
        parts = tuple(Part(group.ranks[member], way, tensor.numel(), _dtype(tensor)) for way, (member, tensor) in ways)
        self._local.label, self._local.on_device = label, not on_host(label)
        self._launch(group.process_group, "exchange", None, True, "", parts)
        self._local.batch = True
        try:
            return original(group, sends, receives, label)
        finally:
            self._local.batch = None

    def _made(self, work: Any) -> Any:
        if work is not None:
            self._works[id(work)] = work, self._local.number
        return work

    def _wait(self, original: Callable[..., Any], work: Any, *args: Any) -> Any:
        _, number = self._works.pop(id(work), (None, None))
        if number is not None:
            self._add(Wait(number, self.thread, self.stream))
        return original(work, *args)

    def _connect(self, original: Callable[..., Any], size: int, rank: int, ranks: list[int], *args: Any, **more: Any) -> Any:
        name = str(args[2])  # torch's: of ranks and channel, alike on all of them
        self._add(Connect(Communicator(name[:8], tuple(ranks), False), self.thread, self.stream))
        return original(size, rank, ranks, *args, **more)

    # -- threads and streams

    def _tick(self, original: Callable[..., Any], recorder: Any) -> None:
        original(recorder)
        self._add(Pass(self.thread, self.stream))

    def _start(self, original: Callable[..., Any], task: Any, work: Any, name: str, *more: Any) -> None:
        with self._lock:
            self._threads += 1
            task.recorded_as = f"{name} {self._threads}"
        self._add(Fork(task.recorded_as, self.thread, self.stream))
        original(task, work, name, *more)

    def _run_task(self, original: Callable[..., Any], task: Any) -> None:
        threading.current_thread().recorded_as = task.recorded_as  # type: ignore[attr-defined]
        original(task)

    def _join(self, original: Callable[..., Any], task: Any) -> None:
        original(task)
        if hasattr(task, "recorded_as"):
            self._add(Join(task.recorded_as, self.thread, self.stream))

    def _begin_transfer(self, original: Callable[..., Any], transfer: Any, *args: Any, **more: Any) -> None:
        transfer.recorded_on = (ARRIVALS if self.stream == ARRIVALS else SIDE) if more.get("beside") else ""
        if transfer.recorded_on:
            self._add(Follow(transfer.recorded_on, self.stream, self.thread))
        original(transfer, *args, **more)

    def _begin_arrival(self, original: Callable[..., Any], arrival: Any) -> None:
        """By the main thread, on a stream that nothing else waits for until :meth:`_await_arrival`."""
        with self._in_stream(ARRIVALS):
            original(arrival)

    def _await_arrival(self, original: Callable[..., Any], arrival: Any) -> None:
        original(arrival)
        self._add(Follow(self.stream, ARRIVALS, self.thread))

    def _on_stream(self, original: Callable[..., Any], transfer: Any) -> Any:
        return self._in_stream(transfer.recorded_on or self.stream)

    def _end_transfer(self, original: Callable[..., Any], transfer: Any) -> None:
        original(transfer)
        if transfer.recorded_on:
            self._add(Follow(self.stream, transfer.recorded_on, self.thread))


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **more: Any) -> Any:
        return wrapper(original, *args, **more)

    return wrapped


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextlib.contextmanager
def as_on_nccl() -> Iterator[None]:
    """Devices of this process exchange as GPUs do, and are not exact. torch computes, whatever else there is."""
    from rlhf_spmd.generation import backends
    from rlhf_spmd.kernels import devices, dispatch

    def none(*_: Any) -> str:
        return "the device is a CPU"

    able = replace(devices._CPU, nccl=True, batch_invariant=False)
    with (
        mock.patch.object(devices, "_CPU", able),
        mock.patch.object(backends, "unavailable", none),
        mock.patch.object(dispatch, "unavailable", none),
    ):
        yield


def _recorded(world: Any, fn: Callable[..., Any], *args: Any) -> list[Event]:
    recording = Recording(world)
    with as_on_nccl(), recording.on():
        fn(world, *args)
    return recording.events


def record_ranks(size: int, fn: Callable[..., Any], *args: Any) -> dict[int, list[Event]]:
    """Of ranks of their own, since communicators of earlier runs would be taken for connected."""
    with contextlib.suppress(KeyError):
        close_pool(size)
    events = run_ranks(size, _recorded, fn, *args)
    close_pool(size)
    return dict(enumerate(events))
