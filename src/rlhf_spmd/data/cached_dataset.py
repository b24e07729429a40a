"""Builds a data set from the rows of a configuration, or maps its cached file.

Rows are read in chunks, so only tokens and packed rows add up in memory; bad rows are left out and counted. With
``data.cache_dir`` the result is a safetensors file that every process maps into memory. The file's name hashes
everything its content depends on: the data files (path, size, time of change), the tokenizer's files, the template, the
settings and this package's code. One process writes the file while the others wait for its lock, which the kernel
releases when a process ends. The file is written aside and renamed, so a file with that name is complete.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_spmd.config.load import to_dict
from rlhf_spmd.config.words import first_line
from rlhf_spmd.data.batch import Ragged
from rlhf_spmd.data.dataset import DatasetConfig, RowTally, StoredRowsConfig, TokenDataset, concat_datasets
from rlhf_spmd.data.encoding import NAMED_TEMPLATES, read_template
from rlhf_spmd.data.files import DataError, Row, RowError, RowOrError, local_files

CHUNK_ROWS = 256
SHOWN_ROWS = 3  # bad rows that an error names
# settings that change neither tokens nor rows; the paths are hashed as files
ORDER_KEYS = ("train_batch_size", "val_batch_size", "shuffle", "seed", "epochs", "curriculum_epochs")
UNHASHED_KEYS = (*ORDER_KEYS, "path", "val_path", "cache_dir")
TOKENIZER_PATTERNS = ("*token*", "vocab*", "merges*", "*.model", "*.jinja", f"{NAMED_TEMPLATES}/*", "config.json")
TENSOR_KINDS = ("columns", "numbers", "row_fields")  # attributes of a data set


def load_dataset(config: StoredRowsConfig, tokenizer: Any, validation: bool = False) -> TokenDataset:
    """Return the data set of :func:`build_dataset`, from the cached file if ``cache_dir`` is set.

    Rows from the hub are not cached. Local: no communication; processes of any jobs may call it at once. Raises DataError, one line.
    """
    files = [local_files(source) for source in config.sources(validation)]
    if config.cache_dir is None or not all(files):
        return build_dataset(config, tokenizer, validation)
    directory = Path(config.cache_dir).expanduser()
    started = time.time()
    path = directory / f"{_cache_key(config, tokenizer, validation, files)}.safetensors"
    try:
        if not path.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".lock").open("a+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when its holder ends
                _raise_failure_after(started, lock)
                if not path.is_file():
                    _write_cache_file(path, lock, config, tokenizer, validation)
        return _map_cache_file(path, config.encode_chunk([], tokenizer))
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"data.cache_dir={config.cache_dir}: {path.name} cannot be made or read: {reason}") from error


def _cache_key(config: StoredRowsConfig, tokenizer: Any, validation: bool, files: list[list[Path]]) -> str:
    """Return the name of the cached file."""
    settings = {key: value for key, value in to_dict(config).items() if key not in UNHASHED_KEYS}
    data_files = [[(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in group] for group in files]
    tokenizer_dir = Path(getattr(tokenizer, "name_or_path", "") or os.devnull)
    matches = (file for pattern in TOKENIZER_PATTERNS for file in tokenizer_dir.glob(pattern))
    tokenizer_files = sorted({file for file in matches if file.is_file()})
    code = sorted(Path(__file__).parent.glob("*.py"))
    contents = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in (*tokenizer_files, *code)]
    versions = [version(name) for name in ("tokenizers", "transformers")]
    template = read_template(config.chat_template, "data.chat_template")
    key_parts = [type(config).__qualname__, validation, settings, data_files, contents, versions, template]
    return hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()[:32]


def _raise_failure_after(since: float, lock: IO[str]) -> None:
    """Raise the DataError that another process wrote into the lock file after ``since``."""
    lock.seek(0)
    failed_at, _, error = lock.read().partition("\n")
    if failed_at and float(failed_at) >= since:
        raise DataError(error)


def _write_cache_file(path: Path, lock: IO[str], config: StoredRowsConfig, tokenizer: Any, validation: bool) -> None:
    """Build the data set and write it to ``path``; an error goes into the lock file, for the processes that wait."""
    for stale in path.parent.glob(f".{path.name}.*.tmp"):  # of a killed process
        stale.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        dataset = build_dataset(config, tokenizer, validation)
        metadata = {"tally": json.dumps(dataclasses.asdict(dataset.tally)), "fingerprint": dataset.fingerprint}
        save_file(_tensors(dataset), temporary, metadata)
        temporary.chmod(os.fstat(lock.fileno()).st_mode & 0o777)  # as the umask says; safetensors lets only the owner read
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
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
    for kind in TENSOR_KINDS:
        for name, column in getattr(dataset, kind).items():
            parts = {"values": column.values, "lengths": column.lengths} if isinstance(column, Ragged) else {"": column}
            tensors |= {f"{kind}/{name}/{part}": values.contiguous() for part, values in parts.items()}
    return tensors


def _map_cache_file(path: Path, empty: TokenDataset) -> TokenDataset:
    """Return the file's data set; its tensors are views of the file. ``empty``: a data set of its kind without rows."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    fields: dict[str, dict[str, Any]] = {kind: {} for kind in TENSOR_KINDS}
    for name, values in tensors.items():
        kind, column, part = name.split("/")
        if part != "lengths":
            fields[kind][column] = Ragged(values, tensors[f"{kind}/{column}/lengths"]) if part else values
    dataset = empty.with_tensors(RowTally(**json.loads(metadata["tally"])), **fields)
    dataset.fingerprint = metadata["fingerprint"]
    return dataset


