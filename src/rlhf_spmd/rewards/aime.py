"""AIME: the answer is a whole number from 0 to 999, boxed or after "answer:"."""

from __future__ import annotations

from rlhf_spmd.rewards.math import final_answer, normalise, number, right_answer


def score(response: str, ground_truth: object) -> float:
    """1.0 if the final answer is that number (``025`` is 25), else 0.0. Raises ValueError where the row's answer is none."""
    right = number(normalise(right_answer(ground_truth)))
    if right is None or right.denominator != 1:
        raise ValueError(f"the row's answer {str(ground_truth)[-80:]!r} is no whole number")
    found = final_answer(response)
    return float(found is not None and number(normalise(found.rstrip("* "))) == right)
