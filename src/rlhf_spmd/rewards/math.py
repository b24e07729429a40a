r"""Mathematical answers: is the last ``\boxed{}`` of a response the answer? By the library math-verify.

``math`` reads the last box only, as data sets in the form of MATH (Hendrycks et al. 2021, arXiv 2103.03874) have it.
``math:flexible`` also reads an answer that a response without a box states ("the answer is", "answer:", a heading).
``math:exact`` compares the boxed text itself, white space aside.

math-verify (Kydlíček et al., github.com/huggingface/Math-Verify) parses both answers and compares them with sympy: numbers
to 6 decimals, expressions by algebra, lists and sets in any order, tuples and intervals in theirs. Only the answer itself
is given to it, so its own search for an answer in a text is not used. It is imported where it is needed, in the reward's
worker; ``reward.timeout_s`` ends and counts slow calls, because the library's own alarms do not work in threads.
"""

from __future__ import annotations

import functools
import logging
import re
from contextlib import suppress
from typing import Any

from rlhf_spmd.rewards.answers import Verdict, alternatives, boxed, final_answer, plain
from rlhf_spmd.rewards.answers import check_rows as check_rows
from rlhf_spmd.rewards.latex import spell, without_letter

MAX_CHARACTERS = 400  # of an answer that is parsed


def load() -> None:
    """Import math-verify, which takes a second or two."""
    import math_verify

    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)  # it warns that its alarms are off


