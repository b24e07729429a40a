"""What all data sets share: where rows come from, and rows as token ids without those that are too long."""

from __future__ import annotations

import copy
import hashlib
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from rlhf_spmd.config.constraints import NonNegativeInt, NumRows, PositiveFloat, PositiveInt, Seed
from rlhf_spmd.data.batch import Batch, Field, Ragged, concat_field, ragged, take_rows
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.data.files import DataError, Paths, Row, RowOrError, list_paths, row_or_raise, set_names, stream_rows

Truncation = Literal["error", "left", "right"]  # what becomes of a row above the limit that is not dropped; verl's names
TELLING_SHARE = 0.05  # of rows that are dropped for their length, above which there is a warning


@dataclass(frozen=True)
class RowsConfig(EncodingConfig):
    """Rows of a file or a data set.

    - path: required: file, glob pattern, directory or `datasets` name; a list of them; or a mapping from them to
      weights, see [data_and_rewards.md](data_and_rewards.md)
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

    def encode(self, rows: Sequence[Row], tokenizer: Any) -> TokenDataset:
        """Return some of the rows (or none) as a data set of this kind, for :func:`joined`.

        The error of a row begins with the row's place.
        """
        raise AssertionError(f"{type(self).__name__} does not say what its rows are")

    def tokenize(self, rows: Sequence[Row], tokenizer: Any) -> TokenDataset:
        """Return the rows as a data set of this kind. Raises DataError."""
        return joined([self.encode(rows, tokenizer)])


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
        """Return the row if it looks usable before it is tokenised. Raises DataError."""
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
            sets = enumerate(self.sources(validation=True))
            numbered_rows = (
                (i, row) for i, path in sets for row in stream_rows(path, self.val_split, self.subset, self.val_max_samples)
            )
            numbered = enumerate(numbered_rows)
            return (replace(row, number=n, source=i) if isinstance(row, Row) else row for n, (i, row) in numbered)
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

    ``overlong``: the first row that is too long. ``shortest``: tokens of the shortest row. ``num_dialogues``: rows
    whose prompt is the beginning of a dialogue. ``left_out``: counts by reason. ``bad``: the first of ``num_bad``
    unusable rows.
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
        """Add the counts of the rows that follow."""
        self.num_overlong += other.num_overlong
        self.num_dialogues += other.num_dialogues
        self.num_cut += other.num_cut
        self.overlong, self.first_left_out = self.overlong or other.overlong, self.first_left_out or other.first_left_out
        self.shortest = min(self.shortest, other.shortest)
        self.left_out = dict(Counter(self.left_out) + Counter(other.left_out))

    def describe(self) -> str:
        """Return the counts in words, with a comma before each."""
        text = f", {self.num_dialogues} cut from whole dialogues at their last turn" if self.num_dialogues else ""
        text += f", {self.num_overlong} over-long ones dropped" if self.num_overlong else ""
        text += f", {self.num_cut} over-long ones cut" if self.num_cut else ""
        text += "".join(f", {count} left out whose {reason}" for reason, count in self.left_out.items())
        text += f" (the first is {self.first_left_out})" if self.left_out else ""
        text += f", {self.num_duplicates} duplicate{'s' * (self.num_duplicates > 1)} left out" if self.num_duplicates else ""
        return text + (f", {self.num_bad} bad ones left out" if self.num_bad else "")


class TokenDataset:
    """Rows as token ids. ``batch(indices, row_ids)`` has one Ragged int64 field for each of ``columns``, which are stored
    as int32.

    ``numbers`` holds one number per entry; a batch then has these fields as float64 [entries], and ``entry``, the
    entry's position. ``group_size`` entries of ``columns`` form one row of the data and a group of rows in a batch: 2
    for pairs.

    A row is dropped if the columns of an entry together have more tokens than the limit; ``kept`` holds the
    positions of the others. ``limit`` and ``drop`` are keys of ``data`` with their values; if ``drop`` is false, a long
    row raises.

    ``row_fields`` holds other tensors by row: always ``source`` int64 (which path) and ``rank`` float64 (of a
    curriculum). A field whose values all equal ``omitted_if`` is left out; ``batch_fields`` names those that batches
    have. Everything is a tensor or the tally, so a file can hold it.
    """

    noun = "rows"
    group_size = 1
    omitted_if: ClassVar[dict[str, int]] = {}
    batch_fields: ClassVar[tuple[str, ...]] = ()
    can_cut: ClassVar[bool] = False  # its configuration has ``truncation``
    fingerprint = ""

    def __init__(
        self,
        rows: Sequence[Row],
        columns: Mapping[str, Sequence[Sequence[int]]],
        limit: tuple[str, int],
        drop: tuple[str, bool],
        numbers: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        size = self.group_size
        each = [sum(map(len, entries)) for entries in zip(*columns.values(), strict=True)]
        lengths = [max(each[first : first + size]) for first in range(0, len(each), size)]
        self.limit, self.drop, self.known = limit, drop, dict[str, Tensor]()
        self.kept = [i for i, length in enumerate(lengths) if length <= limit[1]]
        self.tally = RowTally(len(rows) - len(self.kept), shortest=min(lengths, default=sys.maxsize))
        if self.tally.num_overlong:
            first = next(i for i, length in enumerate(lengths) if length > limit[1])
            self.tally.overlong = f"{rows[first].where}: {lengths[first]} tokens"
        self.row_fields: dict[str, Field] = {
            "source": torch.tensor([rows[i].source for i in self.kept], dtype=torch.int64),
            "rank": torch.tensor([rows[i].rank for i in self.kept], dtype=torch.float64),
        }
        entries = [i * size + j for i in self.kept for j in range(size)]
        self.columns = {name: ragged([column[i] for i in entries], torch.int32) for name, column in columns.items()}
        self.numbers = {name: torch.tensor(column, dtype=torch.float64)[entries] for name, column in (numbers or {}).items()}

    def check(self) -> None:
        """Raise DataError if a row is too long and may not be dropped, or if no row is left."""
        tally, limit = self.tally, f"data.{self.limit[0]}={self.limit[1]}"
        if tally.num_overlong and not self.drop[1]:
            raise DataError(
                f"{tally.overlong} are more than {limit}; raise it, or set data.{self.drop[0]}=true "
                f"({tally.num_overlong} of {len(self) + tally.num_overlong} {self.noun} are too long)"
            )
        if len(self) == 0 and tally.num_overlong:
            all_of_them = f"all {tally.num_overlong} {self.noun}{replace(tally, num_overlong=0).describe()}"
            raise DataError(f"{all_of_them} are longer than {limit} tokens (the shortest has {tally.shortest})")
        if len(self) == 0:
            reasons = "".join(f"; {bad}" for bad in tally.bad)
            raise DataError(
                f"none of {sum(tally.left_out.values()) + tally.num_bad} {self.noun} can be used{tally.describe()}{reasons}"
            )

    def warnings(self) -> list[str]:
        """Return a line about the bad rows, if there are any, and one if many are dropped for their length."""
        tally, name = self.tally, f"data.{self.limit[0]}={self.limit[1]}"
        rows = "1 row cannot be used and is" if tally.num_bad == 1 else f"{tally.num_bad} rows cannot be used and are"
        lines = [f"{rows} left out; the first: {'; '.join(tally.bad)}"] if tally.num_bad else []
        share = tally.num_overlong / (len(self) + tally.num_overlong)
        if share > TELLING_SHARE:
            of = f"{tally.num_overlong} of {len(self) + tally.num_overlong} {self.noun} ({share:.0%})"
            remedy = f", or cut them by data.truncation with data.{self.drop[0]}=false" if self.can_cut else ""
            lines.append(f"{name} drops {of}, which are longer; the first: {tally.overlong}. Raise it{remedy}")
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
        """Return the tokens of each entry over all columns, int64 [rows * group_size]."""
        return torch.stack([column.lengths for column in self.columns.values()]).sum(0)

    def batch(self, indices: Sequence[int], row_ids: Sequence[int]) -> Batch:
        """Return rows by index; each is its own group, whose j-th row has the id ``row_id * group_size + j``."""
        groups = torch.tensor(list(row_ids), dtype=torch.int64)
        rows = torch.tensor(list(indices), dtype=torch.int64)
        fields = {name: take_rows(self.row_fields[name], rows) for name in self.batch_fields if name in self.row_fields}
        ids, entries = ((x[:, None] * self.group_size + torch.arange(self.group_size)).flatten() for x in (groups, rows))
        for name, column in self.columns.items():
            tokens = column.take(entries)
            fields[name] = Ragged(tokens.values.long(), tokens.lengths)
        numbers = {name: column[entries] for name, column in (self.numbers | self.known).items()}
        fields |= {name: values for name, values in numbers.items() if not values.isnan().any()}
        if self.numbers:
            fields["entry"] = entries.double()
        return Batch(ids, groups.repeat_interleave(self.group_size), fields)

    def keep(self, name: str, entries: Tensor, numbers: Tensor) -> None:
        """Store a further number for ``entries``; a batch has the field if all its rows know it."""
        empty = torch.full((len(self) * self.group_size,), torch.nan, dtype=torch.float64)
        self.known.setdefault(name, empty)[entries.long()] = numbers

    def summary(self) -> str:
        lengths = self.lengths
        shortest, longest, mean = int(lengths.min()), int(lengths.max()), float(lengths.double().mean())
        return f"{len(self)} {self.noun} of {shortest} to {longest} tokens (mean {mean:.1f}){self.tally.describe()}"


def joined(parts: Sequence[TokenDataset], bad: RowTally | None = None) -> TokenDataset:
    """Concatenate data sets. ``bad`` counts the rows that are in none of them. Raises DataError."""
    dataset, full = copy.copy(parts[0]), [part for part in parts if len(part)] or parts[:1]
    dataset.tally = bad or RowTally()
    for part in parts:
        dataset.tally.add(part.tally)
    dataset.columns = {name: concat_field([part.columns[name] for part in full]) for name in full[0].columns}
    dataset.numbers = {name: torch.cat([part.numbers[name] for part in full]) for name in full[0].numbers}
    beside = {name: concat_field([part.row_fields[name] for part in full]) for name in full[0].row_fields}
    dataset.row_fields = {
        name: x for name, x in beside.items() if name not in dataset.omitted_if or not _all(x, dataset.omitted_if[name])
    }
    dataset.check()
    dataset.fingerprint = dataset.digest()
    return dataset


def _all(field: Field, value: int) -> bool:
    return bool(((field.values if isinstance(field, Ragged) else field) == value).all())
