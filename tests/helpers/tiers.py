"""Which cases of a test run when: the short tier, ``scripts/test.sh``, and the long one, ``scripts/test.sh --all``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def tiers(values: Iterable[Any], short: Callable[[Any], bool] | Iterable[Any]) -> list[Any]:
    """Returns parameters of a test. Those in ``short``, or for which it returns True, run in both tiers, the others in the long one."""
    is_short = short if callable(short) else frozenset(short).__contains__
    return [value if is_short(value) else pytest.param(value, marks=pytest.mark.long) for value in values]


def pairwise(
    axes: Mapping[str, Sequence[Any]], allowed: Callable[[dict[str, Any]], bool] = lambda case: True
) -> list[dict[str, Any]]:
    """Returns a covering array: cases with one value of every axis. Each pair of values of two axes that an allowed case has is in one.

    Greedy and deterministic: the next case is the one of the product that has the most missing pairs, the first of equals.
    """
    cases = [case for values in product(*axes.values()) if allowed(case := dict(zip(axes, values, strict=True)))]
    pairs_of = [set(combinations([(axis, repr(value)) for axis, value in case.items()], 2)) for case in cases]
    missing = set[Any]().union(*pairs_of)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda number: len(pairs_of[number] & missing))
        chosen.append(cases[best])
        missing -= pairs_of[best]
    return chosen
