"""AIME: the answer is a whole number from 0 to 999, boxed or after "answer:"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_spmd.rewards import answers
from rlhf_spmd.rewards.latex import normalise, number
from rlhf_spmd.rewards.math import final_answer, is_right, right_answers


def check_rows(where: str, rows: Sequence[Mapping[str, Any]], places: Sequence[str]) -> None:
    """Raises ValueError for an invalid answer, and if no row's answer is a whole number."""
    answers.check_rows(where, rows, places, _whole_numbers)


def _whole_numbers(ground_truth: object) -> list[str]:
    found = right_answers(ground_truth)
    for value in (number(normalise(text)) for text in found):
        if value is None or value.denominator != 1:
            raise ValueError(f"the row's answer {str(ground_truth)[-80:]!r} is not a whole number")
    return found


def score(response: str, ground_truth: object) -> float:
    """Returns 1.0 if the final answer is the row's number (``025`` is 25), else 0.0. Raises ValueError for another answer."""
    return float(is_right(final_answer(response), _whole_numbers(ground_truth)))
