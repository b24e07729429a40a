"""Happy stories: happy words minus sad words, clipped to [-3, 3] and divided by 3.

A lexicon reward for small story models. Repeating one word satisfies it, which a KL penalty is meant to prevent.
"""

from __future__ import annotations

import re
from typing import Any

_WORD = re.compile(r"[a-z']+")

HAPPY = frozenset(
    _WORD.findall(
        "happy happily smile smiled smiling love loved fun laugh laughed laughing hug hugged proud kind friend friends thank "
        "thanked glad excited good nice"
    )
)
SAD = frozenset(_WORD.findall("sad sadly cry cried crying scared hurt angry mad afraid lonely bad sorry upset worried"))
LIMIT = 3


def score(prompt: str, response: str, row: dict[str, Any]) -> float:
    """Return a score in [-1, 1]; counts words of the response only."""
    words = _WORD.findall(response.lower())
    balance = sum(word in HAPPY for word in words) - sum(word in SAD for word in words)
    return max(-LIMIT, min(LIMIT, balance)) / LIMIT
