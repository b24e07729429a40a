"""Reads rows (dicts of JSON values) from jsonl, json, parquet files or a ``datasets`` name; errors name file and line."""

from __future__ import annotations

import glob
import gzip
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rlhf_spmd.config.json_input import parse_json
from rlhf_spmd.config.words import first_line
from rlhf_spmd.environments.libraries import library_rows, names_library
from rlhf_spmd.telemetry.run_dir import json_value

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
ARROW_ROWS = 1024  # per batch
CHAT_COLUMNS = ("tools", "chat_template_kwargs")  # beside messages, which are known by their roles
HUB_LIMIT_S = 5.0


class DataError(ValueError):
    """Unreadable or unusable data; the message is one line for the user."""

    exit_class = "data"  # how the run ends: process/program.py


class RowError(DataError):
    """A mistake in one row. Whoever reads the row adds its place, by :func:`named_row` or :meth:`Row.error`."""

    def __init__(self, reason: str, where: str = "") -> None:
        super().__init__(f"{where}: {reason}" if where else reason)
        self.where = where


@contextmanager
def named_row(where: str) -> Iterator[None]:
    """Add the place of the row that is read, such as ``train.jsonl:17``, to a RowError that has none."""
    try:
        yield
    except RowError as error:
        if error.where:
            raise
        raise RowError(str(error), where) from error.__cause__


Paths = str | list[str] | dict[str, float]  # one source, several, or sources with weights


@dataclass(frozen=True)
class Row:
    """One row of the data.

    - where: its place for messages: ``train.jsonl:17``
    - number: its position among all rows
    - source: index of its path
    - rank: its place in a curriculum
    """

    values: dict[str, Any]
    where: str
    number: int = 0
    source: int = 0
    rank: float = 0.0

    def get(self, key: str, setting: str) -> Any:
        """Return the value of a required key; ``outer.inner`` reaches into an object.

        ``setting``: the key of the configuration that names it.
        """
        values = self._find(key)
        if not values:
            keys = ", ".join(_dotted(self.values)) or "none"
            raise self.error(f"no key '{key}' ({setting}={key}); this row has: {keys}")
        return values[0]

    def error(self, reason: str) -> RowError:
        return RowError(reason, self.where)

    def __contains__(self, key: str) -> bool:
        return bool(self._find(key))

    def _find(self, key: str) -> list[Any]:
        """Return [value] or []. A column whose own name contains the dots takes precedence."""
        if key in self.values:
            return [self.values[key]]
        value: Any = self.values
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                return []
            value = value[part]
        return [value]


def _dotted(values: dict[str, Any]) -> Iterable[str]:
    for key, value in values.items():
        yield from (f"{key}.{inner}" for inner in _dotted(value)) if isinstance(value, dict) and value else [str(key)]


RowOrError = Row | DataError  # a line's row, or why it cannot be used


def list_paths(path: Paths) -> list[str]:
    return [path] if isinstance(path, str) else list(path)


