"""GSM8K: is the final number right?

The data set ends each solution with ``#### 72`` (Cobbe et al. 2021, arXiv 2110.14168). ``score`` asks for that form (verl's
"strict"); ``flexible``, named ``gsm8k:flexible`` in the config, takes the last number of the response whatever its form.
The row's ``answer`` is a whole solution (``... #### 72``) or the number alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

# Sign and dollar in either order, digits with commas between, an optional fraction.
_NUMBER = r"[-+]?\$?[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
# A number that goes on (18/2, 5-3, 5e3) is no final one.
_MARKED = re.compile(r"####[ \t]*(" + _NUMBER + r")([eE][-+]?\d|[ \t]*[-+*/^][ \t]*[\d$(])?")
_ANY = re.compile(_NUMBER)


def _parse(text: str) -> Decimal | None:
    try:
        return Decimal(text.strip().replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def marked_number(text: str) -> Decimal | None:
    """The last number that follows ``####``, None without one or where a formula goes on. Commas and a dollar sign are dropped."""
    found = _MARKED.findall(text)
    return _parse(found[-1][0]) if found and not found[-1][1] else None


def last_number(text: str) -> Decimal | None:
    """The last number in the text, None without one."""
    found = _ANY.findall(text)
    return _parse(found[-1]) if found else None


def right_number(row: dict[str, Any]) -> Decimal:
    """The number of the row's ``answer``. Raises ValueError where there is none."""
    answer = row.get("answer")
    if answer is None:
        raise ValueError("the row has no 'answer' (set data.answer_key)")
    number = marked_number(str(answer)) if "####" in str(answer) else _parse(str(answer))
    if number is None:
        raise ValueError(f"no number in the row's answer {str(answer)[-80:]!r}")
    return number


def check_rows(where: str, rows: Sequence[dict[str, Any]], places: Sequence[str]) -> None:
    """Raises ValueError where no row has an answer."""
    if rows and all(row.get("answer") is None for row in rows):
        columns = ", ".join(sorted(key for key, value in rows[0].items() if value is not None))
        raise ValueError(
            f"{places[0]}: {where}.function=gsm8k: no row has 'answer' (data.answer_key names its column); the columns are {columns}"
        )


def score(prompt: str, response: str, row: dict[str, Any]) -> float:
    """1.0 if the response's last ``#### number`` equals the answer as a number (72.0 is 72), else 0.0."""
    return float(marked_number(response) == right_number(row))


def flexible(prompt: str, response: str, row: dict[str, Any]) -> float:
    """1.0 if the last number in the response, marked or not, equals the answer, else 0.0."""
    return float(last_number(response) == right_number(row))
