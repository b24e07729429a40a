"""References: what a call returns at once, on every rank, before anything is computed.

A reference is a set of row ids with fields; of each field it knows which call made which rows, and so on which ranks the data
lie. It is bookkeeping only. The data stay with the :class:`CallRecord`, on the ranks that made them, for as long as a reference
to it lives: in a variable of the script until the step ends, or longer where the script keeps one (``data.kept``). A production
also keeps alive the calls whose token counts placed its rows.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlhf_spmd.controller.protocols import ProtocolRanks
from rlhf_spmd.controller.rows import Part, Partition, PartitionSpec, RowIndex
from rlhf_spmd.data.batch import Batch

if TYPE_CHECKING:
    from rlhf_spmd.controller.worker import MethodSpec, Worker

PROMPT = "prompt_ids"  # the field that rows of a group have in common
COPY_STRIDE = 1 << 48  # between the id of a row and that of its copy
_serial = count()


@dataclass(eq=False)
class ReplicatedBatch:
    """Data that every rank holds whole, before all calls."""

    data: Batch
    seq: int = -1
    node: int = -1
    serial: int = field(default_factory=_serial.__next__)

    def lengths(self, name: str, ids: np.ndarray) -> np.ndarray:
        return _at(self.data.row_ids.numpy(), self.data[name].lengths.numpy(), ids)


@dataclass(eq=False, slots=True)
class FieldShard:
    """Rows of a field that one source or call made: ``at`` int64, their positions here; ``ids`` int64, their row ids there."""

    producer: ReplicatedBatch | CallRecord
    name: str
    at: np.ndarray
    ids: np.ndarray

    def same(self, other: FieldShard) -> bool:
        """Whether it is the same data, whatever it is called here."""
        pairs = (self.at, other.at), (self.ids, other.ids)
        is_one = self.producer is other.producer and self.name == other.name
        return is_one and all(mine is theirs or np.array_equal(mine, theirs) for mine, theirs in pairs)


@dataclass(eq=False)
class CallInput:
    """What a call takes of one reference: ``fields`` (name here -> pieces) of ``rows``, cut by ``cut`` and balanced by the lengths
    of the token fields ``tokens``.

    ``shares``: what comes from each call (or source) for the same rows, in program order: a piece, and name here -> name there.
    ``counted``: in short which token counts these are; ``token_makers``: the calls whose counts the cut needs. All are plain
    attributes: a script makes an intake for each call and looks at them several times.
    """

    rows: RowIndex
    fields: Mapping[str, tuple[FieldShard, ...]]
    tokens: tuple[FieldShard, ...]
    cut: PartitionSpec
    shares: list[tuple[FieldShard, dict[str, str]]] = field(default_factory=list)
    _placement: Partition | None = None

    def __post_init__(self) -> None:
        if self.fields and not self.shares:
            self.shares = _shares(self.fields)
        self.counted: Hashable = tuple(
            [(piece.producer.serial, piece.name, _rows_of(piece, self.rows)) for piece in self.tokens]
        )
        self.token_makers: list[CallRecord] = []
        if self.cut.num_parts > 1 and self.cut not in self.rows.given:
            self.token_makers = [piece.producer for piece in self.tokens if isinstance(piece.producer, CallRecord)]

    @property
    def placement(self) -> Partition:
        """May wait for token counts that other ranks make."""
        if self._placement is None:
            self._placement = self.rows.place(self.cut, self.counted, self._count)
        return self._placement

    def _count(self) -> np.ndarray:
        """int64 [2, rows]: tokens in all, and of those the prompt's, which a group has in common: none where only prompts count, as of
        rows that are to grow."""
        found = np.zeros((2, len(self.rows)), dtype=np.int64)
        for piece in self.tokens:
            lengths = piece.producer.lengths(piece.name, piece.ids)
            found[0, piece.at] += lengths
            found[1, piece.at] += lengths if piece.name == PROMPT else 0
        if all(piece.name == PROMPT for piece in self.tokens):
            found[1] = 0
        found[0] += not self.tokens
        return found

    def part(self, index: int) -> Part:
        return self.placement.part(index)

    def forget(self) -> None:
        """After the call: what came in is free to go when no reference needs it."""
        self.fields, self.shares = {}, []


def _rows_of(piece: FieldShard, rows: RowIndex) -> int:
    """In short, which rows of its maker a piece has at which of ``rows``; 0: just these rows."""
    if piece.ids is rows.row_ids or (len(piece.at) == len(rows) and np.array_equal(piece.ids, rows.row_ids)):
        return 0
    return hash((piece.at.tobytes(), piece.ids.tobytes()))


def _shares(fields: Mapping[str, tuple[FieldShard, ...]]) -> list[tuple[FieldShard, dict[str, str]]]:
    found: dict[tuple[int, int, int], tuple[FieldShard, dict[str, str]]] = {}
    for name, pieces in fields.items():
        for piece in pieces:
            its_rows = id(piece.producer), id(piece.at), id(piece.ids)
            found.setdefault(its_rows, (piece, {}))[1][name] = piece.name
    return sorted(found.values(), key=lambda share: share[0].producer.seq)


@dataclass(eq=False)
class CallRecord:
    """One call: what it takes, its results, where they lie and, on the ranks that hold them, the data.

    ``seq`` is the call's number in the run, the same on every rank (-1: of a trace); ``node`` its place in the graph of its script.
    ``version``: of the role's weights, counted in calls that trained it. ``told``: the ranks to which its token counts were sent.
    ``site``: of a trace, the line of the script. ``in_portions``: it can take its rows while they are generated.
    """

    seq: int
    node: int
    role: Worker
    spec: MethodSpec
    name: str
    outputs: tuple[str, ...]
    intakes: list[CallInput]
    args: tuple[Any, ...]
    version: int
    data: Batch | None = None
    values: Any = None
    told: set[int] = field(default_factory=set)
    counts: np.ndarray | None = None  # token counts of its rows, once this rank knows them
    serial: int = field(default_factory=_serial.__next__)
    site: str = ""
    in_portions: bool = False

    def __post_init__(self) -> None:
        self.members: ProtocolRanks = self.role.members(self.spec.protocol)

    @property
    def rows(self) -> RowIndex | None:
        return self.intakes[0].rows if self.intakes else None

    @property
    def num_rows(self) -> int:
        """Of all references together."""
        return sum(len(intake.rows) for intake in self.intakes)

    @property
    def num_chunks(self) -> int:
        """Of training the mini-batches (optimizer steps) of an epoch."""
        return self.intakes[0].cut.num_chunks if self.intakes else 1

    @property
    def epochs(self) -> int:
        return self.intakes[0].cut.epochs if self.intakes else 1

    def lengths(self, name: str, ids: np.ndarray) -> np.ndarray:
        """Tokens in field ``name`` of the rows ``ids``; may wait for the ranks that made them."""
        assert name == self.spec.lengths_of, (
            f"{self.name} makes token field {name!r}, but declares lengths_of={self.spec.lengths_of!r}"
        )
        return _at(self.intakes[0].rows.row_ids, self.role.controller.delivery.learn(self), ids)

    def parts_of(self, ids: np.ndarray) -> np.ndarray:
        """The part of this call that made each of the rows ``ids``, int64."""
        intake = self.intakes[0]
        return _at(intake.rows.row_ids, intake.placement.parts[0], ids)


def _at(row_ids: np.ndarray, values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """``values`` of the rows ``ids``, where ``row_ids`` ascend."""
    if row_ids is ids:
        return values
    found = np.searchsorted(row_ids, ids)
    assert np.array_equal(row_ids[np.minimum(found, len(row_ids) - 1)], ids), "rows that the call did not make"
    return values[found]


@dataclass(eq=False, slots=True)
class Reference:
    """A future: rows by id with fields. Operations cost nothing; none changes the reference that it is called on."""

    rows: RowIndex | None
    fields: Mapping[str, tuple[FieldShard, ...]] = field(default_factory=dict)
    call: CallRecord | None = None  # the call that returned this, for Controller.get

    def __contains__(self, name: str) -> bool:
        return name in self.fields

    def __len__(self) -> int:
        return 0 if self.rows is None else len(self.rows)

    def union(self, *others: Reference) -> Reference:
        """Fields of all. Raises ValueError if rows differ, or if one name stands for different data."""
        rows, fields, call = self.rows, dict(self.fields), self.call
        for other in others:
            if rows is None or other.rows is None or not rows.same(other.rows):
                raise ValueError(
                    f"union of references to different rows: {len(self)} and {len(other)}; take() those of both first"
                )
            for name, pieces in other.fields.items():
                if name in fields and not _same(fields[name], pieces):
                    raise ValueError(f"union: both references have a field {name!r}; rename() one of them or select() fields")
                fields[name] = pieces
            call = other.call
        return Reference(rows, fields, call)

    def select(self, *names: str) -> Reference:
        """These fields only. Raises ValueError for one that is not there."""
        self._check(names)
        return Reference(self.rows, {name: self.fields[name] for name in names}, self.call)

    def rename(self, **names: str) -> Reference:
        """``rename(scores="costs")``: the same data under another name. Raises ValueError for a name that is not there or taken."""
        self._check(names)
        renamed = [names.get(name, name) for name in self.fields]
        taken = next((new for new in names.values() if renamed.count(new) > 1), None)
        if taken is not None:
            raise ValueError(f"rename: the reference would have two fields {taken!r}")
        return Reference(self.rows, dict(zip(renamed, self.fields.values(), strict=True)), self.call)

    def take(self, which: Reference | np.ndarray | Tensor | Sequence[int]) -> Reference:
        """Some of the rows: those of another reference, where a mask is true (bool [rows]), or by id (int64).

        Masks and ids must be the same on every rank (:meth:`Controller.get_field`). Raises ValueError for ids that are not there.
        """
        assert self.rows is not None, "take() of a reference without rows"
        mine = self.rows
        if isinstance(which, Reference):
            theirs = RowIndex(mine.row_ids[:0], mine.group_ids[:0]) if which.rows is None else which.rows
            ids, groups, decided = theirs.row_ids, theirs.group_ids, theirs.decided
        else:
            given = np.asarray(which)
            assert given.dtype.kind in "bi" or not given.size, (
                f"take() of {given.dtype}: it takes a mask or ids, such as get_field(...) > 0"
            )
            ids = mine.row_ids[given] if given.dtype == bool else np.unique(given).astype(np.int64)
            groups, decided = None, True
        at = np.searchsorted(mine.row_ids, ids)
        if len(ids) and not (len(mine) and np.array_equal(mine.row_ids[np.minimum(at, len(mine) - 1)], ids)):
            raise ValueError(f"take: of {len(ids)} rows some are not among the {len(mine)} of the reference")
        if groups is not None and not np.array_equal(mine.group_ids[at], groups):
            raise ValueError("take: the rows have other groups than those of the other reference, so they are other rows")
        return self._moved(at, ids, mine.decided or decided)

    def firsts(self) -> Reference:
        """The first row of each group."""
        assert self.rows is not None
        _, at = np.unique(self.rows.group_ids, return_index=True)
        return self._moved(np.sort(at), self.rows.row_ids[np.sort(at)], self.rows.decided)

    def repeat(self, n: int) -> Reference:
        """n rows for each row, in its group, with the ids ``id * n + j``. Raises ValueError for n below 1 and ids above 63 bits."""
        assert self.rows is not None
        n = operator.index(n)  # of numpy's 64 bits the products below would turn over
        self._check_ids("repeat", n, int(self.rows.row_ids[-1]) * n + n - 1 if len(self) else 0)
        ids = np.repeat(self.rows.row_ids, n) * n + np.tile(np.arange(n), len(self))
        return self._moved(np.repeat(np.arange(len(self)), n), ids, self.rows.decided)

    def copy(self, number: int = 1) -> Reference:
        """The same rows as other rows, which can stand beside them: greedy answers beside drawn ones. Groups stay. Raises ValueError
        for ids above 63 bits, and for a number below 1."""
        assert self.rows is not None
        number = operator.index(number)
        self._check_ids("copy", number, int(self.rows.row_ids[-1]) + number * COPY_STRIDE if len(self) else 0)
        return self._moved(np.arange(len(self)), self.rows.row_ids + number * COPY_STRIDE, self.rows.decided)

    def concat(self, *others: Reference) -> Reference:
        """The rows of all, with the fields that all have. Raises ValueError if a row is in two of them."""
        parts = [self, *others]
        sets = [part.rows for part in parts if part.rows is not None]
        ids, groups = (np.concatenate([getattr(rows, name) for rows in sets]) for name in ("row_ids", "group_ids"))
        order = np.argsort(ids, kind="stable")
        if (np.diff(ids[order]) == 0).any():
            raise ValueError(
                "concat: a row is in two of the references; copy() makes other rows of the same, copy(2) others again"
            )
        rows = RowIndex(ids[order], groups[order], any(part.decided for part in sets))
        starts = np.cumsum([0, *(len(part) for part in parts)])
        where = np.empty_like(order)
        where[order] = np.arange(len(order))
        fields: dict[str, list[FieldShard]] = {name: [] for name in self.fields if all(name in other for other in others)}
        for part, start in zip(parts, starts, strict=False):
            moved: dict[int, np.ndarray] = {}  # pieces for the same rows stay pieces for the same rows
            for name, pieces in fields.items():
                for piece in part.fields[name]:
                    at = moved.setdefault(id(piece.at), where[start + piece.at])
                    pieces.append(FieldShard(piece.producer, piece.name, at, piece.ids))
        return Reference(rows, {name: tuple(pieces) for name, pieces in fields.items()})

    @staticmethod
    def _check_ids(name: str, number: int, largest: int) -> None:
        if number < 1 or largest >= 1 << 63:
            raise ValueError(f"{name}({number}): the largest row id would be {largest}; at least 1, and ids stay below 2**63")

    def _moved(self, index: np.ndarray, ids: np.ndarray, decided: bool) -> Reference:
        """The rows at ``index``, which may repeat, as rows ``ids``."""
        assert self.rows is not None
        if len(index) == len(self) and np.array_equal(ids, self.rows.row_ids):
            rows = self.rows if decided == self.rows.decided else RowIndex(ids, self.rows.group_ids, decided, self.rows.given)
            return Reference(rows, self.fields, self.call)
        moved: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

        def move(piece: FieldShard) -> FieldShard:
            key = id(piece.at), id(piece.ids)
            if key not in moved:
                line = np.full(len(self), -1)
                line[piece.at] = np.arange(len(piece.at))
                lines = line[index]
                at = np.flatnonzero(lines >= 0)
                moved[key] = at, piece.ids[lines[at]]
            return FieldShard(piece.producer, piece.name, *moved[key])

        fields = {name: tuple(piece for piece in map(move, pieces) if len(piece.at)) for name, pieces in self.fields.items()}
        return Reference(RowIndex(ids, self.rows.group_ids[index], decided), fields, self.call)

    def _check(self, names: Iterable[str]) -> None:
        missing = [name for name in names if name not in self.fields]
        if missing:
            raise ValueError(f"reference has no field {missing[0]!r}; it has {', '.join(sorted(self.fields)) or 'none'}")


def _same(one: tuple[FieldShard, ...], other: tuple[FieldShard, ...]) -> bool:
    return one is other or (len(one) == len(other) and all(a.same(b) for a, b in zip(one, other, strict=True)))


def made_by(
    producer: ReplicatedBatch | CallRecord, rows: RowIndex, names: Iterable[str], call: CallRecord | None = None
) -> Reference:
    """Fields that one call, or source, made for all of ``rows``."""
    return Reference(rows, {name: (FieldShard(producer, name, rows.everywhere, rows.row_ids),) for name in names}, call)


def source(batch: Batch, placements: Mapping[PartitionSpec, np.ndarray] | None = None) -> Reference:
    """A batch that every rank holds whole (what the loader gives), its rows with ascending ids.

    ``placements``: the part of each row for calls that cut the rows so; others are balanced by tokens.
    """
    rows = RowIndex(batch.row_ids.numpy(), batch.group_ids.numpy(), given=dict(placements or {}))
    return made_by(ReplicatedBatch(batch), rows, batch.fields)


def pick_rows(batch: Batch, row_ids: Tensor) -> Batch:
    """The rows with these ids, in that order, out of a batch that holds at least these."""
    if batch.row_ids is row_ids or torch.equal(batch.row_ids, row_ids):
        return batch
    return batch.reorder(row_ids)
