# ruff: noqa: RUF001
r"""One way to write a mathematical answer: ``\dfrac12``, ``\frac{1}{2}`` and ``½`` become the same text.

``normalise`` applies the steps of ``STEPS`` in order. No step calculates.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from rlhf_spmd.rewards.answers import plain

_Rewrite = tuple[str, str | Callable[[re.Match[str]], str]]  # a pattern, and what is written for it

# Units by short name. A unit after an answer is ignored, unless both answers have one and they differ.
_UNITS = {
    "in": r"inch(?:es)?|in",
    "ft": r"f(?:oo|ee)t|ft",
    "cm": r"centimet(?:er|re)s?|cm",
    "mm": r"millimet(?:er|re)s?|mm",
    "km": r"kilomet(?:er|re)s?|km",
    "m": r"met(?:er|re)s?|m",
    "mi": r"miles?|mi",
    "yd": r"yards?|yd",
    "mph": r"mph|miles?\s+per\s+hour|miles?\s*/\s*hour",
    "kg": r"kilograms?|kg",
    "mg": r"milligrams?|mg",
    "g": r"grams?|g",
    "lb": r"pounds?|lbs?",
    "oz": r"ounces?|oz",
    "t": r"tons?",
    "ml": r"millilit(?:er|re)s?|m[lL]",
    "l": r"lit(?:er|re)s?|L",
    "gal": r"gallons?",
    "cup": r"cups?",
    "s": r"seconds?|sec|s",
    "min": r"minutes?|min",
    "h": r"hours?|hrs?|h",
    "day": r"days?",
    "week": r"weeks?",
    "month": r"months?",
    "year": r"years?",
    "deg": r"degrees?|deg",
    "rad": r"radians?|rad",
    "cent": r"cents?",
    "dollar": r"dollars?",
    "percent": r"percent(?:age)?|pct",
    "unit": r"units?",
    "way": r"ways?",
    "person": r"people|students",
    "point": r"points?",
    "side": r"sides?",
    "digit": r"digits?",
    "integer": r"integers?",
}
_ANY = "|".join(f"(?:{names})" for names in _UNITS.values())
_NAME = rf"(?P<area>(?:square|sq\.?)\s*)?(?P<volume>(?:cubic|cu\.?)\s*)?(?P<name>{_ANY})\.?"
_PER = rf"(?P<per>(?:\s*/\s*|\s+per\s+)(?:{_ANY})\.?)?"
_POWER = r"(?:\s*\^\s*\{{?(?P<{}>[23])\}}?)?"
_SET = rf"\\(?:text|textrm|textnormal|mathrm|mbox)\s*\{{\s*{_NAME}{_PER}{_POWER.format('inner')}\s*\}}{_POWER.format('outer')}"
# Without \text: after a number, a space between, and no name that may be a product of letters.
_BARE = rf"(?:(?<=[\d}}])|(?<=\\pi))\s+(?!(?:[a-zA-Z]|mi|m[glL])\b){_NAME}{_PER}{_POWER.format('outer')}"
_UNIT = [re.compile(rf"{pattern}\s*$") for pattern in (rf"(?<=\S)\s*{_SET}", _BARE)]

_SYMBOLS = str.maketrans(
    {
        **{"×": r"\times ", "÷": "/", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": "*", "∞": r"\infty ", "±": r"\pm "},
        **{"≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset "},
        **{"°": r"^\circ ", "′": "'", "→": r"\to ", "…": r"\ldots ", "∖": r"\setminus ", "√": r"\root "},
        **{letter: rf"\mathbb{{{name}}}" for letter, name in zip("ℝℤℚℂℕ", "RZQCN", strict=True)},
    }
)
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+"), re.compile("[₀₁₂₃₄₅₆₇₈₉]+")


def _symbols(text: str) -> str:
    """Returns LaTeX for mathematical characters, and one blank for all white space."""
    text = _RAISED.sub(lambda run: f"^{{{plain(unicodedata.normalize('NFKC', run.group()))}}}", text)
    text = _LOWERED.sub(lambda run: f"_{{{unicodedata.normalize('NFKC', run.group())}}}", text)
    return "".join(map(_symbol, " ".join(plain(text).split()).translate(_SYMBOLS)))


def _symbol(one: str) -> str:
    if one.isascii():
        return one
    above, slash, below = unicodedata.normalize("NFKC", one).partition("\u2044")
    kind, _, letter = unicodedata.name(one, "").partition(" LETTER ")
    if slash:
        return rf"\frac{{{above}}}{{{below}}}"
    if kind in ("GREEK SMALL", "GREEK CAPITAL"):
        letter = letter.lower().replace("lamda", "lambda")
        return f"\\{letter if kind == 'GREEK SMALL' else letter.capitalize()} "
    return one


@functools.lru_cache(4096)
def unit(text: str) -> str:
    """Returns the unit after an answer, by its short name and power; "" without one."""
    laid_out = _symbols_and_layout(text) if len(text) <= _LONGEST else ""
    found = next((match for match in (pattern.search(laid_out) for pattern in _UNIT) if match), None)
    if found is None:
        return ""
    groups = found.groupdict()
    power = groups.get("inner") or groups["outer"] or (groups["area"] and "2") or (groups["volume"] and "3") or ""
    per = re.sub(r"[\s/.]|\bper\b", "", groups["per"] or "")
    return _short(found["name"]) + power + (per and "/" + _short(per))


def _short(name: str) -> str:
    return next((short for short, names in _UNITS.items() if re.fullmatch(names, name)), name)


_ROW = r"\cr{}"  # between rows


def _matrix(match: re.Match[str]) -> str:
    rows = re.split(r"\\\\(?:\s*\[[^\]]*\])?|\\cr(?![a-zA-Z])", match["body"])
    rows = [row for row in rows if row.strip()]
    # a space after the comma, which is no part of a number
    return rf"\matrix{{{_ROW.join(', '.join(cell.strip() for cell in row.split('&')) for row in rows)}}}"


def _thousands(match: re.Match[str]) -> str:
    """Removes commas, except in brackets, where they separate entries."""
    before = match.string[: match.start()]
    inside = sum(before.count(mark) for mark in ("(", "[", "\\{")) > sum(before.count(mark) for mark in (")", "]", "\\}"))
    return match.group() if inside else match.group().replace(",", "")


def _unwrap(match: re.Match[str]) -> str:
    """Removes round brackets or braces around the whole text, unless it is a tuple."""
    text, inside = "", match.group()
    while text != inside:
        text, (entries, brackets) = inside, split(inside)
        inside = entries[0] if brackets == "()" and len(entries) == 1 else text[1:-1] if brackets == "{}" else text
    return text


def _ascending(match: re.Match[str]) -> str:
    """Returns ``2<x`` for ``x>2``."""
    return "".join({">": "<", "≥": "≤"}.get(part, part) for part in reversed(re.split("([>≥])", match.group())))


def _lower(match: re.Match[str]) -> str:
    return match.group().lower()


_WORDS = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox|operatorname)\s*"
_BEGIN = r"(?<=[,(\[{=;])|^"  # of an entry
_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_INSIDE = r"(?:[^()]|\([^()]*\))*"
_FACTORS = r"(?:[\w.!^]|\\[a-zA-Z]++|\{[^{}]*\})++"
_FACTOR = r"(?:\d+|[a-zA-Z]|\\sqrt\{[^{}]*\}|\\[a-zA-Z]+)(?:\^\w)?"
_LAYOUT: list[_Rewrite] = [
    (r"^\{.*\}$", _unwrap),
    (r"^\s*\*\*|\*\*\s*$", ""),  # bold
    (r"\\\\(?:\s*\[[^\]]*\])?", r"\\cr{}"),
    (r"\\!|\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits)(?![a-zA-Z])", ""),
    (r"\\[,;:> ]|~|\\q?quad(?![a-zA-Z])", " "),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])", ""),
    (r"\\?[%$€£]|(?<!\\)\\[()\[\]]", ""),  # and \( \), \[ \]
    (r"(?:\\cr\{\}|[.,;\s])+$", ""),
]
STEPS: dict[str, list[_Rewrite]] = {
    "lists": [
        (r"\s*+,?\s*+(?:\\text\s*\{[\s,]*(?:or|and)\s*\}|(?<![a-zA-Z\\])(?:or|and)(?![a-zA-Z]))\s*|;", ", "),
        (r"\\([lr])brace(?![a-zA-Z])", lambda match: "\\{" if match[1] == "l" else "\\}"),
    ],
    "matrices": [
        (r"\\begin\{(?P<kind>[pb](?:small)?matrix)\}(?P<body>.*?)\\end\{(?P=kind)\}", _matrix),
        (
            r"(?:\\left\s*)?[(\[]\s*\\begin\{(?P<kind>matrix|smallmatrix|array)\}(?:\{[lcr|\s]*\})?(?P<body>.*?)"
            r"\\end\{(?P=kind)\}\s*(?:\\right\s*)?[)\]]",
            _matrix,
        ),
    ],
    "thousands": [(r"(?<=\d)(?:\{,\}|,\s*\\!|\\,)\s*(?=\d{3}(?!\d))", "")],  # 1{,}000
    "layout": [*_LAYOUT],
    "units": [(pattern.pattern, "") for pattern in _UNIT],
    "words": [(_WORDS + r"\{([^{}]*)\}", r"\1"), (r"\{,\}", ",")],
    "names": [
        (r"(?<![a-zA-Z\\])(?:pi)(?![a-zA-Z])", r"\\pi "),
        (r"(?<![a-zA-Z\\])inf(?:inity|ty)?(?![a-zA-Z])", r"\\infty "),
        (r"(?<![a-zA-Z\\])sqrt(?![a-zA-Z])", r"\\root "),
        (r"\*\*", "^"),
        (r"\\leq?(?:slant)?(?![a-zA-Z])|<=", "≤"),
        (r"\\geq?(?:slant)?(?![a-zA-Z])|>=", "≥"),
        (r"\\neq?(?![a-zA-Z])|!=", "≠"),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\[lr]?vert(?![a-zA-Z])|\\mid(?![a-zA-Z])", "|"),
        (r"\\rightarrow(?![a-zA-Z])", r"\\to "),
        (r"\\varnothing(?![a-zA-Z])", r"\\emptyset "),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup"),
        (r"\\(sin|cos|tan|cot|sec|csc|ln|log)\s*\(\s*(\w+|\\[a-zA-Z]+)\s*\)(?!\s*[\w\\(^!])", r"\\\1 \2"),
    ],
    "numbers": [
        (r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)", _thousands),
        (r"(?<![\d.,])(?<![\d.,/]\s)\d{1,3}(?: \d{3})+(?!\s*[\d/])", lambda match: match.group().replace(" ", "")),
        (r"(?<![\d.\\])(\d+)\s+(\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}"),  # 1 1/2
    ],
    "fractions": [
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*([\w]|\\[a-zA-Z]+(?![{\[a-zA-Z]))", r"\\frac{\1}"),
        (rf"\\frac\s*({_GROUP})\s*(\w|\\[a-zA-Z]+(?![{{\[a-zA-Z]))", r"\\frac\1{\2}"),
    ],
    "roots": [
        (r"\\(?:root|sqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\root\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
        (r"\\root\s*", r"\\sqrt"),
        (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
    ],
    "space": [(r"(?<!\d)\s+|\s+(?!\d)", "")],  # 2 3 is not 23
    "powers": [
        (r"([\^_])\{(\w(?!\}\d)|-?\d+(?!\}\w))\}", r"\1\2"),  # x^{2}
        (r"(?<=\d)(?:\\cdot|\\times|\*)10\^(-?\d{1,2})(?![\d}])", r"e\1"),
        (r"(?<=\d)(?:\\times|\*)(?=\d)", r"\\cdot"),
        (r"(?<=\d)(?:\\cdot|\\times|\*)(?=[\\a-zA-Z(])", ""),
    ],
    "signs": [
        (
            rf"({_BEGIN})([-+]?)(?:\(({_INSIDE})\)|({_FACTORS}))/(?:\(({_INSIDE})\)|({_FACTOR}))(?=$|[,)\]}};])",
            lambda match: rf"{match[2]}\frac{{{match[3] or match[4]}}}{{{match[5] or match[6]}}}",
        ),
        (rf"({_BEGIN})\+", ""),
        (rf"({_BEGIN})\\frac\{{-((?:[^-+{{}}]|\{{[^{{}}]*\}})+)\}}", r"-\\frac{\2}"),
    ],
    "wrapping": [(r"^[({].*[)}]$", _unwrap), (r"[.,;]+$", "")],
    "words and order": [(r"^[^<≤=,]*[>≥][^<≤=,]*$", _ascending), (r"^(?:No|[a-zA-Z][a-z]{2,}(?:[A-Z][a-z]{2,})*)$", _lower)],
}
_COMPILED = [(re.compile(pattern), to) for step in STEPS.values() for pattern, to in step]
_LAID_OUT = [(re.compile(pattern), to) for pattern, to in _LAYOUT]
_LONGEST = 1_000  # characters; some patterns take seconds for more
_DECIMAL = r"(?:\d{1,60}(?:\.\d{0,60})?|\.\d{1,60})"
_NUMBER = re.compile(rf"([-+]?)({_DECIMAL}(?:e-?\d{{1,2}})?)(?:/({_DECIMAL}))?")
_FRACTION = re.compile(rf"([-+]?)(\d{{1,60}})?\\frac\{{([-+]?{_DECIMAL})\}}\{{([-+]?{_DECIMAL})\}}")
_OPENING, _CLOSING = ("\\matrix{", "\\{", "(", "[", "{"), ("\\}", ")", "]", "}")
_PAIRS = ("\\matrix{}", "\\{\\}", "()", "[]", "(]", "[)", "{}")


def _symbols_and_layout(text: str) -> str:
    text = _symbols(text)
    for pattern, to in _LAID_OUT:
        text = pattern.sub(to, text)
    return text


@functools.lru_cache(4096)  # the responses to a prompt share its answer
def normalise(text: str) -> str:
    """Returns one way to write an answer, as the module says. Commas stay where they may separate entries: in brackets, or
    before a space.

    A text too long for an answer only loses its white space.
    """
    if len(text) > _LONGEST:
        return re.sub(r"\s+", "", text)
    text = _symbols(text)
    for pattern, to in _COMPILED:
        text = pattern.sub(to, text)
    return text


def number(text: str) -> Fraction | None:
    """Returns the value of a normalised decimal, fraction or mixed number, else None."""
    decimal, fraction = _NUMBER.fullmatch(text), _FRACTION.fullmatch(text)
    if decimal:
        sign, above, below = decimal.groups()
        whole, top, bottom = Fraction(0), Fraction(above.rstrip(".")), Fraction((below or "1").rstrip("."))
    elif fraction:
        sign, mixed, above, below = fraction.groups()
        whole, top, bottom = Fraction(mixed or 0), Fraction(above.rstrip(".")), Fraction(below.rstrip("."))
    else:
        return None
    return None if bottom == 0 else (whole + top / bottom) * (-1 if sign == "-" else 1)


def split(text: str) -> tuple[list[str], str]:
    """Returns the entries of a normalised tuple, interval, matrix, set, union or list, and the brackets around them.

    The brackets are ``\\cup`` for a union, and ``\\matrix 2,2`` with the lengths of its rows for a matrix. Any other
    text is its only entry.
    """
    opening = next((mark for mark in _OPENING if text.startswith(mark)), "")
    closing = next((mark for mark in _CLOSING if text.endswith(mark)), "")
    inside = text[len(opening) : len(text) - len(closing)]
    if opening + closing not in _PAIRS or _cut(inside, None) is None:
        entries = _cut(text, ",") or [text]
        union = _cut(text, r"\cup") or [text]
        return (union, r"\cup") if len(entries) == 1 < len(union) else (entries, "")
    if opening == r"\matrix{":
        rows = [row.split(",") for row in inside.split(_ROW)]
        return [cell for row in rows for cell in row], r"\matrix " + ",".join(str(len(row)) for row in rows)
    return _cut(inside, ",") or [inside], opening + closing


def _cut(text: str, mark: str | None) -> list[str] | None:
    """Returns the parts between marks outside brackets, or None if a bracket closes that did not open."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return None
        if mark and depth == 0 and text.startswith(mark, at):
            parts.append(text[start:at])
            start = at + len(mark)
    return [*parts, text[start:]]