def set_names(paths: Sequence[str]) -> dict[str, str]:
    """Name each path by its file name without suffix, with as many parent directories as make names unique.

    Raises ValueError for a repeated path.
    """
    parts = [[*Path(path).parts[:-1], Path(path).name.partition(".")[0] or Path(path).name] for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return dict(zip(names, paths, strict=True))
    if paths:
        repeated = next(path for path, part in zip(paths, parts, strict=True) if parts.count(part) > 1)
        raise ValueError(f"the set {repeated} is given twice, or its name differs from another's in the suffix only; name them")
    return {}


def read_rows(path: Paths, split: str = "train", subset: str | None = None, limit: int | None = None) -> list[Row]:
    """Return all rows of ``path``, source by source, or the first ``limit``.

    A source is a file with a known suffix (.jsonl, .json, either with .gz, .parquet), a glob pattern over such files
    (sorted), ``LIBRARY:NAME`` (``environments/libraries.py``), a directory that ``datasets`` saved or can load, or a data set
    on the hub. ``split`` and ``subset`` apply to the last two. Raises DataError.
    """
    return list(map(row_or_raise, stream_rows(path, split, subset, limit)))


def row_or_raise(row: RowOrError) -> Row:
    """Return the row. Raises it if it is an error."""
    if isinstance(row, DataError):
        raise row
    return row


def stream_rows(path: Paths, split: str, subset: str | None, limit: int | None = None) -> Iterator[RowOrError]:
    """Yield the rows of :func:`read_rows`, one by one; an unreadable row is yielded as its error and counts.

    Raises DataError for a file that cannot be read.
    """
    return islice(_numbered(path, split, subset), limit)


def local_files(path: str) -> list[Path]:
    """Return the files of ``path``, those of a directory at any depth; none for a data set on the hub."""
    location = Path(path).expanduser()
    if location.exists():  # even if the name looks like a pattern
        return sorted(file for file in location.rglob("*") if file.is_file()) if location.is_dir() else [location]
    return list(map(Path, sorted(glob.glob(str(location), recursive=True)))) if glob.has_magic(path) else []


def _numbered(path: Paths, split: str, subset: str | None) -> Iterator[RowOrError]:
    number = 0
    for source, name in enumerate(list_paths(path)):
        first = number
        for row in _rows(name, split, subset):
            yield Row(row.values, row.where, number, source) if isinstance(row, Row) else row
            number += 1
        if number == first:
            raise DataError(f"'{name}' holds no rows")


def _rows(path: str, split: str, subset: str | None) -> Iterable[RowOrError]:
    if names_library(path):
        yield from _library_rows(path)
        return
    location = Path(path).expanduser()
    if location.is_dir() and glob.has_magic(path):
        raise DataError(
            f"data directory '{path}' cannot be read: its name would be taken for a pattern; rename it, or give its files"
        )
    if location.is_dir():
        yield from _dataset_rows(str(location), split, subset)
    elif files := local_files(path):
        yield from chain.from_iterable(map(_file_rows, files))
    elif glob.has_magic(path):
        raise DataError(f"no file matches '{path}'")
    elif _looks_local(path):
        raise DataError(f"data file '{path}' does not exist")
    else:
        yield from _dataset_rows(path, split, subset)


def _library_rows(path: str) -> Iterator[RowOrError]:
    """Yield the rows that an environment library makes. Raises DataError."""
    try:
        for number, values in enumerate(library_rows(path), 1):
            yield _row(values, f"{path}, row {number}")
    except ValueError as error:
        raise DataError(f"data '{path}' cannot be made: {first_line(error)}") from error


def _looks_local(path: str) -> bool:
    """Return True unless ``path`` looks like a hub name (``name`` or ``owner/name``): then it is a mistyped file."""
    return path.endswith(JSON_SUFFIXES + PARQUET_SUFFIXES) or path.startswith((".", "/", "~")) or path.count("/") > 1


def _file_rows(file: Path) -> Iterable[RowOrError]:
    name = file.name.lower()
    if file.exists() and not file.is_file():
        raise DataError(f"data '{file}' is no regular file, and each rank reads it; write what comes from a pipe into a file")
    try:
        if name.endswith(PARQUET_SUFFIXES):
            yield from _parquet_rows(file)
        elif name.endswith((".json", ".json.gz")):
            yield from _json_rows(file)
        elif name.endswith(JSON_SUFFIXES):
            yield from _jsonl_rows(file)
        else:
            allowed = ", ".join(JSON_SUFFIXES + PARQUET_SUFFIXES)
            raise DataError(f"'{file}' has a suffix that is not known; allowed: {allowed}")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).splitlines()[0]
        raise DataError(f"data file '{file}' cannot be read: {reason}") from error


def _open(file: Path) -> Any:
    return gzip.open(file) if file.name.endswith(".gz") else file.open("rb")


def _jsonl_rows(file: Path) -> Iterable[RowOrError]:
    with _open(file) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _row(line, f"{file}:{number}")


def _json_rows(file: Path) -> Iterable[RowOrError]:
    """Read one JSON list of objects; a file with several lines of objects is read as jsonl."""
    with _open(file) as stream:
        text = stream.read().decode("utf-8-sig")
    if not text.lstrip().startswith("["):
        yield from _jsonl_rows(file)
        return
    for number, value in enumerate(_parse(text, str(file)), 1):
        yield _row(value, f"{file}, entry {number}", has_escapes="\\u" in text)


def _parse(text: str, where: str) -> Any:
    try:
        return parse_json(text, unique_keys=True)
    except json.JSONDecodeError as error:
        line = f":{error.lineno}" if "\n" in text.rstrip() else ""
        raise DataError(f"{where}{line}: not valid JSON: {error.msg} at column {error.colno}") from error
    except ValueError as error:  # nested too deeply, or a number of more digits than Python converts
        raise DataError(f"{where}: {first_line(error)}") from error


