"""Raw values (mappings, lists, scalars) into dataclasses, strictly. An unknown key is refused with the nearest known one.

A field's type is a dataclass, ``int``, ``float``, ``bool``, ``str``, ``Literal``, ``Any``, a ``list`` or ``dict`` of these, or a
union. ``Annotated`` adds a range (:mod:`~rlhf_spmd.config.constraints`). A field with ``PART_OF`` in its metadata is a ``dict`` of some
keys of a dataclass. A field made by :func:`inline` gives its keys to the section.
"""

from __future__ import annotations

import dataclasses
import difflib
import numbers
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args, get_origin

from rlhf_spmd.config.constraints import LARGEST, describe, field_default, full_type_hints, options_of
from rlhf_spmd.config.foreign import foreign_hint
from rlhf_spmd.config.plain_yaml import Plain, resolve
from rlhf_spmd.config.words import NEAR, dotted, listed, shortened

T = TypeVar("T")

MAX_HINTS = 3  # known keys that the message for an unknown one proposes
EVERYWHERE = ("name", "type", "path", "model", "enable")  # keys of so many sections that another one's is no hint
NEAR_ELSEWHERE = 0.8  # least likeness of a mistyped key to the key of another section
PART_OF = "part_of"  # in a field's metadata: the dataclass of which a mapping has some keys
INLINE = "inline"  # in a field's metadata: see inline
UNSET = "???"  # OmegaConf's word for a value that must be given
CONVERTIBLE_FROM = {int: (int, str), float: (float, int, str), str: (str, int, float, bool), bool: (bool, int, str)}
NUMBER_CLASSES = {int: (numbers.Integral,), float: (numbers.Real,)}
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}  # short names, of every key ...dtype
SWITCH = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}


class ConfigError(ValueError):
    """A mistake in the configuration; the message is one line for the user."""


type_hints = cache(typing.get_type_hints)  # without ranges


def inline(piece: type[Any], **defaults: Any) -> Any:
    """Return a field for a dataclass whose keys are keys of the section itself.

    The key ``algorithm.clip_ratio`` is ``config.policy.clip_ratio`` in Python. ``defaults``: those that differ from the piece's own.
    """
    if defaults:
        hints = full_type_hints(piece)  # type: ignore[arg-type]  # mypy: a class is hashable
        fields = [(key, hints[key], value) for key, value in defaults.items()]
        piece = dataclasses.make_dataclass(piece.__name__, fields, bases=(piece,), frozen=True)
    return field(default_factory=piece, metadata={INLINE: True})


def is_inline(f: dataclasses.Field[Any]) -> bool:
    return INLINE in f.metadata


