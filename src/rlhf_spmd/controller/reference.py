"""References: what a call returns at once, on every rank, before anything is computed.

A reference is a set of row ids with fields. For each field it knows which call made which rows, and so on which ranks the data lie.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from rlhf_spmd.controller.call import CallInput, CallRecord, FieldShard, ReplicatedBatch
from rlhf_spmd.controller.rows import PartitionSpec, RowIndex
from rlhf_spmd.controller.signature import Signature
from rlhf_spmd.data.batch import Batch

COPY_STRIDE = 1 << 48  # between the id of a row and the id of its copy


@dataclass(eq=False, slots=True)
class Reference:
    """Row ids with fields whose data may not exist yet. Operations touch no data, and each returns a new reference."""

    rows: RowIndex | None
    fields: Mapping[str, tuple[FieldShard, ...]] = field(default_factory=dict)
    call: CallRecord | None = None  # the call that returned this, for Controller.get

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def __len__(self) -> int:
        return 0 if self.rows is None else len(self.rows)

    def union(self, *others: Reference) -> Reference:
        """Return the fields of all references. Raises ValueError if rows differ, or if one name has different data in two of them."""
        fields = dict(self.fields)
        call = self.call
        for other in others:
            if self.rows is None or other.rows is None or not self.rows.same(other.rows):
                raise ValueError(
                    f"union of references to different rows: {len(self)} and {len(other)}; take() those of both first"
                )
            for name, shards in other.fields.items():
                if name in fields and not _same(fields[name], shards):
                    raise ValueError(f"union: both references have a field {name!r}; rename() one of them or select() fields")
                fields[name] = shards
            call = other.call
        return Reference(self.rows, fields, call)

    def select(self, *names: str) -> Reference:
        """Return only these fields. Raises ValueError for a name that the reference does not have."""
        self._check(names)
        return Reference(self.rows, {name: self.fields[name] for name in names}, self.call)

    def rename(self, **names: str) -> Reference:
        """``rename(scores="costs")`` returns the same data under another name. Raises ValueError for an unknown name or one in use."""
        self._check(names)
        renamed = [names.get(name, name) for name in self.fields]
        duplicate = next((new for new in names.values() if renamed.count(new) > 1), None)
        if duplicate is not None:
            raise ValueError(f"rename: the reference would have two fields {duplicate!r}")
        return Reference(self.rows, dict(zip(renamed, self.fields.values(), strict=True)), self.call)

    def take(self, rows: Reference | np.ndarray | Tensor | Sequence[int]) -> Reference:
        """Return some of the rows: those of another reference, those where a mask (bool [rows]) is true, or those with given ids.

        Masks and ids must be the same on every rank (:meth:`Controller.get_field`). Raises ValueError for unknown ids.
        """
        assert self.rows is not None, "take() of a reference without rows"
        mine = self.rows
        if isinstance(rows, Reference):
            theirs = RowIndex(mine.row_ids[:0], mine.group_ids[:0]) if rows.rows is None else rows.rows
            ids, groups, data_dependent = theirs.row_ids, theirs.group_ids, theirs.data_dependent
        else:
            chosen = np.asarray(rows)
            assert chosen.dtype.kind in "bi" or not chosen.size, (
                f"take() of {chosen.dtype}: it takes a mask or ids, such as get_field(...) > 0"
            )
            ids = mine.row_ids[chosen] if chosen.dtype == bool else np.unique(chosen).astype(np.int64)
            groups, data_dependent = None, True
        positions = np.searchsorted(mine.row_ids, ids)
        if len(ids) and not (len(mine) and np.array_equal(mine.row_ids[np.minimum(positions, len(mine) - 1)], ids)):
            raise ValueError(f"take: of {len(ids)} rows some are not among the {len(mine)} of the reference")
        if groups is not None and not np.array_equal(mine.group_ids[positions], groups):
            raise ValueError("take: the rows have other groups than those of the other reference, so they are other rows")
        return self._moved(positions, ids, mine.data_dependent or data_dependent)

    def firsts(self) -> Reference:
        """Return the first row of each group."""
        assert self.rows is not None
        first = np.sort(np.unique(self.rows.group_ids, return_index=True)[1])
        return self._moved(first, self.rows.row_ids[first], self.rows.data_dependent)

    def repeat(self, n: int) -> Reference:
        """Return ``n`` rows for each row, in its group, with ids ``id * n + j``. Raises ValueError if n < 1 or ids exceed 63 bits."""
        assert self.rows is not None
        n = operator.index(n)  # products of numpy's 64-bit integers would overflow
        self._check_ids("repeat", n, int(self.rows.row_ids[-1]) * n + n - 1 if len(self) else 0)
        ids = np.repeat(self.rows.row_ids, n) * n + np.tile(np.arange(n), len(self))
        return self._moved(np.repeat(np.arange(len(self)), n), ids, self.rows.data_dependent)

    def copy(self, number: int = 1) -> Reference:
        """Return the same rows under other ids, in the same groups: for greedy answers beside sampled ones, say.

        Raises ValueError if ``number`` < 1 or an id needs over 63 bits.
        """
        assert self.rows is not None
        number = operator.index(number)
        self._check_ids("copy", number, int(self.rows.row_ids[-1]) + number * COPY_STRIDE if len(self) else 0)
        return self._moved(np.arange(len(self)), self.rows.row_ids + number * COPY_STRIDE, self.rows.data_dependent)

    def concat(self, *others: Reference) -> Reference:
        """Return the rows of all references, with the fields that all have. Raises ValueError if a row is in two of them."""
        parts = [self, *others]
        sets = [part.rows for part in parts if part.rows is not None]
        ids, groups = (np.concatenate([getattr(rows, name) for rows in sets]) for name in ("row_ids", "group_ids"))
        order = np.argsort(ids, kind="stable")
        if (np.diff(ids[order]) == 0).any():
            raise ValueError("concat: a row is in two of the references; copy() gives rows other ids, copy(2) yet others")
        rows = RowIndex(ids[order], groups[order], any(part.data_dependent for part in sets))
        starts = np.cumsum([0, *(len(part) for part in parts)])
        new_positions = np.empty_like(order)
        new_positions[order] = np.arange(len(order))
        fields: dict[str, list[FieldShard]] = {name: [] for name in self.fields if all(name in other for other in others)}
        for part, start in zip(parts, starts, strict=False):
            moved: dict[int, np.ndarray] = {}  # shards that share rows keep sharing them
            for name, shards in fields.items():
                for shard in part.fields[name]:
                    positions = moved.setdefault(id(shard.positions), new_positions[start + shard.positions])
                    shards.append(FieldShard(shard.producer, shard.name, positions, shard.ids))
        return Reference(rows, {name: tuple(shards) for name, shards in fields.items()})

    @staticmethod
    def _check_ids(name: str, number: int, largest: int) -> None:
        if number < 1 or largest >= 1 << 63:
            raise ValueError(f"{name}({number}): the largest row id would be {largest}; at least 1, and ids stay below 2**63")

    def _moved(self, index: np.ndarray, ids: np.ndarray, data_dependent: bool) -> Reference:
        """Return the rows at positions ``index``, which may repeat, under the ids ``ids``."""
        assert self.rows is not None
        if len(index) == len(self) and np.array_equal(ids, self.rows.row_ids):
            rows = (
                self.rows
                if data_dependent == self.rows.data_dependent
                else RowIndex(ids, self.rows.group_ids, data_dependent, self.rows.fixed_parts)
            )
            return Reference(rows, self.fields, self.call)
        moved: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}  # positions and ids of a shard -> those after it

        def move(shard: FieldShard) -> FieldShard:
            key = id(shard.positions), id(shard.ids)
            if key not in moved:
                shard_index = np.full(len(self), -1)  # of each row; -1: the shard lacks it
                shard_index[shard.positions] = np.arange(len(shard.positions))
                shard_indices = shard_index[index]
                positions = np.flatnonzero(shard_indices >= 0)
                moved[key] = positions, shard.ids[shard_indices[positions]]
            return FieldShard(shard.producer, shard.name, *moved[key])

        fields = {
            name: tuple(shard for shard in map(move, shards) if len(shard.positions)) for name, shards in self.fields.items()
        }
        return Reference(RowIndex(ids, self.rows.group_ids[index], data_dependent), fields, self.call)

    def _check(self, names: Iterable[str]) -> None:
        missing = [name for name in names if name not in self.fields]
        if missing:
            raise ValueError(f"reference has no field {missing[0]!r}; it has {', '.join(sorted(self.fields)) or 'none'}")


def _same(mine: tuple[FieldShard, ...], theirs: tuple[FieldShard, ...]) -> bool:
    return mine is theirs or (len(mine) == len(theirs) and all(a.same(b) for a, b in zip(mine, theirs, strict=True)))


def made_by(
    producer: ReplicatedBatch | CallRecord, rows: RowIndex, names: Iterable[str], call: CallRecord | None = None
) -> Reference:
    """Return a reference to fields that one producer made for all of ``rows``."""
    return Reference(rows, {name: (FieldShard(producer, name, rows.all_positions, rows.row_ids),) for name in names}, call)


def source(batch: Batch, fixed_parts: Mapping[PartitionSpec, np.ndarray] | None = None) -> Reference:
    """Return a reference to a batch that every rank holds in full, such as the loader's. Row ids ascend.

    ``fixed_parts``: the part of each row in calls that partition by such a spec. Other calls balance the rows by tokens.
    """
    rows = RowIndex(batch.row_ids.numpy(), batch.group_ids.numpy(), fixed_parts=dict(fixed_parts or {}))
    return made_by(ReplicatedBatch(batch), rows, batch.fields)


def call_inputs(
    call: CallRecord,
    references: Sequence[Reference],
    signature: Signature,
    seed: int,
    limits: tuple[int, int],
    tracing: bool,
) -> list[CallInput]:
    """Return what a call takes from its references, and how it partitions their rows.

    ``limits``: see :class:`PartitionSpec`.

    Raises ValueError for missing fields, and for a train call without rows or with more mini-batches than groups.
    """
    inputs: list[CallInput] = []
    num_mini_batches = 0
    for reference, spec in zip(references, signature.inputs, strict=False):
        rows = reference.rows
        assert rows is not None, f"{call.name}: a reference without rows"
        names = spec.fields_to_take(reference.fields, call.name, call.role.ignored_inputs)
        tokens = tuple([shard for token in call.spec.tokens for shard in reference.fields.get(token, ())])
        spec_limits = (0, 0) if spec.keep_groups else limits  # with whole groups the limits change nothing
        partition_spec = PartitionSpec(call.members.num_parts, spec.keep_groups, speeds=call.members.speeds, limits=spec_limits)
        if call.spec.kind == "train":
            if not (len(rows) or tracing):
                raise ValueError(f"{call.name}: no rows to train on; a script that filters its rows may branch on len(rows)")
            num_mini_batches = num_mini_batches or max(
                1, -(-rows.num_groups // (signature.mini_batch_size or max(rows.num_groups, 1)))
            )
            if num_mini_batches > max(rows.num_groups, 1):
                raise ValueError(
                    f"{call.name}: {rows.num_groups} groups of rows cannot be cut into {num_mini_batches} mini-batches"
                )
            partition_spec = partition_spec._replace(num_mini_batches=num_mini_batches, epochs=signature.epochs, seed=seed)
        inputs.append(CallInput(rows, {name: reference.fields[name] for name in names}, tokens, partition_spec))
    return inputs