@functools.lru_cache(4096)  # the responses to a prompt share its answer
def _parse(text: str) -> list[Any]:
    """Return what math-verify makes of an answer: an expression, if it can be parsed, and its text."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    load()
    normalisation = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last")
    extraction = LatexExtractionConfig(
        try_extract_without_anchor=False, boxed_match_priority=0, normalization_config=normalisation
    )
    return list(parse(f"\\boxed{{{text}}}", [extraction], parsing_timeout=None))


_WORDS = re.compile(r"(?:\\text\s*\{)?\s*\(?([^\W\d_][^\W\d_\s]*(?:\s[^\W\d_\s]+)*)\)?\s*\}?")
# What an answer may be called, and its name left out: x, f(x), (x, y).
_NAME = re.compile(r"\\?[a-zA-Z]+(?:_\{?\w+\}?|\^\{?-1\}?|')?\s*(?:\([^()]*\))?\s*=|\(\s*\w+(?:\s*,\s*\w+)+\s*\)\s*=")
_BASE = re.compile(r"[0-9A-Fa-f]+_\s*\{?\s*\d+\s*\}?")  # 1011_2
_HUGE = re.compile(r"[\d)]\s*\^\s*(?:\{[^{}]*\d\s*\^|\d+\s*\^)|\^\s*\{?\s*-?\d{5}|\d{5}\s*!|!\s*!")  # 9^{9^9}, 2^{99999}
_NAMED = re.compile(r"(?:^|,)\s*(\\?[a-zA-Z]\w*)\s*=")


def equal(answer: str, truth: str) -> bool:
    """Return True if an answer is the right one, ``truth``, by math-verify; words are compared as texts.

    math-verify takes ``X`` for ``x``, a set for an interval, ``x=1,y=2`` for ``1,2``, ``0`` for ``D^k=0``, ``12_5`` for
    ``12_6``, and small numbers for each other; these are different here. So are answers whose units differ.
    """
    if not (_is_parsable(answer) and _is_parsable(truth)):
        return answer.strip() == truth.strip() != ""
    (answer_text, answer_unit), (truth_text, truth_unit) = spell(answer), spell(truth)
    if not answer_text or not truth_text or len({answer_unit, truth_unit} - {""}) > 1:
        return False
    answer_text, truth_text = without_letter(answer_text, truth_unit), without_letter(truth_text, answer_unit)
    if _squeezed(answer_text) == _squeezed(truth_text):
        return True
    words_are_equal = _compare_words(answer_text, truth_text)
    if words_are_equal is not None:
        return words_are_equal
    if _differ_in_form(answer_text, truth_text):
        return False
    if _BASE.fullmatch(answer_text) or _BASE.fullmatch(truth_text):
        return re.sub(r"[{}\s]", "", answer_text) == re.sub(r"[{}\s]", "", truth_text)
    from math_verify import verify

    answer_parsed = _parse(answer_text)
    truth_parsed = _parse(truth_text)
    return bool(verify(truth_parsed, answer_parsed, timeout_seconds=None)) and _are_close(truth_parsed, answer_parsed)


def _compare_words(answer: str, truth: str) -> bool | None:
    """Return whether two answers that are words are equal; None if math-verify must compare.

    One letter is compared as it is; two or three may be a product.
    """
    words = [match for match in map(_WORDS.fullmatch, (answer, truth)) if match]
    if len(words) == 2 and len({match[1].lower() if len(match[1]) > 1 else match[1] for match in words}) == 1:
        return True
    are_text = any(len(match[1]) > 3 or "\\text" in match[0] for match in words)
    return False if are_text or [len(match[1]) for match in words] == [1, 1] else None


def _differ_in_form(answer: str, truth: str) -> bool:
    """Return True for two answers that are different by their form, which math-verify may take for equal."""
    num_sets = sum(text.startswith("\\{") for text in (answer, truth))
    is_set_and_tuple = num_sets == 1 and _in_brackets(answer) and _in_brackets(truth)  # {1,2} and (1,2)
    answer_names = set(_NAMED.findall(answer))
    truth_names = set(_NAMED.findall(truth))
    have_other_names = len(answer_names | truth_names) > 1 and answer_names != truth_names  # x=1,y=2 and 1,2
    lacks_equation = "=" in truth and "=" not in answer and not _NAME.match(truth)  # 0 and D^k=0
    return is_set_and_tuple or have_other_names or lacks_equation


def _are_close(*parsed: list[Any]) -> bool:
    """Return False for two numbers that differ in their sixth digit, however small they are."""
    try:
        first, second = (complex(value) for value, *_ in parsed if getattr(value, "is_number", False))
    except (ValueError, TypeError, OverflowError):  # not two numbers, or too large for floats
        return True
    return abs(first - second) <= 2e-6 * max(abs(first), abs(second))


def _is_parsable(text: str) -> bool:
    """Return False for what may take minutes: texts too long for an answer, brackets that do not match, and towers of powers."""
    braces_match = text.count("{") == text.count("}")
    brackets_match = len(re.findall(r"[(\[]", text)) == len(re.findall(r"[)\]]", text))
    return len(text) <= MAX_CHARACTERS and braces_match and brackets_match and not _HUGE.search(text)


def _squeezed(text: str) -> str:
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # 2 3 is not 23


def _in_brackets(text: str) -> bool:
    return text.startswith(("\\{", "(", "[")) and text.endswith(("\\}", ")", "]"))


def right_answers(ground_truth: object) -> list[str]:
    """Return the answers of which any is right, also of whole solutions. Raises ValueError as ``alternatives`` does."""
    return [text if (box := boxed(text)) is None else box for text in alternatives(ground_truth)]


def verdict_on(answer: str | None, ground_truth: object) -> Verdict:
    """Return the verdict on an answer, or on None. The verdict's answer is the row's first one for every right answer."""
    rights = right_answers(ground_truth)
    if answer is None:
        return Verdict(0.0, None)
    if any(equal(answer, right) for right in rights):
        return Verdict(1.0, rights[0])
    return Verdict(0.0, canonical_text(answer))


def canonical_text(answer: str) -> str:
    """Return a text that is equal for equal answers: the value of a number, else the answer as it is parsed."""
    if not _is_parsable(answer) or not (text := spell(answer)[0]):
        return answer.strip()
    parsed = next(iter(_parse(text)), text)
    if getattr(parsed, "is_number", False):
        with suppress(TypeError, OverflowError):  # complex, or large
            return f"{float(parsed):.9g}"
    return _squeezed(str(parsed))


def score(response: str, ground_truth: object, begun: str = "") -> Verdict:
    r"""Return 1.0 if the last ``\boxed{}`` is the answer (a solution with a box, or the answer alone), else 0.0.

    ``begun``: the beginning of the response that the prompt already contains, else "".
    """
    return verdict_on(boxed(begun + response), ground_truth)


def flexible(response: str, ground_truth: object, begun: str = "") -> Verdict:
    """Return what ``score`` returns, and for a response without a box the verdict on its ``final_answer``."""
    return verdict_on(final_answer(begun + response), ground_truth)


def exact(response: str, ground_truth: object, begun: str = "") -> Verdict:
    r"""Return 1.0 if the text in the last ``\boxed{}`` is the answer's text, white space aside, else 0.0."""
    box = boxed(begun + response)
    text = None if box is None else "".join(plain(box).split())
    return Verdict(text is not None and text in ["".join(plain(right).split()) for right in right_answers(ground_truth)], text)
