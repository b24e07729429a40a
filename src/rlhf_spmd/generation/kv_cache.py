"""The paged KV cache: its memory, how large it may be, and where the tokens of a step lie in it.

Shape legend: B rows or tiles, H KV heads of this rank, P pages per tile, L = P * page_size keys, D head_dim, T tokens of the
step, N pages in the cache.

The C++ kernels read pages as they lie. For torch the keys and values of a layer lie as [2, H, N, page_size, D], so one gather of
whole pages yields [2, H, B, L, D], which matrix products take without another copy. Every gather writes to one persistent
buffer, since a fresh one costs a page fault per 4 KB.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_spmd.generation.config import GenerationConfig
from rlhf_spmd.generation.recurrent_states import RecurrentStates
from rlhf_spmd.generation.routed_experts import ExpertPages
from rlhf_spmd.generation.sequence import SequenceWork
from rlhf_spmd.kernels import CppOps, Ops, capabilities, on_device
from rlhf_spmd.kernels.devices import allocated_bytes, free_bytes, total_bytes
from rlhf_spmd.kernels.pinned_memory import host_empty
from rlhf_spmd.models.attention import Attention, MixedHeadAttention
from rlhf_spmd.models.block import Block
from rlhf_spmd.models.decoder import Decoder

COPIED_BYTES = 4 << 20  # bytes of pages copied at a time on CPUs: a larger block is fresh memory, with a page fault per 4 KB
QUEUED_BYTES = 256 << 20  # bytes of pages copied at a time on GPUs, where each block costs launches instead
TEMPORARY_STATES = 4.1  # states of linear attention that a layer holds at once, per row of a decode step

IndexArray = NDArray[np.int64]


@dataclass(frozen=True)
class Backend:
    """How attention over the pages of a cache is computed; ``backends`` builds it.

    - for_step: makes the attention context of a step from (work in the order in which its tokens are packed, the cache, this
      rank's query heads)
    - decoding: makes the context of one token per row from (``positions`` int64 [B], ``page_table`` int32 [B, P], the cache, this
      rank's query heads). The host does not read these tensors
    - ops: decide how a page is laid out, and compute what the backend has no kernel for
    - capturable: ``decoding`` can be captured as a CUDA graph
    """

    for_step: Callable[[Sequence[SequenceWork], KVCache, int], Attention]
    decoding: Callable[[Tensor, Tensor, KVCache, int], Attention]
    ops: Ops
    capturable: bool = False


class KVCache:
    """Keys and values of the tokens of rows. ``pages`` [layers, 2, H, N, elements of a page]: keys, then values;
    one plane in place of two with latent attention, except in the C++ kernels.

    ``value_dim``: values are the keys' first ``value_dim`` elements, as with latent attention. Then there are no pages of values,
    except for the C++ kernels, which read values in another order. None: values have pages, and head_dim elements.

    A page has page_size * D elements, or for the C++ kernels those that ``kernels/attention.cpp`` says. Pages are zeros at
    first: attention reads and masks unused slots, which must be finite.

    ``global_head_cache``: the cache of layers with ``ModelSpec.global_heads``. Its pages have the same numbers as these.
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
        value_dim: int | None = None,
        states: RecurrentStates | None = None,
        global_head_cache: KVCache | None = None,
        experts: ExpertPages | None = None,
    ) -> None:
        self.global_head_cache = global_head_cache
        self.states = states  # those of the rows in flight, for models with linear attention
        self.experts = experts  # those of the tokens in the pages, if they are recorded
        parts: tuple[RecurrentStates | ExpertPages | KVCache | None, ...] = states, experts, global_head_cache
        self._parts = [part for part in parts if part is not None]
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.num_pages, self.page_size = num_pages, page_size
        self.backend, self.ops = backend, backend.ops
        self.kv_tensors_per_page = kv_tensors_per_page(self.ops, value_dim)
        self.value_dim = value_dim or head_dim
        self._shape = num_layers, self.kv_tensors_per_page, kv_heads, num_pages, self.ops.page_elements(page_size, head_dim)
        self.pages = self._zeros(dtype, device)
        self._buffer = self.pages.new_empty(0)
        self._on_host: tuple[Tensor, Tensor] | None = None  # offloaded: page numbers, contents

    def _zeros(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeroed pages; on CPUs in the system's huge pages, if it has them.

        A page of the cache is only a few small pages long, far from the next one, and decoding reads all of them for each token.
        """
        if capabilities(device).streams or not hasattr(mmap, "MADV_HUGEPAGE"):
            return torch.zeros(self._shape, dtype=dtype, device=device)
        memory = mmap.mmap(-1, math.prod(self._shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE)
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=dtype).view(self._shape)

    @staticmethod
    def page_bytes(
        num_layers: int, kv_heads: int, head_dim: int, page_size: int, dtype: torch.dtype, num_planes: int = 2
    ) -> int:
        return num_layers * num_planes * kv_heads * CppOps.page_elements(page_size, head_dim) * dtype.itemsize

    def for_step(self, work: Sequence[SequenceWork], num_heads: int) -> Attention:
        """Return the context of :attr:`Backend.for_step`, of all layers."""
        return self._by_heads(lambda cache: self.backend.for_step(work, cache, num_heads))

    def decoding(self, positions: Tensor, page_table: Tensor, num_heads: int) -> Attention:
        """Return the context of :attr:`Backend.decoding`, of all layers."""
        return self._by_heads(lambda cache: self.backend.decoding(positions, page_table, cache, num_heads))

    def _by_heads(self, build: Callable[[KVCache], Attention]) -> Attention:
        return build(self) if self.global_head_cache is None else MixedHeadAttention(build(self), build(self.global_head_cache))

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) pages in all layers. No page is both source and destination."""
        pairs = on_device(np.array(copies, dtype=np.int64), self.pages.device)
        limit = QUEUED_BYTES if capabilities(self.pages.device).streams else COPIED_BYTES
        for block in pairs.split(max(limit * self.num_pages // self.pages.nbytes, 1)):
            source, destination = block.unbind(1)
            self.pages[:, :, :, destination] = self.pages[:, :, :, source]
            if self.experts is not None:
                self.experts.copy(source, destination)
        if self.global_head_cache is not None:
            self.global_head_cache.copy_pages(copies)

    def offload(self, used: Sequence[int]) -> None:
        """Free the memory. The pages ``used`` wait in host memory, pinned where the cache is on a GPU.

        Does nothing if they wait already.
        """
        if self._on_host is not None:
            return
        for part in self._parts:
            part.offload(used)
        index = torch.tensor(used, dtype=torch.int64, device=self.pages.device)
        shape = *self.pages.shape[:3], len(used), self.pages.shape[4]
        host = host_empty(shape, self.pages.dtype, self.pages.device)
        for layer, pages in zip(host, self.pages, strict=True):
            layer.copy_(pages.index_select(2, index))
        self._on_host = index, host
        self.pages = self._buffer = self.pages.new_empty(0)

    def reload(self) -> None:
        """Undo :meth:`offload`, if it was called. The pages may have another address afterwards."""
        if self._on_host is None:
            return
        for part in self._parts:
            part.reload()
        (index, host), self._on_host = self._on_host, None
        self.pages = self._zeros(self.pages.dtype, self.pages.device)
        for layer, pages in zip(host, self.pages, strict=True):
            pages.index_copy_(2, index, layer.to(pages.device))

    def index_of_all_heads(self, index: Tensor, stride: int) -> Tensor:
        """Return ``index``, which counts the ``stride`` entries of one head's keys, repeated for the keys and values of all heads."""
        blocks = torch.arange(self.kv_tensors_per_page * self.kv_heads, device=index.device) * stride
        return (blocks[:, None] + index.reshape(1, -1)).reshape(-1)

    def cache_slots_of(self, positions: Tensor, page_table: Tensor) -> Tensor:
        """Return the slot, page * page_size + offset, of one position [B] per line of ``page_table`` [B, P]."""
        page = page_table.gather(1, torch.div(positions, self.page_size, rounding_mode="floor")[:, None])[:, 0]
        return page.long() * self.page_size + positions % self.page_size

    def write(self, layer: int, all_slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k and v [T, H, D] to ``all_slots`` = index_of_all_heads(cache_slots, N * page_size)."""
        rows = torch.stack([k, v][: self.kv_tensors_per_page]).transpose(1, 2).reshape(-1, self.head_dim)
        self.pages[layer].view(-1, self.head_dim).index_copy_(0, all_slots, rows)

    def gather(self, layer: int, index: Tensor, num_tiles: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [H, B, L, D] at ``index`` = index_of_all_heads(page_table [B, P], N).

        They are valid until the next gather.
        """
        pages = self.pages[layer].view(-1, self.page_size * self.head_dim)
        size = len(index) * pages.shape[1]
        if self._buffer.numel() < size:
            self._buffer = pages.new_empty(size + size // 4)
        out = self._buffer[:size].view(len(index), -1)
        torch.index_select(pages, 0, index, out=out)
        parts = out.view(self.kv_tensors_per_page, self.kv_heads, num_tiles, -1, self.head_dim)
        return parts[0], parts[-1]


def kv_tensors_per_page(ops: Ops, value_dim: int | None) -> int:
    """Return 2 where keys and values have pages, 1 where keys serve as values."""
    return 2 if value_dim is None or isinstance(ops, CppOps) else 1


class SlotMapping(NamedTuple):
    """Where the tokens of a step lie in the cache.

    On the device: ``positions`` int64 [T]; ``cache_slots`` int64 [T], page * page_size + offset; ``page_table`` int32 [rows, P].
    On the host, per row: ``firsts``, its first token in the step; ``starts``, that token's position; ``counts``, its tokens.
    """

    positions: Tensor
    cache_slots: Tensor
    page_table: Tensor
    firsts: IndexArray
    starts: IndexArray
    counts: IndexArray


def slot_mapping(work: Sequence[SequenceWork], cache: KVCache) -> SlotMapping:
    """Return where the tokens of ``work`` lie, which is in the order in which they are packed."""
    starts, counts = np.array([(item.start, item.num_tokens) for item in work], dtype=np.int64).T
    table = fill_lines([item.row.pages for item in work], max(len(item.row.pages) for item in work), np.int32)
    firsts = np.cumsum(counts) - counts
    lines = np.repeat(np.arange(len(work)), counts)
    positions = np.arange(len(lines)) + np.repeat(starts - firsts, counts)
    cache_slots = table[lines, positions // cache.page_size] * np.int64(cache.page_size) + positions % cache.page_size
    tensors = [on_device(array, cache.pages.device) for array in (positions, cache_slots, table)]
    return SlotMapping(tensors[0], tensors[1], tensors[2], firsts, starts, counts)


def fill_lines(lines: Sequence[Sequence[int]], width: int, dtype: type[np.integer[Any]]) -> NDArray[Any]:
    """Return a matrix with ``lines`` as its rows, each cut to ``width`` or filled with zeros."""
    table = np.zeros((len(lines), width), dtype=dtype)
    for table_line, line in zip(table, lines, strict=True):
        table_line[: len(line)] = line[:width]
    return table


def cache_room(config: GenerationConfig, decoder: Decoder, device: torch.device, local_size: int) -> float:
    """Return the bytes that the cache may take beside what is on the device.

    ``local_size``: ranks of this host, which share its memory on CPUs.
    """
    on_host = not capabilities(device).streams
    share = config.memory_share(on_host)
    free = free_bytes(device, local_size)
    if on_host:
        return share * free
    total = total_bytes(device, local_size)
    return room_on_device(share, total, allocated_bytes(device), free, step_bytes(config, decoder))


def room_on_device(share: float, total: float, used: float, free: float, step: float) -> float:
    """Return the bytes for the cache on a GPU, counted as in vLLM.

    ``share`` of the ``total`` memory holds what the process has allocated (``used``), what a step allocates besides (``step``)
    and the cache. The result is never more than is ``free``.
    """
    return min(share * total - used, free) - step


def step_bytes(config: GenerationConfig, decoder: Decoder) -> float:
    """Return the bytes that a step of ``decoder`` allocates for a prefill's activations and for the logits of all rows in flight.

    The logits count twice where steps are captured as graphs.
    """
    spec = decoder.spec
    size = decoder.dtype.itemsize
    blocks = [block for block in decoder.layers if isinstance(block, Block)]
    block = max(blocks, key=lambda block: (block.num_heads + block.num_kv_heads) * block.head_dim)
    queries, keys = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
    mlp = 3 * spec.intermediate_size / decoder.tp.size
    if spec.experts is not None:  # a row for each choice, what its expert makes of it, and the result
        slices = 1 if any(block.first_expert is not None for block in blocks) else decoder.tp.size
        inner = 3 * spec.experts.intermediate_size / slices
        mlp = max(
            mlp,
            spec.experts.experts_per_token * (2 * spec.hidden_size + inner) + 3 * spec.experts.shared_size / decoder.tp.size,
        )
    row = 4 * spec.hidden_size + queries + 2 * keys + max(mlp, 3 * queries + 3 * keys)
    if spec.latent is not None:  # queries twice and their outputs, as wide as an entry of the cache
        row = (
            4 * spec.hidden_size
            + queries
            + 2 * spec.latent.cached_elements
            + max(mlp, 3 * block.num_heads * spec.latent.cached_elements)
        )
    if spec.delta_rule is not None:
        row += (spec.delta_rule.columns + spec.delta_rule.saved_numbers_per_token / 2 * 4 / size) / decoder.tp.size
    copies = 2 + (2 * decoder.tp.size if decoder.tp.size > 1 else 0)
    logits = 4 * config.max_num_seqs * spec.vocab_size / decoder.tp.size * copies if decoder.is_last else 0.0
    captures = config.captures(next(decoder.parameters()).device, decoder.pp)
    decoding = (
        0.0
        if spec.delta_rule is None
        else TEMPORARY_STATES * 4 * config.max_num_seqs * spec.delta_rule.state_numel / decoder.tp.size
    )
    return max(size * config.max_num_batched_tokens * row, decoding) + logits * (1 + captures)
