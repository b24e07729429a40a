"""Chooses the reward by the row's ``data_source``; the names are those of verl's data preparation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_spmd.rewards import aime, code, gsm8k, math, multiple_choice
from rlhf_spmd.rewards.math import load as load
from rlhf_spmd.rewards.row_values import right_answer

_CODE = ("codecontests", "apps", "codeforces", "taco", "openai_humaneval", "mbpp")
_NUMINA = ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
SOURCES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("openai/gsm8k", "gsm8k"), gsm8k.score),
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math500"), math.score),
    **dict.fromkeys(("math", "math_dapo", "math_dapo_reasoning"), math.flexible),
    **dict.fromkeys((f"numina_{name}" for name in _NUMINA), math.flexible),
    **dict.fromkeys(_CODE, code.score),
    **dict.fromkeys(("cais/mmlu", "Idavidrein/gpqa"), multiple_choice.score),
}
PREFIXES: dict[str, Callable[..., Any]] = {"aime": aime.score, "HuggingFaceH4/aime": aime.score}


def _reward(data_source: object) -> Callable[..., Any] | None:
    by_prefix = (function for prefix, function in PREFIXES.items() if str(data_source).startswith(prefix))
    return SOURCES.get(str(data_source)) or next(by_prefix, None)


def check_rows(where: str, rows: Sequence[Mapping[str, Any]], places: Sequence[str]) -> None:
    """Raise ValueError for an unknown ``data_source``, one without answers, and answers that its reward refuses."""
    rows_of_source: dict[str, list[tuple[Mapping[str, Any], str]]] = {}
    for row, place in zip(rows, places, strict=True):
        source = row.get("data_source")
        if _reward(source) is None:
            known = ", ".join((*SOURCES, *(f"{prefix}*" for prefix in PREFIXES)))
            raise ValueError(f"{place}: {where}.function=auto has no reward for the data_source {source!r}; it knows {known}")
        rows_of_source.setdefault(str(source), []).append((row, place))
    for source, source_rows in rows_of_source.items():
        function = _reward(source)
        if function is code.score:
            continue
        first_row, first_place = source_rows[0]
        if all(right_answer(row) is None for row, _ in source_rows):
            columns = ", ".join(sorted(key for key, value in first_row.items() if value is not None))
            raise ValueError(
                f"{first_place}: {where}.function=auto: no row of the data_source {source!r} has an answer (data.answer_key names "
                f"its column); the columns are {columns}"
            )
        check = sys.modules[function.__module__].check_rows
        check(where, [row for row, _ in source_rows], [place for _, place in source_rows])


def score(response: str, row: dict[str, Any], data_source: str, ground_truth: object = None, begun: str = "") -> Any:
    """Return what the reward of ``data_source`` returns."""
    function = _reward(data_source)
    if function is None:
        raise ValueError(f"no reward for the data_source {data_source!r}")
    if function is code.score:
        return code.score(response, row, ground_truth)
    takes_begun = function in (math.score, math.flexible, aime.score)
    return function(begun + response if takes_begun else response, ground_truth)
