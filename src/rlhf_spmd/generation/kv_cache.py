"""The paged KV cache, and what reads and writes it.

Shape legend: B rows or tiles, H KV heads of this rank, P pages per tile, L = P * page_size keys, D head_dim, T tokens of the
step, N pages in the cache.

The C++ kernels read pages as they lie. For torch the keys and values of a layer lie as [2, H, N, page_size, D], so that one
gather of whole pages yields [2, H, B, L, D]: what the matrix products want, without another copy. Each gather goes to one persistent
buffer (a fresh one costs a page fault per 4 KB).
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.generation.scheduler import Work
from rlhf_spmd.kernels import Kernels, Ops, capabilities, on_device
from rlhf_spmd.kernels.pinned import host_empty
from rlhf_spmd.models.attention import Attention

COPIED_BYTES = 4 << 20  # of pages copied at a time: a larger block is fresh memory, on CPUs a page fault per 4 KB
QUEUED_BYTES = 256 << 20  # on GPUs, where each block costs launches instead


@dataclass(frozen=True)
class Backend:
    """An attention over the pages of a cache, see ``backends``.

    - for_step: the attention context of a step: (work in the order in which its tokens are packed, the cache, this rank's query heads).
    - decoding: the same for one token of each row, told by device tensors alone, without a look of the host at their values:
      (``positions`` int64 [B] of the tokens, ``table`` int32 [B, P] of the rows' pages, the cache, this rank's query heads).
    - ops: what it is computed by where it is no program of its own; pages have their form.
    - capturable: ``decoding`` can be captured as a CUDA graph.
    """

    for_step: Callable[[Sequence[Work], KVCache, int], Attention]
    decoding: Callable[[Tensor, Tensor, KVCache, int], Attention]
    ops: Ops
    capturable: bool = False


class KVCache:
    """``pages`` [layers, 2, H, N, elements of a page], zeros at first, since unused slots are read and masked, so they must be
    finite: for the torch attention page_size * D elements, for the C++ kernels as ``kernels/attention.cpp`` says.
    """

    def __init__(
        self,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        backend: Backend,
    ) -> None:
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.num_pages, self.page_size = num_pages, page_size
        self.backend, self.ops = backend, backend.ops
        self._shape = num_layers, 2, kv_heads, num_pages, self.ops.page_elements(page_size, head_dim)
        self.pages = self._zeros(dtype, device)
        self._buffer = self.pages.new_empty(0)
        self._on_host: tuple[Tensor, Tensor] | None = None  # pages in host memory: their numbers, what lies in them

    def _zeros(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """On CPUs in large pages, where the system has them: a page of the cache is but a few of the small ones, far from the next
        one, and decoding reads all of them once per token."""
        if capabilities(device).streams or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.zeros(self._shape, dtype=dtype, device=device)
        memory = mmap.mmap(-1, math.prod(self._shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=dtype).view(self._shape)

    @staticmethod
    def page_bytes(num_layers: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype) -> int:
        return num_layers * 2 * kv_heads * Kernels.page_elements(page_size, head_dim) * dtype.itemsize

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """(source, destination) pages, in all layers. No page is both."""
        pairs = on_device(np.array(copies, dtype=np.int64), self.pages.device)
        limit = QUEUED_BYTES if capabilities(self.pages.device).streams else COPIED_BYTES
        for some in pairs.split(max(limit * self.num_pages // self.pages.nbytes, 1)):
            source, destination = some.unbind(1)
            self.pages[:, :, :, destination] = self.pages[:, :, :, source]

    def offload(self, used: Sequence[int]) -> None:
        """Give the memory back; what lies in the pages ``used`` waits in host memory, pinned where the cache is on a GPU."""
        index = torch.tensor(used, dtype=torch.int64, device=self.pages.device)
        shape = *self.pages.shape[:3], len(used), self.pages.shape[4]
        host = host_empty(shape, self.pages.dtype, self.pages.device)
        for layer, pages in zip(host, self.pages, strict=True):
            layer.copy_(pages.index_select(2, index))
        self._on_host = index, host
        self.pages = self._buffer = self.pages.new_empty(0)

    def reload(self) -> None:
        """The opposite of :meth:`offload`, if it was called. The pages may then lie elsewhere."""
        if self._on_host is None:
            return
        (index, host), self._on_host = self._on_host, None
        self.pages = self._zeros(self.pages.dtype, self.pages.device)
        for layer, pages in zip(host, self.pages, strict=True):
            pages.index_copy_(2, index, layer.to(pages.device))

    def spread(self, index: Tensor, stride: int) -> Tensor:
        """An index into one (key or value, head) block of ``stride`` entries -> the same in all 2 * H blocks of a layer."""
        blocks = torch.arange(2 * self.kv_heads, device=index.device) * stride
        return (blocks[:, None] + index.reshape(1, -1)).reshape(-1)

    def slots_of(self, positions: Tensor, table: Tensor) -> Tensor:
        """page * page_size + offset [B] of one position [B] per line of ``table`` [B, P]."""
        page = table.gather(1, torch.div(positions, self.page_size, rounding_mode="floor")[:, None])[:, 0]
        return page.long() * self.page_size + positions % self.page_size

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k and v [T, H, D] to ``slots`` = spread(page * page_size + offset, N * page_size)."""
        rows = torch.stack([k, v]).transpose(1, 2).reshape(-1, self.head_dim)
        self.pages[layer].view(-1, self.head_dim).index_copy_(0, slots, rows)

    def gather(self, layer: int, index: Tensor, num_tiles: int) -> tuple[Tensor, Tensor]:
        """Keys and values [H, B, L, D] of ``index`` = spread(pages [B, P], N); valid until the next gather."""
        pages = self.pages[layer].view(-1, self.page_size * self.head_dim)
        size = len(index) * pages.shape[1]
        if self._buffer.numel() < size:
            self._buffer = pages.new_empty(size + size // 4)
        out = self._buffer[:size].view(len(index), -1)
        torch.index_select(pages, 0, index, out=out)
        keys, values = out.view(2, self.kv_heads, num_tiles, -1, self.head_dim).unbind(0)
        return keys, values
