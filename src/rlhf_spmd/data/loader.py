"""Builds data sets, or maps their cached file, and gives their rows in training order.

Rows are read in chunks, so only tokens and packed rows add up in memory; bad rows are left out and counted. With
``data.cache_dir`` the result is a safetensors file that every process maps into memory. The file's name hashes
everything its content depends on: the data files (path, size, time of change), the tokenizer's files, the template, the
settings and this package's code. One process makes the file while the others wait for its lock, which the kernel
releases when a process ends. The file is written aside and renamed, so a file with that name is complete.

The training order is a permutation per epoch that depends on (seed, epoch) only. An integer cursor, which a checkpoint
stores, says where it stands.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_spmd.config.load import to_dict
from rlhf_spmd.config.words import first_line
from rlhf_spmd.data.batch import Batch, Ragged
from rlhf_spmd.data.dataset import DatasetConfig, RowTally, StoredRowsConfig, TokenDataset, joined
from rlhf_spmd.data.encoding import NAMED_TEMPLATES, read_template
from rlhf_spmd.data.files import DataError, Row, RowError, RowOrError, local_files

CHUNK_ROWS = 256
SHOWN_ROWS = 3  # bad rows that an error names
# settings that change neither tokens nor rows; the paths are hashed as files
ORDER = ("train_batch_size", "val_batch_size", "gen_batch_size", "shuffle", "seed", "epochs", "curriculum_epochs")
UNSEEN = (*ORDER, "path", "val_path", "cache_dir")
TOKENIZER_PATTERNS = ("*token*", "vocab*", "merges*", "*.model", "*.jinja", f"{NAMED_TEMPLATES}/*", "config.json")


def load_dataset(config: StoredRowsConfig, tokenizer: Any, validation: bool = False) -> TokenDataset:
    """Return the data set of :func:`build_dataset`, from the cached file if ``cache_dir`` is set. Rows from the hub are
    not cached.

    Local: no communication; processes of any jobs may call it at once. Raises DataError, one line.
    """
    files = [local_files(source) for source in config.sources(validation)]
    if config.cache_dir is None or not all(files):
        return build_dataset(config, tokenizer, validation)
    directory = Path(config.cache_dir).expanduser()
    started = time.time()
    path = directory / f"{_key(config, tokenizer, validation, files)}.safetensors"
    try:
        if not path.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".lock").open("a+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when its holder ends
                _raise_error_since(started, lock)
                if not path.is_file():
                    _make(path, lock, config, tokenizer, validation)
        return _map_file(path, config.encode([], tokenizer))
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"data.cache_dir={config.cache_dir}: {path.name} cannot be made or read: {reason}") from error


def _key(config: StoredRowsConfig, tokenizer: Any, validation: bool, files: list[list[Path]]) -> str:
    """Return the name of the cached file."""
    settings = {key: value for key, value in to_dict(config).items() if key not in UNSEEN}
    seen = [[(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in group] for group in files]
    home = Path(getattr(tokenizer, "name_or_path", "") or os.devnull)
    tokenizer_files = sorted({file for pattern in TOKENIZER_PATTERNS for file in home.glob(pattern) if file.is_file()})
    code = sorted(Path(__file__).parent.glob("*.py"))
    contents = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in (*tokenizer_files, *code)]
    versions = [version(name) for name in ("tokenizers", "transformers")]
    template = read_template(config.chat_template, "data.chat_template")
    key_parts = [type(config).__qualname__, validation, settings, seen, contents, versions, template]
    return hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()[:32]


def _raise_error_since(since: float, lock: IO[str]) -> None:
    """Raise the maker's DataError, which stands in the lock's file, if it failed after ``since``."""
    lock.seek(0)
    failed_at, _, error = lock.read().partition("\n")
    if failed_at and float(failed_at) >= since:
        raise DataError(error)


def _make(path: Path, lock: IO[str], config: StoredRowsConfig, tokenizer: Any, validation: bool) -> None:
    """Build the data set and write it to ``path``; an error goes into the lock's file for the processes that wait."""
    for left in path.parent.glob(f".{path.name}.*.tmp"):  # left by a killed process
        left.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        dataset = build_dataset(config, tokenizer, validation)
        metadata = {"tally": json.dumps(dataclasses.asdict(dataset.tally)), "fingerprint": dataset.fingerprint}
        save_file(_tensors(dataset), temporary, metadata)
        temporary.chmod(os.fstat(lock.fileno()).st_mode & 0o777)  # as the umask says; safetensors lets only the owner read
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except DataError as error:
        lock.truncate(0)
        lock.write(f"{time.time()}\n{error}")
        lock.flush()
        raise
    finally:
        temporary.unlink(missing_ok=True)


def _tensors(dataset: TokenDataset) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for kind in ("columns", "numbers", "row_fields"):
        for name, column in getattr(dataset, kind).items():
            parts = {"values": column.values, "lengths": column.lengths} if isinstance(column, Ragged) else {"": column}
            tensors |= {f"{kind}/{name}/{part}": values.contiguous() for part, values in parts.items()}
    return tensors


