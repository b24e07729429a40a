"""Data sets from their rows, chunk by chunk, so that only tokens and packed rows add up; bad rows are left out and counted. The same
as safetensors files, made once and mapped into memory by every process that reads them.

A file's name is the hash of all that its content follows from: the data's files by path, size and time of change, the tokenizer's
files, the template, the settings and the code of this package. One process makes it while the others wait for its lock, which the
kernel takes back where a process ends; it is written aside and renamed, so what bears the name is whole.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_spmd.config.load import to_dict
from rlhf_spmd.config.schema import first_line
from rlhf_spmd.data.batch import Ragged
from rlhf_spmd.data.dataset import DatasetConfig, StoredRowsConfig, Tally, TokenDataset, joined
from rlhf_spmd.data.encoding import read_template
from rlhf_spmd.data.files import DataError, Given, Row, local_files

CHUNK_ROWS = 256
SHOWN_ROWS = 3  # of the bad ones
# of the section: what changes neither tokens nor rows; paths are there as files
ORDER = ("train_batch_size", "val_batch_size", "gen_batch_size", "shuffle", "seed", "epochs", "curriculum_epochs")
UNSEEN = (*ORDER, "path", "val_path", "cache_dir")
TOKENIZER_PATTERNS = ("*token*", "vocab*", "merges*", "*.model", "*.jinja", "config.json")
WAIT_S = 3600.0  # for another process that makes the file
POLL_S = 0.2
TELL_S = 30.0  # between two signs of life of the one that makes it


def load_dataset(config: StoredRowsConfig, tokenizer: Any, validation: bool = False) -> TokenDataset:
    """As :func:`build_dataset`; with ``cache_dir`` from there, made first if need be. Rows from the hub are not stored.

    Local: no communication; processes of any jobs may call it at once. Raises DataError, one line.
    """
    files = [local_files(source) for source in config.sources(validation)]
    if config.cache_dir is None or not all(files):
        return build_dataset(config, tokenizer, validation)
    directory, since = Path(config.cache_dir).expanduser(), time.time()
    path = directory / f"{_key(config, tokenizer, validation, files)}.safetensors"
    try:
        if not path.is_file():
            directory.mkdir(parents=True, exist_ok=True)
            with _alone(path.with_suffix(".lock"), since) as lock:
                if not path.is_file():
                    _make(path, lock, config, tokenizer, validation)
        return _mapped(path, config.encode([], tokenizer))
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise DataError(f"data.cache_dir={config.cache_dir}: {path.name} cannot be made or read: {reason}") from error


def _key(config: StoredRowsConfig, tokenizer: Any, validation: bool, files: list[list[Path]]) -> str:
    settings = {key: value for key, value in to_dict(config).items() if key not in UNSEEN}
    seen = [[(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in group] for group in files]
    home = Path(getattr(tokenizer, "name_or_path", "") or os.devnull)
    own = sorted({file for pattern in TOKENIZER_PATTERNS for file in home.glob(pattern) if file.is_file()})
    code = sorted(Path(__file__).parent.glob("*.py"))
    contents = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in (*own, *code)]
    versions = [version(name) for name in ("tokenizers", "transformers")]
    template = read_template(config.chat_template, "data.chat_template")
    whole = [type(config).__qualname__, validation, settings, seen, contents, versions, template]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:32]


@contextmanager
def _alone(path: Path, since: float) -> Iterator[IO[str]]:
    """The lock's file while no other process has it. Raises DataError as the one that had it last did, if that was after ``since``."""
    with path.open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.time() - since > WAIT_S:
                    raise DataError(
                        f"data.cache_dir: another process has held {path} for {WAIT_S:.0f} s; see what it does"
                    ) from None
                time.sleep(POLL_S)
        file.seek(0)
        told = file.read().partition("\n")
        if told[0] and float(told[0]) >= since:
            raise DataError(told[2])
        yield file


