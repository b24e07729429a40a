"""Mathematical answers by the library math-verify, which does algebra: ``x^2-1`` is ``(x-1)(x+1)``."""

from __future__ import annotations

import importlib.util

from rlhf_spmd.rewards.math import right_answer


def check(where: str) -> None:
    """Raises ValueError where the library is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ValueError("reward 'math_verify' needs the library: pip install 'rlhf_spmd[rewards]' (or math-verify)")


def score(response: str, ground_truth: object) -> float:
    """1.0 if the response's final answer equals the row's, else 0.0. Raises ValueError where that cannot be read.

    The library's own alarms are off: ``reward.timeout_s`` ends a call that takes too long, and counts it.
    """
    from math_verify import parse, verify

    right = parse(f"\\boxed{{{right_answer(ground_truth)}}}", parsing_timeout=None)
    if not right:
        raise ValueError(f"the row's answer {str(ground_truth)[-80:]!r} cannot be read")
    return float(verify(right, parse(response, parsing_timeout=None), timeout_seconds=None))
