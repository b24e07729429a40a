"""Multiple choice: is the letter that the response settles on the right one?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from rlhf_spmd.rewards import answers
from rlhf_spmd.rewards.math import boxed

# Removed before the search for a letter: bold, code, LaTeX commands, and quotes or brackets around a letter.
_CLEAN: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\*\*|[`$\"]|\\[()\[\]]"), ""),
    (re.compile(r"(?<!\w)'([A-Z][).:]?)'"), r"\1"),
    (re.compile(r"\[+([A-Z])\]+"), r"(\1)"),
]
_SMALL = re.compile(  # a small letter is one in brackets, or at a line's end
    r"(?P<said>\b(?i:answer|option|choice)(?:\s+is\b)?\s*+[:=]?\s*+)(?:\((?P<a>[a-z])\)|(?P<b>[a-z])(?=\s*\.?\s*(?:\n|\Z)))"
)

# "A" and "I" before other words are words: "a good choice", "I think".
_LETTER = r"(?:\(([A-Z])\)|\b([A-Z])\b(?!(?<=[AI])\s+(?!(?:because|since|as|is|which|and|but|so|for|or|nor)\b)[a-z])(?!'))"
_KINDS = r"(?i:answer|choice|option|statement|choose|pick)\b"
# A clause ends with its sentence, and where another begins: "A is wrong, so the answer".
_ANCHOR = re.compile(
    rf"(?<!\bnot )(?<!n't )(?<!\bdoubt )(?<!\bdoubt the )(?<!\bdoubt that the )"
    rf"\b(?P<kind>{_KINDS})(?P<clause>(?:\**\s*\(?[A-Z]\b\)?|(?!,\s+(?:\w+\s+){{0,3}}{_KINDS})[^\n.;])*)"
)
# Another letter next to the given one: "A or B", "A, B".
_OTHER = r"(?:(?:(?:,\s*)?\bor\b|/)[^\n.;]{0,20}?(?<!\w)\(?[A-Z]\b|(?:,|&|\band\b)\s*\(?[A-Z]\b\)?(?=\s*(?:[.,;!&\n]|\Z|and\b|or\b)))"
_DIRECT = re.compile(rf"(?P<link>(?:\s+is\b)?\s*+[:=]?)\s*+\**+\s*+{_LETTER}(?!\)?\s*{_OTHER})")
_NOT = r"(?:not\b|n't\b|\b(?:wrong|incorrect|except|never|false|distractor|anything but|one of|unlikely|doubt)\b)"
# A statement about a letter ends at a comma, a reason or another letter.
_END = re.compile(r"(?i)[,;]|\b(?:because|since|as|but|while)\b|\bnot\s+\(?(?-i:[A-Z])\b")
_VERDICT = re.compile(rf"(?i)(?P<denied>{_NOT})|\b(?:correct|right|best|answer)\b")
# "B is the correct answer."
_NAMED = re.compile(
    rf"(?:\A|[.\n:,]|\b(?:therefore|thus|so|hence|is)\b)\s*{_LETTER}\s+is\s+(?:the\s+)?(?:correct|right|best|answer)\b",
    re.MULTILINE,
)
_INSTEAD = re.compile(r"\bnot\s+\(?[A-Z]\)?,?\s+but\s+\(?([A-Z])\b")  # "not A but B"
_ALONE = re.compile(r"\s*\(?([A-Za-z])\)?[.:]?\s*")
_BEGINS = re.compile(r"^\s*\(?([A-Z])[).:][.:]?\s+\S", re.MULTILINE)
_BRACKETS = re.compile(r"(?<!\bnot )(?<!n't )\(([A-Z])\)(?!\s+(?:is|are)\s+(?:not|wrong|incorrect|false)\b)")


def _said(anchor: re.Match[str]) -> tuple[bool, str] | None:
    """Returns the letter after "answer" and the like, and whether it is given as the answer or only named ("option B").

    It is the letter that comes first in the clause, else the only one there; a denied letter does not count.
    """
    clause, answers = anchor["clause"], anchor["kind"].lower() == "answer"
    direct = _DIRECT.match(clause)
    if direct is None:
        letters = {one or other for one, other in re.findall(_LETTER, clause)}
        return (answers, letters.pop()) if len(letters) == 1 and not re.search(f"(?i){_NOT}", clause) else None
    verdict, linked = _VERDICT.search(_END.split(clause[direct.end() :])[0]), bool(direct["link"].strip())
    if verdict and verdict["denied"] and not linked:
        return None
    return answers or linked or verdict is not None, direct[2] or direct[3]


def letter(response: str, choices: str = "ABCDEFGHIJ") -> str | None:
    """Returns the letter that a response settles on, or None. The first of these rules that applies decides:

    the boxed letter, or the whole response; the last letter given as the answer ("answer B", "option is B", "option B
    is right"); the last letter that is named ("option B") and not denied; the letter that the response begins with
    (``B) Paris``), unless another line begins with another; its only ``(X)`` that is not denied.
    """
    box = boxed(response)
    text = _clean(response if box is None else box)
    alone = _ALONE.fullmatch(text) or (box is not None and _begun(text))
    if alone:
        found: str | None = alone[1].upper()
    else:
        text = _clean(response)
        said = sorted((one for one in map(_said, _ANCHOR.finditer(text)) if one), key=itemgetter(0))
        begins, brackets = set(_BEGINS.findall(text)), set(_BRACKETS.findall(text))
        begun = begins if _BEGINS.match(text) and brackets <= begins else set()
        named = [one or other for one, other in _NAMED.findall(text)] or _INSTEAD.findall(text)
        only = next((letters.pop() for letters in (begun, brackets) if len(letters) == 1), None)
        found = said[-1][1] if said and said[-1][0] else named[-1] if named else said[-1][1] if said else only
    return found if found is not None and found in choices else None


def _clean(text: str) -> str:
    text = answers.plain(text)
    for pattern, to in _CLEAN:
        text = pattern.sub(to, text)
    return _SMALL.sub(lambda match: f"{match['said']}({(match['a'] or match['b']).upper()})", text)


def _begun(text: str) -> re.Match[str] | None:
    """Returns the letter that a text begins with, unless another line or bracket has another."""
    return _BEGINS.match(text) if len({*_BEGINS.findall(text), *_BRACKETS.findall(text)}) == 1 else None


def right_letters(ground_truth: object) -> list[str]:
    """Returns the letters of a row's answer (``B``, ``(B)``, ``B) Rome``). Raises ValueError for another answer."""
    found = [(_ALONE.fullmatch(text) or _begun(text)) for text in map(_clean, answers.alternatives(ground_truth))]
    if not all(found):
        raise ValueError(f"the row's answer {str(ground_truth)[:80]!r} is not a letter")
    return [letter[1].upper() for letter in found if letter]


def check_rows(where: str, rows: Sequence[Mapping[str, Any]], places: Sequence[str]) -> None:
    """Raises ValueError for an invalid answer, and if no row's answer is a letter."""
    answers.check_rows(where, rows, places, right_letters)


def score(response: str, ground_truth: object, choices: str = "ABCDEFGHIJ") -> float:
    """Returns 1.0 if the response's letter is the answer's, or any of a list, else 0.0.

    Raises ValueError for an answer that is not among ``choices``.
    """
    rights = right_letters(ground_truth)
    if not set(rights) <= set(choices):
        raise ValueError(f"the row's answer {str(ground_truth)[:80]!r} is not one of the choices {choices}")
    return float(letter(response, choices) in rights)
