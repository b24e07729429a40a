"""What a field of a configuration may hold, as its type says it, and settings that do nothing.

The type of a field has its range, as in ``PositiveInt`` or ``Annotated[float, Range(least=0, below=1)]``, or its choices, as in
``Literal["a", "b"]``. :func:`check_fields` checks both. :func:`idle_settings` yields settings that do nothing as the others are.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rlhf_spmd.config.words import dotted, listed, nearest, shortened

WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "null", Any: "any value"}
# numbers reach devices and other processes as int32 and float32: larger ones would be other numbers there, or end a process
LARGEST = {int: 2**31 - 1, float: (2 - 2**-23) * 2.0**127}


@dataclass(frozen=True)
class Range:
    """The finite numbers within the bounds. A side without a bound has that of ``LARGEST``, which ``words`` leaves out."""

    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    most: float = math.inf

    def allows(self, value: float) -> bool:
        finite = isinstance(value, int) or math.isfinite(value)
        return finite and self.least <= value <= self.most and self.above < value < self.below

    def too_large(self, value: float, kind: type) -> str:
        """Return what ``value`` of a key of type ``kind`` must be to fit in 32 bits; "" if it fits, is infinite, or has a bound."""
        largest = LARGEST[kind]
        if isinstance(value, float) and not math.isfinite(value):
            return ""
        if value > largest and not math.isfinite(min(self.most, self.below)):
            return f"at most {largest}, which 32 bits hold"
        if value < -largest and not math.isfinite(max(self.least, self.above)):
            return f"at least {-largest}, which 32 bits hold"
        return ""

    def words(self) -> list[str]:
        """Return the bounds in words, as ``["at least 0", "below 1"]``."""
        bounds = {"at least": self.least, "above": self.above, "below": self.below, "at most": self.most}
        return [f"{word} {bound}" for word, bound in bounds.items() if math.isfinite(bound)]

    def refusal(self, value: float) -> str:
        """Return in words what ``value``, which is out of the range, must be."""
        words = self.words()
        finite = isinstance(value, int) or math.isfinite(value)
        return " and ".join(words) if words and finite else ", ".join(["a finite number", *words])


PositiveInt = Annotated[int, Range(least=1)]
NonNegativeInt = Annotated[int, Range(least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(least=0)]
FiniteFloat = Annotated[float, Range()]
Fraction = Annotated[float, Range(least=0, most=1)]
PositiveFraction = Annotated[float, Range(above=0, most=1)]
NumRows = Annotated[int, Range(least=1, most=2**20)]  # of a step or a request: each takes the host kilobytes
Workers = Annotated[int, Range(least=1, most=1024)]  # threads or processes of one rank: a process may not start many more
Seconds = Annotated[float, Range(above=0, most=100_000_000)]  # three years: clocks and threads still take multiples of it
Seed = Annotated[int, Range(least=-(2**63), most=2**63 - 1)]  # draws use 64 bits of a seed: beyond, two seeds would be one


def options_of(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or a tuple of ``annotation`` alone if it is no union."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def idle_settings(section: Any, where: str) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield the settings of a dataclass that differ from their defaults and do nothing: key, value, default, and the condition.

    ``needs`` of the class and of its bases lists conditions: ``{"val_path": ("val_batch_size",), "type=adaptive": ("horizon",)}``.
    A condition is met where its field is true, or has the value after ``=``; `` or `` separates alternatives.
    """
    for condition, keys in needs_of(type(section)):
        alternatives = [alternative.partition("=") for alternative in condition.split(" or ")]
        settings = {name: getattr(section, name) for name, _, _ in alternatives}
        if any(str(settings[name]).lower() == value if value else settings[name] for name, _, value in alternatives):
            continue
        for key in keys:
            name, _, inner = key.partition(".")
            default = field_default(section.__dataclass_fields__[name])
            default = attrgetter(inner)(default) if inner else default
            value = attrgetter(key)(section)
            if value != default:
                yield f"{where}.{key}", value, default, f"{where}.{condition}"


