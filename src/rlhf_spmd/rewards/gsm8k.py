"""GSM8K: is the final number right?

The data set ends each solution with ``#### 72`` (Cobbe et al. 2021, arXiv 2110.14168). ``score`` requires that form
(verl's "strict"). ``flexible``, named ``gsm8k:flexible`` in the configuration, takes the last number of the response in
any form. The row's answer is a solution (``... #### 72``), the number alone, or a list of which any is right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from rlhf_spmd.rewards import answers
from rlhf_spmd.rewards.answers import Verdict

_DIGITS = r"(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d+)(?:\.\d+)?|\.\d+"  # 1,000 and 1,00,000, but 7,2 are two
_MONEY = r"(?:\\?[$€£])?"
# Sign and dollar in either order. After a digit, a letter or a bracket there is no sign: 5-3, 10-12.
_NUMBER = rf"(?:(?<![\w)\]}}])[-+])?{_MONEY}(?:(?<![\w)\]}}])[-+])?(?:{_DIGITS})"
# A number that goes on (18/2, 5-3, 5e3, 18 × 2, 5 or 6) is no final one.
_GOES_ON = (
    r"[eE.][-+]?\d|:\d|[xX][\da-fA-F]|[²³!√kK]|[ \t]*[;&][ \t]*\d|"
    r"[ \t]*(?:[-+*/^×÷·⋅∙∗%,]|\\(?:times|cdot|div)\b)[ \t]*\\?[\d$(.]|,[ \t]*(?:and|or)\b|"  # noqa: RUF001
    r"[ \t]+(?:[xX][ \t]*\d|\\?\$?\d|(?:and|or|to|plus|minus|times|million|billion|thousand|hundred|dozen)\b)"
)
_MARKED = re.compile(rf"####[ \t]*(?:\*\*)?({_NUMBER})({_GOES_ON})?")
_ANY = re.compile(_NUMBER)
_PARTS = str.maketrans({"½": ".5", "¼": ".25", "¾": ".75"})


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(re.sub(r"[,\\$€£]", "", text.strip()))
    except InvalidOperation:
        return None


def _plain(text: str) -> str:
    return answers.plain(text).translate(_PARTS)


def marked_number(text: str) -> Decimal | None:
    """Return the last number after ``####``; None without one, or if a formula goes on. Commas and a dollar sign are dropped."""
    matches = _MARKED.findall(_plain(text))
    return _decimal(matches[-1][0]) if matches and not matches[-1][1] else None


def last_number(text: str) -> Decimal | None:
    """Return the last number in the text, or None."""
    matches = _ANY.findall(_plain(text))
    return _decimal(matches[-1]) if matches else None


def right_numbers(ground_truth: object) -> list[Decimal]:
    """Return the numbers of a row's answer. Raises ValueError if there are none."""
    numbers: list[Decimal] = []
    for text in answers.alternatives(ground_truth):
        number = marked_number(text) if "####" in text else _decimal(_plain(text))
        if number is None or not number.is_finite():
            raise ValueError(f"no number in the row's answer {text[-80:]!r}")
        numbers.append(number)
    return numbers


def check_rows(where: str, rows: Sequence[Mapping[str, Any]], places: Sequence[str]) -> None:
    """Raise ValueError for an invalid answer, and if no row's answer has a number."""
    answers.check_rows(where, rows, places, right_numbers)


def _verdict(number: Decimal | None, ground_truth: object) -> Verdict:
    return Verdict(number in right_numbers(ground_truth), None if number is None else f"{number.normalize():f}")


def score(response: str, ground_truth: object) -> Verdict:
    """Return 1.0 if the response's last ``#### number`` equals the answer as a number (72.0 is 72), else 0.0."""
    return _verdict(marked_number(response), ground_truth)


def flexible(response: str, ground_truth: object) -> Verdict:
    """Return 1.0 if the last number in the response, marked or not, equals the answer, else 0.0."""
    return _verdict(last_number(response), ground_truth)
