"""The response must be the answer, character for character, surrounding white space aside."""

from __future__ import annotations


def score(response: str, answer: object) -> float:
    """1.0 if the stripped response equals the stripped ``answer`` of the row, else 0.0."""
    return float(response.strip() == str(answer).strip())
