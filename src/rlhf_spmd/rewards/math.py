r"""MATH: is what stands in the last ``\boxed{}`` of the response the answer?

The data set (Hendrycks et al. 2021, arXiv 2103.03874) ends its solutions with ``\boxed{\frac{3}{4}}``. Two answers are equal if they
are the same text once spacing, units and ways to write are taken away, or the same number (``0.75``, ``3/4``), or as many
equal entries in the same brackets. No algebra is done: ``math_verify`` does it.
"""

from __future__ import annotations

import re
from fractions import Fraction

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_SAID = re.compile(  # possessive: white space is not tried in all its parts
    r"(?i)\banswer\b\**+(?:\s+is\b)?\s*+[:=]?\s*+\**+\s*+(?:(?:\\\[|\$\$)\s*+)?((?:(?!\banswer\b|\.(?:\s|\Z))[^\n])+)"
)
_WORDS = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*"
_UNITS = (
    r"(?:(?:square|sq\.?|cubic|cu\.?)\s*)?(?:inch(?:es)?|in|f(?:oo|ee)t|ft|(?:centi|milli|kilo)?met(?:er|re)s?|[cmk]?m|miles?|mi|"
    r"yards?|yd|(?:kilo|milli)?grams?|k?g|mg|pounds?|lbs?|ounces?|oz|tons?|(?:milli)?lit(?:er|re)s?|m?L|ml|gallons?|cups?|"
    r"seconds?|sec|s|minutes?|min|hours?|hrs?|h|days?|weeks?|months?|years?|degrees?|deg|radians?|rad|cents?|dollars?|percent|"
    r"units?|ways|people|students|points|sides|mph)\.?"
)
_UNIT = rf"\\(?:text|textrm|mathrm|mbox)\s*\{{\s*{_UNITS}(?:(?:\s*/\s*|\s+per\s+){_UNITS})?\s*(?:\^\s*\{{?\d\}}?\s*)?\}}"
_REWRITES: list[tuple[str, str | None]] = [
    (r"\\text\s*\{\s*(?:or|and)\s*\}", ","),
    (r"(?<=\d)(?:\{,\}|,\s*\\!|\\,)\s*(?=\d{3}(?!\d))", ""),  # 1{,}000
    (r"\\!|\\(?:left|right|displaystyle|limits)(?![a-zA-Z])", ""),
    (r"\\[,;:> ]|~|\\q?quad(?![a-zA-Z])", " "),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°", ""),
    (r"\\?[%$]|(?<!\\)\\[()\[\]]", ""),  # and \( \), \[ \]
    (r"(?<=\S)\s*" + _UNIT + r"(?:\s*\^\s*\{?\d\}?)?\s*$", ""),
    (_WORDS + r"\{([^{}]*)\}", r"\1"),
    (r"\{,\}", ","),
    (r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])", None),  # 1,000, see normalise
    (r"(?<![\d.\\])(\d+)\s+(\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}"),  # 1 1/2
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"(?<!\d)\s+|\s+(?!\d)", ""),  # 2 3 is not 23
    (r"\\frac(\{[^{}]*\})(\d)", r"\\frac\1{\2}"),
    (r"\\frac(\d)(\{)", r"\\frac{\1}\2"),
    (r"\\sqrt(\w)", r"\\sqrt{\1}"),
    (r"([\^_])\{(\w(?!\}\d)|-?\d+(?!\}\w))\}", r"\1\2"),  # x^{2}
    (r"\\(?:cdot|times)10\^\{?(-?\d{1,2})\}?", r"e\1"),
    (r"[.,;]+$", ""),
]
_RULES = [(re.compile(pattern), to) for pattern, to in _REWRITES]
_ASSIGNED = re.compile(r"(\\?[a-zA-Z]\w*(?:\([a-z]\))?)(?:=|\\in(?![a-z]))(.*)")  # x = ..., f(x) = ...
_DECIMAL = r"(?:\d{1,60}(?:\.\d{0,60})?|\.\d{1,60})"
_NUMBER = re.compile(rf"([-+]?)({_DECIMAL}(?:e-?\d{{1,2}})?)(?:/({_DECIMAL}))?")
_FRACTION = re.compile(rf"([-+]?)(\d{{1,60}})?\\frac\{{([-+]?{_DECIMAL})\}}\{{([-+]?{_DECIMAL})\}}")


def boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` holds, braces balanced; None where there is none or it is cut off."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if text[start : start + 1] != "{":
        return text[start : start + 1] or None
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start + 1 : end]
    return None


def final_answer(text: str) -> str | None:
    """The last boxed text, or what follows the last "answer:" or "answer is" in its sentence; None without either."""
    said = _SAID.findall(text)
    found = boxed(text)
    return found if found is not None else said[-1] if said else None


def normalise(text: str) -> str:
    """One way to write an answer: see the module. Commas stay where they may be between entries: in brackets, or before a space."""

    def joined(match: re.Match[str]) -> str:
        before = match.string[: match.start()]
        inside = sum(before.count(mark) for mark in ("(", "[", "\\{")) > sum(before.count(mark) for mark in (")", "]", "\\}"))
        return match.group() if inside else match.group().replace(",", "")

    for pattern, to in _RULES:
        text = pattern.sub(joined if to is None else to, text)
    return text


def number(text: str) -> Fraction | None:
    """The value of a normalised decimal, fraction or mixed number, None of anything else."""
    plain, fraction = _NUMBER.fullmatch(text), _FRACTION.fullmatch(text)
    if plain:
        sign, above, below = plain.groups()
        whole, top, bottom = Fraction(0), Fraction(above.rstrip(".")), Fraction((below or "1").rstrip("."))
    elif fraction:
        sign, mixed, above, below = fraction.groups()
        whole, top, bottom = Fraction(mixed or 0), Fraction(above.rstrip(".")), Fraction(below.rstrip("."))
    else:
        return None
    return None if bottom == 0 else (whole + top / bottom) * (-1 if sign == "-" else 1)


def canonical(text: str) -> str:
    """The same text for answers that are the same, see the module. Entries without brackets may come in any order."""
    text = normalise(text)
    value = number(text)
    if value is not None:
        return str(value)
    entries, brackets = _entries(text)
    if len(entries) == 1:
        return text
    each = [canonical(entry) for entry in entries]
    ordered = sorted(each) if brackets in ("", "\\{\\}") else each
    return f"{brackets} {','.join(ordered)}"


def equal(one: str, other: str) -> bool:
    """Whether two answers are the same, see the module. Entries without brackets may come in any order, unless they are values of
    several names. Where both answers say what they are of (``y = 2``), that must be the same."""
    if canonical(one) == canonical(other) != "":
        return True
    one, other = normalise(one), normalise(other)
    if None not in (number(one), number(other)):
        return False
    (ones, around), (others, around_other) = _entries(one), _entries(other)
    (name, value), (name_other, value_other) = _assigned(ones), _assigned(others)
    if name or name_other:
        values = value if name else one, value_other if name_other else other
        return (not name or not name_other or name == name_other) and equal(*values)
    if around != around_other or len(ones) != len(others) or len(ones) < 2:
        return False
    if around in ("", "\\{\\}"):
        names = [{_assigned([entry])[0] for entry in entries} - {""} for entries in (ones, others)]
        if max(map(len, names)) < 2 or names[0] == names[1]:
            ones, others = sorted(ones, key=_order), sorted(others, key=_order)
    return all(map(equal, ones, others))


def _assigned(entries: list[str]) -> tuple[str, str]:
    """Of a single ``x=3`` the name and the value; without a name empty texts."""
    found = _ASSIGNED.fullmatch(entries[0]) if len(entries) == 1 else None
    return (found.group(1), found.group(2)) if found else ("", "")


def _order(entry: str) -> str:
    entry = _assigned([entry])[1] or entry
    value = number(entry)
    return entry if value is None else str(value)


def _entries(text: str) -> tuple[list[str], str]:
    """Of a tuple, interval, set or list its entries, and the brackets around them."""
    around = next((mark for mark in ("\\{", "(", "[") if text.startswith(mark)), "")
    closing = next((mark for mark in ("\\}", ")", "]") if around and text.endswith(mark)), "")
    inside = text[len(around) : len(text) - len(closing)] if closing else text
    found, depth, start = [], 0, 0
    for i, character in enumerate(inside):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            found.append(inside[start:i])
            start = i + 1
    return [*found, inside[start:]], around + closing if closing else ""


def right_answer(ground_truth: object) -> str:
    """The answer itself, of a whole solution too."""
    found = boxed(str(ground_truth))
    return str(ground_truth) if found is None else found


def score(response: str, ground_truth: object) -> float:
    r"""1.0 if the last ``\boxed{}`` is the answer (a solution with a box, or the answer alone), else 0.0."""
    found = boxed(response)
    return float(found is not None and equal(found, right_answer(ground_truth)))


def flexible(response: str, ground_truth: object) -> float:
    """As ``score``, and where nothing is boxed by what is said, see ``final_answer``."""
    found = final_answer(response)
    return float(found is not None and equal(found.rstrip("* "), right_answer(ground_truth)))
