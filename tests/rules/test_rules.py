"""Every rule of the code base refuses what it is about, in the words that its table has.

A file beside this one that is named after a package has its cases (``CASES``): what breaks a rule, and the whole line. A rule without
a case fails here.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from places import ROOT
from rlhf_spmd.config.rules import Rule, RuleBroken

TABLES = sorted(path.stem for path in Path(__file__).parent.glob("*_rules.py") if path.stem != "test_rules")
SOURCE = ROOT / "src" / "rlhf_spmd"
CASES: list[tuple[Callable[[], Any], str]] = [case for table in TABLES for case in importlib.import_module(table).CASES]


def all_rules() -> dict[int, str]:
    """Return where each rule of the code base stands, by the rule's identity."""
    places: dict[int, str] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        if "Rule(" not in path.read_text():
            continue
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        for noun, value in vars(importlib.import_module(name)).items():
            owned = vars(value).get("rules", ()) if isinstance(value, type) and dataclasses.is_dataclass(value) else value
            if isinstance(owned, tuple):
                places |= {id(rule): f"{name}.{noun}: {rule.why}" for rule in owned if isinstance(rule, Rule)}
    return places


def refusal(case: Callable[[], Any]) -> tuple[str, Rule]:
    """Return the line with which ``case`` is refused, and the rule that refused it."""
    with pytest.raises(ValueError, match=": ") as caught:
        case()
    cause: BaseException | None = caught.value
    while cause is not None and not isinstance(cause, RuleBroken):
        cause = cause.__cause__
    assert isinstance(cause, RuleBroken), f"refused by no rule: {caught.value}"
    return str(caught.value), cause.rule


@pytest.mark.parametrize(("case", "line"), CASES, ids=[line[:60] for _, line in CASES])
def test_a_rule_refuses_in_one_line_what_breaks_it(case: Callable[[], Any], line: str) -> None:
    assert refusal(case)[0] == line


def test_every_rule_has_a_case() -> None:
    refused = {id(refusal(case)[1]) for case, _ in CASES}
    assert not [place for rule, place in all_rules().items() if rule not in refused]
