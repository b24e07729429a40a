"""The response must be the answer, character for character, surrounding white space aside."""

from __future__ import annotations

from typing import Any


def score(prompt: str, response: str, row: dict[str, Any]) -> float:
    """1.0 if the stripped response equals the stripped ``answer`` of the row, else 0.0. Raises ValueError without an answer."""
    if row.get("answer") is None:
        raise ValueError("the row has no 'answer' (set data.answer_key)")
    return float(response.strip() == str(row["answer"]).strip())
