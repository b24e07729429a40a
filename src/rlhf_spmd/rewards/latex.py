# ruff: noqa: RUF001
r"""Spells a mathematical answer as math-verify reads it, and takes its unit apart.

math-verify knows LaTeX in ASCII. Characters such as ``½``, ``√`` or ``≤``, markdown, and numbers with spaces are written
for it here; the rest, such as ``\dfrac12``, it reads itself.
"""

from __future__ import annotations

import re
import unicodedata

from rlhf_spmd.rewards.answers import plain

_SYMBOLS = str.maketrans(
    {
        **{"×": r"\times ", "÷": "/", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "∗": "*", "∞": r"\infty ", "±": r"\pm "},
        **{"≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "≤": r"\le ", "≥": r"\ge "},
        **{"≠": r"\ne ", "°": r"^\circ ", "′": "'", "→": r"\to ", "∖": r"\setminus "},
        **{letter: rf"\mathbb{{{name}}}" for letter, name in zip("ℝℤℚℂℕ", "RZQCN", strict=True)},
    }
)
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_ROOT = re.compile(r"([√∛])\s*(?:\(([^()]*)\)|(\d+|\w)?)")
_SPELLING = [  # pattern and replacement, in order; the comments are examples
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^\s*(?:\*\*|\\\(|\\\[|\$(?!\d)|\s)+|(?:\*\*|(?<!\\)\\\)|(?<!\\)\\\]|(?<!\\)\$|\s)+$", ""),  # $5$, **5**, \(5\)
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),  # \lbrace 1
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),  # 1 \rbrace
        (r"\\\\\s*\[[^\]]*\]", r"\\\\ "),  # \\[4pt]
        (r"\\(?:mathrm|textrm|textbf|mathbf|textit|mathit|textnormal|mbox|operatorname)(?=\s*\{)", r"\\text"),  # \mathrm{cm}
        (r"(?<!\s)\\text\s*\{([a-zA-Z])\}", r" \1"),  # 2\mathrm{i} has no unit
        (r"(?<![\d.])(\d+)\s+(\d+)\s*/\s*(\d+)", r"\1\\frac{\2}{\3}"),  # 1 1/2
        (r"(?<=\d)(?:\\,|\\!|\{,\}|,\\!)\s*(?=\d{3}(?!\d))", ""),  # 12\,500
        (r"\\frac\s*(\\[a-zA-Z]+|\w)\s*(\\[a-zA-Z]+|\w)", r"\\frac{\1}{\2}"),  # \frac12
        (r"\\sqrt\s*(\[[^\]]*\])\s*(\w)", r"\\sqrt\1{\2}"),  # \sqrt[3]2
        (r"(?<=[)\]])\s*U\s*(?=[(\[])", r" \\cup "),  # (0,1)U(2,3)
        (r"(?:\s*(?<!\\);|\s*,?\s*(?:\\text\s*\{\s*)?\b(?:and|or)\b(?:\s*\})?)\s*", ", "),  # 1 and 2
        (r"(?:\\[,:;!>]|\\q?quad|[\\.,:~\s])+$", ""),  # 5\, and the backslash that is left of "5\ "
        (r"(?<=[\d}])\s*\\?%$", " percent"),  # 5\%
    )
]
_SPACED = re.compile(r"-?\d{1,3}(?: \d{3})+")  # 12 500
_GROUPS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d|,\d)")  # 12,500

