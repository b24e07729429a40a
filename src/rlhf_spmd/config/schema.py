"""What a dataclass schema allows: unknown keys with the nearest known one, types in words. Pure Python."""

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


def first_line(error: BaseException) -> str:
    """What an exception says in its first line; its type's name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def fields_of(section: Any) -> dict[str, Any]:
    """Key -> annotation of a dataclass."""
    hints = typing.get_type_hints(section)
    return {f.name: hints[f.name] for f in dataclasses.fields(section)}


def check_keys(allowed: Mapping[str, Any], raw: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first key of ``raw`` that is not allowed, or a scalar where a section must be.

    ``allowed``, here and below: the keys of the root, each with its annotation.
    """
    _check_section(allowed, raw, "", sorted(set(_known_keys(allowed, raw, ""))))


def type_at(allowed: Mapping[str, Any], raw: Any, key: str) -> tuple[Any, Any]:
    """The annotation of a dotted key such as ``models.actor.optim.lr`` or ``stages[0].pp``, and its value in ``raw``."""
    first, *rest = KEY_PART.findall(key)
    annotation, value = allowed.get(first), _child(raw, first)
    for part in rest:
        section = _section(annotation)
        annotation = _element(annotation) if section is None else fields_of(section).get(part)
        value = _child(value, part)
    return annotation, value


def locate(raw: Any, key: str) -> str:
    """The full dotted path of a leaf that OmegaConf knows by its last parts only (inside lists of dataclasses)."""
    leaves = [leaf.removeprefix(".") for leaf in _leaves(raw, "")]
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
        return f"a mapping with the keys {_listed(fields_of(annotation))}"
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


def _check_section(allowed: Mapping[str, Any], raw: Mapping[str, Any], where: str, known: Sequence[str]) -> None:
    for key, child in raw.items():
        if key not in allowed:
            raise ConfigError(_unknown_key(where, str(key), list(allowed), known))
        _check_value(allowed[key], child, _dotted(where, key), known)


def _check_value(annotation: Any, value: Any, where: str, known: Sequence[str]) -> None:
    section = _section(annotation)
    if value is None or (isinstance(value, str) and "${" in value):
        return
    if section is None:
        kinds = {get_origin(option) or option for option in _options(annotation)}
        fitting = (
            {dict, Mapping} if isinstance(value, Mapping) else {list, tuple, Sequence} if isinstance(value, list) else kinds
        )
        if Any not in kinds and not kinds & fitting:
            raise ConfigError(f"{where}={value!r} must be {describe(annotation)}")
        for suffix, child in _entries(value):
            _check_value(_element(annotation), child, where + suffix, known)
    elif isinstance(value, Mapping):
        _check_section(fields_of(section), value, where, known)
    elif not any(isinstance(value, option) for option in _options(annotation) if option in (str, int, float, bool)):
        raise ConfigError(f"{where}={value!r} must be {describe(section)}")


def _unknown_key(where: str, key: str, allowed: Sequence[str], known: Sequence[str]) -> str:
    dotted = _dotted(where, key)
    inside = [_dotted(where, name) for name in allowed]
    same_name = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    hint = nearest(dotted, inside) if difflib.get_close_matches(key, allowed, n=1, cutoff=0.6) else ""
    if not hint:
        hint = f"; did you mean '{same_name[0]}'?" if same_name else nearest(dotted, known)
    separator = "" if hint else ";"
    return f"unknown key '{dotted}'{hint}{separator} allowed here: {_listed(sorted(allowed))}"


def _known_keys(allowed: Mapping[str, Any], raw: Any, where: str) -> Iterator[str]:
    """Dotted names of the schema; inside a dict of dataclasses, under the names that ``raw`` uses."""
    for key, annotation in allowed.items():
        yield _dotted(where, key)
        yield from _known_inside(annotation, _child(raw, key), _dotted(where, key))


def _known_inside(annotation: Any, value: Any, where: str) -> Iterator[str]:
    section = _section(annotation)
    if section is not None:
        yield from _known_keys(fields_of(section), value, where)
    elif isinstance(value, Mapping):
        for suffix, child in _entries(value):
            yield where + suffix
            yield from _known_inside(_element(annotation), child, where + suffix)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """What is in a mapping (``.key``) or a list (``[index]``)."""
    if isinstance(value, Mapping):
        yield from ((f".{key}", child) for key, child in value.items())
    elif isinstance(value, list):
        yield from ((f"[{index}]", child) for index, child in enumerate(value))


def _leaves(value: Any, where: str) -> Iterator[str]:
    if not isinstance(value, (Mapping, list)):
        yield where
    for suffix, child in _entries(value):
        yield from _leaves(child, where + suffix)


def _dotted(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


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


def _listed(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:SHOWN_KEYS]) + (f" and {len(names) - SHOWN_KEYS} more" if len(names) > SHOWN_KEYS else "")
