"""A data set from its rows, chunk by chunk, so that only tokens and packed rows add up; bad rows are left out and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from rlhf_spmd.data.dataset import StoredRowsConfig, TokenDataset, joined
from rlhf_spmd.data.files import DataError, Given, Row

CHUNK_ROWS = 256
SHOWN_ROWS = 3  # of the bad ones


class BadRows:
    """The rows that cannot be used: how many, and the first of them as the errors that name them."""

    def __init__(self, limit: int) -> None:
        self.limit, self.count = limit, 0
        self.first: list[DataError] = []

    def add(self, error: DataError) -> None:
        """Raises DataError above the limit."""
        self.count += 1
        if len(self.first) < SHOWN_ROWS:
            self.first.append(error.with_traceback(None))  # whose frames hold a chunk of rows
        if self.count > self.limit == 0:
            raise error
        if self.count > self.limit:
            shown = "; ".join(map(str, self.first))
            raise DataError(
                f"{self.count} rows cannot be used, more than data.max_bad_rows={self.limit}; the first are {shown}"
            )


def build_dataset(
    config: StoredRowsConfig, tokenizer: Any, validation: bool = False, tick: Callable[[int], None] = lambda rows: None
) -> TokenDataset:
    """The rows of ``config``, as tokens. ``tick`` is told the number of rows so far.

    Raises DataError, one line: for more bad rows than ``max_bad_rows``, and for what is not of a row.
    """
    bad, parts, done = BadRows(config.max_bad_rows), list[TokenDataset](), 0
    rows = config.stream(validation)
    while chunk := list(islice(rows, None if config.one_chunk else CHUNK_ROWS)):
        parts.append(_encode(config, chunk, tokenizer, bad))
        done += len(chunk)
        tick(done)
    return joined(parts or [config.encode([], tokenizer)], bad.first, bad.count)


def _encode(config: StoredRowsConfig, chunk: Sequence[Given], tokenizer: Any, bad: BadRows) -> TokenDataset:
    rows: list[Row] = []
    for row in chunk:
        bad.add(row) if isinstance(row, DataError) else rows.append(row)
    while True:
        try:
            return config.encode(rows, tokenizer)
        except DataError as error:
            at = next((i for i, row in enumerate(rows) if str(error).startswith(f"{row.where}: ")), None)
            if at is None:  # of the settings, or of the data as a whole
                raise
            bad.add(error)
            del rows[at]