def _row(value: Any, where: str, has_escapes: bool = False) -> RowOrError:
    """Return a row, or its error. ``value`` may be the bytes of a line.

    ``has_escapes``: the text has escapes, one of which may be half a character.
    """
    try:
        if isinstance(value, bytes):
            line = value.decode("utf-8-sig")  # some Windows programs begin a file with a byte order mark
            value = _parse(line, where)
            has_escapes = "\\u" in line
        if has_escapes:
            json.dumps(value, ensure_ascii=False).encode()
    except DataError as error:
        return error
    except UnicodeDecodeError as error:
        return DataError(f"{where}: not valid UTF-8: byte {error.start} of the line is 0x{error.object[error.start]:02x}")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):x}"
        return DataError(f"{where}: not valid Unicode: the escape {half} is half of a character (a lone surrogate)")
    if not isinstance(value, dict):
        return DataError(f"{where}: must be a JSON object, not {type(value).__name__}")
    return Row(json_value(value), where)


def _parquet_rows(file: Path) -> Iterable[RowOrError]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            names = parquet.schema_arrow.names
            if repeated := next((name for name in names if names.count(name) > 1), None):
                raise DataError(f"data file '{file}' has two columns '{repeated}'; rename one")
            yield from _arrow_rows(parquet.iter_batches(batch_size=ARROW_ROWS), str(file))
    except pyarrow.ArrowException as error:
        raise DataError(f"data file '{file}' is not readable parquet: {first_line(error)}") from error


def _arrow_rows(tables: Iterable[Any], source: str) -> Iterator[RowOrError]:
    """Yield the rows of Arrow's tables or batches. Columns of the type Json are the values of their text.

    In Arrow all objects of a column have the same keys, so one has nulls for those of the others: in messages and tools
    they are left out. Nulls inside Json stay.
    """
    number = 0
    for table in tables:
        json_columns = {field.name: field.type for field in table.schema if "arrow.json" in str(field.type)}
        try:
            rows = table.to_pylist()
        except ValueError as error:  # two fields of an object have one name
            raise DataError(f"{source} cannot be read: {first_line(error)}") from error
        for row in rows:
            number += 1
            where = f"{source}, row {number}"
            values = _without_nulls(row, is_chat=False)
            try:
                decoded = {key: _decoded(values[key], kind, f"{where}: '{key}'") for key, kind in json_columns.items()}
                yield _row({**values, **decoded}, where)
            except DataError as error:
                yield error


def _without_nulls(value: Any, is_chat: bool) -> Any:
    """Return the value without the nulls in its messages (objects with a role), tools and variables of templates."""
    if isinstance(value, dict):
        is_chat = is_chat or "role" in value
        fields = {key: field for key, field in value.items() if field is not None or not is_chat}
        return {key: _without_nulls(field, is_chat or key in CHAT_COLUMNS) for key, field in fields.items()}
    if isinstance(value, list) and value and not isinstance(value[0], str | int | float):
        return [_without_nulls(item, is_chat) for item in value]
    return value


def _decoded(value: Any, kind: Any, where: str) -> Any:
    """Return a value of Arrow's type ``kind`` with Json decoded, at any depth. Raises DataError."""
    if getattr(kind, "extension_name", None) == "arrow.json":
        return _parse(value, where) if isinstance(value, str) else value
    if isinstance(value, dict):
        return {key: _decoded(field, kind.field(key).type, where) for key, field in value.items()}
    return [_decoded(item, kind.value_type, where) for item in value] if isinstance(value, list) else value


def _dataset_rows(path: str, split: str, subset: str | None) -> Iterable[RowOrError]:
    import datasets
    import huggingface_hub.constants
    from datasets.exceptions import DatasetsError

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if not Path(path).exists() and not _hub_answers():  # use the cache only, instead of a minute of retries
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    saved = Path(path, "state.json").is_file() or Path(path, "dataset_dict.json").is_file()
    try:
        loaded = datasets.load_from_disk(path) if saved else datasets.load_dataset(path, subset, split=split)
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        where = "" if Path(path).exists() else f"'{path}' is not a file or directory here; "
        reason = first_line(error.__cause__ or error)
        endings = [suffix for suffix in JSON_SUFFIXES + PARQUET_SUFFIXES if any(Path(path).glob(f"*{suffix}"))]
        is_mixed = bool(endings) and isinstance(error, DatasetsError)
        hint = f"; to read its files one after the other give {path}/*{endings[0]}, or one of them" if is_mixed else ""
        raise DataError(f"{where}data set '{path}' (split '{split}') cannot be loaded: {reason}{hint}") from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"data set '{path}' has no split '{split}'; it has: {', '.join(loaded)}")
        loaded = loaded[split]
    yield from _arrow_rows(loaded.with_format("arrow").iter(batch_size=ARROW_ROWS), path)


def _hub_answers() -> bool:
    from huggingface_hub import constants

    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=HUB_LIMIT_S):
            return True
    except urllib.error.HTTPError:  # an answer
        return True
    except OSError:
        return False
