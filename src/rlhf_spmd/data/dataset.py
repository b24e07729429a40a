"""What the data sets share: where their rows come from, and rows as token ids, without those that are too long."""

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

from rlhf_spmd.config.constraints import NonNegativeInt, PositiveFloat, PositiveInt, Seed
from rlhf_spmd.data.batch import Batch, Field, Ragged, concat_field, ragged, take_rows
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.data.files import DataError, Given, Paths, Row, list_paths, names_of, readable, stream_rows


@dataclass(frozen=True)
class RowsConfig(EncodingConfig):
    """Rows of a file or a data set.

    - path: required: file, glob pattern, directory or `datasets` name; a list of them; or a mapping of them to weights, see
      [own_data_and_reward.md](own_data_and_reward.md)
    - split: of a `datasets` name or directory
    - subset: of a `datasets` name
    - prompt_key: column of the prompt; here and in the other keys of columns dots reach inside one: `reward_model.ground_truth`
    """

    path: Paths = ""
    split: str = "train"
    subset: str | None = None
    prompt_key: str = "prompt"

    def check(self, where: str) -> None:
        super().check(where)
        self.check_path(where)

    def check_path(self, where: str) -> None:
        """Raises ValueError."""
        if not self.path:
            raise ValueError(f"{where}.path must be given: a jsonl or parquet file, or the name of a data set")

    def sources(self, validation: bool = False) -> list[str]:
        """Where the rows are from, a name for each source."""
        return list_paths(self.path)

    def stream(self, validation: bool = False) -> Iterator[Given]:
        """All rows one by one, those that cannot be used as the error. Raises DataError for what is not of a row."""
        return stream_rows(self.path, self.split, self.subset)

    def read(self, validation: bool = False) -> list[Row]:
        """All rows. Raises DataError."""
        return list(map(readable, self.stream(validation)))

    def encode(self, rows: Sequence[Row], tokenizer: Any) -> TokenDataset:
        """Some of the rows (or none) as this kind of data has them, for :func:`joined`. An error of a row begins with where it is."""
        raise AssertionError(f"{type(self).__name__} does not say what its rows are")

    def tokenize(self, rows: Sequence[Row], tokenizer: Any) -> TokenDataset:
        """The rows as this kind of data has them. Raises DataError."""
        return joined([self.encode(rows, tokenizer)])


@dataclass(frozen=True)
class StoredRowsConfig(RowsConfig):
    """``one_chunk``: rows are encoded all together.

    - max_bad_rows: so many rows that cannot be used are left out, named and counted; one more ends the run. See
      [own_data_and_reward.md](own_data_and_reward.md#bad-rows)
    - cache_dir: directory for tokens and rows, made once and mapped into memory by all ranks; null: each rank tokenises for
      itself. See [own_data_and_reward.md](own_data_and_reward.md#many-rows)
    """

    max_bad_rows: NonNegativeInt = 0
    cache_dir: str | None = None
    one_chunk: ClassVar[bool] = False

    def usable(self, row: Given) -> Row:
        """The row, as far as it can be told without its tokens. Raises DataError."""
        return readable(row)


@dataclass(frozen=True)
class DatasetConfig(StoredRowsConfig):
    """Rows for training, and for validation those of ``val_path``. Batch sizes count rows.

    - val_path: `path` of the rows to validate by
    - val_split: `split` of the rows to validate by
    - train_batch_size: rows per step
    - val_batch_size: rows per batch of validation; null: all
    - train_max_samples: read only the first rows
    - val_max_samples: read only the first rows to validate by
    - shuffle: a new order in every epoch
    - seed: of the order; null: `run.seed`
    - epochs: how long the run is, in passes over the data, in place of `run.steps`, which is then `null`; the last step may
      begin another pass
    - curriculum_key: column with a number: the first epochs go through the rows by it, the smallest first
    - curriculum_epochs: so many epochs go by `curriculum_key`
    - duplicates: of training rows with the `id` of an earlier one that can be used: `refuse`, `drop` or `keep`
    """

    val_path: str | list[str] | dict[str, str] | None = None
    val_split: str = "test"
    train_batch_size: PositiveInt = 64
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

    def stream(self, validation: bool = False) -> Iterator[Given]:
        """The training rows, or the validation rows."""
        if validation:
            assert self.val_path is not None, "there are no validation rows without val_path"
            sets = enumerate(self.sources(validation=True))
            found = (
                (i, row) for i, path in sets for row in stream_rows(path, self.val_split, self.subset, self.val_max_samples)
            )
            numbered = enumerate(found)
            return (replace(row, number=n, source=i) if isinstance(row, Row) else row for n, (i, row) in numbered)
        rows = stream_rows(self.path, self.split, self.subset, self.train_max_samples)
        return rows if self.curriculum_key is None else map(self._ranked, rows)

    def _ranked(self, row: Given) -> Given:
        try:
            return row if isinstance(row, DataError) else replace(row, rank=self._rank(row))
        except DataError as error:
            return error

    def _rank(self, row: Row) -> float:
        assert self.curriculum_key is not None
        value = row.get(self.curriculum_key, "data.curriculum_key")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise DataError(f"{row.where}: '{self.curriculum_key}' (data.curriculum_key) must be a number, not {value!r}")
        return float(value)

    @property
    def val_sets(self) -> dict[str, str]:
        """Where each set of validation rows is. Raises ValueError."""
        return self.val_path if isinstance(self.val_path, dict) else names_of(list_paths(self.val_path or []))


