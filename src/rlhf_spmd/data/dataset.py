"""What the data sets share: where their rows come from, and rows as token ids, without those that are too long."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlhf_spmd.config.bounds import check_bounds
from rlhf_spmd.data.batch import Batch, Field, Ragged, ragged
from rlhf_spmd.data.encoding import EncodingConfig
from rlhf_spmd.data.files import DataError, Paths, Row, list_paths, names_of, read_rows

DUPLICATES = ("refuse", "drop", "keep")


@dataclass(frozen=True)
class RowsConfig(EncodingConfig):
    """``path``: a file, a glob pattern, a directory or a ``datasets`` name (with ``split``, ``subset``); a list of them; or a mapping
    of them to weights. A key is a column, or with dots (``reward_model.ground_truth``) a value inside one."""

    path: Paths = ""
    split: str = "train"
    subset: str | None = None
    prompt_key: str = "prompt"

    def check(self, where: str) -> None:
        super().check(where)
        self.check_path(where)
        counts = [field.name for field in fields(self) if type(getattr(self, field.name)) is int and field.name != "seed"]
        check_bounds(self, where, *counts, least=1)

    def check_path(self, where: str) -> None:
        """Raises ValueError."""
        if not self.path:
            raise ValueError(f"{where}.path must be given: a jsonl or parquet file, or the name of a data set")

    def read(self) -> list[Row]:
        """All rows. Raises DataError."""
        return read_rows(self.path, self.split, self.subset)

    def tokenize(self, rows: Sequence[Row], tokenizer: Any) -> TokenDataset:
        """The rows as this kind of data has them."""
        raise AssertionError(f"{type(self).__name__} does not say what its rows are")


@dataclass(frozen=True)
class DatasetConfig(RowsConfig):
    """Rows for training, and for validation those of ``val_path``, which may be a list or a mapping from names: several sets. Batch
    sizes count rows.

    ``val_batch_size``: null = all rows at once. ``seed``: of the training order; null = ``run.seed``. ``epochs``: how long the run is,
    in place of ``run.steps``. ``curriculum_key``: the rows of the first ``curriculum_epochs`` epochs come by this number, the
    smallest first. ``duplicates``: what happens to rows with the ``id`` of an earlier one.
    """

    val_path: str | list[str] | dict[str, str] | None = None
    val_split: str = "test"
    train_batch_size: int = 64
    val_batch_size: int | None = None
    train_max_samples: int | None = None
    val_max_samples: int | None = None
    shuffle: bool = True
    seed: int | None = None
    epochs: float | None = None
    curriculum_key: str | None = None
    curriculum_epochs: int = 1
    duplicates: str = "refuse"

    def check(self, where: str) -> None:
        super().check(where)
        check_bounds(self, where, "epochs", above=0)
        if self.duplicates not in DUPLICATES:
            raise ValueError(f"{where}.duplicates={self.duplicates!r} must be {', '.join(DUPLICATES)}")
        weights = self.path if isinstance(self.path, dict) else {}
        for path, weight in weights.items():
            if not 0 < weight < math.inf:
                raise ValueError(f"{where}.path: the weight of {path!r} is {weight}; it must be above 0")

    def read(self, validation: bool = False) -> list[Row]:
        """The training rows, or the validation rows. Raises DataError."""
        if not validation:
            rows = self.without_duplicates(read_rows(self.path, self.split, self.subset, self.train_max_samples))
            return rows if self.curriculum_key is None else [replace(row, rank=self._rank(row)) for row in rows]
        assert self.val_path is not None, "there are no validation rows without val_path"
        paths = enumerate(self.val_sets.values())
        sets = [
            [replace(row, source=i) for row in read_rows(path, self.val_split, self.subset, self.val_max_samples)]
            for i, path in paths
        ]
        return [replace(row, number=number) for number, row in enumerate(chain.from_iterable(sets))]

    def without_duplicates(self, rows: list[Row]) -> list[Row]:
        """The first row of each ``id``; rows without one are all their own. Raises DataError where duplicates are refused."""
        first: dict[str, Row] = {}
        for row in rows if self.duplicates != "keep" else ():
            name = row.values.get("id")
            earlier = row if name is None else first.setdefault(json.dumps(name), row)
            if earlier is not row and self.duplicates == "refuse":
                raise DataError(
                    f"{row.where}: the id {name!r} is also that of {earlier.where}; set data.duplicates=drop to leave such rows out, "
                    "or keep"
                )
        if len(first) == 0:
            return rows
        return [row for row in rows if row.values.get("id") is None or first[json.dumps(row.values["id"])] is row]

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


class TokenDataset:
    """``batch(indices, row_ids)`` has one field (Ragged int64) for each of ``columns``, which holds them as int32.

    ``numbers``: besides, one number per entry, fields float64 [entries]; then there is ``entry``, its position, too.
    ``group_size``: entries of ``columns`` that make one row of the data, a group of as many rows of a batch: 2 for pairs.
    ``num_overlong`` rows are dropped, of which an entry has more than the limit's tokens, all columns together; ``kept``: the numbers
    of the others, ``sources`` int64 [rows]: which of the paths they are from, ``ranks`` float64 [rows]: of a curriculum. ``limit``
    and ``drop`` are keys of ``data`` with their values; without ``drop`` a long row raises.
    """

    noun = "rows"
    group_size = 1

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
        self.kept = [i for i, length in enumerate(lengths) if length <= limit[1]]
        self.num_overlong = len(rows) - len(self.kept)
        self.sources = torch.tensor([rows[i].source for i in self.kept], dtype=torch.int64)
        self.ranks = torch.tensor([rows[i].rank for i in self.kept], dtype=torch.float64)
        if self.num_overlong and not drop[1]:
            first = next(i for i, length in enumerate(lengths) if length > limit[1])
            raise DataError(
                f"{rows[first].where}: {lengths[first]} tokens are more than data.{limit[0]}={limit[1]}; raise it, or set "
                f"data.{drop[0]}=true ({self.num_overlong} of {len(rows)} {self.noun} are too long)"
            )
        if not self.kept:
            raise DataError(
                f"all {len(rows)} {self.noun} are longer than data.{limit[0]}={limit[1]} tokens (the shortest has {min(lengths)})"
            )
        entries = [i * size + j for i in self.kept for j in range(size)]
        self.columns = {name: ragged([column[i] for i in entries], torch.int32) for name, column in columns.items()}
        self.numbers = {name: torch.tensor(column, dtype=torch.float64)[entries] for name, column in (numbers or {}).items()}
        digest = hashlib.sha256()
        for column in self.columns.values():
            digest.update(column.offsets.numpy().tobytes())
            digest.update(column.values.numpy().tobytes())
        for number in self.numbers.values():
            digest.update(number.numpy().tobytes())
        self.fingerprint = f"{len(self)}-{digest.hexdigest()[:16]}"
        if self.numbers:
            self.numbers["entry"] = torch.arange(len(entries), dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.kept)

    @property
    def lengths(self) -> Tensor:
        """int64 [rows * group_size]: tokens of each entry, all columns together."""
        return torch.stack([column.lengths for column in self.columns.values()]).sum(0)

    def batch(self, indices: Sequence[int], row_ids: Sequence[int]) -> Batch:
        """Rows by index; each row is its own group, whose j-th row has the id ``row_id * group_size + j``."""
        groups, at = (torch.tensor(list(given), dtype=torch.int64) for given in (row_ids, indices))
        ids, at = ((x[:, None] * self.group_size + torch.arange(self.group_size)).flatten() for x in (groups, at))
        fields: dict[str, Field] = {}
        for name, column in self.columns.items():
            taken = column.take(at)
            fields[name] = Ragged(taken.values.long(), taken.lengths)
        fields |= {name: column[at] for name, column in self.numbers.items() if not column[at].isnan().any()}
        return Batch(ids, groups.repeat_interleave(self.group_size), fields)

    def keep(self, name: str, entries: Tensor, numbers: Tensor) -> None:
        """One more of ``numbers``, of these entries; a batch has the field if it is known of all its rows."""
        column = self.numbers.setdefault(name, torch.full_like(self.numbers["entry"], torch.nan))
        column[entries.long()] = numbers

    def summary(self) -> str:
        lengths = self.lengths
        dropped = f", {self.num_overlong} over-long ones dropped" if self.num_overlong else ""
        shortest, longest, mean = int(lengths.min()), int(lengths.max()), float(lengths.double().mean())
        return f"{len(self)} {self.noun} of {shortest} to {longest} tokens (mean {mean:.1f}){dropped}"
