"""Mathematical answers by the library math-verify, which does algebra: ``x^2-1`` is ``(x-1)(x+1)``."""

from __future__ import annotations

import importlib.util

from rlhf_spmd.rewards.answers import check_rows as check_rows
from rlhf_spmd.rewards.answers import plain
from rlhf_spmd.rewards.math import right_answers


def check(where: str) -> None:
    """Raises ValueError if the library is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("reward 'math_verify' needs the library: pip install 'rlhf_spmd[rewards]' (or math-verify)")


def score(response: str, ground_truth: object) -> float:
    """Returns 1.0 if the response's final answer equals the row's, or any of a list, else 0.0.

    Raises ValueError if the row's answer cannot be read. The library's own alarms are off: ``reward.timeout_s`` ends
    and counts slow calls.
    """
    from math_verify import parse, verify

    rights = [parse(f"\\boxed{{{plain(right)}}}", parsing_timeout=None) for right in right_answers(ground_truth)]
    if not all(rights):
        raise ValueError(f"the row's answer {str(ground_truth)[-80:]!r} cannot be read")
    found = parse(plain(response), parsing_timeout=None)
    return float(any(verify(right, found, timeout_seconds=None) for right in rights))
