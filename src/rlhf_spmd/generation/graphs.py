"""Decode steps as CUDA graphs: memory that keeps its addresses from call to call, and the graphs that read it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def padded_size(num_rows: int) -> int:
    """Rows of the graph that serves so many: powers of two up to 16, multiples of 16 up to 256, then of 64."""
    if num_rows <= 16:
        return 1 << (num_rows - 1).bit_length()
    multiple = 16 if num_rows <= 256 else 64
    return -(-num_rows // multiple) * multiple


class Arena:
    """Tensors by name that lie where they lay in the last call: a graph knows its tensors by their addresses. ``stamp`` changes when
    one of them moves."""

    def __init__(self) -> None:
        self.stamp = 0
        self._sizes: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}

    def size(self, name: str, least: int) -> int:
        """The largest that was ever asked for under this name."""
        self._sizes[name] = max(self._sizes.get(name, 0), least)
        return self._sizes[name]

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """With the contents of the last call, or zeros at first."""
        known = self._tensors.get(name)
        if known is not None and (known.shape, known.dtype, known.device) == (shape, dtype, device):
            return known
        self.stamp += 1
        del known
        self._tensors.pop(name, None)  # its memory may serve the new one
        self._tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
        return self._tensors[name]


@cache
def capture_stream() -> torch.cuda.Stream:
    """One for all captures of the process: cuBLAS keeps a workspace of 32 MiB for each stream that it has seen."""
    return torch.cuda.Stream()


class Graphs:
    """Captured decode steps of one lane, kept as long as nothing that they read has moved. ``arena``: what they share with the host.

    Graphs share one pool of memory, which they hold while they are kept: the activations of one step of the largest.
    """

    def __init__(self) -> None:
        self.arena = Arena()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._addresses: Hashable = None
        self._pool: Any = None
        self._anchor: torch.cuda.CUDAGraph | None = None  # never replayed: while it lives, others can be captured into its pool

    def run(self, step: Callable[[], None], repeats: int, key: Hashable, addresses: Hashable) -> None:
        """``step`` so many times. ``key``: what its launches depend on beside the contents of tensors; ``addresses``: of all tensors
        that it reads or writes and does not make, beside the arena's."""
        addresses = self.arena.stamp, addresses
        if addresses != self._addresses:
            # the allocator gives the memory of a pool without graphs to no other pool, so the next graphs take this one's
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
        """Run ``step`` once, which compiles kernels and fills caches, then capture it. Not by ``torch.cuda.graph``, which waits for
        the device and empties the allocators' caches each time."""
        stream, graph, collects = capture_stream(), torch.cuda.CUDAGraph(), gc.isenabled()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                step()
                gc.disable()  # what it frees may call CUDA, which ends a capture
                # weights may be arriving in another thread, which takes memory
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    step()
                finally:
                    graph.capture_end()
        finally:  # also where memory was lacking: what the step wrote to may be given back now
            if collects:
                gc.enable()
            torch.cuda.current_stream().wait_stream(stream)
        return graph
