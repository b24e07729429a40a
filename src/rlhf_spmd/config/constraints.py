"""What a field of a configuration may hold, said in its type, and settings that do nothing.

A field says its range as ``PositiveInt`` or ``Annotated[float, Range(least=0, below=1)]`` and its choices as
``Literal["a", "b"]``. ``rules.check_section`` checks both. ``load.check_tree`` also refuses a setting that does nothing beside the
other settings (:func:`idle_settings`).
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass
from operator import attrgetter
from typing import Annotated, Any, Union, get_args, get_origin

# numbers reach devices and other processes as int32 and float32: larger ones would be other numbers there, or end a process
LARGEST = {int: 2**31 - 1, float: (2 - 2**-23) * 2.0**127}


@dataclass(frozen=True)
class Range:
    """The finite numbers within the bounds that are given; where none is given, those of ``LARGEST``, which ``words`` do not say."""

    least: float = -math.inf
    above: float = -math.inf
    below: float = math.inf
    most: float = math.inf

    def allows(self, value: float) -> bool:
        finite = isinstance(value, int) or math.isfinite(value)
        return finite and self.least <= value <= self.most and self.above < value < self.below

    def too_large(self, value: float, kind: type) -> str:
        """Return what ``value`` of a key of type ``kind`` must be to fit in 32 bits; "" if it does, is infinite, or has own bounds."""
        largest = LARGEST[kind]
        if isinstance(value, float) and not math.isfinite(value):
            return ""
        if value > largest and not math.isfinite(min(self.most, self.below)):
            return f"at most {largest}, which 32 bits hold"
        if value < -largest and not math.isfinite(max(self.least, self.above)):
            return f"at least {-largest}, which 32 bits hold"
        return ""

    def words(self) -> list[str]:
        """Return ``["at least 0", "below 1"]``."""
        bounds = {"at least": self.least, "above": self.above, "below": self.below, "at most": self.most}
        return [f"{word} {bound}" for word, bound in bounds.items() if math.isfinite(bound)]

    def refusal(self, value: float) -> str:
        """Return what ``value``, which is out of the range, must be."""
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
    """Return the members of a union; a type that is none by itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def idle_settings(section: Any, where: str) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield the settings of a dataclass that differ from their defaults and do nothing: key, value, default, and what they need.

    ``needs`` of its class and of the bases lists them: ``{"val_path": ("val_batch_size",), "type=adaptive": ("horizon",)}``. A
    setting counts where the field that it needs is true, or has the value after ``=``; `` or `` separates alternatives.
    """
    for needed, keys in needs_of(type(section)):
        pairs = [condition.partition("=") for condition in needed.split(" or ")]
        settings = {name: getattr(section, name) for name, _, _ in pairs}
        if any(str(settings[name]).lower() == value if value else settings[name] for name, _, value in pairs):
            continue
        for key in keys:
            first, _, inner = key.partition(".")
            field: Field[Any] = section.__dataclass_fields__[first]
            default = field.default if field.default_factory is MISSING else field.default_factory()
            default = attrgetter(inner)(default) if inner else default
            value = attrgetter(key)(section)
            if value != default:
                yield f"{where}.{key}", value, default, f"{where}.{needed}"


def needs_of(section: type) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what ``needs`` of a dataclass and of its bases says: a condition, and the keys that do nothing without it."""
    for base in section.__mro__:
        yield from vars(base).get("needs", {}).items()