def count_bad_row(error: DataError, tally: RowTally, limit: int) -> None:
    """Count a row that cannot be used. Raises DataError if there are more than ``limit``."""
    tally.num_bad += 1
    if len(tally.bad) < SHOWN_ROWS:
        tally.bad.append(str(error))
    if tally.num_bad > limit:
        text = f"{tally.num_bad} rows cannot be used, more than data.max_bad_rows={limit}"
        raise DataError(f"{text}; the first are {'; '.join(tally.bad)}") if limit else error


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
        parts.append(_encode_usable(config, _usable_rows(config, chunk, duplicates, places, tally), tokenizer, tally))
    return concat_datasets(parts or [config.encode_chunk([], tokenizer)], tally)


def _usable_rows(
    config: StoredRowsConfig, chunk: Sequence[RowOrError], duplicates: str, places: dict[str, str], tally: RowTally
) -> list[Row]:
    """Return the rows that look usable; of several rows with the same id the first. Raises DataError.

    ``places``: the place of each id so far, which this adds to.
    """
    rows = []
    for row_or_error in chunk:
        try:
            row = config.checked(row_or_error)
        except DataError as error:
            count_bad_row(error, tally, config.max_bad_rows)
            continue
        row_id = row.values.get("id")
        key = json.dumps(row_id)
        if row_id is None or duplicates == "keep" or key not in places:
            rows.append(row)
            places[key] = row.where
        elif duplicates == "drop":
            tally.num_duplicates += 1
        else:
            remedy = "set data.duplicates=drop to leave such rows out, or keep"
            raise row.error(f"the id {row_id!r} is also that of {places[key]}; {remedy}")
    return rows


def _encode_usable(config: StoredRowsConfig, rows: list[Row], tokenizer: Any, tally: RowTally) -> TokenDataset:
    """Encode a chunk without its bad rows. Raises DataError if there are too many, or for an error outside single rows."""
    while True:
        try:
            return config.encode_chunk(rows, tokenizer)
        except RowError as error:
            bad_row = next((i for i, row in enumerate(rows) if row.where == error.where), None)
            if bad_row is None:  # an error outside single rows
                raise
            count_bad_row(error, tally, config.max_bad_rows)
            del rows[bad_row]
