"""References: what a call returns at once, on every rank, before anything is computed.

A reference says which rows there are, which call makes each field, and so on which ranks the data lie. It is bookkeeping only:
the data stay with the :class:`Production` on the ranks that made them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.controller.protocols import Members
from rlhf_spmd.data.balance import partition_by_tokens
from rlhf_spmd.data.batch import Batch

if TYPE_CHECKING:
    from rlhf_spmd.controller.worker import MethodSpec, Worker


@dataclass(frozen=True)
class Cut:
    """How rows are cut: each of ``num_chunks`` equal runs of rows (mini-batches) is balanced over the parts by itself."""

    num_parts: int
    keep_groups: bool
    num_chunks: int


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of one part of a cut: ascending ``positions`` in the row set, int64, and ids."""

    rows: RowSet
    cut: Cut
    index: int
    positions: np.ndarray
    row_ids: Tensor
    group_ids: Tensor


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
    _placements: dict[Cut, np.ndarray] = field(default_factory=dict)
    _parts: dict[tuple[Cut, int], Part] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.row_ids)

    def place(self, cut: Cut) -> np.ndarray:
        """Part of each row, int64 [rows]. Raises ValueError if the rows cannot be cut into equal chunks."""
        if cut not in self._placements:
            if len(self) % cut.num_chunks:
                raise ValueError(f"{len(self)} rows cannot be cut into {cut.num_chunks} mini-batches of equal size")
            placement = np.zeros(len(self), dtype=np.int64)
            if cut.num_parts > 1:
                tokens = self.tokens()
                for chunk in np.split(np.arange(len(self)), cut.num_chunks):
                    groups = self.group_ids[chunk] if cut.keep_groups else None
                    placement[chunk] = partition_by_tokens(tokens[chunk], cut.num_parts, groups)
            self._placements[cut] = placement
        return self._placements[cut]

    def part(self, cut: Cut, index: int) -> Part:
        if (cut, index) not in self._parts:
            positions = np.flatnonzero(self.place(cut) == index)
            ids = torch.from_numpy(self.row_ids[positions]), torch.from_numpy(self.group_ids[positions])
            self._parts[cut, index] = Part(self, cut, index, positions, *ids)
        return self._parts[cut, index]


@dataclass(eq=False)
class Source:
    """Data that every rank holds whole, before all calls."""

    data: Batch
    seq: int = -1
    node: int = -1


@dataclass(eq=False)
class Production:
    """One call's results: where they lie and, on the ranks that hold them, the data.

    ``seq`` is the call's number, the same on every rank; ``node`` is where it stands in the graph. ``rows`` None: a call without.
    """

    seq: int
    node: int
    rows: RowSet | None
    role: Worker
    spec: MethodSpec
    data: Batch | None = None
    values: Any = None

    @property
    def name(self) -> str:
        return f"{self.role.name}.{self.spec.name}"

    @cached_property
    def members(self) -> Members:
        return self.role.members(self.spec.protocol)

    @cached_property
    def cut(self) -> Cut:
        num_chunks = self.spec.mini_batches(self.role) if self.spec.mini_batches else 1
        return Cut(self.members.num_parts, not self.spec.split_groups, num_chunks)

    def placement(self) -> np.ndarray:
        """Part of each row under the call's protocol, int64 [rows]; may wait for the rows' lengths."""
        assert self.rows is not None
        return self.rows.place(self.cut)

    def part(self, index: int) -> Part:
        """May wait for the rows' lengths, as :meth:`placement`."""
        assert self.rows is not None
        return self.rows.part(self.cut, index)

    def parts_with(self, part: Part) -> list[int]:
        """The parts of this call in which the rows of another call's part lie."""
        if not len(part.positions):
            return []  # nothing of it moves, whoever holds it
        if part.rows is self.rows and part.cut == self.cut:
            return [part.index]
        found: list[int] = np.unique(self.placement()[part.positions]).tolist()
        return found


@dataclass(frozen=True, eq=False)
class Reference:
    """A future: fields of rows, and which call makes each. Operations are those of a batch and cost nothing."""

    rows: RowSet | None
    fields: Mapping[str, tuple[Source | Production, str]] = field(default_factory=dict)  # name -> (who made it, its name there)
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


def source(batch: Batch, token_field: str | None = None, placements: Mapping[Cut, np.ndarray] | None = None) -> Reference:
    """A batch that every rank holds whole (what the loader gives). ``token_field``: the ragged field that sets row lengths.

    ``placements``: the part of each row for calls that cut the rows so; others are balanced by tokens.
    """
    lengths = batch[token_field].lengths.numpy() if token_field else np.ones(len(batch), dtype=np.int64)
    rows = RowSet(batch.row_ids.numpy(), batch.group_ids.numpy(), lambda: lengths, _placements=dict(placements or {}))
    made = Source(batch)
    return Reference(rows, {name: (made, name) for name in batch.fields})


def pick_rows(batch: Batch, row_ids: Tensor) -> Batch:
    """The rows with these ids, in that order, out of a batch that holds at least these."""
    if batch.row_ids is row_ids or torch.equal(batch.row_ids, row_ids):
        return batch
    return batch.reorder(row_ids)
