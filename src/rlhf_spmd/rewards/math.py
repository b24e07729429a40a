r"""MATH: is the last ``\boxed{}`` of the response the answer?

The data set (Hendrycks et al. 2021, arXiv 2103.03874) ends its solutions with ``\boxed{\frac{3}{4}}``. Two answers are
equal if they are the same text without spacing, units and notation (``latex``), the same number (``0.75``, ``3/4``), or
lists of equal entries in the same brackets. No algebra is done; ``math_verify`` does it.
"""

from __future__ import annotations

import re

from rlhf_spmd.rewards.answers import alternatives, plain
from rlhf_spmd.rewards.answers import check_rows as check_rows
from rlhf_spmd.rewards.latex import normalise, number, split, unit

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
# Boxes with no more than this between them are one list.
_BETWEEN = re.compile(
    r"(?:[\s$]|\\[()\[\]]|\\q?quad)*(?:,|;|\\text\s*\{[,\s]*(?:and|or)\s*\}|\b(?:and|or)\b)(?:[\s$,]|\\[()\[\]]|\\q?quad|\b(?:and|or)\b|\\text\s*\{\s*(?:and|or)\s*\})*"
)
_BRACE = re.compile(r"\\.|([{}])", re.DOTALL)
_SAID = re.compile(  # possessive: white space is not tried in all its parts
    r"(?i)\banswer\b\**+(?:\s+is\b)?\s*+[:=]?\s*+\**+\s*+(?:(?:\\\[|\$\$)\s*+)?((?:(?!\banswer\b|\.(?:\s|\Z))[^\n])+)"
)
_ASSIGNED = re.compile(
    r"(\\?[a-zA-Z]\w*(?:\([a-z]\))?|\((?:[a-zA-Z],)+[a-zA-Z]\))(?:=|\\in(?![a-z]))(.*)"
)  # x = ..., f(x) = ...
_UNORDERED = ("", r"\{\}", r"\cup")


def boxed(text: str) -> str | None:
    r"""Returns the content of the last ``\boxed{...}``, braces balanced, or None if there is none or it is cut off.

    Boxes joined by a comma, "and" or "or", such as ``\boxed{1}, \boxed{2}``, give the list, unless they are the same
    answer.
    """
    found, before = list[str](), len(text)
    for box in reversed(list(_BOX.finditer(text))):
        inside, end = _box(text, box.end())
        if inside is None or (found and not _BETWEEN.fullmatch(text, end, before)):
            break
        found.insert(0, inside)
        before = box.start()
    return found[-1] if len({canonical(one) for one in found}) == 1 else ", ".join(found) if found else None


def _box(text: str, start: int) -> tuple[str | None, int]:
    """Returns what the braces at ``start`` hold (without braces one character) and where it ends; None if they never
    close."""
    if text[start : start + 1] != "{":
        return text[start : start + 1] or None, start + 1
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += (brace[1] == "{") - (brace[1] == "}")
        if depth == 0:
            return text[start + 1 : brace.start()], brace.end()
    return None, len(text)


def final_answer(text: str) -> str | None:
    """Returns the last boxed text, else what follows the last "answer:" or "answer is" in its sentence, else None."""
    said = _SAID.findall(plain(text))
    found = boxed(text)
    return found if found is not None else said[-1] if said else None


def canonical(text: str) -> str:
    """Returns the same text for equal answers, as the module says. Entries without brackets may come in any order."""
    text = normalise(text)
    value = number(text)
    if value is not None:
        return str(value)
    entries, brackets = _entries(text)
    if len(entries) == 1:
        return entries[0] if brackets == "" else text
    each = [canonical(entry) for entry in entries]
    return f"{brackets} {','.join(sorted(each) if brackets in _UNORDERED else each)}"


def equal(one: str, other: str) -> bool:
    """True if two answers are equal, as the module says. Entries without brackets may come in any order, unless several
    are named.

    If both answers have a name (``y = 2``) or a unit, these must be equal.
    """
    units = {unit(one), unit(other)} - {""}
    if len(units) > 1:
        return False
    if canonical(one) == canonical(other) != "":
        return True
    one, other = normalise(one), normalise(other)
    if None not in (number(one), number(other)):
        return False
    (ones, around), (others, around_other) = _entries(one), _entries(other)
    (name, value), (name_other, value_other) = _assigned(ones), _assigned(others)
    if name or name_other:
        values = value if name else one, value_other if name_other else other
        return (not name or not name_other or name == name_other) and equal(*values)
    if around != around_other or len(ones) != len(others) or len(ones) < 2:
        return False
    if around in _UNORDERED:
        names = [{_assigned([entry])[0] for entry in entries} - {""} for entries in (ones, others)]
        if max(map(len, names)) < 2 or names[0] == names[1]:
            ones, others = sorted(ones, key=_order), sorted(others, key=_order)
    return all(map(equal, ones, others))


def _entries(text: str) -> tuple[list[str], str]:
    r"""Like ``split``, but a set is a list, and ``1 \pm x`` in a list gives two entries."""
    entries, brackets = split(text)
    if brackets not in ("", r"\{\}"):
        return entries, brackets
    signed = ([entry.replace(r"\pm", sign) for sign in "+-"] if entry.count(r"\pm") == 1 else [entry] for entry in entries)
    return [entry for both in signed for entry in both], ""


def _assigned(entries: list[str]) -> tuple[str, str]:
    """Returns name and value of a single ``x=3``; empty texts without a name."""
    found = _ASSIGNED.fullmatch(entries[0]) if len(entries) == 1 else None
    return (found.group(1), found.group(2)) if found else ("", "")


def _order(entry: str) -> str:
    return canonical(_assigned([entry])[1] or entry)


def right_answers(ground_truth: object) -> list[str]:
    """Returns the answers of which any is right, also of whole solutions. Raises ValueError as ``alternatives`` does."""
    return [text if (found := boxed(text)) is None else found for text in alternatives(ground_truth)]


def is_right(found: str | None, ground_truth: object) -> bool:
    """True if an answer is any of the right ones."""
    rights = right_answers(ground_truth)
    return found is not None and any(equal(found, right) for right in rights)


def score(response: str, ground_truth: object) -> float:
    r"""Returns 1.0 if the last ``\boxed{}`` is the answer (a solution with a box, or the answer alone), else 0.0."""
    return float(is_right(boxed(response), ground_truth))


def flexible(response: str, ground_truth: object) -> float:
    """Like ``score``, but a response without a box is judged by its words, see ``final_answer``."""
    return float(is_right(final_answer(response), ground_truth))
