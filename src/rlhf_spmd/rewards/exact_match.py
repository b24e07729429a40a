"""The response must be the answer, character for character, surrounding white space aside."""

from __future__ import annotations

from rlhf_spmd.rewards.answers import alternatives
from rlhf_spmd.rewards.answers import check_rows as check_rows


def score(response: str, ground_truth: object) -> float:
    """1.0 if the stripped response equals the stripped answer of the row, or any of a list, else 0.0. A text stands for itself, also
    one that looks like a list. Raises ValueError for an answer that is neither text nor number."""
    rights = [ground_truth] if isinstance(ground_truth, str) else alternatives(ground_truth)
    return float(response.strip() in [right.strip() for right in rights])
