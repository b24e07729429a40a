"""Every key of a configuration with its type, default and meaning, for ``--help``, completion and the documents.

The docstring of a dataclass says what its keys mean, as ``- key: text`` or ``- key, other: text``, with further lines indented. A
derived class may replace the text. The text is Markdown, whose links are relative to ``docs/``. What a dataclass refuses by its
``rules`` and ``needs`` is printed with the first key that the refusal names.
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

from rlhf_spmd.config.constraints import describe, field_default, full_type_hints, needs_of
from rlhf_spmd.config.rules import rules_of
from rlhf_spmd.config.schema import is_inline

ENTRY_NAMES = {"models": "role", "calls": "method"}  # what the keys of a mapping are called; of any other: name


class SectionRefusal(NamedTuple):
    """What a section refuses. ``keys``: dotted names, with commas between them."""

    keys: str
    why: str


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a configuration.

    - name: its dotted name
    - default: its default as JSON; None: it must be given
    - kind: its type in words
    - text: its meaning, or empty
    - refusals: those of its section that name this key first
    """

    name: str
    default: str | None
    kind: str
    text: str
    refusals: tuple[SectionRefusal, ...] = ()

    def lines(self, width: int) -> str:
        """Return the key as ``--help`` shows it."""
        default = "must be given" if self.default is None else f"= {self.default}"
        text = re.sub(r"\[([^]]*)\]\(([^)#]*)[^)]*\)", r"\1 (docs/\2)", self.text)
        text = re.sub(r"(\S+) \(docs/\1\)", r"docs/\1", text)  # a link that is called as its file
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


def list_keys(schema: type, type_overrides: Mapping[str, type]) -> Iterator[Key]:
    """Yield every key below the dataclass ``schema``, in its order. Entries of a mapping to dataclasses are called ``<name>``.

    A section that may be missing, and a mapping to sections, are keys too. ``type_overrides``: dataclasses in place of the types of
    fields; the fields need not be in ``schema``.
    """
    return _keys_below(schema, type_overrides, "", None, {})


SectionRefusals = dict[str, tuple[SectionRefusal, ...]]  # refusals of a section and of those around it, by first key


def _keys_below(
    schema: type, type_overrides: Mapping[str, type], where: str, defaults: Any, refusals: SectionRefusals
) -> Iterator[Key]:
    """Yield the keys of :func:`list_keys` in the section ``where``. ``defaults``: an instance whose values are the defaults."""
    for refusal in refusals_of(schema, where):
        key = refusal.keys.partition(",")[0]
        refusals[key] = (*refusals.get(key, ()), refusal)
    fields = {field.name: field for field in dataclasses.fields(schema)}
    annotations = {name: kind for name, kind in full_type_hints(schema).items() if name in fields} | dict(type_overrides)
    texts = key_texts(schema)
    for name, annotation in annotations.items():
        field = fields.get(name)
        default = None if field is None else getattr(defaults, name, field_default(field))
        if field is not None and is_inline(field):
            yield from _keys_below(type(default), {}, where, default, refusals)
            continue
        key = f"{where}{name}"
        section = _section_in(annotation)
        is_mapping = get_origin(annotation) is dict
        if section is None or name in texts:
            kind = describe(annotation) if section is None else "sections by name" if is_mapping else "a section"
            yield Key(key, _as_json(default), kind, texts.get(name, ""), refusals.get(key, ()))
        if section is not None:
            entry = f".<{ENTRY_NAMES.get(name, 'name')}>" if is_mapping else ""
            instance = default if dataclasses.is_dataclass(default) else None  # a mapping of sections is no instance
            yield from _keys_below(section, {}, f"{key}{entry}.", instance, refusals)


def _section_in(annotation: Any) -> type | None:
    """Return the dataclass of a section, of a section that may be missing, or of a mapping to sections; None for other types."""
    parts = () if get_origin(annotation) is list else (annotation, *get_args(annotation))
    return next((part for part in parts if isinstance(part, type) and dataclasses.is_dataclass(part)), None)


def refusals_of(section: type, where: str = "") -> Iterator[SectionRefusal]:
    """Yield what a dataclass refuses by its rules, then which settings do nothing without another.

    ``where``: the beginning of its keys, with a dot at the end.
    """
    for rule in rules_of(section):
        yield SectionRefusal(", ".join(where + key for key in rule.general_keys()), rule.general())
    for condition, keys in needs_of(section):
        why = f"{'does' if len(keys) == 1 else 'do'} nothing without {condition}"
        yield SectionRefusal(", ".join(where + key for key in keys), why)


@cache
def key_texts(schema: type) -> dict[str, str]:
    """Return the meaning of each key, from the docstrings of a dataclass and its bases. The most derived class counts."""
    texts: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        docstring = inspect.cleandoc(vars(base).get("__doc__") or "")
        for names, text in re.findall(r"^- (\w+(?:, \w+)*): (.*(?:\n +.*)*)", docstring, flags=re.MULTILINE):
            texts |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return texts


def _as_json(default: Any) -> str | None:
    """Return a default as JSON; None if the key must be given."""
    return None if default is dataclasses.MISSING else json.dumps(default, default=str)
