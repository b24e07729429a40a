"""What a model that judges responses is asked, and what its verdict says (``reward.judge``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rlhf_spmd.config.constraints import NonNegativeFloat, PositiveInt
from rlhf_spmd.config.schema import nearest
from rlhf_spmd.rewards.format import check as check_pattern

FIELDS = ("prompt", "response", "answer")
LARGEST = 1e38  # of a score: a finite number in float32, too


@dataclass(frozen=True)
class JudgeConfig:
    """A model generates a verdict on each response, as LLM-as-a-judge does (Zheng et al., arXiv:2306.05685, single-answer
    grading); the number in it is the row's score.

    - template: the question, a text with `{prompt}`, `{response}`, `{answer}` (recognised by a brace) or a file with one
    - pattern: regular expression of the number in a verdict: the last match counts, of it the first group, or all of it without
      one. By default a number, of `8/10` and `8 out of 10` the first
    - range: `[lowest, highest]`: they become 0 and 1, and a number outside is no verdict; null: the number as it is
    - max_response_length: tokens of a verdict
    - temperature: of verdicts; 0: greedy
    """

    template: str = ""
    pattern: str = r"([-+]?\d+(?:\.\d+)?)(?:\s*(?:/|out of)\s*\d+(?:\.\d+)?)?"
    range: list[float] | None = None
    max_response_length: PositiveInt = 256
    temperature: NonNegativeFloat = 0.0

    def check(self, where: str) -> None:
        """Raises ValueError naming the key and the value; reads the template's file."""
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
        """The question about a row; braces in ``values`` (prompt, response, answer) are text."""
        return re.sub(r"\{(\w+)\}", lambda match: values[match[1]], self.text)

    def score(self, verdict: str, cut: bool = False) -> float:
        """Raises ValueError, which says why, for a verdict that cannot be read. ``cut``: at ``max_response_length``; its last number
        may not be whole, and by the default pattern not the last."""
        matches = list(re.finditer(self.pattern, verdict, re.DOTALL))
        group = min(1, re.compile(self.pattern).groups)
        found = matches[-1].group(group) if matches else None
        if cut and found and (self.pattern == JudgeConfig.pattern or not verdict[matches[-1].end(group) :].lstrip(".,")):
            raise ValueError(
                f"max_response_length={self.max_response_length} cut the verdict before its number was sure: {verdict[-200:]!r}"
            )
        try:
            number = float(found or "")
        except ValueError:
            number = float("nan")
        lowest, highest = self.range or (-LARGEST, LARGEST)
        if not lowest <= number <= highest:
            wanted = f"no number from {lowest:g} to {highest:g}" if self.range else "no number"
            raise ValueError(f"{wanted} in the verdict {verdict[-200:]!r}")
        return (number - lowest) / (highest - lowest) if self.range else number
