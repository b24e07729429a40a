"""The answer is what a regular expression finds."""

from __future__ import annotations

import re

from rlhf_spmd.rewards.answers import Verdict
from rlhf_spmd.rewards.answers import check_rows as check_rows
from rlhf_spmd.rewards.format import check as check
from rlhf_spmd.rewards.math import load as load
from rlhf_spmd.rewards.math import verdict_on


def score(response: str, ground_truth: object, pattern: str) -> Verdict:
    """Return 1.0 if the last match, or its first group, is the answer, as ``math`` compares, else 0.0."""
    matches = list(re.finditer(pattern, response, re.DOTALL))
    answer = matches[-1].group(min(1, len(matches[-1].groups()))) if matches else None
    return verdict_on(answer, ground_truth)
