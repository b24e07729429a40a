"""A reward as verl's users write it: ``compute_score`` is the name that verl looks for."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> float:
    return float(solution_str == ground_truth)
