"""Plain values (mappings, lists, scalars) into dataclasses, strictly: types in words, unknown keys with the nearest known one.

A field's type is a dataclass, ``int``, ``float``, ``bool``, ``str``, ``Literal``, ``Any``, a ``list`` or ``dict`` of these, or a
union. ``Annotated`` adds a range (:mod:`~rlhf_spmd.config.constraints`). A field with ``PART`` in its metadata is a ``dict`` of some
keys of a dataclass; one made by :func:`inline` gives its keys to the section.
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
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from rlhf_spmd.config.constraints import LARGEST, Range, options_of
from rlhf_spmd.config.foreign import foreign_hint
from rlhf_spmd.config.written import Plain, resolve

T = TypeVar("T")

SHOWN_KEYS, SHOWN_HINTS = 40, 3
MOST_DIGITS = 40
EVERYWHERE = ("name", "type", "path", "model", "enable")  # keys of so many sections that another one's is no hint
NEAR, NEARER = 0.6, 0.8  # likeness of a mistyped name to a known one; of a key to that of another section
PART = "part_of"  # in a field's metadata: the dataclass of which a mapping has some keys
INLINE = "inline"  # in a field's metadata: see inline
UNSET = "???"  # OmegaConf's word for a value that must be given
WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null", Any: "any value"}
READABLE = {int: (int, str), float: (float, int, str), str: (str, int, float, bool), bool: (bool, int, str)}
EXACT = {int: (numbers.Integral,), float: (numbers.Real,)}
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}  # short names, of every key ...dtype
SWITCH = {**dict.fromkeys(("true", "yes", "on", "1"), True), **dict.fromkeys(("false", "no", "off", "0"), False)}


class ConfigError(ValueError):
    """A mistake in the configuration; the message is one line for the user."""


type_hints = cache(typing.get_type_hints)  # without ranges


@cache
def full_type_hints(section: Any) -> dict[str, Any]:
    return typing.get_type_hints(section, include_extras=True)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message; its type's name if the message is empty."""
    return printable((str(error).strip() or type(error).__name__).splitlines()[0])


def printable(text: str) -> str:
    """Return ``text`` with characters that a terminal would obey, such as escape, written as Python writes them."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def shortened(value: float) -> str:
    """Return a number as text, without most of its digits if it has very many."""
    text = str(value)
    return text if len(text) <= MOST_DIGITS else f"{text[:MOST_DIGITS]}... ({len(text)} digits)"


def counted(number: int, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ``; did you mean 'x'?`` or the empty string."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def describe(annotation: Any) -> str:
    """Return a type in words, with its article: ``an integer, at least 1``."""
    options = options_of(annotation)
    if len(options) > 1:
        words = [describe(option) for option in options]
        return (", or " if any("," in word for word in words) else " or ").join(words)
    if dataclasses.is_dataclass(annotation):
        return f"a mapping with the keys {_listed([f.name for f in dataclasses.fields(annotation)])}"
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin is Annotated:
        return ", ".join(
            [describe(inner[0]), *(word for rule in inner[1:] if isinstance(rule, Range) for word in rule.words())]
        )
    if inner:
        return f"{'a list, each entry' if origin is list else 'a mapping, each value'} {describe(inner[-1])}"
    return WORDS.get(annotation, str(annotation))


def inline(piece: type[Any], **defaults: Any) -> Any:
    """Return a field for a dataclass whose keys are keys of the section itself: the key ``algorithm.clip_ratio`` is
    ``config.policy.clip_ratio`` in Python. ``defaults``: those that differ from the piece's own."""
    if defaults:
        hints = full_type_hints(piece)  # type: ignore[arg-type]  # mypy: a class is hashable
        changed = [(key, hints[key], value) for key, value in defaults.items()]
        piece = dataclasses.make_dataclass(piece.__name__, changed, bases=(piece,), frozen=True)
    return field(default_factory=piece, metadata={INLINE: True})