def _make(path: Path, lock: IO[str], config: StoredRowsConfig, tokenizer: Any, validation: bool) -> None:
    for left in path.parent.glob(f".{path.name}.*.tmp"):  # by a process that was killed
        left.unlink(missing_ok=True)
    last = time.monotonic()

    def tick(rows: int) -> None:
        nonlocal last
        if time.monotonic() - last > TELL_S:
            last = time.monotonic()
            print(f"data.cache_dir: {rows} rows so far for {path}", file=sys.stderr, flush=True)

    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        dataset = build_dataset(config, tokenizer, validation, tick)
        told = {"tally": json.dumps(dataclasses.asdict(dataset.tally)), "fingerprint": dataset.fingerprint}
        save_file(_tensors(dataset), temporary, told)
        temporary.chmod(os.fstat(lock.fileno()).st_mode & 0o777)  # by the umask; safetensors: its owner alone
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
    found: dict[str, Tensor] = {}
    for kind in ("columns", "numbers", "beside"):
        for name, field in getattr(dataset, kind).items():
            parts = {"values": field.values, "lengths": field.lengths} if isinstance(field, Ragged) else {"": field}
            found |= {f"{kind}/{name}/{part}": values.contiguous() for part, values in parts.items()}
    return found


def _mapped(path: Path, empty: TokenDataset) -> TokenDataset:
    """The file's data set; its tensors are views of the file. ``empty``: one without rows, of its kind."""
    with safe_open(path, "pt") as file:
        told, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    empty.columns, empty.numbers, empty.beside = {}, {}, {}
    for name, values in tensors.items():
        kind, field, part = name.split("/")
        if part != "lengths":
            getattr(empty, kind)[field] = Ragged(values, tensors[f"{kind}/{field}/lengths"]) if part else values
    empty.tally, empty.fingerprint = Tally(**json.loads(told["tally"])), told["fingerprint"]
    return empty


def leave_out(error: DataError, tally: Tally, limit: int) -> None:
    """Count a row that cannot be used. Raises DataError above the limit."""
    tally.num_bad += 1
    if len(tally.bad) < SHOWN_ROWS:
        tally.bad.append(str(error))
    if tally.num_bad > limit:
        first = "; ".join(tally.bad)
        more = f"{tally.num_bad} rows cannot be used, more than data.max_bad_rows={limit}; the first are {first}"
        raise DataError(more) if limit else error


def build_dataset(
    config: StoredRowsConfig, tokenizer: Any, validation: bool = False, tick: Callable[[int], None] = lambda rows: None
) -> TokenDataset:
    """The rows of ``config``, as tokens. ``tick`` is told the number of rows so far.

    Raises DataError, one line: for more bad rows than ``max_bad_rows``, and for what is not of a row.
    """
    tally, parts, done, seen = Tally(), list[TokenDataset](), 0, dict[str, str]()
    duplicates = config.duplicates if isinstance(config, DatasetConfig) and not validation else "keep"
    rows = config.stream(validation)
    while chunk := list(islice(rows, None if config.one_chunk else CHUNK_ROWS)):
        parts.append(_encode(config, chunk, tokenizer, tally, duplicates, seen))
        done += len(chunk)
        tick(done)
    return joined(parts or [config.encode([], tokenizer)], tally)


def _encode(
    config: StoredRowsConfig, chunk: Sequence[Given], tokenizer: Any, tally: Tally, duplicates: str, seen: dict[str, str]
) -> TokenDataset:
    """``seen``: where the row of each id is; only rows that can be used have one, so that a bad one stands in no other's way."""
    rows: list[Row] = []
    for row in chunk:
        try:
            rows.append(config.usable(row))
        except DataError as error:
            leave_out(error, tally, config.max_bad_rows)
    while True:
        own, ids, again = (rows, {}, []) if duplicates == "keep" else _first_of_each_id(rows, seen)
        try:
            dataset = config.encode(own if duplicates == "drop" else rows, tokenizer)
            break
        except DataError as error:
            at = next((i for i, row in enumerate(rows) if str(error).startswith(f"{row.where}: ")), None)
            if at is None:  # of the settings, or of the data as a whole
                raise
            leave_out(error, tally, config.max_bad_rows)
            del rows[at]
    if again and duplicates == "refuse":
        raise again[0]
    seen.update(ids)
    tally.num_duplicates += len(again)
    return dataset


def _first_of_each_id(rows: Sequence[Row], seen: Mapping[str, str]) -> tuple[list[Row], dict[str, str], list[DataError]]:
    """The rows whose id no earlier one has, or that have none; where that of each id is; and what is said of each other row."""
    own, ids, again = list[Row](), dict[str, str](), list[DataError]()
    for row in rows:
        name = row.values.get("id")
        key = json.dumps(name)
        if name is not None and (first := ids.get(key) or seen.get(key)):
            remedy = "set data.duplicates=drop to leave such rows out, or keep"
            again.append(DataError(f"{row.where}: the id {name!r} is also that of {first}; {remedy}"))
            continue
        own.append(row)
        ids |= {} if name is None else {key: row.where}
    return own, ids, again
