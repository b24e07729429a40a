"""What a step's calls report, as metrics and samples; and the validation by generated responses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_spmd.controller import Reference
from rlhf_spmd.data.loader import validation_batches
from rlhf_spmd.data.prompts import PromptDataset
from rlhf_spmd.generation.config import SamplingConfig


def merge_values(calls: Iterable[list[Any]]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The collected values of a step's calls as metrics (keys with a slash) and samples.

    Members' values of one key are equal, or local: then the largest of names that end in max, the smallest of min, else the mean.
    """
    metrics: dict[str, float] = {}
    samples: list[dict[str, Any]] = []
    for members in calls:
        reports = [member for member in members if isinstance(member, dict)]
        for key in dict.fromkeys(key for report in reports for key in report if "/" in key):
            values = [float(report[key]) for report in reports if key in report]
            if key.endswith("max"):
                metrics[key] = max(values)
            elif key.endswith("min"):
                metrics[key] = min(values)
            else:
                metrics[key] = values[0] if len(set(values)) == 1 else sum(values) / len(values)
        samples += [sample for report in reports for sample in report.get("samples", [])]
        metrics |= mean_extras(reports)
    return metrics, samples


def mean_extras(reports: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Means over all rows of the other numbers that a reward function returned beside the score: ``<role>/extra/<name>``."""
    sums: dict[str, list[float]] = {}
    for report in reports:
        for name, (total, count) in report.get("extras", {}).items():
            before = sums.setdefault(name, [0.0, 0.0])
            sums[name] = [before[0] + total, before[1] + count]
    return {name: total / count for name, (total, count) in sums.items()}


def validate_prompts(
    models: Any, prompts: PromptDataset, batch_size: int | None, sampling: SamplingConfig, number: int
) -> dict[str, float]:
    """Mean score on the validation prompts, and means of what else the reward function returned.

    Collective over the world: every rank of it must call, in program order.
    """

    def script(rows: Reference) -> Any:
        return models.reward.compute_reward(rows.union(models.actor.generate_sequences(rows, sampling, number)))

    controller = models.actor.controller
    reports: list[dict[str, Any]] = []
    for batch in validation_batches(prompts, batch_size):
        scored = controller.run(script, controller.source(batch.repeat(sampling.n), "prompt_ids"))
        reports += controller.get(scored)[0]
    rows = sum(report["rows"] for report in reports)
    mean = {"val/reward_mean": sum(report["score_sum"] for report in reports) / rows} if rows else {}
    return {**mean, **{f"val/{name}": value for name, value in mean_extras(reports).items()}}