def needs_of(section: type) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what ``needs`` of a dataclass and of its bases says: a condition, and the keys that do nothing without it."""
    for base in section.__mro__:
        yield from vars(base).get("needs", {}).items()


def field_default(f: Field[Any]) -> Any:
    """Return the default of a field; MISSING if the field must be given."""
    return f.default if f.default_factory is MISSING else f.default_factory()


@cache
def full_type_hints(section: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, with their ranges."""
    return typing.get_type_hints(section, include_extras=True)


def describe(annotation: Any) -> str:
    """Return a type in words, with its article: ``an integer, at least 1``."""
    options = options_of(annotation)
    if len(options) > 1:
        words = [describe(option) for option in options]
        return (", or " if any("," in word for word in words) else " or ").join(words)
    if dataclasses.is_dataclass(annotation):
        return f"a mapping with the keys {listed([f.name for f in dataclasses.fields(annotation)])}"
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin is Annotated:
        bounds = [word for limits in arguments[1:] if isinstance(limits, Range) for word in limits.words()]
        return ", ".join([describe(arguments[0]), *bounds])
    if arguments:
        return f"{'a list, each entry' if origin is list else 'a mapping, each value'} {describe(arguments[-1])}"
    return WORDS.get(annotation, str(annotation))


def check_fields(section: Any, where: str) -> None:
    """Raise ValueError for the first field of a dataclass that is out of its range or none of its choices. ``where``: the dataclass's
    dotted path, "" for the root."""
    hints = full_type_hints(type(section))  # type: ignore[arg-type]  # mypy: a class is hashable
    for f in dataclasses.fields(section):
        for violation in _violations(hints[f.name], getattr(section, f.name), dotted(where, f.name)):
            raise ValueError(violation)


def _violations(annotation: Any, value: Any, key: str) -> Iterator[str]:
    """Yield a line for each part of ``value``, the value of ``key``, that its type does not allow."""
    options = [option for option in options_of(annotation) if option is not type(None)]
    if value is None or Any in options:
        return
    if len(options) > 1:
        if all(any(_violations(option, value, key)) or not isinstance(value, _class_of(option)) for option in options):
            yield f"{key}={value!r} must be {describe(annotation)}"
        return
    origin = get_origin(options[0])
    arguments = get_args(options[0])
    scalar = arguments[0] if origin is Annotated else options[0]
    if scalar in LARGEST and isinstance(value, int | float):
        yield from _range_violations(scalar, arguments[1:] if origin is Annotated else (), value, key)
    elif origin is Literal and value not in arguments:
        hint = nearest(str(value), list(map(str, arguments))) or ";"
        null = ", or null" if annotation is not options[0] else ""
        yield f"{key}={value!r} is not known{hint} allowed: {listed(arguments)}{null}"
    elif origin is list:
        for index, entry in enumerate(value):
            yield from _violations(arguments[0], entry, f"{key}[{index}]")
    elif origin is dict:
        for name, entry in value.items():
            yield from _violations(arguments[0], name, f"{key}.{name}")
            yield from _violations(arguments[1], entry, f"{key}.{name}")


def _range_violations(scalar: type, limits: tuple[Any, ...], value: float, key: str) -> Iterator[str]:
    """Yield a line for each range of ``limits`` that ``value`` is out of. Without a range, 32 bits are the limit."""
    ranges = [limit for limit in limits if isinstance(limit, Range)]
    for limit in ranges or [Range()]:
        if ranges and not limit.allows(value):
            yield f"{key}={shortened(value)}: must be {limit.refusal(value)}"
        elif bound := limit.too_large(value, scalar):
            yield f"{key}={shortened(value)}: must be {bound}"


def _class_of(annotation: Any) -> Any:
    """Return the class, or classes, of the values of a type that is no union."""
    origin = get_origin(annotation)
    if origin is Literal:
        return tuple(map(type, get_args(annotation)))
    base = get_args(annotation)[0] if origin is Annotated else origin or annotation
    return (int, float) if base is float else base
