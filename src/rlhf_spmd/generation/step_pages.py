"""Where the tokens of a step lie in the pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rlhf_spmd.generation.kv_cache import KVCache
from rlhf_spmd.generation.scheduler import Work
from rlhf_spmd.kernels import on_device

Index = NDArray[np.int64]


class StepPages(NamedTuple):
    """On the device: ``positions`` int64 [T], ``slots`` int64 [T] (page * page_size + offset), ``table`` int32 [rows, P] (pages).
    On the host, of each row: ``firsts`` (its first token of the step), ``starts`` (that one's position), ``counts``."""

    positions: Tensor
    slots: Tensor
    table: Tensor
    firsts: Index
    starts: Index
    counts: Index


def fill_lines(lines: Sequence[Sequence[int]], width: int, dtype: type[np.integer[Any]]) -> NDArray[Any]:
    """``lines`` one under the other, cut or filled with zeros to ``width``."""
    table = np.zeros((len(lines), width), dtype=dtype)
    for to, line in zip(table, lines, strict=True):
        to[: len(line)] = line[:width]
    return table


def locate_tokens(work: Sequence[Work], cache: KVCache) -> StepPages:
    """``work`` in the order in which its tokens are packed."""
    starts, counts = np.array([(item.start, item.num_tokens) for item in work], dtype=np.int64).T
    table = fill_lines([item.row.pages for item in work], max(len(item.row.pages) for item in work), np.int32)
    firsts = np.cumsum(counts) - counts
    lines = np.repeat(np.arange(len(work)), counts)
    positions = np.arange(len(lines)) + np.repeat(starts - firsts, counts)
    slots = table[lines, positions // cache.page_size] * np.int64(cache.page_size) + positions % cache.page_size
    first, second, third = (on_device(array, cache.pages.device) for array in (positions, slots, table))
    return StepPages(first, second, third, firsts, starts, counts)
