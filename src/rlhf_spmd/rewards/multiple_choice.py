"""Multiple choice: is the letter that the response settles on the right one?"""

from __future__ import annotations

import re

from rlhf_spmd.rewards.math import boxed, normalise

# "A" and "I" before other words are words: "a good choice", "I think".
_LETTER = r"(?:\(([A-Z])\)|\b([A-Z])\b(?!(?<=[AI])\s+(?!because|since|as|is|which|and|but|so|for)[a-z])(?!'))"
_ANCHOR = re.compile(r"(?i:\b(?:answer|choice|option)\b)(?P<clause>(?:\**\s*\(?[A-Z]\b\)?|[^\n.])*)")
_DIRECT = re.compile(rf"(?:\s+is)?\s*[:=]?\s*\**\s*{_LETTER}")
_NOT = re.compile(r"(?i)\bnot\b|n't\b|\bwrong\b|\bincorrect\b|\bexcept\b")
_ALONE = re.compile(r"\s*\**\(?([A-Z])\)?[.:]?\s*\**\s*")
_BEGINS = re.compile(r"^\s*\**\(?([A-Z])[).:]\**[.:]?\s+\S", re.MULTILINE)
_BRACKETS = re.compile(r"(?<!\bnot )(?<!n't )\(([A-Z])\)(?!\s+(?:is|are)\s+(?:not|wrong|incorrect|false)\b)")


def _said(clause: str) -> str | None:
    """The letter that stands first in what follows "answer", else the only one there if nothing is denied."""
    direct = _DIRECT.match(clause)
    letters = {one or other for one, other in re.findall(_LETTER, clause)}
    return (
        direct.group(1) or direct.group(2)
        if direct
        else letters.pop()
        if len(letters) == 1 and not _NOT.search(clause)
        else None
    )


def letter(response: str, choices: str = "ABCDEFGHIJ") -> str | None:
    """The boxed letter or the whole response, else the last that is said after "answer", "choice" or "option", else the one that
    the response begins with (``B) Paris``) if no other line does so with another, else its only ``(X)`` that is not denied."""
    box = boxed(response)
    alone = _ALONE.fullmatch(normalise(box) if box is not None else response)
    if alone:
        found: str | None = alone.group(1)
    else:
        said = [one for one in (_said(match["clause"]) for match in _ANCHOR.finditer(response)) if one]
        begins, brackets = set(_BEGINS.findall(response)), set(_BRACKETS.findall(response))
        begun = begins if _BEGINS.match(response) and brackets <= begins else set()
        only = next((letters.pop() for letters in (begun, brackets) if len(letters) == 1), None)
        found = said[-1] if said else only
    return found if found is not None and found in choices else None


def score(response: str, ground_truth: object, choices: str = "ABCDEFGHIJ") -> float:
    """1.0 if the response's letter is the answer's (``B``, ``(B)``), else 0.0. Raises ValueError for another answer."""
    right = str(ground_truth).strip().strip("().").upper()
    if len(right) != 1 or right not in choices:
        raise ValueError(f"the row's answer {str(ground_truth)[:80]!r} is none of the choices {choices}")
    return float(letter(response, choices) == right)