# Name of a unit -> its short name. A unit is ignored, unless both answers have one and they differ.
_SHORT = {
    name: short
    for short, names in {
        "in": "inch inches",
        "ft": "foot feet",
        "cm": "centimeter centimetre",
        "mm": "millimeter millimetre",
        "m": "meter metre",
        "km": "kilometer kilometre",
        "mi": "mile",
        "mph": "miles/hour mile/hour mi/h mi/hr",
        "kg": "kilogram",
        "g": "gram",
        "lb": "pound",
        "s": "second sec",
        "min": "minute",
        "h": "hour hr",
        "l": "liter litre",
        "ml": "milliliter millilitre",
        "deg": "degree",
        "dollar": "usd",
    }.items()
    for name in names.split()
}
# Words behind a number that are no units.
_NO_UNITS = {"hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "pi", "sqrt", "or", "and", "to"}
_NO_UNITS |= {"times", "plus", "minus", "mod", "if", "for", "where"}
_SPACE_BEHIND = re.compile(r"(?:\\[,:;!> ]|~|\s)+$")
_NAME = r"[a-zA-Z][a-zA-Z./\s]*"
_POWER = r"\s*(?:\^\s*\{?\s*([23])\s*\}?)?"
_IN_TEXT = re.compile(rf"(?<=\S)\s*\\text\s*\{{\s*({_NAME}){_POWER}\s*\}}{_POWER}$")
_BARE = re.compile(rf"(?<=[\d}}])(?:(?:\s|\\[,:;])+|(?=(?:[cmk]m|kg|ml|mph)\b))((?=[a-zA-Z]{{2}}){_NAME}){_POWER}$")

# Units as symbols. They stay in the text: math-verify ignores them.
_SYMBOLIC = {"dollar": re.compile(r"\\?\$\s*[\d.]"), "euro": re.compile("€"), "deg": re.compile(r".*\^\s*\{?\s*\\circ\s*\}?$")}
_LETTER = re.compile(r"(.*[\d}])(?:\s|\\[,:;])*([a-z])")


def without_letter(text: str, unit: str) -> str:
    """Return a spelled answer without a letter at its end that is the other answer's ``unit``: ``12`` for ``12 h``."""
    match = _LETTER.fullmatch(text)
    return match[1] if match and match[2] == unit else text


def spell(text: str) -> tuple[str, str]:
    r"""Return an answer in LaTeX, without its unit, and the short name of the unit ("" without one): ``15``, ``cm2``."""
    text = _RAISED.sub(lambda run: f"^{{{plain(unicodedata.normalize('NFKC', run[0]))}}}", text)
    text = _LOWERED.sub(lambda run: f"_{{{unicodedata.normalize('NFKC', run[0])}}}", text)
    text = _ROOT.sub(_root, text)
    text = "".join(map(_symbol, plain(text).translate(_SYMBOLS)))
    for pattern, replacement in _SPELLING:
        text = pattern.sub(replacement, text)
    if _SPACED.fullmatch(text):
        text = text.replace(" ", "")
    if not re.search(r"[(\[{]", text):  # in brackets a comma separates entries
        text = _GROUPS.sub(lambda number: number[0].replace(",", ""), text)
    match = _IN_TEXT.search(text) or _BARE.search(text)
    if match is None or _NO_UNITS & set(match[1].lower().split()):
        return text, next((unit for unit, form in _SYMBOLIC.items() if form.match(text)), "")
    return _SPACE_BEHIND.sub("", text[: match.start()]), _unit(match[1], next(filter(None, match.groups()[1:]), ""))


def _root(root: re.Match[str]) -> str:
    content = root[2] or root[3]
    command = r"\sqrt" if root[1] == "√" else r"\sqrt[3]"
    return f"{command}{{{content}}}" if content else command


def _symbol(character: str) -> str:
    """Return LaTeX for a fraction such as ``½`` and for Greek letters."""
    if character.isascii():
        return character
    above, slash, below = unicodedata.normalize("NFKC", character).partition("\u2044")
    kind, _, letter = unicodedata.name(character, "").partition(" LETTER ")
    if slash:
        return rf"\frac{{{above}}}{{{below}}}"
    if kind in ("GREEK SMALL", "GREEK CAPITAL"):
        letter = letter.lower().replace("lamda", "lambda")
        return f"\\{letter if kind == 'GREEK SMALL' else letter.capitalize()} "
    return character


def _unit(name: str, power: str) -> str:
    words = re.sub(r"\s*(?:\bper\b|/)\s*", "/", name.lower().replace(".", "")).split()
    if len(words) > 1 and words[0] in ("square", "sq", "cubic", "cu"):
        power = "2" if words[0].startswith("sq") else "3"
        words = words[1:]
    single = " ".join(words)
    singular = single.removesuffix("s") if len(single) > 2 else single
    return _SHORT.get(single, _SHORT.get(singular, singular)) + power
