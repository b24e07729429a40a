r"""MATH: is what stands in the last ``\boxed{}`` of the response the answer?

The data set (Hendrycks et al. 2021, arXiv 2103.03874) ends its solutions with ``\boxed{\frac{3}{4}}``. Two answers are equal if they
are the same text once spacing, units and ways to write are taken away (``latex``), or the same number (``0.75``, ``3/4``), or as many
equal entries in the same brackets. No algebra is done: ``math_verify`` does it.
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
    r"""What the last ``\boxed{...}`` holds, braces balanced; None where there is none or it is cut off. Of boxes that a comma, "and" or
    "or" joins, such as ``\boxed{1}, \boxed{2}``, the list, if they are not the same answer."""
    found, before = list[str](), len(text)
    for box in reversed(list(_BOX.finditer(text))):
        inside, end = _box(text, box.end())
        if inside is None or (found and not _BETWEEN.fullmatch(text, end, before)):
            break
        found.insert(0, inside)
        before = box.start()
    return found[-1] if len({canonical(one) for one in found}) == 1 else ", ".join(found) if found else None


def _box(text: str, start: int) -> tuple[str | None, int]:
    """What stands in the braces at ``start`` (without braces one character), and where it ends; None where no brace closes."""
    if text[start : start + 1] != "{":
        return text[start : start + 1] or None, start + 1
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += (brace[1] == "{") - (brace[1] == "}")
        if depth == 0:
            return text[start + 1 : brace.start()], brace.end()
    return None, len(text)


def final_answer(text: str) -> str | None:
    """The last boxed text, or what follows the last "answer:" or "answer is" in its sentence; None without either."""
    said = _SAID.findall(plain(text))
    found = boxed(text)
    return found if found is not None else said[-1] if said else None


def canonical(text: str) -> str:
    """The same text for answers that are the same, see the module. Entries without brackets may come in any order."""
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
    """Whether two answers are the same, see the module. Entries without brackets may come in any order, unless they are values of
    several names. Where both answers say what they are of (``y = 2``) or have a unit, that must be the same."""
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
    r"""As ``split``; a set is a list, and of ``1 \pm x`` in a list there are two entries."""
    entries, brackets = split(text)
    if brackets not in ("", r"\{\}"):
        return entries, brackets
    signed = ([entry.replace(r"\pm", sign) for sign in "+-"] if entry.count(r"\pm") == 1 else [entry] for entry in entries)
    return [entry for both in signed for entry in both], ""


def _assigned(entries: list[str]) -> tuple[str, str]:
    """Of a single ``x=3`` the name and the value; without a name empty texts."""
    found = _ASSIGNED.fullmatch(entries[0]) if len(entries) == 1 else None
    return (found.group(1), found.group(2)) if found else ("", "")


def _order(entry: str) -> str:
    return canonical(_assigned([entry])[1] or entry)


def right_answers(ground_truth: object) -> list[str]:
    """The answers of which any is right, of whole solutions too. Raises ValueError as ``alternatives`` does."""
    return [text if (found := boxed(text)) is None else found for text in alternatives(ground_truth)]


def is_right(found: str | None, ground_truth: object) -> bool:
    """Whether an answer is any of the right ones."""
    rights = right_answers(ground_truth)
    return found is not None and any(equal(found, right) for right in rights)


def score(response: str, ground_truth: object) -> float:
    r"""1.0 if the last ``\boxed{}`` is the answer (a solution with a box, or the answer alone), else 0.0."""
    return float(is_right(boxed(response), ground_truth))


def flexible(response: str, ground_truth: object) -> float:
    """As ``score``, and where nothing is boxed by what is said, see ``final_answer``."""
    return float(is_right(final_answer(response), ground_truth))
