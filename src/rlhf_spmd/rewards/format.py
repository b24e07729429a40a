"""Does the whole response have a form? By default reasoning and answer in tags, once each and in order, as in DeepSeek-R1
(arXiv 2501.12948): ``<think>...</think><answer>...</answer>``."""

from __future__ import annotations

import re

_NO_TAG = r"(?:(?!</?(?:think|answer)>).)+"
THINK_ANSWER = rf"\s*<think>{_NO_TAG}</think>\s*<answer>{_NO_TAG}</answer>\s*"


def check(where: str, pattern: str = THINK_ANSWER) -> None:
    """Raise ValueError for an invalid regular expression."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{where}.pattern={pattern!r} is not a regular expression: {error}") from error


def score(response: str, pattern: str = THINK_ANSWER) -> float:
    """Return 1.0 if ``pattern`` matches the whole response (a dot also matches a new line), else 0.0."""
    return float(re.fullmatch(pattern, response, re.DOTALL) is not None)
