"""The right answers of a row, and text in plain characters; shared by all rewards that compare with an answer."""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from rlhf_spmd.rewards.row_values import right_answer

_SIGNS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63", "-"),  # minus, hyphens, en dash
    **dict.fromkeys("\u2044\u2215", "/"),
    **dict.fromkeys("\u2018\u2019\u201c\u201d", "'"),
}
_GROUPED = re.compile(r"(?<=\d)[\u00a0\u2007-\u200a\u202f](?=\d{3}(?!\d))")
_FULL_WIDTH = 0xFEE0  # from ! to full-width !


@functools.cache
def _character(character: str) -> str:
    category = unicodedata.category(character)
    if character in _SIGNS:
        return _SIGNS[character]
    if category in ("Cf", "Zs"):  # zero width, or a space of any width
        return " " if category == "Zs" else ""
    if category == "Nd":
        return str(unicodedata.digit(character))
    return chr(ord(character) - _FULL_WIDTH) if "\uff01" <= character <= "\uff5e" else character


class Verdict(float):
    """A score, and the answer that the reward has read in the response, as a text that is equal for equal answers; None if
    it has read none. Votes (maj@k), metrics and samples use this answer."""

    answer: str | None

    def __new__(cls, score: float, answer: str | None) -> Verdict:
        verdict = super().__new__(cls, score)
        verdict.answer = answer
        return verdict


def plain(text: str) -> str:
    """Return ``text`` with ASCII forms of minus, slash, quotes, spaces, digits and full-width characters."""
    return text if text.isascii() else "".join(map(_character, _GROUPED.sub("", text)))


def alternatives(answer: object) -> list[str]:
    """Return the texts of which each is a right answer: one, or each entry of a list, which may be written as text.

    A whole float has two: ``72`` and ``72.0``. Raises ValueError for anything else, such as a dict.
    """
    value = answer.tolist() if hasattr(answer, "tolist") else answer  # of numpy
    entries = [entry for entry in value if entry is not None] if isinstance(value, list | tuple) else [value]
    if len(entries) == 1 and isinstance(entries[0], str):
        entries = _listed(entries[0]) or entries
    texts = [text for entry in entries for text in _texts(entry)]
    if not texts or not all(isinstance(entry, str | int | float | Decimal) for entry in entries):
        kind = "an empty list" if value in ([], ()) else f"not an answer but {_kind(value)}"
        raise ValueError(
            f"the answer {repr(answer)[:80]} is {kind}; it must be a text, a number, or a list of them, of which any is right"
        )
    return texts


def _kind(value: object) -> str:
    inner = next((_kind(entry) for entry in value if not _texts(entry)), "nothing") if isinstance(value, list | tuple) else ""
    return f"a {type(value).__name__}" + (f" with {inner}" if inner else "")


def _listed(text: str) -> list[Any]:
    """Return the entries of a list in JSON's or Python's form: of texts, or of one number. Empty for another text."""
    if not re.match(r"\s*\[\s*(?:[\"']|-?[\d.]+\s*\]\s*\Z)", text):
        return []
    for read in (json.loads, ast.literal_eval):
        try:
            entries = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(entries, list) and (len(entries) == 1 or all(isinstance(entry, str) for entry in entries)):
            return entries
    return []


def _texts(entry: object) -> list[str]:
    """Return how a single answer may be written; empty for an invalid one."""
    if isinstance(entry, bool):
        return [str(entry), str(entry).lower()]
    if isinstance(entry, float):
        integer = [str(int(entry))] if math.isfinite(entry) and entry.is_integer() else []
        return [*integer, str(entry)] if math.isfinite(entry) else []
    return [str(entry)] if isinstance(entry, str | int | Decimal) else []


def check_rows(
    where: str, rows: Sequence[Mapping[str, Any]], places: Sequence[str], read: Callable[[Any], Any] = alternatives
) -> None:
    """Raise ValueError, one line, for an answer that :func:`alternatives` refuses, or if ``read`` can read no row's
    answer."""
    errors = list[str]()
    answered = [(place, answer) for place, answer in zip(places, map(right_answer, rows), strict=True) if answer is not None]
    for place, answer in answered:
        try:
            alternatives(answer)
        except ValueError as error:
            raise ValueError(f"{place}: {where}.function: {error} (data.answer_key names its column)") from error
        try:
            read(answer)
        except ValueError as error:
            errors.append(
                f"{place}: {where}.function: {error}; all rows are like this (data.answer_key names the answer's column)"
            )
    if errors and len(errors) == len(answered):
        raise ValueError(errors[0])
