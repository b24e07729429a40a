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

from rlhf_spmd.rewards.answers import Verdict, alternatives, plain
from rlhf_spmd.rewards.answers import check_rows as check_rows
from rlhf_spmd.rewards.latex import spell, without_letter

_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_SPACE = r"(?:[\s$,]|\\[()\[\]]|\\q?quad(?![a-z]))"
# Boxes with no more than this between them are one list.
_BETWEEN = re.compile(rf"{_SPACE}*(?:,|;|\\text\s*\{{[,\s]*(?:and|or)\s*\}}|\b(?:and|or)\b){_SPACE}*(?:(?:and|or)\b{_SPACE}*)?")
_BRACE = re.compile(r"\\.|([{}])", re.DOTALL)
LONGEST = 400  # characters of an answer that is parsed


def load() -> None:
    """Import math-verify, which takes a second or two."""
    import math_verify

    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)  # it warns that its alarms are off


# -- reading


def boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``, braces balanced, or None if there is none or it is cut off.

    Boxes joined by a comma, "and" or "or", such as ``\boxed{1}, \boxed{2}``, give the list, unless they are the same text.
    """
    entries, before = list[str](), len(text)
    for box in reversed(list(_BOX.finditer(text))):
        inside, end = _box(text, box.end())
        if inside is None or (entries and not _BETWEEN.fullmatch(text, end, before)):
            break
        entries.insert(0, inside)
        before = box.start()
    return entries[-1] if len({"".join(entry.split()) for entry in entries}) == 1 else ", ".join(entries) if entries else None


def _box(text: str, start: int) -> tuple[str | None, int]:
    """Return what the braces at ``start`` hold (without braces one character) and where it ends; None if they never
    close."""
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
    text, stated, start = plain(text), None, 0
    for anchor in _STATEMENT.finditer(text):
        if anchor.start() >= start:
            statement = _stated(text, anchor.end(), anchor[0].rstrip("* ").endswith((":", "=")))
            stated, start = (stated, start) if statement is None else statement
    return stated


def _stated(text: str, start: int, with_colon: bool) -> tuple[str, int] | None:
    """Return the answer that a text states from ``start`` on, and where it ends; None without an answer there."""
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


# -- comparing


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
    words = [match for match in map(_WORDS.fullmatch, (answer_text, truth_text)) if match]
    if len(words) == 2 and len({_word(match[1]) for match in words}) == 1:
        return True
    # One letter is compared as it is; two or three may be a product.
    if any(len(match[1]) > 3 or "\\text" in match[0] for match in words) or [len(match[1]) for match in words] == [1, 1]:
        return False
    answer_names, truth_names = set(_NAMED.findall(answer_text)), set(_NAMED.findall(truth_text))
    if _is_set(answer_text) != _is_set(truth_text) and _in_brackets(answer_text) and _in_brackets(truth_text):
        return False
    if len(answer_names | truth_names) > 1 and answer_names != truth_names:
        return False
    if "=" in truth_text and "=" not in answer_text and not _NAME.match(truth_text):
        return False
    if _BASE.fullmatch(answer_text) or _BASE.fullmatch(truth_text):
        return re.sub(r"[{}\s]", "", answer_text) == re.sub(r"[{}\s]", "", truth_text)
    from math_verify import verify

    return bool(verify(_parse(truth_text), _parse(answer_text), timeout_seconds=None)) and _are_close(
        _parse(truth_text), _parse(answer_text)
    )


def _are_close(*parsed: list[Any]) -> bool:
    """Return False for two numbers that differ in their sixth digit, however small they are."""
    try:
        first, second = (complex(value) for value, *_ in parsed if getattr(value, "is_number", False))
    except (ValueError, TypeError, OverflowError):  # not two numbers, or too large for floats
        return True
    return abs(first - second) <= 2e-6 * max(abs(first), abs(second))


def _is_parsable(text: str) -> bool:
    """Return False for what may take minutes: texts too long for an answer, brackets that do not match, and towers of powers."""
    pairs = ((text.count("{"), text.count("}")), (len(re.findall(r"[(\[]", text)), len(re.findall(r"[)\]]", text))))
    return len(text) <= LONGEST and all(opened == closed for opened, closed in pairs) and not _HUGE.search(text)


def _squeezed(text: str) -> str:
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # 2 3 is not 23


def _word(text: str) -> str:
    return text.lower() if len(text) > 1 else text


def _is_set(text: str) -> bool:
    return text.startswith("\\{")


def _in_brackets(text: str) -> bool:
    return text.startswith(("\\{", "(", "[")) and text.endswith(("\\}", ")", "]"))


def right_answers(ground_truth: object) -> list[str]:
    """Return the answers of which any is right, also of whole solutions. Raises ValueError as ``alternatives`` does."""
    return [text if (box := boxed(text)) is None else box for text in alternatives(ground_truth)]


def judge(answer: str | None, ground_truth: object) -> Verdict:
    """Return the verdict on an answer, or on none. All right answers are one vote, as the row's first answer."""
    rights = right_answers(ground_truth)
    if answer is None:
        return Verdict(0.0, None)
    if any(equal(answer, right) for right in rights):
        return Verdict(1.0, rights[0])
    return Verdict(0.0, _vote(answer))


def _vote(answer: str) -> str:
    """Return a text that is equal for equal wrong answers: the value of a number, else the answer as it is parsed."""
    if not _is_parsable(answer) or not (text := spell(answer)[0]):
        return answer.strip()
    parsed = next(iter(_parse(text)), text)
    if getattr(parsed, "is_number", False):
        with suppress(TypeError, OverflowError):  # complex, or large
            return f"{float(parsed):.9g}"
    return _squeezed(str(parsed))


def score(response: str, ground_truth: object, begun: str = "") -> Verdict:
    r"""Return 1.0 if the last ``\boxed{}`` is the answer (a solution with a box, or the answer alone), else 0.0. The prompt may have
    ``begun`` the answer."""
    return judge(boxed(begun + response), ground_truth)


def flexible(response: str, ground_truth: object, begun: str = "") -> Verdict:
    """Like ``score``, but a response without a box is judged by what it states, see ``final_answer``."""
    return judge(final_answer(begun + response), ground_truth)


def exact(response: str, ground_truth: object, begun: str = "") -> Verdict:
    r"""Return 1.0 if the text in the last ``\boxed{}`` is the answer's text, white space aside, else 0.0."""
    box = boxed(begun + response)
    text = None if box is None else "".join(plain(box).split())
    return Verdict(text is not None and text in ["".join(plain(right).split()) for right in right_answers(ground_truth)], text)