def _map_file(path: Path, empty: TokenDataset) -> TokenDataset:
    """Return the file's data set; its tensors are views of the file. ``empty``: a data set of its kind without rows."""
    with safe_open(path, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    empty.columns, empty.numbers, empty.row_fields = {}, {}, {}
    for name, values in tensors.items():
        kind, column, part = name.split("/")
        if part != "lengths":
            getattr(empty, kind)[column] = Ragged(values, tensors[f"{kind}/{column}/lengths"]) if part else values
    empty.tally, empty.fingerprint = RowTally(**json.loads(metadata["tally"])), metadata["fingerprint"]
    return empty


def count_bad_row(error: DataError, tally: RowTally, limit: int) -> None:
    """Count a row that cannot be used. Raises DataError above the limit."""
    tally.num_bad += 1
    if len(tally.bad) < SHOWN_ROWS:
        tally.bad.append(str(error))
    if tally.num_bad > limit:
        first = "; ".join(tally.bad)
        more = f"{tally.num_bad} rows cannot be used, more than data.max_bad_rows={limit}; the first are {first}"
        raise DataError(more) if limit else error


def build_dataset(config: StoredRowsConfig, tokenizer: Any, validation: bool = False) -> TokenDataset:
    """Return the rows of ``config`` as tokens.

    Raises DataError, one line, for more bad rows than ``max_bad_rows``, or for an error outside single rows.
    """
    tally = RowTally()
    parts: list[TokenDataset] = []
    places: dict[str, str] = {}
    duplicates = config.duplicates if isinstance(config, DatasetConfig) and not validation else "keep"
    rows = config.stream(validation)
    while chunk := list(islice(rows, None if config.one_chunk else CHUNK_ROWS)):
        parts.append(_encode(config, _rows_of(config, chunk, duplicates, places, tally), tokenizer, tally))
    return joined(parts or [config.encode([], tokenizer)], tally)


def _rows_of(
    config: StoredRowsConfig, chunk: Sequence[RowOrError], duplicates: str, places: dict[str, str], tally: RowTally
) -> list[Row]:
    """Return the rows that look usable, of rows with one id the first. ``places``: of the ids so far. Raises DataError."""
    rows = []
    for row_or_error in chunk:
        try:
            row = config.checked(row_or_error)
        except DataError as error:
            count_bad_row(error, tally, config.max_bad_rows)
            continue
        name = row.values.get("id")
        key = json.dumps(name)
        if name is None or duplicates == "keep" or key not in places:
            rows.append(row)
            places[key] = row.where
        elif duplicates == "drop":
            tally.num_duplicates += 1
        else:
            remedy = "set data.duplicates=drop to leave such rows out, or keep"
            raise row.error(f"the id {name!r} is also that of {places[key]}; {remedy}")
    return rows


def _encode(config: StoredRowsConfig, rows: list[Row], tokenizer: Any, tally: RowTally) -> TokenDataset:
    """Encode a chunk without its bad rows. Raises DataError if there are too many, or for an error outside single rows."""
    while True:
        try:
            return config.encode(rows, tokenizer)
        except RowError as error:
            bad_row = next((i for i, row in enumerate(rows) if row.where == error.where), None)
            if bad_row is None:  # an error without a place ends the run
                raise
            count_bad_row(error, tally, config.max_bad_rows)
            del rows[bad_row]


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Return the order of an epoch, int64 [num_rows].

    Sorts raw Philox words, because numpy guarantees their stream, but not that of ``Generator.permutation``.
    """
    if not shuffle:
        return np.arange(num_rows)
    words = np.random.Philox(key=np.array([seed % 2**64, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(words, kind="stable")


def mixture_order(sources: np.ndarray, weights: Sequence[float], seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """Return the order of an epoch of weighted sources, int64 [rows]; it has as many rows as all sources together.

    The i-th source gets the share of its weight. A source goes through all its rows before it repeats one, across
    epochs too. Without ``shuffle`` the sources alternate evenly. ``sources`` int64 [rows] is the source of each row.
    The result depends on the arguments only.
    """
    running = np.cumsum([0.0, *weights])
    number, bounds = len(sources), running / running[-1]  # the last is 1 to the bit, or an epoch would be a row short
    parts, places = [], []
    for source in range(len(weights)):
        source_rows = np.flatnonzero(sources == source)
        # rows of the source before this epoch, and before the next one
        begin, end = (int(n * number * bounds[source + 1]) - int(n * number * bounds[source]) for n in (epoch, epoch + 1))
        passes = range(begin // len(source_rows), (end - 1) // len(source_rows) + 1)
        rows = np.concatenate(
            [source_rows[epoch_order(len(source_rows), seed + 1 + source, number, shuffle)] for number in passes]
        )
        parts.append(rows[begin - passes.start * len(source_rows) :][: end - begin])
        places.append((np.arange(end - begin) + 0.5) / (end - begin))
    order = np.concatenate(parts)
    assert len(order) == number, f"{len(order)} of {number} rows"
    return order[epoch_order(len(order), seed, epoch, True) if shuffle else np.argsort(np.concatenate(places), kind="stable")]


@dataclass
class Loader:
    """Yields full batches for ever; a batch that reaches the end of an epoch goes on with the next one.

    Row ids count samples over the whole run, so they never repeat. Every rank has the same loader; nothing is
    communicated. ``weights`` are those of the sources; without them every row comes once per epoch. ``curriculum``:
    number of epochs ordered by rank. Raises DataError if there are too few rows.
    """

    dataset: TokenDataset
    batch_size: int
    shuffle: bool = True
    seed: int = 0
    weights: Mapping[str, float] | None = None
    curriculum: int = 0
    epoch: int = field(default=0, init=False)
    index: int = field(default=0, init=False)  # in the epoch
    samples: int = field(default=0, init=False)
    orders: dict[int, np.ndarray] = field(default_factory=dict, init=False)  # of the last two epochs

    def __post_init__(self) -> None:
        num_rows, weights = len(self.dataset), self.weights or {}
        if num_rows < self.batch_size:
            raise DataError(
                f"data.train_batch_size={self.batch_size}, but the data have only {num_rows} usable rows; lower it or give more data"
            )
        for number, (path, weight) in enumerate(weights.items()):
            usable, share = int((self.dataset.sources == number).sum()), weight / sum(weights.values()) * num_rows
            if not usable or share < 2:
                raise DataError(
                    f"data.path: {path!r} has {usable} usable rows and with its weight {weight} a share of {share:.2f} rows in an "
                    "epoch; it needs a row and a share of at least 2"
                )

    def next_batch(self, size: int | None = None) -> Batch:
        """Return ``size`` rows (default ``batch_size``) and moves the cursor."""
        size = self.batch_size if size is None else size
        indices: list[int] = []
        while len(indices) < size:
            if self.index == len(self.dataset):
                self.epoch, self.index = self.epoch + 1, 0
            order = self._order(self.epoch)[self.index : self.index + size - len(indices)]
            indices += order.tolist()
            self.index += len(order)
        row_ids = range(self.samples, self.samples + size)
        self.samples += size
        return self.dataset.batch(indices, row_ids)

    def rows(self, row_ids: Sequence[int]) -> Batch:
        """Return rows that were given before, by id: sample i of the run is row i modulo the data's length of its epoch."""
        places = (divmod(row_id, len(self.dataset)) for row_id in row_ids)
        return self.dataset.batch([int(self._order(epoch)[index]) for epoch, index in places], row_ids)

    @property
    def epochs(self) -> float:
        """Return the passes over the data so far."""
        return self.epoch + self.index / len(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "index": self.index,
            "samples": self.samples,
            "rows": len(self.dataset),
            "seed": self.seed,
            "fingerprint": self.dataset.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, with its order. Warns if the data have changed since."""
        if state["fingerprint"] != self.dataset.fingerprint:
            warnings.warn(
                f"the training data changed since the checkpoint ({state['rows']} rows then, {len(self.dataset)} now); "
                f"going on at epoch {state['epoch']}, row {state['index']} of the new data",
                stacklevel=2,
            )
        self.epoch, self.index, self.samples = int(state["epoch"]), int(state["index"]), int(state["samples"])
        self.seed, self.orders = int(state["seed"]), {}
        self.index = min(self.index, len(self.dataset))

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self.orders:
            if self.weights:
                sources = self.dataset.sources.numpy()
                order = mixture_order(sources, list(self.weights.values()), self.seed, epoch, self.shuffle)
            else:
                order = epoch_order(len(self.dataset), self.seed, epoch, self.shuffle)
            if epoch < self.curriculum:
                order = order[np.argsort(self.dataset.ranks.numpy()[order], kind="stable")]
            self.orders = {**dict([*self.orders.items()][-1:]), epoch: order}
        return self.orders[epoch]


def build_loader(dataset: TokenDataset, config: DatasetConfig, run_seed: int) -> Loader:
    """Return the training order of the configuration. Raises DataError if there are too few rows."""
    weights = config.path if isinstance(config.path, dict) else None
    curriculum = config.curriculum_epochs if config.curriculum_key is not None else 0
    seed = run_seed if config.seed is None else config.seed
    return Loader(dataset, config.train_batch_size, config.shuffle, seed, weights, curriculum)


def validation_batches(dataset: TokenDataset, batch_size: int | None = None) -> Iterator[Batch]:
    """Yield every row once, in order; the last batch may be smaller. Row ids are positions in the data set."""
    size = len(dataset) if batch_size is None else batch_size
    for start in range(0, len(dataset), size):
        rows = range(len(dataset))[start : start + size]
        yield dataset.batch(rows, rows)