def is_inline(f: dataclasses.Field[Any]) -> bool:
    return INLINE in f.metadata


def section_keys(section: Any, hints: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the keys of a dataclass with their types, those of its inline pieces among them.

    ``hints``: types that go before the dataclass's own.
    """
    hints = hints or type_hints(section)
    keys: dict[str, Any] = {}
    for f in dataclasses.fields(section):
        keys |= section_keys(hints[f.name]) if is_inline(f) else {f.name: hints[f.name]}
    return keys


def check_fields(section: Any, where: str) -> None:
    """Raise ValueError for the first field of a dataclass that is out of its range or none of its choices. ``where``: the dataclass's
    dotted path, "" for the root."""
    hints = full_type_hints(type(section))  # type: ignore[arg-type]  # mypy: a class is hashable
    for f in dataclasses.fields(section):
        for wrong in _violations(hints[f.name], getattr(section, f.name), dotted(where, f.name)):
            raise ValueError(wrong)


def _violations(annotation: Any, value: Any, key: str) -> Iterator[str]:
    options = [option for option in options_of(annotation) if option is not type(None)]
    if value is None or Any in options:
        return
    if len(options) > 1:
        if all(any(_violations(option, value, key)) or not isinstance(value, _class_of(option)) for option in options):
            yield f"{key}={value!r} must be {describe(annotation)}"
        return
    origin, inner = get_origin(options[0]), get_args(options[0])
    scalar = inner[0] if origin is Annotated else options[0]
    if scalar in LARGEST and isinstance(value, int | float):
        ranges = [limits for limits in inner[1:] if isinstance(limits, Range)] if origin is Annotated else []
        for limits in ranges or [Range()]:
            if ranges and not limits.allows(value):
                yield f"{key}={shortened(value)}: must be {limits.refusal(value)}"
            elif bound := limits.too_large(value, scalar):
                yield f"{key}={shortened(value)}: must be {bound}"
    elif origin is Literal and value not in inner:
        null = ", or null" if annotation is not options[0] else ""
        yield f"{key}={value!r} is not known{nearest(str(value), list(map(str, inner))) or ';'} allowed: {_listed(inner)}{null}"
    elif origin in (list, dict):
        for index, child in value.items() if origin is dict else enumerate(value):
            if origin is dict:
                yield from _violations(inner[0], index, f"{key}.{index}")
            yield from _violations(inner[-1], child, f"{key}.{index}" if origin is dict else f"{key}[{index}]")


def _class_of(annotation: Any) -> Any:
    """Return the class, or classes, of the values of a type that is no union."""
    origin = get_origin(annotation)
    if origin is Literal:
        return tuple(map(type, get_args(annotation)))
    base = get_args(annotation)[0] if origin is Annotated else origin or annotation
    return (int, float) if base is float else base


def read_section(
    schema: type[T],
    plain: Mapping[str, Any],
    replaced: Mapping[str, Any] = MappingProxyType({}),
    interpolated: bool = False,
    strict: bool = False,
) -> T:
    """Return an instance of the dataclass ``schema`` with the values of ``plain``.

    ``replaced``: types that go before those of ``schema``'s own fields. ``interpolated``: a text with ``${`` stands for a value that
    is not known yet. ``strict``: a program wrote the values, so a text is no number; keys of mappings may be, since JSON has only text.
    Raises ConfigError for the first value that does not fit, then for all that are missing. Ranges are not checked here.
    """
    reader = _Reader(schema, replaced, plain, interpolated, strict)
    result: T = reader.section(schema, plain, "", None)
    if reader.missing:
        names = [f"'{key}' ({describe(reader.missing[key])})" for key in sorted(reader.missing)]
        raise ConfigError(f"{', '.join(names)} must be given")
    return result


def read_value(annotation: Any, value: Any, where: str) -> Any:
    """Return ``value``, which a program wrote, in the declared type of the field ``where``. Raises ConfigError."""
    return _Reader(None, {}, {}, False, strict=True)._value(annotation, value, where)


@dataclass
class _Reader:
    """One call of :func:`read_section`. ``missing``: keys that must be given, with their types."""

    schema: Any
    replaced: Mapping[str, Any]
    plain: Mapping[str, Any]
    interpolated: bool
    strict: bool
    missing: dict[str, Any] = field(default_factory=dict)

    def _hints(self, section: Any) -> dict[str, Any]:
        return {**type_hints(section), **(self.replaced if section is self.schema else {})}

    def _keys(self, section: Any) -> dict[str, Any]:
        return section_keys(section, self._hints(section))

    def section(self, section: Any, value: Mapping[str, Any], where: str, default: Any) -> Any:
        """Return the section. ``default``: an instance whose values stand where ``value`` has none."""
        self._check_keys(section, value, where)
        hints = self._hints(section)
        fields: dict[str, Any] = {}
        for f in dataclasses.fields(section):
            name, key = f.name, dotted(where, f.name)
            usual = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            usual = getattr(default, name, usual)
            if is_inline(f):
                inner = {key: value[key] for key in self._keys(hints[name]) if key in value}
                fields[name] = self.section(type(usual), inner, where, usual)
            elif value.get(name, UNSET) != UNSET:
                read = self._part if PART in f.metadata and isinstance(value[name], Mapping) else self._value
                fields[name] = read(f.metadata.get(PART, hints[name]), value[name], key, usual)
            else:
                fields[name] = usual
                if usual is dataclasses.MISSING:
                    self.missing[key] = hints[name]
        return section(**fields)

    def _part(self, section: Any, value: Mapping[str, Any], where: str, default: Any) -> dict[str, Any]:
        """Return the values of those keys of a section that ``value`` has."""
        self._check_keys(section, value, where)
        hints = self._keys(section)
        return {str(key): self._value(hints[key], child, dotted(where, key)) for key, child in value.items()}

    def _value(self, annotation: Any, value: Any, where: str, default: Any = None) -> Any:
        options = {get_origin(option) or option: option for option in options_of(annotation)}
        section = _dataclass(annotation)
        if where.endswith("dtype") and isinstance(value, str):
            value = DTYPES.get(value, value)
        if value is None and type(None) in options:
            return None
        if self.interpolated and isinstance(value, str) and "${" in value:
            return str(value)
        if Any in options:
            return resolve(value)
        if section is not None and isinstance(value, Mapping):
            return self.section(section, value, where, default)
        if isinstance(value, Mapping) and dict in options:
            of_key, of_value = get_args(options[dict])
            keys = dataclasses.replace(self, strict=False)
            paths = {key: dotted(where, key) for key in value}
            return {keys._value(of_key, key, path): self._value(of_value, value[key], path) for key, path in paths.items()}
        if isinstance(value, list | tuple) and list in options:
            (element,) = get_args(options[list])
            return [self._value(element, child, f"{where}[{index}]") for index, child in enumerate(value)]
        scalars = list(dict.fromkeys(kind for option in options.values() for kind in _scalars(option)))
        if type(value) in scalars or (str in scalars and isinstance(value, str) and not isinstance(value, Plain)):
            return value
        if len(scalars) > 1 and isinstance(value, Plain):
            scalars = [_kind_of(value, scalars)]
        try:
            if len(scalars) == 1 and self._fits(scalars[0], value):
                return _read(scalars[0], value)
        except (ValueError, KeyError):
            pass
        except OverflowError:
            raise ConfigError(f"{where}={shortened(resolve(value))}: must be at most {LARGEST[scalars[0]]}") from None
        has_default = default is not None and section is None and not isinstance(default, list | dict)
        hint = f"; leave it out for {default}" if value is None and has_default else ""
        raise ConfigError(f"{where}={'null' if value is None else repr(resolve(value))} must be {describe(annotation)}{hint}")

    def _fits(self, scalar: type, value: Any) -> bool:
        """Return True if ``value``, of another type, stands for a ``scalar``. numpy's numbers are numbers."""
        exact = isinstance(value, EXACT.get(scalar, ())) and not isinstance(value, bool)
        kind = str if isinstance(value, str) else type(value)
        return exact or (not self.strict and kind in READABLE[scalar])

    def _check_keys(self, section: Any, value: Mapping[str, Any], where: str) -> None:
        hints = self._keys(section)
        unknown = [key for key in value if key not in hints]
        if unknown:
            known = self._known(self.schema, self.plain, "")
            raise ConfigError(_unknown_key(where, str(unknown[0]), list(hints), known, value[unknown[0]]))

    def _known(self, annotation: Any, value: Any, where: str) -> Iterator[str]:
        """Yield the dotted names of the schema. Entries of a dict of dataclasses have the names that ``value`` uses."""
        section = _dataclass(annotation)
        values = value if isinstance(value, Mapping) else {}
        entries = dict.fromkeys(values, (get_args(annotation) or [Any])[-1]) if section is None else self._keys(section)
        for key, inner in entries.items():
            yield dotted(where, key)
            yield from self._known(inner, values.get(key), dotted(where, key))


def _unknown_key(where: str, key: str, allowed: Sequence[str], known: Iterable[str], value: Any) -> str:
    """Return the message for the unknown ``key`` in the section ``where``, which has the keys ``allowed``.

    ``known``: dotted names of all keys.
    """
    known = sorted({*known} - {dotted(where, key)})
    last = {name: name.rpartition(".")[2] for name in known}
    same_name = [name for name in known if last[name] == key.rpartition(".")[2] and (not where or key not in EVERYWHERE)]
    below = [name for name in known if last[name] == key and where and name.startswith(f"{where}.")]
    longer = [dotted(where, name) for name in sorted(allowed) if len(key) > 2 and name.startswith(key)]
    here = [dotted(where, name) for name in difflib.get_close_matches(key, allowed, 1, NEAR)]
    elsewhere = [
        name for end in difflib.get_close_matches(key, last.values(), 1, NEARER) for name in known if last[name] == end
    ]
    meant = next(filter(None, [below, longer[:1], here, same_name, elsewhere[:1]]), [])
    hint = f"; did you mean {' or '.join(map(repr, meant[:SHOWN_HINTS]))}?" if meant else ";"
    names = [*(name for name, _ in leaves(value, dotted(where, key))), *([] if where or same_name else [key])]
    foreign = foreign_hint(names, by_end=not (same_name or below) and not isinstance(value, Mapping))
    if foreign:
        return f"unknown key {foreign}"
    return f"unknown key '{dotted(where, key)}'{hint} allowed here: {_listed(sorted(allowed))}"


def _scalars(option: Any) -> Iterator[type]:
    """Yield the scalar types of a type that is no union."""
    kinds = map(type, get_args(option)) if get_origin(option) is Literal else [option]
    return (kind for kind in kinds if kind in READABLE)


def _kind_of(value: Plain, scalars: Sequence[type]) -> type:
    """Return which of several types a plain value has."""
    if bool in scalars and value.lower() in SWITCH:
        return bool
    kind = type(resolve(value))
    return kind if kind in scalars else str if str in scalars else scalars[0]


def _read(scalar: type, value: Any) -> Any:
    """Return ``value`` as a ``scalar``. Raises ValueError or KeyError if it is none."""
    if scalar is bool:
        return SWITCH[str(value).lower()]
    if scalar is str:
        return str(value).lower() if isinstance(value, bool) else str(value)
    resolved = resolve(value)  # .inf is a number, too
    return resolved if type(resolved) is scalar else scalar(value)


def dotted(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


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


def _listed(names: Sequence[object]) -> str:
    more = f" and {len(names) - SHOWN_KEYS} more" if len(names) > SHOWN_KEYS else ""
    return ", ".join(map(str, names[:SHOWN_KEYS])) + more
