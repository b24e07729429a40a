"""Multiple choice: is the letter that the response settles on the right one?"""

from __future__ import annotations

import re

from rlhf_spmd.rewards.math import boxed, normalise

_LETTER = r"\(?\b([A-Z])\b\)?"
_SAID = re.compile(rf"(?i:\b(?:answer|choice|option)(?:\s+is)?\s*[:=]?\s*\**\s*){_LETTER}")
_ALONE = re.compile(r"\s*\(?([A-Z])\)?[.:]?\s*\**\s*")
_BRACKETS = re.compile(r"\(([A-Z])\)")


def letter(response: str, choices: str = "ABCDEFGHIJ") -> str | None:
    """The boxed letter, else the last after "answer", "choice" or "option", else the whole response or its only ``(X)``."""
    box = boxed(response)
    alone = _ALONE.fullmatch(normalise(box) if box is not None else response)
    said, brackets = _SAID.findall(response), set(_BRACKETS.findall(response))
    found = alone.group(1) if alone else said[-1] if said else brackets.pop() if len(brackets) == 1 else None
    return found if found is not None and found in choices else None


def score(response: str, ground_truth: object, choices: str = "ABCDEFGHIJ") -> float:
    """1.0 if the response's letter is the answer's (``B``, ``(B)``), else 0.0. Raises ValueError for another answer."""
    right = str(ground_truth).strip().strip("().").upper()
    if len(right) != 1 or right not in choices:
        raise ValueError(f"the row's answer {str(ground_truth)[:80]!r} is none of the choices {choices}")
    return float(letter(response, choices) == right)