def section_keys(section: Any, hints: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the keys of a dataclass with their types, those of its inline pieces among them.

    ``hints``: the types of its fields, if they differ from the declared ones.
    """
    hints = hints or type_hints(section)
    keys: dict[str, Any] = {}
    for f in dataclasses.fields(section):
        keys |= section_keys(hints[f.name]) if is_inline(f) else {f.name: hints[f.name]}
    return keys


def read_section(
    schema: type[T],
    raw_values: Mapping[str, Any],
    type_overrides: Mapping[str, Any] = MappingProxyType({}),
    has_references: bool = False,
    strict: bool = False,
) -> T:
    """Return an instance of the dataclass ``schema`` with the values of ``raw_values``. Ranges are not checked here.

    - type_overrides: types in place of those of the fields of ``schema`` itself
    - has_references: a text with ``${`` stands for a value that is not known yet
    - strict: a program wrote the values, so a text is no number; keys of mappings may be, since JSON has only text

    Raises ConfigError for the first value that does not fit, then for all that are missing.
    """
    reader = _Reader(schema, type_overrides, raw_values, has_references, strict)
    result: T = reader.read_dataclass(schema, raw_values, "", None)
    if reader.missing:
        names = [f"'{key}' ({describe(reader.missing[key])})" for key in sorted(reader.missing)]
        raise ConfigError(f"{', '.join(names)} must be given")
    return result


def read_value(annotation: Any, value: Any, where: str) -> Any:
    """Return ``value``, which a program wrote, in the declared type of the field ``where``. Raises ConfigError."""
    return _Reader(None, {}, {}, False, strict=True).read(annotation, value, where)


@dataclass
class _Reader:
    """One call of :func:`read_section`. ``missing``: keys that must be given, with their types."""

    schema: Any
    type_overrides: Mapping[str, Any]
    raw_values: Mapping[str, Any]
    has_references: bool
    strict: bool
    missing: dict[str, Any] = field(default_factory=dict)

    def _hints(self, section: Any) -> dict[str, Any]:
        return {**type_hints(section), **(self.type_overrides if section is self.schema else {})}

    def _keys(self, section: Any) -> dict[str, Any]:
        return section_keys(section, self._hints(section))

    def read_dataclass(self, section: Any, values: Mapping[str, Any], where: str, defaults: Any) -> Any:
        """Return an instance of ``section``. ``defaults``: an instance whose values stand where ``values`` has none."""
        self._check_keys(section, values, where)
        hints = self._hints(section)
        fields: dict[str, Any] = {}
        for f in dataclasses.fields(section):
            name = f.name
            key = dotted(where, name)
            default_value = getattr(defaults, name, field_default(f))
            if is_inline(f):
                inner = {key: values[key] for key in self._keys(hints[name]) if key in values}
                fields[name] = self.read_dataclass(type(default_value), inner, where, default_value)
            elif values.get(name, UNSET) == UNSET:
                fields[name] = default_value
                if default_value is dataclasses.MISSING:
                    self.missing[key] = hints[name]
            elif PART_OF in f.metadata and isinstance(values[name], Mapping):
                fields[name] = self._read_part(f.metadata[PART_OF], values[name], key)
            else:
                fields[name] = self.read(f.metadata.get(PART_OF, hints[name]), values[name], key, default_value)
        return section(**fields)

    def _read_part(self, section: Any, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the values of those keys of a section that ``values`` has."""
        self._check_keys(section, values, where)
        hints = self._keys(section)
        return {str(key): self.read(hints[key], value, dotted(where, key)) for key, value in values.items()}

    def read(self, annotation: Any, value: Any, where: str, default: Any = None) -> Any:
        """Return ``value`` in the type ``annotation``. ``where``: its key. ``default``: the key's default."""
        options = {get_origin(option) or option: option for option in options_of(annotation)}
        section = _dataclass(annotation)
        if where.endswith("dtype") and isinstance(value, str):
            value = DTYPES.get(value, value)
        if value is None and type(None) in options:
            return None
        if self.has_references and isinstance(value, str) and "${" in value:
            return str(value)
        if Any in options:
            return resolve(value)
        if section is not None and isinstance(value, Mapping):
            return self.read_dataclass(section, value, where, default)
        if dict in options and isinstance(value, Mapping):
            return self._read_mapping(options[dict], value, where)
        if list in options and isinstance(value, list | tuple):
            (element,) = get_args(options[list])
            return [self.read(element, entry, f"{where}[{index}]") for index, entry in enumerate(value)]
        return self._read_scalar(annotation, value, where, default)

    def _read_mapping(self, annotation: Any, values: Mapping[Any, Any], where: str) -> dict[Any, Any]:
        key_type, value_type = get_args(annotation)
        key_reader = dataclasses.replace(self, strict=False)
        paths = {key: dotted(where, key) for key in values}
        return {key_reader.read(key_type, key, path): self.read(value_type, values[key], path) for key, path in paths.items()}

    def _read_scalar(self, annotation: Any, value: Any, where: str, default: Any) -> Any:
        """Return ``value`` in the scalar type that ``annotation`` has for it. Raises ConfigError if there is none."""
        scalars = list(dict.fromkeys(scalar for option in options_of(annotation) for scalar in _scalars(option)))
        if type(value) in scalars or (str in scalars and isinstance(value, str) and not isinstance(value, Plain)):
            return value
        if len(scalars) > 1 and isinstance(value, Plain):
            scalars = [_scalar_of(value, scalars)]
        try:
            if len(scalars) == 1 and self._is_convertible(scalars[0], value):
                return _convert(scalars[0], value)
        except (ValueError, KeyError):
            pass
        except OverflowError:
            raise ConfigError(f"{where}={shortened(resolve(value))}: must be at most {LARGEST[scalars[0]]}") from None
        has_default = default is not None and _dataclass(annotation) is None and not isinstance(default, list | dict)
        hint = f"; leave it out for {default}" if value is None and has_default else ""
        raise ConfigError(f"{where}={'null' if value is None else repr(resolve(value))} must be {describe(annotation)}{hint}")

    def _is_convertible(self, scalar: type, value: Any) -> bool:
        """Return True if ``value``, of another type, stands for a ``scalar``. numpy's numbers are numbers."""
        is_number = isinstance(value, NUMBER_CLASSES.get(scalar, ())) and not isinstance(value, bool)
        kind = str if isinstance(value, str) else type(value)
        return is_number or (not self.strict and kind in CONVERTIBLE_FROM[scalar])

    def _check_keys(self, section: Any, values: Mapping[str, Any], where: str) -> None:
        hints = self._keys(section)
        unknown = [key for key in values if key not in hints]
        if unknown:
            known = self._known_keys(self.schema, self.raw_values, "")
            raise ConfigError(_unknown_key(where, str(unknown[0]), list(hints), known, values[unknown[0]]))

    def _known_keys(self, annotation: Any, value: Any, where: str) -> Iterator[str]:
        """Yield the dotted keys of the schema. Entries of a dict of dataclasses have the names that ``value`` uses."""
        section = _dataclass(annotation)
        values = value if isinstance(value, Mapping) else {}
        entries = dict.fromkeys(values, (get_args(annotation) or [Any])[-1]) if section is None else self._keys(section)
        for key, inner in entries.items():
            yield dotted(where, key)
            yield from self._known_keys(inner, values.get(key), dotted(where, key))


def _unknown_key(where: str, key: str, allowed: Sequence[str], known: Iterable[str], value: Any) -> str:
    """Return the message for the unknown ``key`` in the section ``where``, which has the keys ``allowed``.

    ``known``: dotted names of all keys. ``value``: that of the unknown key.
    """
    known = sorted({*known} - {dotted(where, key)})
    last_part = {name: name.rpartition(".")[2] for name in known}
    same_name = [name for name in known if last_part[name] == key.rpartition(".")[2] and (not where or key not in EVERYWHERE)]
    below = [name for name in known if last_part[name] == key and where and name.startswith(f"{where}.")]
    longer = [dotted(where, name) for name in sorted(allowed) if len(key) > 2 and name.startswith(key)]
    here = [dotted(where, name) for name in difflib.get_close_matches(key, allowed, 1, NEAR)]
    near_parts = difflib.get_close_matches(key, last_part.values(), 1, NEAR_ELSEWHERE)
    elsewhere = [name for part in near_parts for name in known if last_part[name] == part]
    proposals = next(filter(None, [below, longer[:1], here, same_name, elsewhere[:1]]), [])
    hint = f"; did you mean {' or '.join(map(repr, proposals[:MAX_HINTS]))}?" if proposals else ";"
    names = [*(name for name, _ in leaves(value, dotted(where, key))), *([] if where or same_name else [key])]
    foreign = foreign_hint(names, by_end=not (same_name or below) and not isinstance(value, Mapping))
    if foreign:
        return f"unknown key {foreign}"
    return f"unknown key '{dotted(where, key)}'{hint} allowed here: {listed(sorted(allowed))}"


def _scalars(option: Any) -> Iterator[type]:
    """Yield the scalar types of a type that is no union."""
    kinds = map(type, get_args(option)) if get_origin(option) is Literal else [option]
    return (kind for kind in kinds if kind in CONVERTIBLE_FROM)


def _scalar_of(value: Plain, scalars: Sequence[type]) -> type:
    """Return which of several scalar types a plain value has."""
    if bool in scalars and value.lower() in SWITCH:
        return bool
    kind = type(resolve(value))
    return kind if kind in scalars else str if str in scalars else scalars[0]


def _convert(scalar: type, value: Any) -> Any:
    """Return ``value`` as a ``scalar``. Raises ValueError or KeyError if it is none."""
    if scalar is bool:
        return SWITCH[str(value).lower()]
    if scalar is str:
        return str(value).lower() if isinstance(value, bool) else str(value)
    resolved = resolve(value)  # .inf is a number, too
    return resolved if type(resolved) is scalar else scalar(value)


def leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the values in a tree of mappings, by dotted key."""
    if not (isinstance(value, Mapping) and value):
        yield where, value
    else:
        for key, child in value.items():
            yield from leaves(child, dotted(where, key))


def _dataclass(annotation: Any) -> Any:
    """Return the dataclass of ``X`` or ``X | None``, else None."""
    return next((option for option in options_of(annotation) if dataclasses.is_dataclass(option)), None)
