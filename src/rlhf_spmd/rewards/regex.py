"""The answer is what a regular expression finds."""

from __future__ import annotations

import re

from rlhf_spmd.rewards.format import check as check
from rlhf_spmd.rewards.math import equal


def score(response: str, ground_truth: object, pattern: str) -> float:
    """1.0 if the first group of the last match (the whole match without a group) is the answer, as text or as a number."""
    matches = list(re.finditer(pattern, response, re.DOTALL))
    found = matches[-1].group(min(1, len(matches[-1].groups()))) if matches else None
    return float(found is not None and equal(found, str(ground_truth)))
