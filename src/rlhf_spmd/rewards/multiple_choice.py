"""Multiple choice: is the letter that the response states the right one?

``multiple_choice`` reads stated forms only: a box, ``[[B]]``, ``"answer": "B"`` in JSON, a line ``Answer: B``, a heading
"Answer" with the letter below, or a response that is the letter (``B``, ``(B)``, ``B) Rome``). If two of them
differ, there is no answer. ``multiple_choice:sentences`` reads sentences as well, if there is no such form: the last one
of "the answer is B", "B is correct", "option B is the best answer". It errs where a sentence speaks of something else:
"Option B is correct." about a part of a question counts, and a letter that is denied in other words ("B would be
correct") does not end an answer given before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_spmd.rewards import answers
from rlhf_spmd.rewards.answers import Verdict, boxed

CHOICES = "ABCDEFGHIJ"
# Removed before the search for a letter: bold, code, LaTeX commands and delimiters, and quotes around a letter.
_CLEAN: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf)\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\*\*|__|[`$]|\\[()\[\]]"), ""),
    (re.compile(r"(?<!\w)[\"']([A-Z][).:]?)[\"']"), r"\1"),
]
_LETTER = r"(?:\(([A-Za-z])\)|\[\[?([A-Za-z])\]\]?|([A-Za-z])(?!\w))"
# The letter alone, or with its text: B, (B), b., B) Rome, B: Rome.
_TEXT = r"[ \t]*(?:(?<=\))|[).:])[ \t]+(?!or\b|and\b)"
_CHOICE = rf"\s*(?:(?:option|choice)\s+)?{_LETTER}(?:[ \t]*[.!]?[ \t]*$|{_TEXT}\S[^\n]*$"
_TRUTH = re.compile(rf"(?mi){_CHOICE})")
# A response may speak of the choice ("A) is too small", "A: The answer is B."), and then does not choose it.
_IS = r"(?:is|isn't|was|seems|looks|can|can't|cannot|could|would|might|may|must)\b"
_CHOSEN = rf"(?![^\n]*\banswer\s+(?:is|must\s+be)\b){_CHOICE.replace(_TEXT, rf'{_TEXT}(?!{_IS})')}"
_ALONE = re.compile(rf"(?mi){_CHOSEN})")
# B because, B - Rome
_REASON = r"|[ \t]*,?[ \t]*(?:because|since|as)\b[^\n]*$|[ \t]+[-\u2014][ \t]+(?![a-z][).]?[ \t]*$)\S[^\n]*$"
_LINE = re.compile(
    rf"(?mi)^[ \t>#-]*(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|my|your)\s+)?(?:(?:final|correct|best|right)\s+){{0,2}}"
    rf"(?:answer|choice|option)(?:\s+is)?\s*:{_CHOSEN}{_REASON})|^[ \t]*#*[ \t]*(?:final\s+)?answer[ \t]*\n{_CHOSEN})"
)
_JSON = re.compile(r'"(?:answer|choice|letter|final_answer)"\s*:\s*"?\s*\(?([A-Za-z])\)?[.)]?\s*"?\s*(?=[,}\n]|\Z)')
_DOUBLE = re.compile(r"\[\[\s*([A-Z])\s*\]\]")

# "A" and "I" before other words are words: "a good choice", "I think".
_NAME = r"(?:\(([A-Z])\)|\b([A-Z])\b(?!(?<=[AI])\s+(?!(?:because|since|as|is|which|and|but|so|for|or|nor)\b)[a-z])(?!'))"
_OTHER = r"\)?\s*(?:,\s*)?(?:\bor\b|\band\b|/|,|&)\s*(?:perhaps\s+|maybe\s+|possibly\s+)?(?:option\s+)?['\"]?\(?[A-Z]\b"
_DENIED = r"(?<!\bnot )(?<!n't )(?<!\bdoubt )(?<!\bdoubt the )(?<!\bdoubt that the )(?<!\bdoubt that )"
_END = r"(?=\s*(?:[.,;!]|\n|\Z|(?:because|since|as|and|but)\b))"
_SENTENCES = re.compile(
    rf"{_DENIED}\b(?i:answer|choice|option)\s+(?i:is|must be)\s*:?\s+(?:(?i:option|choice|clearly|therefore)\s+)?{_NAME}(?!{_OTHER})"
    rf"|\b(?i:answer|choice)\s*:\s*(?:(?i:option|choice)\s+)?{_NAME}(?!{_OTHER}|\)?\s+(?i:{_IS}))"
    rf"|{_DENIED}{_NAME}\)?\s+(?i:is)\s+(?i:(?:the\s+)?(?:correct|right|best)(?:\s+(?:answer|choice|option|one))?|the\s+answer){_END}"
    rf"|\b(?i:i\s+(?:choose|pick|select))\s+(?:(?i:option|choice)\s+)?{_NAME}(?!{_OTHER})"
)


def _clean(text: str) -> str:
    text = answers.plain(text)
    for pattern, to in _CLEAN:
        text = pattern.sub(to, text)
    return text.strip()


def _only(match: re.Match[str] | None) -> list[str]:
    """Return the letter of a match in capitals, as a list; empty without a match."""
    return [letter.upper() for letter in match.groups() if letter] if match else []


def stated(response: str, choices: str = CHOICES) -> str | None:
    """Return the letter that the forms of the module state; None without a form, or if two differ."""
    box = boxed(response)
    text = _clean(response)
    letters = {letter for form in (_LINE, _JSON, _DOUBLE) for match in form.finditer(text) for letter in _only(match)}
    letters.update(_only(_ALONE.fullmatch(text)))
    if box is not None:
        letters.update(_only(_ALONE.fullmatch(_clean(box))) or ("",))  # another box is an answer, and no letter
    return letters.pop() if len(letters) == 1 and letters <= set(choices) else None


def letter(response: str, choices: str = CHOICES) -> str | None:
    """Return the letter that the forms state, or without any form the last letter that a sentence gives, or None."""
    if (stated_letter := stated(response, choices)) is not None or boxed(response) is not None:
        return stated_letter
    text = _clean(response)
    if _LINE.search(text) or _JSON.search(text) or _DOUBLE.search(text):  # two that differ
        return None
    letters = [letter for match in _SENTENCES.finditer(text) for letter in _only(match)]
    return letters[-1] if letters and letters[-1] in choices else None


def right_letters(ground_truth: object) -> list[str]:
    """Return the letters of a row's answer (``B``, ``(B)``, ``B) Rome``). Raises ValueError for another answer."""
    letters = [_only(_TRUTH.fullmatch(_clean(text))) for text in answers.alternatives(ground_truth)]
    if not all(letters):
        raise ValueError(f"the row's answer {str(ground_truth)[:80]!r} is not a letter")
    return [match[0] for match in letters]


