"""Happy stories: happy words minus sad words, clipped to [-3, 3] and divided by 3.

A lexicon reward for small story models. It is easy to satisfy by repeating one word, which is what a KL penalty is for.
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
    """In [-1, 1]. Only the response is counted, not the prompt."""
    words = _WORD.findall(response.lower())
    balance = sum(word in HAPPY for word in words) - sum(word in SAD for word in words)
    return max(-LIMIT, min(LIMIT, balance)) / LIMIT
