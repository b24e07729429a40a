"""Rows of environment libraries: ``reasoning_gym:chain_sum?size=500&seed=1`` is the path of a data set that a library makes.

A library's module here has ``rows(source)``, the same in every process. A row has what its environment or agent needs to
find the task again: ``source`` (the path) and ``index``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, quote

from rlhf_spmd.config.schema import ConfigError, leaves

LIBRARIES = {"reasoning_gym": "reasoning-gym", "gem": "gem", "verifiers": "verifiers"}  # with rows; module here -> extra
SERVERS = ("openenv",)  # without rows; the name is an address
AGENT = "rlhf_spmd.environments.verifiers:run"
READABLE = "/:,[]{}\"'"  # characters of a value that a path shows as they are

T = TypeVar("T")


class Source(NamedTuple):
    """``LIBRARY:NAME?KEY=VALUE&KEY.KEY=VALUE``; a value is JSON, or else text."""

    library: str
    name: str
    args: dict[str, Any]

    def __str__(self) -> str:
        values = [(key, _as_text(value)) for key, value in leaves(self.args, "")] if self.args else []
        query = "&".join(f"{key}={quote(text, safe=READABLE)}" for key, text in values)
        return f"{self.library}:{self.name}" + (f"?{query}" if query else "")


def names_library(path: str) -> bool:
    """Return True if ``path`` names rows of a library."""
    library, colon, _ = path.partition(":")
    return bool(colon) and library in LIBRARIES


@lru_cache
def read_source(path: str) -> Source:
    """Return the source that ``path`` names. Raises ValueError."""
    if not names_library(path):
        raise ValueError(f"{path!r} names no rows of a library ({', '.join(LIBRARIES)}), as reasoning_gym:chain_sum does")
    library, _, rest = path.partition(":")
    name, _, query = rest.partition("?")
    args: dict[str, Any] = {}
    try:
        for key, text in parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)):
            *outer, last = key.split(".")
            section = args
            for part in outer:
                section = section.setdefault(part, {})
            section[last] = _as_value(text)
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"{path!r} is not of the form {library}:NAME?KEY=VALUE&KEY=VALUE") from None
    if not name:
        raise ValueError(f"{path!r} names nothing of {library}; write {library}:NAME")
    return Source(library, name, args)


def library_rows(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a source. Raises ValueError if the library is absent or refuses."""
    source = read_source(path)
    module = importlib.import_module(f"rlhf_spmd.environments.{source.library}")
    try:
        for index, row in enumerate(module.rows(source)):
            yield {**row, "data_source": source.name, "source": path, "index": index}
    except ValueError:
        raise
    # The boundary to the library: whatever it raises for a name or settings that it does not know.
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def source_of(row: Mapping[str, Any]) -> Source:
    """Return the source of a row. Raises ValueError for a row of other data."""
    return read_source(row.get("source") or "")


def import_library(name: str, extra: str) -> ModuleType:
    """Return the module ``name`` of an optional package. Raises ValueError that says what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} cannot be imported: {error}; pip install 'rlhf_spmd[{extra}]'") from error


def with_library(config: T) -> T:
    """Return the configuration of a program, in which ``environment.cls`` may be ``LIBRARY:NAME``.

    The name and ``environment.args`` become ``data.path``. For verifiers, whose environments ask the model themselves, the
    environment becomes ``agent.run``. An address of a server becomes ``environment.args.url``. Raises ConfigError.
    """
    sections: Any = config
    others = {name: _with_address(other) for name, other in sections.environments.items()}
    config = _replaced(config, environment=_with_address(sections.environment), environments=others)
    environment = sections.environment
    library, _, name = (environment.cls or "").partition(":")
    if library not in LIBRARIES or not name:
        return config
    where = f"environment.cls={environment.cls}"
    if sections.data.path:
        remedy = f"leave data.path out, or write environment.cls={library} for rows of data.path={library}:NAME"
        raise ConfigError(f"{where}, data.path={sections.data.path}: the first brings its own rows; {remedy}")
    data = replace(sections.data, path=str(Source(library, name, environment.args)))
    environment = replace(environment, cls=library, args={})
    if library != "verifiers":
        return _replaced(config, data=data, environment=environment)
    if not hasattr(config, "agent"):
        raise ConfigError(f"{where}: verifiers' environments ask the model over HTTP, which only train lets them do")
    changed = [f.name for f in fields(environment) if f.name not in ("cls", "args") and _is_set(environment, f.name)]
    if changed:
        raise ConfigError(f"environment.{changed[0]}: {where} is an agent, whose settings are those of the section agent")
    if sections.agent.is_on:
        raise ConfigError(f"{where} is an agent, and the section agent names another one; leave one of them out")
    return _replaced(config, data=data, environment=type(environment)(), agent=replace(sections.agent, run=AGENT))


def _replaced(config: T, **sections: Any) -> T:
    assert is_dataclass(config) and not isinstance(config, type), "a program's configuration is a dataclass"
    return replace(config, **sections)


def _with_address(environment: Any) -> Any:
    """Return the section of an environment with its server's address among ``args``."""
    library, _, url = (environment.cls or "").partition(":")
    is_server = library in SERVERS and bool(url)
    return replace(environment, cls=library, args={"url": url, **environment.args}) if is_server else environment


def _is_set(section: Any, name: str) -> bool:
    return bool(getattr(section, name) != getattr(type(section)(), name))


def _as_text(value: Any) -> str:
    """Return a text that :func:`_as_value` reads as ``value``."""
    return value if isinstance(value, str) and _as_value(value) == value else json.dumps(value)


def _as_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
