"""Multiple choice: is the letter that the response settles on the right one?"""

from __future__ import annotations

import re
from operator import itemgetter

from rlhf_spmd.rewards.math import boxed, normalise

# "A" and "I" before other words are words: "a good choice", "I think".
_LETTER = r"(?:\(([A-Z])\)|\b([A-Z])\b(?!(?<=[AI])\s+(?!(?:because|since|as|is|which|and|but|so|for|or|nor)\b)[a-z])(?!'))"
_KINDS = r"(?i:answer|choice|option)\b"
# A clause ends with its sentence, and where another begins: "A is wrong, so the answer".
_ANCHOR = re.compile(
    rf"(?<!\bnot )\b(?P<kind>{_KINDS})(?P<clause>(?:\**\s*\(?[A-Z]\b\)?|(?!,\s+(?:\w+\s+){{0,3}}{_KINDS})[^\n.;])*)"
)
_DIRECT = re.compile(rf"(?P<link>(?:\s+is\b)?\s*+[:=]?)\s*+\**+\s*+{_LETTER}(?![*\s]*(?:\bor\b|/)[*\s]*\(?[A-Z]\b)")
_NOT = r"(?:not\b|n't\b|\b(?:wrong|incorrect|except|never|false|distractor)\b)"
# What is said of a letter ends at a comma, a reason or another letter.
_END = re.compile(r"(?i)[,;]|\b(?:because|since|as|but|while)\b|\bnot\s+\(?(?-i:[A-Z])\b")
_VERDICT = re.compile(rf"(?i)(?P<denied>{_NOT})|\b(?:correct|right|best|answer)\b")
_ALONE = re.compile(r"\s*\**\(?([A-Z])\)?[.:]?\s*\**\s*")
_BEGINS = re.compile(r"^\s*\**\(?([A-Z])[).:]\**[.:]?\s+\S", re.MULTILINE)
_BRACKETS = re.compile(r"(?<!\bnot )(?<!n't )\(([A-Z])\)(?!\s+(?:is|are)\s+(?:not|wrong|incorrect|false)\b)")


def _said(anchor: re.Match[str]) -> tuple[bool, str] | None:
    """The letter that stands first in what follows "answer", else the only one there, if it is not denied; and whether it is given as
    the answer, not only named ("option B")."""
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
    """The boxed letter or the whole response, else the last that is given as the answer ("answer B", "option is B", "option B is
    right"), else the last that is named ("option B") and not denied, else the one that the response begins with (``B) Paris``) if no
    other line does so with another, else its only ``(X)`` that is not denied."""
    box = boxed(response)
    alone = _ALONE.fullmatch(normalise(box) if box is not None else response)
    if alone:
        found: str | None = alone.group(1)
    else:
        said = sorted((one for one in map(_said, _ANCHOR.finditer(response)) if one), key=itemgetter(0))
        begins, brackets = set(_BEGINS.findall(response)), set(_BRACKETS.findall(response))
        begun = begins if _BEGINS.match(response) and brackets <= begins else set()
        only = next((letters.pop() for letters in (begun, brackets) if len(letters) == 1), None)
        found = said[-1][1] if said else only
    return found if found is not None and found in choices else None


def score(response: str, ground_truth: object, choices: str = "ABCDEFGHIJ") -> float:
    """1.0 if the response's letter is the answer's (``B``, ``(B)``), else 0.0. Raises ValueError for another answer."""
    right = str(ground_truth).strip().strip("().").upper()
    if len(right) != 1 or right not in choices:
        raise ValueError(f"the row's answer {str(ground_truth)[:80]!r} is none of the choices {choices}")
    return float(letter(response, choices) == right)
