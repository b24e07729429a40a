"""Which rows there are, and how a call partitions them into the parts that its members compute. Pure, the same on every rank.

Rows are found by id. A partition assigns whole groups or single rows to parts with about equally many tokens. For a train call it
first forms mini-batches of whole groups, shuffled by the seed, so a mini-batch has the same rows in every layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.data.balance import partition_with_prefixes

MAX_PARTITIONS = 32  # of one RowIndex: more than a script needs; rows that outlive their step get new ones in each step


class PartitionSpec(NamedTuple):
    """How to partition rows into ``num_parts`` parts.

    - keep_groups: the rows of a group go to one part
    - num_mini_batches: mini-batches of about equally many groups (train calls). Each of ``epochs`` forms them anew, in an order that
      depends on (``seed``, epoch, group id)
    - speeds: each part gets tokens in proportion to its speed; empty: all are equal
    - follows: set if rows stay where an earlier call made them: that call's partition spec, the key of its token counts, and for each
      of its parts the part here
    - limits: tokens and rows of a micro-batch; 0: no limit
    """

    num_parts: int
    keep_groups: bool = True
    num_mini_batches: int = 1
    epochs: int = 1
    seed: int = 0
    speeds: tuple[float, ...] = ()
    follows: Hashable = None
    limits: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False)
class RowPart:
    """The rows of one part: their ascending ``positions`` in the :class:`RowIndex`, int64, and their ids.

    ``updates``: for each epoch and mini-batch, which of these rows it has.
    """

    positions: np.ndarray
    row_ids: Tensor
    group_ids: Tensor
    updates: list[np.ndarray]


@dataclass(eq=False)
class Partition:
    """The part and mini-batch of each row: ``parts`` and ``mini_batches``, int64 [epochs, rows].

    If all epochs are equal, both have one.
    """

    rows: RowIndex
    spec: PartitionSpec
    parts: np.ndarray
    mini_batches: np.ndarray
    _parts: dict[int, RowPart] = field(default_factory=dict)

    def positions(self) -> list[tuple[int, np.ndarray]]:
        """Return each part that has rows, with their ascending positions. Only for partitions of one epoch."""
        order = np.argsort(self.parts[0], kind="stable")
        indices, starts = np.unique(self.parts[0][order], return_index=True)
        return list(zip(indices.tolist(), np.split(order, starts[1:]), strict=True)) if len(order) else []

    def part(self, index: int) -> RowPart:
        if index not in self._parts:
            in_part = self.parts == index
            positions = np.flatnonzero(in_part.any(0))
            updates = [
                np.flatnonzero((in_part[epoch] & (self.mini_batches[epoch] == mini_batch))[positions])
                for epoch in range(len(in_part))
                for mini_batch in range(self.spec.num_mini_batches)
            ]
            ids, groups = (torch.from_numpy(x[positions]) for x in (self.rows.row_ids, self.rows.group_ids))
            self._parts[index] = RowPart(positions, ids, groups, updates * (self.spec.epochs // len(in_part)))
        return self._parts[index]


@dataclass(eq=False)
class RowIndex:
    """Some rows, with their partitions: ``row_ids`` int64 [rows], ascending, and ``group_ids``.

    ``data_dependent``: which rows these are depends on computed values, so a trace cannot know. ``fixed_parts``: for calls whose
    partition is fixed in advance, the part of each row.
    """

    row_ids: np.ndarray
    group_ids: np.ndarray
    data_dependent: bool = False
    fixed_parts: dict[PartitionSpec, np.ndarray] = field(default_factory=dict)
    _partitions: dict[Hashable, Partition] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (np.diff(self.row_ids) > 0).all(), "row ids ascend without repeats"

    def __len__(self) -> int:
        return len(self.row_ids)

    @cached_property
    def all_positions(self) -> np.ndarray:
        return np.arange(len(self))

    @cached_property
    def digest(self) -> str:
        """Return the number of rows and a hash of their ids. Ranks differ if a script has filtered rows by what only one rank knows."""
        return f"{len(self)} rows (their ids: {zlib.crc32(self.row_ids.tobytes()):08x})"

    @cached_property
    def num_groups(self) -> int:
        return len(np.unique(self.group_ids))

    def same(self, other: RowIndex) -> bool:
        """Return True if these are the same rows. Ids alone do not decide: repeated rows get ids that other rows may have."""
        pairs = (self.row_ids, other.row_ids), (self.group_ids, other.group_ids)
        return self is other or all(mine is theirs or np.array_equal(mine, theirs) for mine, theirs in pairs)

    def partition(self, spec: PartitionSpec, counts_key: Hashable, tokens: Callable[[], np.ndarray]) -> Partition:
        """Return a partition of the rows, that of an earlier call if ``spec`` and ``counts_key`` are the same.

        ``tokens()`` int64 [2, rows]: the tokens that balance the parts, and how many of them a row shares with its group.
        """
        key = spec, counts_key
        if key not in self._partitions:
            if spec in self.fixed_parts:
                parts, mini_batches = self.fixed_parts[spec][None], np.zeros((1, len(self)), dtype=np.int64)
            else:
                parts, mini_batches = assign_rows(
                    spec, self.group_ids, tokens() if spec.num_parts > 1 else np.zeros((2, len(self)))
                )
            if len(self._partitions) == MAX_PARTITIONS:
                del self._partitions[next(iter(self._partitions))]
            self._partitions[key] = Partition(self, spec, parts, mini_batches)
        return self._partitions[key]


def distinct(parts: np.ndarray) -> list[int]:
    """Return the distinct values of small integers, ascending."""
    values: list[int] = np.flatnonzero(np.bincount(parts.ravel())).tolist()
    return values


def assign_rows(spec: PartitionSpec, group_ids: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return part and mini-batch of each row: int64 [epochs, rows] each, [1, rows] if all epochs are equal.

    ``tokens``: see :meth:`RowIndex.partition`.
    """
    epochs = spec.epochs if spec.num_mini_batches > 1 else 1
    mini_batches = np.zeros((epochs, len(group_ids)), dtype=np.int64)
    if spec.num_mini_batches > 1:
        groups, group_of = np.unique(group_ids, return_inverse=True)
        # equal runs of groups, or one group more
        mini_batch_of_place = np.arange(len(groups)) * spec.num_mini_batches // max(len(groups), 1)
        for epoch in range(epochs):
            order = np.argsort(_scrambled(groups, spec.seed, epoch), kind="stable")
            mini_batch_of = np.empty_like(mini_batch_of_place)
            mini_batch_of[order] = mini_batch_of_place
            mini_batches[epoch] = mini_batch_of[group_of]
    parts = np.zeros_like(mini_batches)
    if spec.num_parts > 1:
        for epoch in range(epochs):
            for mini_batch in range(spec.num_mini_batches):
                rows = np.flatnonzero(mini_batches[epoch] == mini_batch)
                lengths, prefix_lengths = tokens[:, rows]
                options = spec.num_parts, spec.keep_groups, spec.speeds, spec.limits
                parts[epoch, rows] = partition_with_prefixes(lengths, prefix_lengths, group_ids[rows], *options)
    return parts, mini_batches


def _scrambled(ids: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return a uint64 per id that depends only on (seed, epoch, id): three rounds of SplitMix64 (Steele et al. 2014)."""
    words = np.zeros(len(ids), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for value in (np.uint64(seed % 2**64), np.uint64(epoch), ids.astype(np.uint64)):
            words = (words ^ value) + np.uint64(0x9E3779B97F4A7C15)
            words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            words ^= words >> np.uint64(31)
    return words
