"""What a dataclass schema allows: unknown keys with the nearest known one, required keys, types in words. Pure Python."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

KEY_PART = re.compile(r"[^.\[\]]+")
SHOWN_KEYS = 40


class ConfigError(ValueError):
    """A mistake in the configuration; the message is one line for the user."""


def check_keys(schema: type, raw: Mapping[str, Any], replaced: Mapping[str, type]) -> None:
    """Raise ConfigError for the first key of ``raw`` that the schema does not know, or a scalar where a section must be."""
    known = sorted(set(_known_keys(schema, raw, replaced)))
    _check_node(schema, raw, "", replaced, known)


def check_required(schema: type, merged: Any, replaced: Mapping[str, type]) -> None:
    """Raise ConfigError for required keys (fields without a default) that nobody gave; all of them in one message."""
    from omegaconf import OmegaConf

    missing = sorted(OmegaConf.missing_keys(merged))
    if missing:
        names = []
        for key in missing:
            annotation, _ = type_at(schema, {}, replaced, key)
            names.append(f"'{key}'" + (f" ({describe(annotation)})" if annotation is not None else ""))
        raise ConfigError(f"{', '.join(names)} must be given")


def type_at(schema: type, raw: Any, replaced: Mapping[str, type], key: str) -> tuple[Any, Any]:
    """The annotation of a dotted key such as ``models.actor.optim.lr`` or ``stages[0].pp``, and its value in ``raw``."""
    annotation: Any = schema
    value = raw
    for depth, part in enumerate(KEY_PART.findall(key)):
        if dataclasses.is_dataclass(section := _section(annotation)):
            hints = _fields(section, replaced if depth == 0 else {})
            if part not in hints:
                return None, value
            annotation = hints[part]
        else:
            annotation = _element(annotation)
        value = _child(value, part)
    return (annotation if key else None), value


def empty_sections(schema: type, raw: Mapping[str, Any], replaced: Mapping[str, type]) -> list[str]:
    """Top-level sections written without content (``data:``): they mean the defaults, unless null is allowed there."""
    hints = _fields(schema, replaced)
    return [key for key, value in raw.items() if value is None and dataclasses.is_dataclass(hints[key])]


def locate(raw: Any, key: str) -> str:
    """The full dotted path of a leaf that OmegaConf knows by its last parts only (inside lists of dataclasses)."""
    leaves = list(_leaves(raw, ""))
    if not key or key in leaves:
        return key
    return next((leaf for leaf in leaves if re.search(rf"[.\]]{re.escape(key)}$", leaf)), key)


def describe(annotation: Any) -> str:
    """A type in words, with its article."""
    options = _options(annotation)
    if len(options) > 1:
        return " or ".join(describe(option) for option in options)
    annotation = options[0]
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if annotation in words:
        return words[annotation]
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(annotation))
    if dataclasses.is_dataclass(annotation):
        return f"a mapping with the keys {_listed(_fields(annotation, {}))}"
    if isinstance(annotation, type) and hasattr(annotation, "__members__"):
        return "one of " + ", ".join(annotation.__members__)
    origin = get_origin(annotation) or annotation
    if origin in (list, tuple, Sequence):
        return f"a list, each entry {describe(_element(annotation))}"
    if origin in (dict, Mapping):
        return f"a mapping, each value {describe(_element(annotation))}"
    return "any value" if annotation is Any else str(getattr(annotation, "__name__", annotation))


def nearest(name: str, known: Sequence[str]) -> str:
    """``; did you mean 'x'?`` or the empty string."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean '{found[0]}'?" if found else ""


def _check_node(annotation: Any, value: Any, where: str, replaced: Mapping[str, type], known: Sequence[str]) -> None:
    if _is_interpolation(value) or (value is None and where):
        return
    section = _section(annotation)
    if dataclasses.is_dataclass(section):
        if not isinstance(value, Mapping):
            if not any(isinstance(value, option) for option in _options(annotation) if option in (str, int, float, bool)):
                raise ConfigError(f"{where}={value!r} must be {describe(section)}")
            return
        hints = _fields(section, replaced)
        for key, child in value.items():
            dotted = f"{where}.{key}" if where else str(key)
            if key not in hints:
                raise ConfigError(_unknown_key(where, str(key), list(hints), known))
            _check_node(hints[key], child, dotted, {}, known)
    elif isinstance(value, Mapping):
        for key, child in value.items():
            _check_node(_element(annotation), child, f"{where}.{key}", {}, known)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            _check_node(_element(annotation), child, f"{where}[{index}]", {}, known)


def _unknown_key(where: str, key: str, allowed: Sequence[str], known: Sequence[str]) -> str:
    dotted = f"{where}.{key}" if where else key
    inside = [f"{where}.{name}" if where else name for name in allowed]
    same_name = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    hint = nearest(dotted, inside) if difflib.get_close_matches(key, allowed, n=1, cutoff=0.6) else ""
    if not hint:
        hint = f"; did you mean '{same_name[0]}'?" if same_name else nearest(dotted, known)
    separator = "" if hint else ";"
    return f"unknown key '{dotted}'{hint}{separator} allowed here: {_listed(sorted(allowed))}"


def _known_keys(annotation: Any, value: Any, replaced: Mapping[str, type], where: str = "") -> Iterator[str]:
    """Dotted names of the schema; inside a dict of dataclasses, under the names that ``value`` uses."""
    if where:
        yield where
    section = _section(annotation)
    if dataclasses.is_dataclass(section):
        for name, hint in _fields(section, replaced).items():
            yield from _known_keys(hint, _child(value, name), {}, f"{where}.{name}" if where else name)
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from _known_keys(_element(annotation), child, {}, f"{where}.{name}")


def _fields(section: Any, replaced: Mapping[str, type]) -> dict[str, Any]:
    hints = typing.get_type_hints(section)
    return {f.name: replaced.get(f.name, hints[f.name]) for f in dataclasses.fields(section)}


def _leaves(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from _leaves(child, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _leaves(child, f"{where}[{index}]")
    else:
        yield where


def _options(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)


def _section(annotation: Any) -> Any:
    """The dataclass of ``X``, ``X | None``; None where there is none."""
    return next((option for option in _options(annotation) if dataclasses.is_dataclass(option)), None)


def _element(annotation: Any) -> Any:
    """The type of the entries of a list, tuple or dict annotation."""
    for option in _options(annotation):
        args = [arg for arg in get_args(option) if arg is not Ellipsis]
        if args and get_origin(option) is not Literal:
            return args[-1]
    return Any


def _child(value: Any, part: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(part)
    if isinstance(value, list) and part.isdigit() and int(part) < len(value):
        return value[int(part)]
    return None


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _listed(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN_KEYS]) + (f" and {len(names) - SHOWN_KEYS} more" if len(names) > SHOWN_KEYS else "")
