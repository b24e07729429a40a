"""The answer is what a regular expression finds."""

from __future__ import annotations

import re

from rlhf_spmd.rewards.answers import check_rows as check_rows
from rlhf_spmd.rewards.format import check as check
from rlhf_spmd.rewards.math import is_right


def score(response: str, ground_truth: object, pattern: str) -> float:
    """1.0 if the first group of the last match (the whole match without a group) is the answer, as ``math`` compares, else 0.0."""
    matches = list(re.finditer(pattern, response, re.DOTALL))
    found = matches[-1].group(min(1, len(matches[-1].groups()))) if matches else None
    return float(is_right(found, ground_truth))
