"""The sorting task of the quickstart: the response must be the prompt's digits in ascending order."""

from __future__ import annotations

from typing import Any

from rlhf_spmd.rewards import exact_match


def score(prompt: str, response: str, row: dict[str, Any]) -> float:
    """1.0 if the stripped response equals the row's ``answer`` (the sorted digits, made with the prompt), else 0.0."""
    return exact_match.score(prompt, response, row)
