"""Page-locked ("pinned") host memory, so that copies to and from a GPU run beside its work.

torch's own allocator of pinned memory rounds each block up to a power of two: 98 GB of optimizer states become 135 GB. Here one mapping
(:class:`PinnedSlab`) is registered with the CUDA driver and divided into tensors, without rounding. On CPUs, which have no use for
pinned memory, tensors are ordinary ones.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.kernels.devices import capabilities, wait

ALIGNMENT = 512  # bytes, of every tensor in a slab
ARENA_SLAB = 256 << 20  # bytes, the least that an arena asks the driver for: registering takes a second for a few GB
PAGE = 2 << 20  # bytes; a large slab has a multiple of it, so that the system may give large pages, which are registered sooner

ShapeAndDtype = tuple[Sequence[int], torch.dtype]


class PinnedSlab(mmap.mmap):
    """``nbytes`` of zeros, registered with the CUDA driver.

    Tensors in it keep it alive; it is unregistered and freed with the last one. Before that, the owner must have waited
    for copies that read or write them. Raises MemoryError if the driver refuses so much.
    """

    def __new__(cls, nbytes: int) -> PinnedSlab:
        unit = PAGE if nbytes >= PAGE else mmap.PAGESIZE
        return super().__new__(cls, -1, max(-(-nbytes // unit), 1) * unit, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, nbytes: int) -> None:
        self._registered_by: int | None = None
        self._driver = torch.cuda.cudart()
        # a process that is forked must not share these pages: the first write would move one of the two away from the device
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                with suppress(OSError):
                    self.madvise(getattr(mmap, advice))
        self._address = self.cut(0, (len(self),), torch.uint8).data_ptr()
        code = int(self._driver.cudaHostRegister(self._address, len(self), 0))
        if code:
            raise MemoryError(f"the CUDA driver does not pin {len(self) / 2**30:.1f} GiB of host memory (error {code})")
        self._registered_by = os.getpid()

    def cut(self, offset: int, shape: Sequence[int], dtype: torch.dtype, holder: Any = None) -> Tensor:
        """Return a tensor that begins at byte ``offset``.

        ``holder``: a view of this memory that the tensor keeps alive in place of the slab.
        """
        flat = torch.frombuffer(self if holder is None else holder, dtype=dtype, count=math.prod(shape), offset=offset)
        return flat.view(tuple(shape))

    def __del__(self) -> None:
        if self._registered_by == os.getpid():
            self._driver.cudaHostUnregister(self._address)


def host_zeros(shapes_and_dtypes: Sequence[ShapeAndDtype], device: torch.device) -> list[Tensor]:
    """Return zeros in host memory of these shapes and dtypes, each with a storage of its own.

    They share one pinned slab if copies to and from ``device`` need one, which is freed with the last of them.
    """
    if not capabilities(device).pinned:
        return [torch.zeros(tuple(shape), dtype=dtype) for shape, dtype in shapes_and_dtypes]
    sizes = [_rounded(math.prod(shape) * dtype.itemsize) for shape, dtype in shapes_and_dtypes]
    slab = PinnedSlab(sum(sizes)) if any(sizes) else None
    offset = 0
    tensors = []
    for (shape, dtype), size in zip(shapes_and_dtypes, sizes, strict=True):
        tensors.append(slab.cut(offset, shape, dtype) if slab is not None and size else torch.zeros(tuple(shape), dtype=dtype))
        offset += size
    return tensors


class PinnedArena:
    """An allocator of pinned memory for tensors of short life, in slabs.

    Only the current stream of ``device`` reads and writes them. So memory that is freed before a copy has run can be
    reused at once: the next copy comes after it. A tensor's memory returns when its storage dies, in any thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slabs: list[PinnedSlab] = []
        self._free: list[list[tuple[int, int]]] = []  # holes of each slab: (offset, size), ascending, no two adjacent
        self._given_back: deque[tuple[PinnedSlab, int, int]] = deque()  # by finalizers, which may run in the middle of anything

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._slabs))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = _rounded(math.prod(shape) * dtype.itemsize)
        if not size:
            return torch.empty(tuple(shape), dtype=dtype)
        self._collect()
        slab, offset = self._find(size) or self._grow(size)
        with memoryview(slab) as memory:
            view = memory[offset : offset + size]
        tensor = slab.cut(0, shape, dtype, view)
        weakref.finalize(view, self._given_back.append, (slab, offset, size)).atexit = False
        return tensor

    def _find(self, size: int) -> tuple[PinnedSlab, int] | None:
        """Return the smallest hole that is large enough, or None."""
        fits = [(room, n, start) for n, holes in enumerate(self._free) for start, room in holes if room >= size]
        if not fits:
            return None
        room, number, offset = min(fits)
        self._free[number].remove((offset, room))
        if room > size:
            insort(self._free[number], (offset + size, room - size))
        return self._slabs[number], offset

    def _grow(self, size: int) -> tuple[PinnedSlab, int]:
        """Add a slab. Slabs without tensors are freed first."""
        empty = [number for number, slab in enumerate(self._slabs) if self._free[number] == [(0, len(slab))]]
        if empty:
            wait(self._device)  # for copies to memory that was given back
            for number in reversed(empty):
                del self._slabs[number], self._free[number]
        slab = PinnedSlab(max(size, ARENA_SLAB))
        self._slabs.append(slab)
        self._free.append([(size, len(slab) - size)] if len(slab) > size else [])
        return slab, 0

    def _collect(self) -> None:
        """Add what finalizers returned to the holes; adjacent holes become one."""
        while self._given_back:
            slab, offset, size = self._given_back.popleft()
            number = next(n for n, other in enumerate(self._slabs) if other is slab)
            holes = self._free[number]
            for hole in [hole for hole in holes if hole[0] + hole[1] == offset or offset + size == hole[0]]:
                holes.remove(hole)
                offset = min(offset, hole[0])
                size += hole[1]
            insort(holes, (offset, size))


@cache
def _arena(device: torch.device) -> PinnedArena:
    return PinnedArena(device)


def host_like(tensor: Tensor) -> Tensor:
    """Return :func:`host_empty` with a tensor's shape, dtype and strides."""
    if not capabilities(tensor.device).pinned:
        return torch.empty_like(tensor, device="cpu")
    stride = torch.empty_like(tensor, device="meta").stride()
    return _arena(tensor.device).empty((tensor.numel(),), tensor.dtype).as_strided(tensor.shape, stride)


def host_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor of short life in host memory, pinned if copies to and from ``device`` need that.

    Only that device's current stream may copy to and from it.
    """
    if not capabilities(device).pinned:
        return torch.empty(tuple(shape), dtype=dtype)
    return _arena(device).empty(shape, dtype)


def copy_to_host(tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Return contiguous copies in host memory, and a function that waits until they are complete, in any thread.

    The host does not wait for a GPU: it copies in its current stream, so later work of that stream may change ``tensors`` at once.
    """
    copies = [host_empty(x.shape, x.dtype, x.device).copy_(x, non_blocking=True) for x in tensors]
    devices = {x.device for x in tensors if capabilities(x.device).streams}
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait_for_copies() -> None:
        for event in events:
            event.synchronize()

    return copies, wait_for_copies


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
