"""What all data sets share: where rows come from, and rows as token ids without those that are too long."""

from __future__ import annotations

import copy
import hashlib
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

import torch
from torch import Tensor

from rlhf_spmd.config.constraints import NonNegativeInt, NumRows, PositiveFloat, PositiveInt, Seed
from rlhf_spmd.data.batch import Batch, Field, Ragged, concat_field, ragged, take_rows
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.data.files import DataError, Paths, Row, RowOrError, list_paths, row_or_raise, set_names, stream_rows

Truncation = Literal["error", "left", "right"]  # what becomes of a row above the limit that is not dropped; verl's names
WARNED_SHARE = 0.05  # share of rows dropped for their length, above which there is a warning


@dataclass(frozen=True)
class RowsConfig(EncodingConfig):
    """Rows of a file or a data set.

    - path: required: file, glob pattern, directory, `datasets` name or `LIBRARY:NAME`; a list of them; or a mapping from them
      to weights, see [data_and_rewards.md](data_and_rewards.md)
    - split: split of a `datasets` name or directory
    - subset: subset of a `datasets` name
    - prompt_key: column of the prompt; in all keys of columns dots reach inside objects: `reward_model.ground_truth`
    """

    path: Paths = ""
    split: str = "train"
    subset: str | None = None
    prompt_key: str = "prompt"

    def check(self, where: str) -> None:
        super().check(where)
        self.check_path(where)

    def check_path(self, where: str) -> None:
        """Raise ValueError without a path."""
        if not self.path:
            raise ValueError(f"{where}.path must be given: a jsonl or parquet file, or the name of a data set")

    def sources(self, validation: bool = False) -> list[str]:
        """Return a name for each source of rows."""
        return list_paths(self.path)

    def stream(self, validation: bool = False) -> Iterator[RowOrError]:
        """Yield all rows; a row that cannot be used is yielded as its error. Raises DataError for anything but a row."""
        return stream_rows(self.path, self.split, self.subset)

    def read(self, validation: bool = False) -> list[Row]:
        """Return all rows. Raises DataError."""
        return list(map(row_or_raise, self.stream(validation)))

    def encode_chunk(self, rows: Sequence[Row], tokenizer: Any) -> TokenDataset:
        """Return some of the rows (or none) as a data set of this kind, for :func:`concat_datasets`.

        The error of a row begins with the row's place.
        """
        raise AssertionError(f"{type(self).__name__} does not say what its rows are")

    def encode_all(self, rows: Sequence[Row], tokenizer: Any) -> TokenDataset:
        """Return the rows as a complete data set of this kind. Raises DataError."""
        return concat_datasets([self.encode_chunk(rows, tokenizer)])


@dataclass(frozen=True)
class StoredRowsConfig(RowsConfig):
    """Rows that can be cached. ``one_chunk``: all rows are encoded together.

    - max_bad_rows: bad rows that may be left out; they are named and counted, and one more ends the run. See
      [data_and_rewards.md](data_and_rewards.md#bad-rows)
    - cache_dir: directory for tokenised rows, made once and mapped into memory by all ranks; null: each rank tokenises
      for itself. See [data_and_rewards.md](data_and_rewards.md#many-rows)
    """

    max_bad_rows: NonNegativeInt = 0
    cache_dir: str | None = None
    one_chunk: ClassVar[bool] = False

    def checked(self, row: RowOrError) -> Row:
        """Return the row if it looks usable before it is tokenised. Raises DataError if not."""
        return row_or_raise(row)