def check(where: str, choices: Any = CHOICES) -> None:
    """Raise ValueError for choices that are no capital letters."""
    if not choices or not all(re.fullmatch("[A-Z]", letter) for letter in choices):
        raise ValueError(f"{where}.choices={choices!r} must be capital letters, such as {CHOICES[:4]}")


def check_rows(where: str, rows: Sequence[Mapping[str, Any]], places: Sequence[str]) -> None:
    """Raise ValueError for an invalid answer, and if no row's answer is a letter."""
    answers.check_rows(where, rows, places, right_letters)


def _verdict(read: Callable[[str, str], str | None], response: str, ground_truth: object, choices: str) -> Verdict:
    rights = right_letters(ground_truth)
    if not set(rights) <= set(choices):
        raise ValueError(f"the row's answer {str(ground_truth)[:80]!r} is not one of the choices {choices}")
    answer = read(response, choices)
    return Verdict(answer in rights, answer)


def score(response: str, ground_truth: object, choices: str = CHOICES) -> Verdict:
    """Return 1.0 if the letter that the response states is the answer's, or any of a list, else 0.0.

    Raises ValueError for an answer that is not among ``choices``.
    """
    return _verdict(stated, response, ground_truth, choices)


def sentences(response: str, ground_truth: object, choices: str = CHOICES) -> Verdict:
    """Return what ``score`` returns, and for a response without a stated form the verdict on its sentences.

    It errs as the module says.
    """
    return _verdict(letter, response, ground_truth, choices)
