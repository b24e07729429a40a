"""AIME: the answer is a whole number from 0 to 999, boxed or stated as ``math:flexible`` reads it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_spmd.rewards import answers
from rlhf_spmd.rewards.answers import Verdict, final_answer
from rlhf_spmd.rewards.latex import spell
from rlhf_spmd.rewards.math import right_answers

_AROUND = r"(?:\*\*|\\?[\s$(){}\[\]]|\\text|\^\s*\\circ)*"
_NUMBER = re.compile(rf"{_AROUND}(?:[a-zA-Z][\w+\s]*=)?{_AROUND}([-+]?\d{{1,20}})(?:\.0*)?{_AROUND}[.,]?{_AROUND}")


def check_rows(where: str, rows: Sequence[Mapping[str, Any]], places: Sequence[str]) -> None:
    """Raise ValueError for an invalid answer, and if no row's answer is a whole number."""
    answers.check_rows(where, rows, places, _whole_numbers)


def _number(text: str) -> int | None:
    number = _NUMBER.fullmatch(answers.plain(text)[:100]) or _NUMBER.fullmatch(spell(text[:100])[0])
    return int(number[1]) if number else None


def _whole_numbers(ground_truth: object) -> list[int]:
    numbers = [_number(text) for text in right_answers(ground_truth)]
    if None in numbers:
        raise ValueError(f"the row's answer {str(ground_truth)[-80:]!r} is not a whole number")
    return [number for number in numbers if number is not None]


def score(response: str, ground_truth: object, begun: str = "") -> Verdict:
    """Return 1.0 if the final answer is the row's number (``025`` is 25), else 0.0.

    ``begun``: the beginning of the response that the prompt already contains, else "". Raises ValueError for a row's answer that is no
    whole number.
    """
    rights = _whole_numbers(ground_truth)
    answer = final_answer(begun + response)
    number = None if answer is None else _number(answer)
    return Verdict(number in rights, str(number) if number is not None else answer)