@dataclass(frozen=True)
class DatasetConfig(StoredRowsConfig):
    """Rows for training, and those of ``val_path`` for validation. Batch sizes count rows.

    - val_path: `path` of the validation rows
    - val_split: `split` of the validation rows
    - train_batch_size: rows per step
    - val_batch_size: rows per validation batch; null: all
    - train_max_samples: read only the first rows
    - val_max_samples: read only the first validation rows
    - shuffle: a new order in every epoch
    - seed: seed of the order; null: `run.seed`
    - epochs: length of the run in passes over the data, in place of `run.steps`, which is then `null`; the last step
      may begin another pass
    - curriculum_key: column with a number; the first epochs go through the rows by it, the smallest first
    - curriculum_epochs: number of epochs in the order of `curriculum_key`
    - duplicates: what to do with a training row whose `id` an earlier usable row has: `refuse`, `drop` or `keep`
    """

    val_path: str | list[str] | dict[str, str] | None = None
    val_split: str = "test"
    train_batch_size: NumRows = 64
    val_batch_size: PositiveInt | None = None
    train_max_samples: PositiveInt | None = None
    val_max_samples: PositiveInt | None = None
    shuffle: bool = True
    seed: Seed | None = None
    epochs: PositiveFloat | None = None
    curriculum_key: str | None = None
    curriculum_epochs: PositiveInt = 1
    duplicates: Literal["refuse", "drop", "keep"] = "refuse"
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "val_path": ("val_split", "val_batch_size", "val_max_samples"),
        "shuffle": ("seed",),
        "curriculum_key": ("curriculum_epochs",),
    }

    def check(self, where: str) -> None:
        super().check(where)
        weights = self.path if isinstance(self.path, dict) else {}
        for path, weight in weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"{where}.path: the weight of {path!r} is {weight}; it must be above 0")

    def sources(self, validation: bool = False) -> list[str]:
        return list(self.val_sets.values()) if validation else list_paths(self.path)

    def stream(self, validation: bool = False) -> Iterator[RowOrError]:
        """Yield the training rows, or the validation rows."""
        if validation:
            assert self.val_path is not None, "there are no validation rows without val_path"
            rows_by_source = (
                (source, row)
                for source, path in enumerate(self.sources(validation=True))
                for row in stream_rows(path, self.val_split, self.subset, self.val_max_samples)
            )
            numbered = enumerate(rows_by_source)
            return (replace(row, number=n, source=source) if isinstance(row, Row) else row for n, (source, row) in numbered)
        rows = stream_rows(self.path, self.split, self.subset, self.train_max_samples)
        return rows if self.curriculum_key is None else map(self._ranked, rows)

    def _ranked(self, row: RowOrError) -> RowOrError:
        try:
            return row if isinstance(row, DataError) else replace(row, rank=self._rank(row))
        except DataError as error:
            return error

    def _rank(self, row: Row) -> float:
        assert self.curriculum_key is not None
        value = row.get(self.curriculum_key, "data.curriculum_key")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise row.error(f"'{self.curriculum_key}' (data.curriculum_key) must be a number, not {value!r}")
        return float(value)

    @property
    def val_sets(self) -> dict[str, str]:
        """Return the path of each validation set by its name. Raises ValueError."""
        return self.val_path if isinstance(self.val_path, dict) else set_names(list_paths(self.val_path or []))


@dataclass
class RowTally:
    """Counts of a data set's rows, and the first row of each kind that is left out.

    - overlong: the first of ``num_overlong`` rows that are too long and dropped
    - shortest: tokens of the shortest row
    - num_cut: too long rows that are cut
    - num_dialogues: rows whose prompt is the beginning of a dialogue
    - left_out: number of rows by the reason why they are left out
    - bad: the first of ``num_bad`` unusable rows
    """

    num_overlong: int = 0
    overlong: str = ""
    shortest: int = sys.maxsize
    num_cut: int = 0
    num_dialogues: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    first_left_out: str = ""
    num_duplicates: int = 0
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)

    def add(self, other: RowTally) -> None:
        """Add the counts of a chunk that follows. Bad and duplicate rows are counted where rows are read."""
        self.num_overlong += other.num_overlong
        self.num_dialogues += other.num_dialogues
        self.num_cut += other.num_cut
        self.overlong = self.overlong or other.overlong
        self.first_left_out = self.first_left_out or other.first_left_out
        self.shortest = min(self.shortest, other.shortest)
        self.left_out = dict(Counter(self.left_out) + Counter(other.left_out))

    def describe(self) -> str:
        """Return the counts in words, with a comma before each."""
        parts = [f"{self.num_dialogues} cut from whole dialogues at their last turn"] if self.num_dialogues else []
        parts += [f"{self.num_overlong} over-long ones dropped"] if self.num_overlong else []
        parts += [f"{self.num_cut} over-long ones cut"] if self.num_cut else []
        parts += [f"{count} left out whose {reason}" for reason, count in self.left_out.items()]
        if self.left_out:
            parts[-1] += f" (the first is {self.first_left_out})"
        plural = "s" if self.num_duplicates > 1 else ""
        parts += [f"{self.num_duplicates} duplicate{plural} left out"] if self.num_duplicates else []
        parts += [f"{self.num_bad} bad ones left out"] if self.num_bad else []
        return "".join(f", {part}" for part in parts)


