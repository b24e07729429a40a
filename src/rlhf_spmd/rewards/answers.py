"""The right answers of a row, the answer that a response states, and text in plain characters.

Shared by all rewards that compare with an answer.
"""

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
    """A score, and the answer that the reward has read in the response. Votes (maj@k), metrics and samples use the answer.

    - answer: a text that is equal for equal answers; None if the reward has read none
    """

    answer: str | None

    def __new__(cls, score: float, answer: str | None) -> Verdict:
        verdict = super().__new__(cls, score)
        verdict.answer = answer
        return verdict


def plain(text: str) -> str:
    """Return ``text`` with ASCII forms of minus, slash, quotes, spaces, digits and full-width characters."""
    return text if text.isascii() else "".join(map(_character, _GROUPED.sub("", text)))


def alternatives(answer: object) -> list[str]:
    """Return the texts of which each is a right answer: one, or each entry of a list, which may itself be a text.

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
    """Raise ValueError, one line, for an answer that :func:`alternatives` refuses, or if ``read`` can read no row's answer."""
    errors: list[str] = []
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


# -- the answer of a response

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_SPACE = r"(?:[\s$,]|\\[()\[\]]|\\q?quad(?![a-z]))"
# Boxes with no more than this between them are one list.
_BETWEEN = re.compile(rf"{_SPACE}*(?:,|;|\\text\s*\{{[,\s]*(?:and|or)\s*\}}|\b(?:and|or)\b){_SPACE}*(?:(?:and|or)\b{_SPACE}*)?")
_BRACE = re.compile(r"\\.|([{}])", re.DOTALL)


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``, braces balanced, or None if there is none or it is cut off.

    Boxes joined by a comma, "and" or "or", such as ``\boxed{1}, \boxed{2}``, give the list, unless they are the same text.
    """
    entries: list[str] = []
    next_start = len(text)
    for box in reversed(list(_BOX.finditer(text))):
        content, end = _box_content(text, box.end())
        if content is None or (entries and not _BETWEEN.fullmatch(text, end, next_start)):
            break
        entries.insert(0, content)
        next_start = box.start()
    return entries[-1] if len({"".join(entry.split()) for entry in entries}) == 1 else ", ".join(entries) if entries else None


def _box_content(text: str, start: int) -> tuple[str | None, int]:
    """Return the content of the braces at ``start``, or one character without braces, and where it ends; None if they never close."""
    if text[start : start + 1] != "{":
        return text[start : start + 1] or None, start + 1
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += (brace[1] == "{") - (brace[1] == "}")
        if depth == 0:
            return text[start + 1 : brace.start()], brace.end()
    return None, len(text)


# "answer" and what links it to an answer. "This answer is" says something of an answer that was given before.
_STATEMENT = re.compile(
    r"(?im)(?<!\bthis )(?<!\bthat )\banswer\b\s?\**(?:\s+is\b\s?\**\s?:?|\s?[:=])\**"  # answer is, answer:, **answer**:
    r"|^[ \t]*(?:(?:#+|\*\*)[ \t]*(?:\w+[ \t]+)?|(?:final[ \t]+)?)answer[ \t]*(?:\*\*)?[ \t]*$"  # a heading
)
_DELIMITED = re.compile(
    r"\s*(?:\\\[(?P<a>.+?)\\\]|\$\$(?P<b>.+?)\$\$|\\\((?P<c>.+?)\\\)|(?<!\\)\$(?P<d>[^$\n]+?)(?<!\\)\$|\*\*(?P<e>[^*\n]+)\*\*)",
    re.DOTALL,
)
# Behind $5$ or **5**: the answer goes on, as a list or a formula.
_GOES_ON = re.compile(
    r"[ \t]*(?:,[ \t]*)?(?:(?:or|and|to|times)\b|[-+*/^=<>%\d$\\(]|,\s*\d|(?:hundred|thousand|million|billion|trillion|dozen)\b)"
)
# An answer begins with a number, a sign, a bracket, LaTeX, or a letter that no word follows.
_ANSWER = re.compile(r"[-+\u2212±]?\s*(?:[\d.,({\[|\\$€£√]|[^\W\d_](?![^\W\d_]|\s+[a-z]{2})|pi\b|sqrt\b)")
_SENTENCE = re.compile(r"\s*([^\n]*?)(?:\.(?=\s|\*|\Z)|\n|\Z|[!?](?=\s|\Z)|\s(?:because|since|which|so|where|when|as)\b)")
_REMARK = re.compile(r"(?i)(?<!\\)\b(?:correct|right|wrong|sure|certain|verified|checked)\b")


def final_answer(text: str) -> str | None:
    """Return the last boxed text, else the answer that a response states last, else None.

    A statement is "answer is", "answer:" or a heading "Answer" with an answer right behind it, up to the end of its
    sentence. A plain word is an answer only behind "answer:"; "this answer is" states none.
    """
    if (box := boxed(text)) is not None:
        return box
    text = plain(text)
    answer, end = None, 0
    for anchor in _STATEMENT.finditer(text):
        if anchor.start() >= end:
            with_colon = anchor[0].rstrip("* ").endswith((":", "="))
            answer, end = _stated_answer(text, anchor.end(), with_colon) or (answer, end)
    return answer


def _stated_answer(text: str, start: int, with_colon: bool) -> tuple[str, int] | None:
    """Return the answer that a text states from ``start`` on, and where it ends; None if there is none."""
    delimited = _DELIMITED.match(text, start)
    if delimited and not _GOES_ON.match(text, delimited.end()):
        content = delimited[delimited.lastgroup or 0].strip()
        return None if _REMARK.search(content) else (content, delimited.end())
    sentence = _SENTENCE.match(text, start)
    content = sentence[1].strip() if sentence else ""
    is_word = with_colon and re.fullmatch(r"[^\W\d_]+", content) is not None
    if sentence is None or not (is_word or _ANSWER.match(content)) or _REMARK.search(content):
        return None
    return content, sentence.end(1)
