"""Every key of a configuration with its type, default and meaning, for people: ``--help``, completion, the documents.

The docstring of a dataclass says what its keys mean, as ``- key: text`` or ``- key, other: text``, with further lines indented. A
derived class may say it in words of its own. The text is Markdown, whose links are those of a page in ``docs/``. What a dataclass
refuses by its ``rules`` and ``needs`` belongs to the first key that it names.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple, get_args, get_origin

from rlhf_spmd.config.constraints import needs_of
from rlhf_spmd.config.rules import rules_of
from rlhf_spmd.config.schema import describe, full_type_hints, is_inline

ENTRIES = {"models": "role", "calls": "method"}  # what the entries of a mapping are called; those of others: name


class SectionRefusal(NamedTuple):
    """What a section refuses. ``keys``: dotted names, with commas between them."""

    keys: str
    why: str


@dataclasses.dataclass(frozen=True)
class Key:
    """A key. ``refusals``: what its section refuses, of which this is the first key.

    ``default``: as JSON; None: must be given. ``kind``: its type in words. ``text``: its meaning, or empty.
    """

    name: str
    default: str | None
    kind: str
    text: str
    refusals: tuple[SectionRefusal, ...] = ()

    def lines(self, width: int) -> str:
        """Return the key as ``--help`` shows it."""
        default = "must be given" if self.default is None else f"= {self.default}"
        text = re.sub(r"\[[^]]*\]\(([^)#]*)[^)]*\)", r"docs/\1", self.text)
        return f"  {self.name} {default} ({self.kind})\n{_indented(text, width)}".rstrip()


def help_lines(keys: Iterable[Key], width: int) -> Iterator[str]:
    """Yield each key as ``--help`` shows it, and below the keys of a section what it refuses."""
    for _, group in groupby(keys, key=lambda key: key.name.rpartition(".")[0]):
        refusals: list[SectionRefusal] = []
        for key in group:
            yield key.lines(width)
            refusals += key.refusals
        if refusals:
            yield "  refused:"
            yield from (_indented(f"{refusal.keys}: {refusal.why}", width) for refusal in refusals)


def _indented(text: str, width: int) -> str:
    return textwrap.indent(textwrap.fill(text, width - 6), " " * 6)


def list_keys(schema: type, replaced: Mapping[str, type]) -> Iterator[Key]:
    """Yield every key below the dataclass ``schema``, in its order. A section that may be missing, and a mapping to sections, count as
    keys too.

    ``replaced``: dataclasses that describe keys in place of their annotation; the keys need not be in ``schema``. Entries of a mapping
    to dataclasses are called ``<name>``.
    """
    return _keys_below(schema, replaced, "", None, {})


def _keys_below(
    schema: type, replaced: Mapping[str, type], where: str, default: Any, refusals: dict[str, tuple[SectionRefusal, ...]]
) -> Iterator[Key]:
    """Yield the keys of :func:`list_keys` in the section ``where``.

    ``default``: an instance whose values are the defaults. ``refusals``: those of the sections around it, by first key.
    """
    for refusal in refusals_of(schema, where):
        first = refusal.keys.partition(",")[0]
        refusals[first] = (*refusals.get(first, ()), refusal)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    annotations = {name: kind for name, kind in full_type_hints(schema).items() if name in fields} | dict(replaced)
    texts = key_texts(schema)
    for name, annotation in annotations.items():
        if name in fields and is_inline(fields[name]):
            build: Any = fields[name].default_factory
            piece = getattr(default, name, None) or build()
            yield from _keys_below(type(piece), {}, where, piece, refusals)
            continue
        key, is_mapping = f"{where}{name}", get_origin(annotation) is dict
        parts = () if get_origin(annotation) is list else (annotation, *get_args(annotation))
        section = next((part for part in parts if isinstance(part, type) and dataclasses.is_dataclass(part)), None)
        if section is None or name in texts:
            kind = describe(annotation) if section is None else "sections by name" if is_mapping else "a section"
            yield Key(key, _default(fields[name], default), kind, texts.get(name, ""), refusals.get(key, ()))
        if isinstance(section, type):
            factory: Any = fields[name].default_factory if name in fields else None
            value = getattr(default, name, None) or (factory() if callable(factory) else None)  # MISSING is not
            value = value if dataclasses.is_dataclass(value) else None  # a mapping of sections is not
            below = f"{key}.<{ENTRIES.get(name, 'name')}>." if is_mapping else f"{key}."
            yield from _keys_below(section, {}, below, value, refusals)


def refusals_of(section: type, where: str = "") -> Iterator[SectionRefusal]:
    """Yield what a dataclass refuses by its rules, then which settings do nothing without another. ``where``: before its keys."""
    for rule in rules_of(section):
        yield SectionRefusal(", ".join(where + key for key in rule.general_keys()), rule.general())
    for needed, keys in needs_of(section):
        why = f"{'does' if len(keys) == 1 else 'do'} nothing without {needed}"
        yield SectionRefusal(", ".join(where + key for key in keys), why)


@cache
def key_texts(schema: type) -> dict[str, str]:
    """Return the meaning of each key from the docstrings of a dataclass and its bases; the nearest one counts."""
    texts: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        docstring = inspect.cleandoc(vars(base).get("__doc__") or "")
        for names, text in re.findall(r"^- (\w+(?:, \w+)*): (.*(?:\n +.*)*)", docstring, flags=re.MULTILINE):
            texts |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return texts


def _default(field: dataclasses.Field[Any], default: Any) -> str | None:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    value = getattr(default, field.name, value)
    return None if value is dataclasses.MISSING else json.dumps(value, default=str)