class LengthLimit(NamedTuple):
    """Most tokens of a row, as ``data.<key>`` sets it; ``data.<drop_key>`` says whether a longer row is dropped or raises."""

    key: str
    tokens: int
    drop_key: str
    drops: bool

    def __str__(self) -> str:
        return f"data.{self.key}={self.tokens}"


class TokenDataset:
    """Rows as token ids. A row whose columns together have more tokens than ``limit`` is dropped or raises.

    - columns: token ids by name, one Ragged int32 each, with an entry for each row; :meth:`batch` has them as int64
    - group_size: entries that form one row of the data, and a group of rows in a batch; 2 for pairs
    - numbers: numbers by name, float64 [entries]; a batch has these fields, and ``entry``, the entry's position
    - later_numbers: numbers that :meth:`store_numbers` adds during a run
    - row_fields: other tensors by row: always ``source`` int64 (which path) and ``rank`` float64 (of a curriculum)
    - batch_fields: the ``row_fields`` that batches have
    - omitted_if: a row field is left out if all its values equal this one
    - kept_positions: while rows are encoded, positions in the input of the rows that are not dropped
    - can_cut: the configuration has ``truncation``

    Columns, numbers, row fields and the tally are all that a cached file holds.
    """

    noun = "rows"
    group_size = 1
    omitted_if: ClassVar[dict[str, int]] = {}
    batch_fields: ClassVar[tuple[str, ...]] = ()
    can_cut: ClassVar[bool] = False
    fingerprint = ""

    def __init__(
        self,
        rows: Sequence[Row],
        columns: Mapping[str, Sequence[Sequence[int]]],
        limit: LengthLimit,
        numbers: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        size = self.group_size
        entry_lengths = [sum(map(len, entry)) for entry in zip(*columns.values(), strict=True)]
        lengths = [max(entry_lengths[first : first + size]) for first in range(0, len(entry_lengths), size)]
        self.limit = limit
        self.later_numbers: dict[str, Tensor] = {}
        self.kept_positions = [i for i, length in enumerate(lengths) if length <= limit.tokens]
        self.tally = RowTally(len(rows) - len(self.kept_positions), shortest=min(lengths, default=sys.maxsize))
        if self.tally.num_overlong:
            first = next(i for i, length in enumerate(lengths) if length > limit.tokens)
            self.tally.overlong = f"{rows[first].where}: {lengths[first]} tokens"
        self.row_fields: dict[str, Field] = {
            "source": torch.tensor([rows[i].source for i in self.kept_positions], dtype=torch.int64),
            "rank": torch.tensor([rows[i].rank for i in self.kept_positions], dtype=torch.float64),
        }
        entries = [i * size + j for i in self.kept_positions for j in range(size)]
        self.columns = {name: ragged([column[i] for i in entries], torch.int32) for name, column in columns.items()}
        self.numbers = {name: torch.tensor(column, dtype=torch.float64)[entries] for name, column in (numbers or {}).items()}

    def check(self) -> None:
        """Raise DataError if a row is too long and may not be dropped, or if no row is left."""
        tally = self.tally
        if tally.num_overlong and not self.limit.drops:
            raise DataError(
                f"{tally.overlong} are more than {self.limit}; raise it, or set data.{self.limit.drop_key}=true "
                f"({tally.num_overlong} of {len(self) + tally.num_overlong} {self.noun} are too long)"
            )
        if len(self) == 0 and tally.num_overlong:
            rows = f"all {tally.num_overlong} {self.noun}{replace(tally, num_overlong=0).describe()}"
            raise DataError(f"{rows} are longer than {self.limit} tokens (the shortest has {tally.shortest})")
        if len(self) == 0:
            reasons = "".join(f"; {bad}" for bad in tally.bad)
            raise DataError(
                f"none of {sum(tally.left_out.values()) + tally.num_bad} {self.noun} can be used{tally.describe()}{reasons}"
            )

    def warnings(self) -> list[str]:
        """Return a line about the bad rows, if there are any, and one if many are dropped for their length."""
        tally = self.tally
        rows = "1 row cannot be used and is" if tally.num_bad == 1 else f"{tally.num_bad} rows cannot be used and are"
        lines = [f"{rows} left out; the first: {'; '.join(tally.bad)}"] if tally.num_bad else []
        num_read = len(self) + tally.num_overlong
        share = tally.num_overlong / num_read
        if share > WARNED_SHARE:
            dropped = f"{tally.num_overlong} of {num_read} {self.noun} ({share:.0%})"
            remedy = f", or cut them by data.truncation with data.{self.limit.drop_key}=false" if self.can_cut else ""
            lines.append(f"{self.limit} drops {dropped}, which are longer; the first: {tally.overlong}. Raise it{remedy}")
        return lines

    def digest(self) -> str:
        """Return a fingerprint of the rows."""
        digest = hashlib.sha256()
        fields = (*self.columns.values(), *self.numbers.values(), *(self.row_fields[name] for name in sorted(self.row_fields)))
        for column in fields:
            for part in (column.lengths, column.values) if isinstance(column, Ragged) else (column,):
                digest.update(part.numpy().tobytes())
        return f"{len(self)}-{digest.hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def sources(self) -> Tensor:
        """Return the path that each row comes from, int64 [rows]."""
        return cast(Tensor, self.row_fields["source"])

    @property
    def ranks(self) -> Tensor:
        """Return places in a curriculum, float64 [rows]."""
        return cast(Tensor, self.row_fields["rank"])

    @property
    def lengths(self) -> Tensor:
        """Return the number of tokens of each entry over all columns, int64 [rows * group_size]."""
        return torch.stack([column.lengths for column in self.columns.values()]).sum(0)

    def batch(self, indices: Sequence[int], row_ids: Sequence[int]) -> Batch:
        """Return rows by index. Each is a group of its own, whose j-th row has the id ``row_id * group_size + j``."""
        groups = torch.tensor(list(row_ids), dtype=torch.int64)
        rows = torch.tensor(list(indices), dtype=torch.int64)
        fields = {name: take_rows(self.row_fields[name], rows) for name in self.batch_fields if name in self.row_fields}
        ids, entries = ((x[:, None] * self.group_size + torch.arange(self.group_size)).flatten() for x in (groups, rows))
        for name, column in self.columns.items():
            tokens = column.take(entries)
            fields[name] = Ragged(tokens.values.long(), tokens.lengths)
        numbers = {name: column[entries] for name, column in (self.numbers | self.later_numbers).items()}
        fields |= {name: values for name, values in numbers.items() if not values.isnan().any()}
        if self.numbers:
            fields["entry"] = entries.double()
        return Batch(ids, groups.repeat_interleave(self.group_size), fields)

    def store_numbers(self, name: str, entries: Tensor, numbers: Tensor) -> None:
        """Store a further number for ``entries``; a batch has the field if all its rows have the number."""
        empty = torch.full((len(self) * self.group_size,), torch.nan, dtype=torch.float64)
        self.later_numbers.setdefault(name, empty)[entries.long()] = numbers

    def with_tensors(
        self, tally: RowTally, columns: dict[str, Ragged], numbers: dict[str, Tensor], row_fields: dict[str, Field]
    ) -> Self:
        """Return a data set of the same kind and limit with other rows."""
        dataset = copy.copy(self)
        dataset.tally = tally
        dataset.columns = columns
        dataset.numbers = numbers
        dataset.row_fields = row_fields
        return dataset

    def summary(self) -> str:
        lengths = self.lengths
        mean = float(lengths.double().mean())
        return f"{len(self)} {self.noun} of {lengths.min()} to {lengths.max()} tokens (mean {mean:.1f}){self.tally.describe()}"


def concat_datasets(parts: Sequence[TokenDataset], tally: RowTally | None = None) -> TokenDataset:
    """Concatenate data sets. ``tally`` counts the rows that are in none of them. Raises DataError."""
    tally = tally or RowTally()
    for part in parts:
        tally.add(part.tally)
    full = [part for part in parts if len(part)] or parts[:1]
    columns = {name: concat_field([part.columns[name] for part in full]) for name in full[0].columns}
    numbers = {name: torch.cat([part.numbers[name] for part in full]) for name in full[0].numbers}
    fields = {name: concat_field([part.row_fields[name] for part in full]) for name in full[0].row_fields}
    omitted = {name for name, value in parts[0].omitted_if.items() if name in fields and _all(fields[name], value)}
    row_fields = {name: field for name, field in fields.items() if name not in omitted}
    dataset = parts[0].with_tensors(tally, columns, numbers, row_fields)
    dataset.check()
    dataset.fingerprint = dataset.digest()
    return dataset


def _all(field: Field, value: int) -> bool:
    return bool(((field.values if isinstance(field, Ragged) else field) == value).all())
