"""Validation rows of a run, and the calls of an algorithm on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from rlhf_spmd.controller import Controller, Reference, source
from rlhf_spmd.data.dataset import TokenDataset
from rlhf_spmd.data.loader import validation_batches
from rlhf_spmd.generation.config import SamplingConfig
from rlhf_spmd.rewards.eval_metrics import measure_sets
from rlhf_spmd.rewards.results import RewardError, merge_sums
from rlhf_spmd.training.agent_rows import AgentRows


class ValidationRows(NamedTuple):
    """The validation rows of one stream.

    - batch_size: rows that are evaluated at a time; None: all at once
    - sets: names of the files that the rows are from
    - duplicate_metrics: names of reward means that another metric already reports
    """

    dataset: TokenDataset
    batch_size: int | None
    sets: list[str]
    duplicate_metrics: frozenset[str] = frozenset()


@dataclass(eq=False)
class Validation:
    """Evaluates an algorithm's calls on validation rows.

    - rows: validation rows by stream; their row ids are positions in the data set
    - num_shown: number of prompts of each set of which a response is kept in ``shown``, for people to read
    - agent_rows: the form of the rows, if agents answer them
    - shown: responses since :meth:`take_shown` was called
    """

    _controller: Controller
    rows: Mapping[str, ValidationRows]
    sampling: SamplingConfig
    num_shown: int
    agent_rows: AgentRows | None = None
    shown: list[dict[str, Any]] = field(default_factory=list)

    @property
    def rows_per_episode(self) -> int:
        """Return how many row ids each episode has; 1 without agents."""
        return 1 if self.agent_rows is None else self.agent_rows.per_episode

    def take_shown(self) -> list[dict[str, Any]]:
        """Return the responses in ``shown``, and empty it."""
        samples = self.shown
        self.shown = []
        return samples

    def evaluate_rows(self, name: str, call: Callable[[Reference], Reference]) -> list[Any]:
        """Return the values of a call on all validation rows of a stream: one per rank that has results, batch after batch.

        Collective over the world: every rank of it must call, in program order.
        """
        rows = self.rows[name]
        batches = map(source, validation_batches(rows.dataset, rows.batch_size))
        return [value for batch in batches for value in self._controller.get(self._controller.run(call, batch))[0]]

    def evaluate_rewards(
        self, name: str, script: Callable[[Reference, SamplingConfig, frozenset[int]], tuple[Reference, list[Reference]]]
    ) -> dict[str, float]:
        """Sample and score responses to a stream's validation prompts. Return metrics, each named ``val/...``.

        The metrics are ``reward_mean``, the mean of the scores; the means of the rewards' extras; and those of
        :func:`eval_metrics.measure_sets` for prompts whose responses all have a score. The first prompts of each set go to
        ``shown``, with one response each.

        ``script`` gets rows, sampling, and the ids of the rows that are to be reported as samples. It returns a reference to the
        rows' ``scores`` (nan: none) and ``answer_codes``, and the calls that report. Raises RewardError if no response has a score.

        Collective over the world: every rank of it must call, in program order.
        """
        rows = self.rows[name]
        n = self.sampling.n
        stride = n * self.rows_per_episode
        firsts = [int((rows.dataset.sources < number).sum()) for number in range(len(rows.sets))]
        shown = frozenset(stride * (first + i) for first in firsts for i in range(self.num_shown))
        reports: list[dict[str, Any]] = []
        fields = {"scores": [torch.empty(0)], "answer_codes": [torch.empty(0)]}
        for batch in validation_batches(rows.dataset, rows.batch_size):
            samples = batch.repeat(stride)
            if self.agent_rows is not None:
                samples = self.agent_rows.with_prompts(samples)
            scored_rows, calls = self._controller.run(script, source(samples), self.sampling, shown)
            for field_name, parts in fields.items():
                parts.append(self._controller.get_field(scored_rows, field_name))
            reports += [report for members in self._controller.get(*calls) for report in members]
        means = {key: value for key, value in mean_extras(reports).items() if key not in rows.duplicate_metrics}
        scores, codes = (torch.cat(parts).reshape(-1, n).numpy() for parts in fields.values())
        scored = ~np.isnan(scores)
        if not scored.any():
            raise RewardError(f"no reward scores any of the {scores.size} responses to validation prompts")
        has_answers = (~np.isnan(codes)).any(1).tolist()  # by prompt: the reward reads answers
        votes = [[code if code >= 0 else None for code in row] for row in codes.tolist()]  # nan becomes None, too
        answers = [row if has_answer else None for row, has_answer in zip(votes, has_answers, strict=True)]
        set_numbers = rows.dataset.sources.numpy()
        is_complete = scored.all(1)
        reported = {int(sample["row_id"]): sample for report in reports for sample in report.get("samples", [])}
        for row_id, sample in sorted(reported.items()):
            number = row_id // stride
            set_name, score = rows.sets[set_numbers[number]], float(scores[number, 0])  # of all rewards
            self.shown.append({"set": set_name, "answer": None, **sample, "score": score})
        sets = {name: np.flatnonzero((set_numbers == number) & is_complete) for number, name in enumerate(rows.sets)}
        means = {"reward_mean": float(scores[scored].mean(dtype=np.float64)), **means, **measure_sets(scores, answers, sets)}
        return {f"val/{key}": value for key, value in means.items()}


def mean_extras(reports: list[dict[str, Any]]) -> dict[str, float]:
    """Return means, over all rows, of the numbers that reward functions returned beside the score."""
    sums = merge_sums(report.get("extras", {}) for report in reports)
    return {name: total / count for name, (total, count) in sums.items()}
