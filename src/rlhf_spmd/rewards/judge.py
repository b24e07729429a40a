"""A model that judges responses (``reward.judge``): the question that it gets, and the number in its verdict."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlhf_spmd.config.constraints import NonNegativeFloat, PositiveInt
from rlhf_spmd.config.words import nearest
from rlhf_spmd.rewards.answers import plain
from rlhf_spmd.rewards.format import check as check_pattern

FIELDS = ("prompt", "response", "answer")
LARGEST = 1e38  # score; finite in float32 too


@dataclass(frozen=True)
class JudgeConfig:
    """A model generates a verdict on each response, as LLM-as-a-judge does (Zheng et al., arXiv:2306.05685, single-answer
    grading); the number in it is the row's score.

    - template: the question: text with `{prompt}`, `{response}`, `{answer}` (recognised by a brace), or a file with it
    - pattern: regular expression of the number in a verdict; of the last match the first group counts, or all without a
      group. Null: the number that the verdict states as `[[8]]`, `"score": 8`, a line `Rating: 8`, `8/10`, `8 out of 10`, or
      alone, see [a judge](data_and_rewards.md#a-judge)
    - range: `[lowest, highest]` become 0 and 1, and a number outside is no verdict; null: the number as it is
    - max_response_length: tokens of a verdict
    - temperature: temperature of verdicts; 0: greedy
    """

    template: str = ""
    pattern: str | None = None
    range: list[float] | None = None
    max_response_length: PositiveInt = 256
    temperature: NonNegativeFloat = 0.0

    def check(self, where: str) -> None:
        """Raise ValueError that names the key and the value; reads the template's file."""
        if self.pattern is not None:
            check_pattern(where, self.pattern)
        limits = self.range
        if limits is not None and not (len(limits) == 2 and -LARGEST <= limits[0] < limits[1] <= LARGEST):
            raise ValueError(f"{where}.range={limits} must be [lowest, highest], two finite numbers in this order, or null")
        try:
            names = self.fields
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{where}.template={self.template!r} is neither a text with {{response}} nor a file that can be read: {error}"
            ) from error
        for name in names:
            if name not in FIELDS:
                hint = nearest(name, FIELDS) or ";"
                raise ValueError(f"{where}.template: unknown field {{{name}}}{hint} known are {', '.join(FIELDS)}")
        if "response" not in names:
            raise ValueError(f"{where}.template has no field {{response}}, so the judge would not see what it judges")

    @cached_property
    def text(self) -> str:
        return self.template if "{" in self.template else Path(self.template).expanduser().read_text(encoding="utf-8")

    @property
    def fields(self) -> list[str]:
        return re.findall(r"\{(\w+)\}", self.text)

    def render(self, values: Mapping[str, str]) -> str:
        """Return the question about a row; braces in ``values`` (prompt, response, answer) are text."""
        return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], self.text)

    def score(self, verdict: str, cut: bool = False) -> float:
        """Return the score in a verdict. Raises ValueError with the reason if the verdict cannot be read.

        ``cut``: the verdict was cut at ``max_response_length``, so its last number may be incomplete, or without a pattern
        not the last.
        """
        text, is_sure = self._match(verdict) if self.pattern is not None else (stated_number(verdict, self.range), False)
        if cut and text and not is_sure:
            raise ValueError(
                f"max_response_length={self.max_response_length} cut the verdict before its number was sure: {verdict[-200:]!r}"
            )
        try:
            number = float(text or "")
        except ValueError:
            number = float("nan")
        lowest, highest = self.range or (-LARGEST, LARGEST)
        if not lowest <= number <= highest:
            lack = f"no number from {lowest:g} to {highest:g}" if self.range else "no number"
            raise ValueError(f"{lack} in the verdict {verdict[-200:]!r}")
        return (number - lowest) / (highest - lowest) if self.range else number

    def _match(self, verdict: str) -> tuple[str | None, bool]:
        """Return the number that ``pattern`` matches, None without a match, and whether text follows it."""
        assert self.pattern is not None, "there is a pattern to search for"
        matches = list(re.finditer(self.pattern, verdict, re.DOTALL))
        group = min(1, re.compile(self.pattern).groups)
        return (matches[-1].group(group), bool(verdict[matches[-1].end(group) :].lstrip(".,"))) if matches else (None, False)


_NUMBER = r"([-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?)"
_SCALE = r"(?:\s*\(?\s*(?:/|out\s+of\b|of\b)\s*(\d+(?:\.\d+)?)(?![\d.]*\d)\s*\)?)"  # /10, out of 10, (out of 10)
_LABEL = r"(?:(?:overall|final|total|my)\s+)*(?:rating|score|grade|reward|mark|points|verdict|result|total|overall)(?:\s+is)?"
_SAID = r"(?:the|my)\s+(?:(?:overall|final|total)\s+)?(?:rating|score|grade)\s+is\b"
# A number behind its name: Rating: 8, The score is 8, # Rating and 8 below, <score>8.
_LABELLED = (
    rf"(?:(?:^\W{{0,4}}|[.!?;]\s+)(?:(?:the\s+)?{_LABEL}\s*[:=]|{_SAID})|^#+[ \t]*{_LABEL}[ \t]*:?[ \t]*\n|<(?:rating|score|grade)>)"
    rf"\s*{_NUMBER}{_SCALE}?"
)
# How a verdict may state its number. Of the first form that occurs all must say the same.
STATED = tuple(
    re.compile(form, re.MULTILINE | re.IGNORECASE)
    for form in (
        rf"\[\[\s*{_NUMBER}\s*\]\]{_SCALE}?",
        rf"[\"'](?:\w+_)?(?:rating|score|grade|reward)[\"']\s*:\s*[\"']?{_NUMBER}{_SCALE}?[\"']?\s*(?=[,}}\n]|\Z)",
        rf"{_LABELLED}\s*(?:points?)?\s*[.!]?\s*(?:</\w+>\s*)?$",
        rf"(?<![\w.,/-]){_NUMBER}\s*(?:/|out\s+of\b)\s*(\d+(?:\.\d+)?)(?=\s*(?:[.,;!)](?!\d)|$))",
        rf"\A\s*{_NUMBER}{_SCALE}?\s*(?:points?)?\s*[.!]?\s*\Z",
    )
)

_REMARKED = re.compile(_LABELLED, re.MULTILINE | re.IGNORECASE)  # a labelled number that a remark may follow


def stated_number(verdict: str, limits: Sequence[float] | None) -> str | None:
    """Return the number that a verdict states in one of the forms ``STATED``; None without one, or if two numbers differ.

    The last two forms have no label, and do not count if a labelled number differs (``Rating: 8, it covers 2/3.``).
    ``limits``: lowest and highest rating; a number of another scale (``4/5`` of 1 to 10) does not count.
    """
    text = re.sub(r"\*\*|__|`", "", plain(verdict))
    for form in STATED:
        pairs = {(match[1], match[2]) for match in form.finditer(text)}
        if not pairs:
            continue
        numbers = {float(number) for number, _ in pairs}
        if form in STATED[-2:]:
            numbers |= {float(match[1]) for match in _REMARKED.finditer(text)}
        if len(numbers) > 1:
            return None
        scales = {float(scale) for _, scale in pairs if scale}
        return next(iter(pairs))[0] if limits is None or scales <= {float(limits[1])} else None
    return None
