"""Every key of a configuration with its type, default and meaning, for people: ``--help``, completion, the documents.

The docstring of a dataclass says what its keys mean, as ``- key: text`` or ``- key, other: text``, with further lines indented. A
derived class may say it in words of its own. The text is Markdown, whose links are those of a page in ``docs/``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_origin

from rlhf_spmd.config.schema import ConfigError, describe, full_type_hints, is_inline, unknown_key

ENTRIES = {"models": "role", "calls": "method"}  # what the entries of a mapping are called; those of others: name


@dataclasses.dataclass(frozen=True)
class Key:
    """``default``: as JSON; None: must be given. ``kind``: its type in words. ``text``: its meaning, or empty."""

    name: str
    default: str | None
    kind: str
    text: str

    def lines(self, width: int) -> str:
        """Return the key as ``--help`` shows it."""
        default = "must be given" if self.default is None else f"= {self.default}"
        said = re.sub(r"\[[^]]*\]\(([^)#]*)[^)]*\)", r"docs/\1", self.text)
        return f"  {self.name} {default} ({self.kind})\n{textwrap.indent(textwrap.fill(said, width - 6), ' ' * 6)}".rstrip()


def list_keys(schema: type, replaced: Mapping[str, type], where: str = "", default: Any = None) -> Iterator[Key]:
    """Yield every key below the dataclass ``schema``, in its order. A section that may be missing, and a mapping to sections, count as
    keys too.

    ``replaced``: dataclasses that describe keys in place of their annotation; the keys need not be in ``schema``. Entries of a mapping
    to dataclasses are called ``<name>``. ``default``: an instance whose values are the defaults.
    """
    fields = {field.name: field for field in dataclasses.fields(schema)}
    annotations = {name: kind for name, kind in full_type_hints(schema).items() if name in fields} | dict(replaced)
    said = key_texts(schema)
    for name, annotation in annotations.items():
        if name in fields and is_inline(fields[name]):
            build: Any = fields[name].default_factory
            piece = getattr(default, name, None) or build()
            yield from list_keys(type(piece), {}, where, piece)
            continue
        key, is_mapping = f"{where}{name}", get_origin(annotation) is dict
        parts = () if get_origin(annotation) is list else (annotation, *get_args(annotation))
        section = next((part for part in parts if isinstance(part, type) and dataclasses.is_dataclass(part)), None)
        if section is None or name in said:
            kind = describe(annotation) if section is None else "sections by name" if is_mapping else "a section"
            yield Key(key, _default(fields[name], default), kind, said.get(name, ""))
        if isinstance(section, type):
            factory: Any = fields[name].default_factory if name in fields else None
            made = getattr(default, name, None) or (factory() if callable(factory) else None)  # MISSING is not
            made = made if dataclasses.is_dataclass(made) else None  # a mapping of sections is not
            yield from list_keys(section, {}, f"{key}.<{ENTRIES.get(name, 'name')}>." if is_mapping else f"{key}.", made)


@cache
def key_texts(schema: type) -> dict[str, str]:
    """Return the meaning of each key from the docstrings of a dataclass and its bases; the nearest one counts."""
    found: dict[str, str] = {}
    for one in reversed(schema.__mro__):
        text = inspect.cleandoc(vars(one).get("__doc__") or "")
        for names, said in re.findall(r"^- (\w+(?:, \w+)*): (.*(?:\n +.*)*)", text, flags=re.MULTILINE):
            found |= dict.fromkeys(names.split(", "), " ".join(said.split()))
    return found


def check_names(keys: Iterable[Key], tree: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first key of ``tree`` that is not among ``keys``, with the same line as loading does."""
    names: _Names = {}
    for key in keys:
        section = names
        for part in key.name.split("."):
            section = section.setdefault(part, {})
    _check_names(names, tree, "", names, tree)


_Names = dict[str, Any]  # keys of a section -> those below each; a mapping to sections has one, <name>


def _check_names(names: _Names, given: Mapping[str, Any], where: str, root: _Names, tree: Mapping[str, Any]) -> None:
    below = _entries(names, given)
    for key in given:
        if key not in below:
            raise ConfigError(unknown_key(where, str(key), list(below), _all_names(root, tree, ""), given[key]))
    for key, inner in below.items():
        if inner and isinstance(given.get(key), Mapping):
            _check_names(inner, given[key], f"{where}.{key}" if where else str(key), root, tree)


def _entries(names: _Names, given: Mapping[str, Any]) -> _Names:
    only = next(iter(names))
    return dict.fromkeys(given, names[only]) if only.startswith("<") else names


def _all_names(names: _Names, given: Any, where: str) -> Iterator[str]:
    given = given if isinstance(given, Mapping) else {}
    for key, inner in _entries(names, given).items():
        name = f"{where}.{key}" if where else str(key)
        yield name
        yield from _all_names(inner, given.get(key), name) if inner else ()


def _default(field: dataclasses.Field[Any], default: Any) -> str | None:
    made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    made = getattr(default, field.name, made)
    return None if made is dataclasses.MISSING else json.dumps(made, default=str)
