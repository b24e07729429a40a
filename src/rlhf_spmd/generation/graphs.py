"""Decode steps as CUDA graphs, the memory at fixed addresses that they read, and a trial of sums over ranks in them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.kernels import capabilities
from rlhf_spmd.parallel.collectives import Group

TRIAL_S = 20.0  # seconds that the trial of a captured sum may take


def padded_size(num_rows: int) -> int:
    """Return the size of the graph for ``num_rows`` rows: a power of two up to 16, a multiple of 16 up to 256, else of 64."""
    if num_rows <= 16:
        return 1 << (num_rows - 1).bit_length()
    multiple = 16 if num_rows <= 256 else 64
    return -(-num_rows // multiple) * multiple


class Arena:
    """Tensors by name that keep their addresses from call to call, since a graph knows its tensors by their addresses.

    ``stamp`` changes when one of them moves.
    """

    def __init__(self) -> None:
        self.stamp = 0
        self._sizes: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}

    def size(self, name: str, min_size: int) -> int:
        """Return the largest ``min_size`` that was ever given with this name."""
        self._sizes[name] = max(self._sizes.get(name, 0), min_size)
        return self._sizes[name]

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the tensor of this name, with the contents of the last call; at first zeros."""
        tensor = self._tensors.get(name)
        if tensor is not None and (tensor.shape, tensor.dtype, tensor.device) == (shape, dtype, device):
            return tensor
        self.stamp += 1
        del tensor
        self._tensors.pop(name, None)  # its memory may serve the new one
        self._tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
        return self._tensors[name]


@cache
def capture_stream() -> torch.cuda.Stream:
    """Return the stream of all captures: cuBLAS keeps a workspace of 32 MiB for each stream that it has seen."""
    return torch.cuda.Stream()


class Graphs:
    """The captured decode steps of one micro-batch, kept until something that they read moves.

    ``arena``: the tensors that they share with the host. All graphs share one memory pool, as large as the activations of one
    step of the largest graph.
    """

    def __init__(self) -> None:
        self.arena = Arena()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._addresses: Hashable = None
        self._pool: Any = None
        self._anchor: torch.cuda.CUDAGraph | None = None  # never replayed; while it lives, others can be captured into its pool

    def run(self, step: Callable[[], None], repeats: int, key: Hashable, addresses: Hashable) -> None:
        """Run ``step`` ``repeats`` times.

        ``key``: what its launches depend on beside the contents of tensors. ``addresses``: the addresses of the tensors that it reads
        or writes, except the arena's and those that it allocates itself.
        """
        addresses = self.arena.stamp, addresses
        if addresses != self._addresses:
            # the allocator gives a pool's memory to no other pool, even without graphs, so the next graphs use this pool
            self._anchor = next(iter(self._graphs.values()), self._anchor)
            self._graphs.clear()
            self._addresses = addresses
        graph = self._graphs.get(key)
        if graph is None:
            self._graphs[key] = graph = self._capture(step)
            repeats -= 1
        for _ in range(repeats):
            graph.replay()

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run ``step`` once, which compiles kernels and fills caches, then capture it.

        ``torch.cuda.graph`` would wait for the device and empty the allocators' caches each time.
        """
        stream = capture_stream()
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                step()
                gc.disable()  # freeing objects may call CUDA, which ends a capture
                # another thread, in which weights arrive, may allocate
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        finally:  # also after an out-of-memory error: what the step wrote to may be freed now
            if collects:
                gc.enable()
            torch.cuda.current_stream().wait_stream(stream)
        return graph


class CapturedSumTimeout(RuntimeError):
    """A captured sum over ranks has not ended. The device executes nothing that was queued after it."""

    exit_class = "hang"  # how the run ends: process/program.py


def reason_against_captured_sums(group: Group, device: torch.device) -> str:
    """Return why CUDA graphs cannot have sums over ``group`` here; "" if they can on all ranks.

    A small sum is captured, and then replayed twice with other numbers. Ranks agree after each of the two, so that none replays
    what another one could not capture. Raises CapturedSumTimeout if a replay has not ended in TRIAL_S seconds.
    Collective over the group: every rank of it must call, in program order.
    """
    group.connect_nccl(device)  # connecting takes its own time
    graphs = Graphs()
    numbers = torch.zeros(1 << 14, device=device)
    total = torch.empty(1 << 14, device=device)
    num_calls = 0

    def step() -> None:
        nonlocal num_calls
        num_calls += 1
        total.copy_(numbers)
        if num_calls > 1:  # the first call is before the capture: a rank where that fails would leave the others in a sum
            group.all_reduce(total, "generation:trial")

    def capture() -> str:
        graphs.run(step, 1, "trial", ())
        return ""

    def replay() -> str:
        reason = ""
        for number in (1, 2):
            numbers.fill_(number * (group.rank + 1))
            graphs.run(step, 1, "trial", ())
            expected = number * group.size * (group.size + 1) // 2
            if not bool((total == expected).all()):
                reason = f"a captured sum is {float(total[0]):g}, not {expected}"
        return reason

    for stage in (capture, replay):
        reason = _reason_of_stage(stage, device)
        outcome = torch.tensor([2 if reason is None else int(bool(reason))], dtype=torch.int32)
        worst = int(group.all_reduce(outcome, "generation:graphs", "max"))
        if worst == 2:
            raise CapturedSumTimeout(
                f"a captured sum over tp has not ended in {TRIAL_S:.0f} s; start again with generation.enforce_eager=true"
            )
        if worst:
            return reason or "it fails on another rank"
    return ""


def _reason_of_stage(stage: Callable[[], str], device: torch.device) -> str | None:
    """Return what ``stage`` returns, or its RuntimeError as text; None if it takes more than TRIAL_S seconds.

    It runs in a thread, since a wait for another rank may never end.
    """
    outcomes: list[str] = []

    def attempt() -> None:
        try:
            with torch.cuda.device(device) if capabilities(device).streams else nullcontext():
                outcomes.append(stage())
        except RuntimeError as error:  # CUDA, NCCL or torch raised it
            outcomes.append(f"{type(error).__name__}: {' '.join(str(error).split())}")

    trial = threading.Thread(target=attempt, daemon=True)
    trial.start()
    trial.join(TRIAL_S)
    return next(iter(outcomes), None)