@dataclass
class Tally:
    """Counts of a data set's rows, and of each kind that is left out the first. ``overlong``: the first row that is too long;
    ``shortest``: tokens of the shortest. ``num_dialogues``: rows whose prompt is the beginning of a dialogue. ``left_out``: by
    reason. ``bad``: the first rows of ``num_bad`` that cannot be used."""

    num_overlong: int = 0
    overlong: str = ""
    shortest: int = sys.maxsize
    num_dialogues: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    first_left_out: str = ""
    num_duplicates: int = 0
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        """What was counted of the rows that follow."""
        self.num_overlong += other.num_overlong
        self.num_dialogues += other.num_dialogues
        self.overlong, self.first_left_out = self.overlong or other.overlong, self.first_left_out or other.first_left_out
        self.shortest = min(self.shortest, other.shortest)
        self.left_out = dict(Counter(self.left_out) + Counter(other.left_out))

    def told(self) -> str:
        """In words, with a comma before each."""
        text = f", {self.num_dialogues} cut from whole dialogues at their last turn" if self.num_dialogues else ""
        text += f", {self.num_overlong} over-long ones dropped" if self.num_overlong else ""
        text += "".join(f", {count} left out whose {reason}" for reason, count in self.left_out.items())
        text += f" (the first is {self.first_left_out})" if self.left_out else ""
        text += f", {self.num_duplicates} duplicate{'s' * (self.num_duplicates > 1)} left out" if self.num_duplicates else ""
        return text + (f", {self.num_bad} bad ones left out" if self.num_bad else "")

    def warnings(self) -> list[str]:
        """A line about the bad rows, if there are any."""
        told = f"{self.num_bad} rows cannot be used and are left out; the first: {'; '.join(self.bad)}"
        return [f"  warning: {told}"] if self.num_bad else []


