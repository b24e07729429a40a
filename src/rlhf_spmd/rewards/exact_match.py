"""The response must equal the answer, character for character, except for surrounding white space."""

from __future__ import annotations

from rlhf_spmd.rewards.answers import Verdict, alternatives
from rlhf_spmd.rewards.answers import check_rows as check_rows


def score(response: str, ground_truth: object) -> Verdict:
    """Return 1.0 if the response equals the row's answer, or any of a list, else 0.0.

    A text stands for itself, even if it looks like a list. Raises ValueError for a row's answer that is neither text nor
    number.
    """
    rights = [ground_truth] if isinstance(ground_truth, str) else alternatives(ground_truth)
    answer = response.strip()
    return Verdict(answer in [right.strip() for right in rights], answer or None)
