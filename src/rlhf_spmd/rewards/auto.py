"""The reward that a row's ``data_source`` asks for; the names are those that verl's data preparation writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_spmd.rewards import aime, code, gsm8k, math, multiple_choice
from rlhf_spmd.rewards.binding import right_answer

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
    """Raises ValueError for a ``data_source`` that is not known, and one whose rows have no answers."""
    answered = {str(row.get("data_source")) for row in rows if right_answer(row) is not None}
    for row, place in zip(rows, places, strict=True):
        source = row.get("data_source")
        function = _reward(source)
        if function is None:
            known = ", ".join((*SOURCES, *(f"{prefix}*" for prefix in PREFIXES)))
            raise ValueError(f"{place}: {where}.function=auto has no reward for the data_source {source!r}; it knows {known}")
        if function is not code.score and str(source) not in answered:
            columns = ", ".join(sorted(key for key, value in row.items() if value is not None))
            raise ValueError(
                f"{place}: {where}.function=auto: no row of the data_source {source!r} has an answer (data.answer_key names its "
                f"column); the columns are {columns}"
            )


def score(response: str, row: dict[str, Any], data_source: str, ground_truth: object = None) -> Any:
    """What the reward of ``data_source`` returns."""
    function = _reward(data_source)
    if function is None:
        raise ValueError(f"no reward for the data_source {data_source!r}")
    if function is gsm8k.score:
        return gsm8k.score("", response, {**row, "answer": ground_truth})
    if function is code.score:
        return code.score(response, row, ground_truth)
    return function(response, ground_truth)