class TokenDataset:
    """``batch(indices, row_ids)`` has one field (Ragged int64) for each of ``columns``, which holds them as int32.

    ``numbers``: besides, one number per entry, fields float64 [entries]; then there is ``entry``, its position, too.
    ``group_size``: entries of ``columns`` that make one row of the data, a group of as many rows of a batch: 2 for pairs.
    Rows are dropped of which an entry has more than the limit's tokens, all columns together; ``kept``: positions of the others in
    ``rows``. ``limit`` and ``drop`` are keys of ``data`` with their values; without ``drop`` a long row raises.
    ``beside``: fields by row that are no tokens; always ``source`` int64, which of the paths it is from, and ``rank`` float64, of a
    curriculum. One whose values all are that of ``trivial`` is left out; those named in ``in_batches`` are fields of batches. All
    of it is tensors, and a tally, so that a file can hold it.
    """

    noun = "rows"
    group_size = 1
    trivial: ClassVar[dict[str, int]] = {}
    in_batches: ClassVar[tuple[str, ...]] = ()
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
        lengths = [max(each[at : at + size]) for at in range(0, len(each), size)]
        self.limit, self.drop, self.known = limit, drop, dict[str, Tensor]()
        self.kept = [i for i, length in enumerate(lengths) if length <= limit[1]]
        self.tally = Tally(len(rows) - len(self.kept), shortest=min(lengths, default=sys.maxsize))
        if self.tally.num_overlong:
            first = next(i for i, length in enumerate(lengths) if length > limit[1])
            self.tally.overlong = f"{rows[first].where}: {lengths[first]} tokens"
        self.beside: dict[str, Field] = {
            "source": torch.tensor([rows[i].source for i in self.kept], dtype=torch.int64),
            "rank": torch.tensor([rows[i].rank for i in self.kept], dtype=torch.float64),
        }
        entries = [i * size + j for i in self.kept for j in range(size)]
        self.columns = {name: ragged([column[i] for i in entries], torch.int32) for name, column in columns.items()}
        self.numbers = {name: torch.tensor(column, dtype=torch.float64)[entries] for name, column in (numbers or {}).items()}

    def check(self) -> None:
        """Raises DataError where a row is too long and none may be dropped, and where no row is left."""
        tally, limit = self.tally, f"data.{self.limit[0]}={self.limit[1]}"
        if tally.num_overlong and not self.drop[1]:
            raise DataError(
                f"{tally.overlong} are more than {limit}; raise it, or set data.{self.drop[0]}=true "
                f"({tally.num_overlong} of {len(self) + tally.num_overlong} {self.noun} are too long)"
            )
        if len(self) == 0 and tally.num_overlong:
            all_of_them = f"all {tally.num_overlong} {self.noun}{replace(tally, num_overlong=0).told()}"
            raise DataError(f"{all_of_them} are longer than {limit} tokens (the shortest has {tally.shortest})")
        if len(self) == 0:
            reasons = "".join(f"; {bad}" for bad in tally.bad)
            raise DataError(
                f"none of {sum(tally.left_out.values()) + tally.num_bad} {self.noun} can be used{tally.told()}{reasons}"
            )

    def digest(self) -> str:
        """What tells these rows from others."""
        digest = hashlib.sha256()
        fields = (*self.columns.values(), *self.numbers.values(), *(self.beside[name] for name in sorted(self.beside)))
        for one in fields:
            for part in (one.lengths, one.values) if isinstance(one, Ragged) else (one,):
                digest.update(part.numpy().tobytes())
        return f"{len(self)}-{digest.hexdigest()[:16]}"

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def sources(self) -> Tensor:
        """int64 [rows]: which of the paths each is from."""
        return cast(Tensor, self.beside["source"])

    @property
    def ranks(self) -> Tensor:
        """float64 [rows]: of a curriculum."""
        return cast(Tensor, self.beside["rank"])

    @property
    def lengths(self) -> Tensor:
        """int64 [rows * group_size]: tokens of each entry, all columns together."""
        return torch.stack([column.lengths for column in self.columns.values()]).sum(0)

    def batch(self, indices: Sequence[int], row_ids: Sequence[int]) -> Batch:
        """Rows by index; each row is its own group, whose j-th row has the id ``row_id * group_size + j``."""
        groups, at = (torch.tensor(list(given), dtype=torch.int64) for given in (row_ids, indices))
        fields = {name: take_rows(self.beside[name], at) for name in self.in_batches if name in self.beside}
        ids, at = ((x[:, None] * self.group_size + torch.arange(self.group_size)).flatten() for x in (groups, at))
        for name, column in self.columns.items():
            taken = column.take(at)
            fields[name] = Ragged(taken.values.long(), taken.lengths)
        numbers = {name: column[at] for name, column in (self.numbers | self.known).items()}
        fields |= {name: values for name, values in numbers.items() if not values.isnan().any()}
        if self.numbers:
            fields["entry"] = at.double()
        return Batch(ids, groups.repeat_interleave(self.group_size), fields)

    def keep(self, name: str, entries: Tensor, numbers: Tensor) -> None:
        """One more of ``numbers``, of these entries; a batch has the field if it is known of all its rows."""
        empty = torch.full((len(self) * self.group_size,), torch.nan, dtype=torch.float64)
        self.known.setdefault(name, empty)[entries.long()] = numbers

    def summary(self) -> str:
        lengths = self.lengths
        shortest, longest, mean = int(lengths.min()), int(lengths.max()), float(lengths.double().mean())
        return f"{len(self)} {self.noun} of {shortest} to {longest} tokens (mean {mean:.1f}){self.tally.told()}"


def joined(parts: Sequence[TokenDataset], bad: Tally | None = None) -> TokenDataset:
    """One data set of the rows of all, one after the other. ``bad``: the rows that are in none. Raises DataError."""
    whole, full = copy.copy(parts[0]), [part for part in parts if len(part)] or parts[:1]
    whole.tally = bad or Tally()
    for part in parts:
        whole.tally.add(part.tally)
    whole.columns = {name: concat_field([part.columns[name] for part in full]) for name in full[0].columns}
    whole.numbers = {name: torch.cat([part.numbers[name] for part in full]) for name in full[0].numbers}
    beside = {name: concat_field([part.beside[name] for part in full]) for name in full[0].beside}
    whole.beside = {name: x for name, x in beside.items() if name not in whole.trivial or not _all(x, whole.trivial[name])}
    whole.check()
    whole.fingerprint = whole.digest()
    return whole


def _all(field: Field, value: int) -> bool:
    return bool(((field.values if isinstance(field, Ragged) else field) == value).all())
