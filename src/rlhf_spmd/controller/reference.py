"""References: what a call returns at once, on every rank, before anything is computed.

A reference says which rows there are, which call makes each field, and so on which ranks the data lie. It is bookkeeping only:
the data stay with the :class:`Production` on the ranks that made them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlhf_spmd.controller.protocols import Protocol
from rlhf_spmd.data.balance import partition_by_tokens
from rlhf_spmd.data.batch import Batch

if TYPE_CHECKING:
    from rlhf_spmd.controller.worker import MethodSpec, Worker


@dataclass(eq=False)
class RowSet:
    """The rows of a batch, as every rank knows them: ids and groups. ``tokens()`` int64 [rows] balances them over ranks.

    Token counts are known everywhere for what the loader gives. When a call makes rows longer (generation), only the ranks that
    will work on those rows learn the new counts, from a header that the producers send.
    """

    row_ids: np.ndarray
    group_ids: np.ndarray
    tokens: Callable[[], np.ndarray]
    lengths_from: int = -1  # graph node whose header sets the token counts
    _placements: dict[tuple[int, bool, int], np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.row_ids)

    def place(self, parts: int, keep_groups: bool, chunks: int) -> np.ndarray:
        """Part of each row, int64 [rows]. Each of ``chunks`` equal runs of rows (mini-batches) is balanced by itself.

        Raises ValueError if the rows cannot be cut into equal chunks.
        """
        if len(self) % chunks:
            raise ValueError(f"{len(self)} rows cannot be cut into {chunks} mini-batches of equal size")
        key = (parts, keep_groups, chunks)
        if key not in self._placements:
            self._placements[key] = self._place(*key)
        return self._placements[key]

    def _place(self, parts: int, keep_groups: bool, chunks: int) -> np.ndarray:
        placement = np.zeros(len(self), dtype=np.int64)
        if parts == 1:
            return placement
        tokens = self.tokens()
        for chunk in np.split(np.arange(len(self)), chunks):
            groups = self.group_ids[chunk].tolist() if keep_groups else None
            for part, rows in enumerate(partition_by_tokens(tokens[chunk].tolist(), parts, groups)):
                placement[chunk[rows]] = part
        return placement


@dataclass(eq=False)
class Production:
    """One call's results: where they lie and, on the ranks that hold them, the data.

    ``seq`` is the call's number, the same on every rank. ``role`` is None for a source, which every rank holds whole.
    """

    seq: int
    node: int
    rows: RowSet | None
    role: Worker | None = None
    spec: MethodSpec | None = None
    chunks: int = 1
    data: Batch | None = None
    values: Any = None

    def placement(self) -> np.ndarray:
        """Part of each row under the call's protocol, int64 [rows]; may wait for the rows' lengths."""
        assert self.role is not None and self.spec is not None and self.rows is not None
        return self.rows.place(self.protocol.parts(self.role.shape), not self.spec.split_groups, self.chunks)

    @property
    def protocol(self) -> Protocol:
        assert self.spec is not None
        return self.spec.protocol

    def holders(self, part: int) -> list[int]:
        """Global ranks that hold the rows of a part; others fetch from the first."""
        assert self.role is not None
        ranks = self.role.pool.ranks
        return [ranks[i] for i in self.protocol.holders(self.role.shape, part)]

    def part_of(self, rank: int) -> int | None:
        """The part that a global rank works on in this call; None if it does not run."""
        assert self.role is not None
        if rank not in self.role.pool.ranks:
            return None
        return self.protocol.distribute(self.role.shape, self.role.pool.ranks.index(rank))


@dataclass(frozen=True, eq=False)
class Reference:
    """A future: fields of rows, and which call makes each. Operations are those of a batch and cost nothing."""

    rows: RowSet | None
    fields: Mapping[str, tuple[Production, str]] = field(default_factory=dict)  # name -> (production, its name there)
    call: Production | None = None  # the call that returned this, for Controller.get

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def union(self, other: Reference) -> Reference:
        """Fields of both. The rows must be the same; those whose token counts are newer win."""
        if self.rows is None or other.rows is None or not np.array_equal(self.rows.row_ids, other.rows.row_ids):
            raise ValueError("union of references to different rows")
        rows = self.rows if self.rows.lengths_from > other.rows.lengths_from else other.rows
        return Reference(rows, {**self.fields, **other.fields}, other.call)

    def select(self, *names: str) -> Reference:
        missing = [name for name in names if name not in self.fields]
        if missing:
            raise ValueError(f"reference has no field {missing[0]!r}; it has {', '.join(sorted(self.fields))}")
        return Reference(self.rows, {name: self.fields[name] for name in names}, self.call)

    def rename(self, **names: str) -> Reference:
        """``rename(rollout_log_probs="old_log_probs")``: the same data under another name."""
        return Reference(self.rows, {names.get(name, name): where for name, where in self.fields.items()}, self.call)


def source(batch: Batch, token_field: str | None) -> Reference:
    """A batch that every rank holds whole (what the loader gives). ``token_field``: the ragged field that sets row lengths."""
    lengths = batch[token_field].lengths.numpy() if token_field else np.ones(len(batch), dtype=np.int64)
    rows = RowSet(batch.row_ids.numpy(), batch.group_ids.numpy(), lambda: lengths)
    production = Production(seq=-1, node=-1, rows=rows, data=batch)
    return Reference(rows, {name: (production, name) for name in batch.fields}, production)


def local_rows(batch: Batch, rows: RowSet, positions: np.ndarray) -> Batch:
    """The rows at ``positions`` of the row set, in that order, out of a batch that holds at least these."""
    if len(positions) == len(batch) and np.array_equal(batch.row_ids.numpy(), rows.row_ids[positions]):
        return batch
    return batch.reorder(torch.from_numpy(rows.row_ids[positions]))
