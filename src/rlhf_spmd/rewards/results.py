"""Results of reward function calls, row by row, and whether a run can go on with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf_spmd.config.schema import printable
from rlhf_spmd.rewards.config import RewardConfig


class RewardError(RuntimeError):
    """The reward cannot go on: a worker does not start, or too many calls fail. Ends the run with class ``reward``."""

    exit_class = "reward"  # how the run ends: process/program.py


def check_failures(
    config: RewardConfig,
    where: str,
    failed: int,
    calls: int,
    first_error: str,
    first_step: bool,
    again: bool = False,
    rows: str | None = None,
) -> None:
    """Raises RewardError if too many calls of a step failed.

    Too many are: more than ``max_failure_rate``, all of the first step, or all of two steps in a row. ``failed``
    (failures and time-outs) and ``calls`` are summed over ranks, so that all ranks decide alike. ``again``: all calls
    of the step before failed too. ``rows``: names what was called if there are no steps.
    """
    everything = failed == calls and (first_step or again)
    if failed and (everything or failed / calls > config.max_failure_rate):
        limit = "" if everything else f", more than {where}.max_failure_rate = {config.max_failure_rate}"
        step = rows or ("the first step" if first_step else f"this step{', as of the step before' if everything else ''}")
        raise RewardError(
            f"{where}.{config.scorer} failed in {failed} of {calls} calls of {step}{limit}; first error: {first_error}"
        )


class RewardResult:
    """Results of one :meth:`RewardRunner.score` in row order, while they arrive and after; rows and calls may be added.

    ``calls``: the rows of each call. ``scores``: the function's scores without weights, ``default`` if a call failed,
    None if the function does not apply. ``extras``: the other numeric entries that the function returned, per row.
    ``answers``: by row the answer that the function has read in the response, None if it found none; rows of functions that
    read no answers, and failed ones, are not in it.
    ``late``: rows whose call overran, for which ``overrun`` is the message. ``errors``: why a row's call failed.
    ``names``: what each row is called outside.
    """

    def __init__(self, default: float | None, overrun: str) -> None:
        self.default, self.overrun, self.unanswered = default, overrun, 0
        self.calls: list[Sequence[int]] = []
        self.scores: list[float | None] = []
        self.extras: list[dict[str, float]] = []
        self.answers: dict[int, str | None] = {}
        self.errors: dict[int, str] = {}
        self.names: list[Any] = []
        self.late: set[int] = set()

    def add_rows(self, names: Sequence[Any]) -> range:
        first = len(self.scores)
        self.names += names
        self.scores += [self.default] * len(names)
        self.extras += [{} for _ in names]
        return range(first, len(self.scores))

    def add_calls(self, calls: Sequence[Sequence[int]]) -> range:
        first = len(self.calls)
        self.calls += calls
        self.unanswered += len(calls)
        return range(first, first + len(calls))

    def select_rows(self, rows: Sequence[int]) -> RewardResult:
        """Returns the results of these rows, in this order."""
        found = RewardResult(self.default, self.overrun)
        found.scores, found.extras = [self.scores[row] for row in rows], [self.extras[row] for row in rows]
        found.names = [self.names[row] for row in rows]
        found.answers = {at: self.answers[row] for at, row in enumerate(rows) if row in self.answers}
        found.errors = {at: self.errors[row] for at, row in enumerate(rows) if row in self.errors}
        found.late = {at for at, row in enumerate(rows) if row in self.late}
        return found

    @property
    def timeouts(self) -> int:
        return len(self.late)

    @property
    def failures(self) -> int:
        """Number of rows whose call raised, returned no finite score, or ended its worker."""
        return len(self.errors) - self.timeouts

    @property
    def first_error(self) -> str | None:
        """Error of the lowest row that failed, or None."""
        first = min(self.errors, default=None)
        return None if first is None else printable(f"row {self.names[first]}: {self.errors[first]}")

    def take(self, call: int, results: list[Any] | str | None) -> None:
        """Stores a worker's answer: the list of results, or for all rows of the call why it failed, or None if it overran."""
        rows = self.calls[call]
        each = results if isinstance(results, list) else [results] * len(rows)
        for index, result in zip(rows, each, strict=True):
            if result is None:
                self.late.add(index)
                self.errors[index] = self.overrun
            elif isinstance(result, str):
                self.errors[index] = result
            else:
                self.scores[index], self.extras[index], *answer = result
                if answer:
                    self.answers[index] = answer[0]
        self.unanswered -= 1

    def extra_sums(self) -> dict[str, tuple[float, int]]:
        """Returns sum and number of rows for each extra, so that ranks can take a mean."""
        return merge_sums({key: (value, 1) for key, value in row.items()} for row in self.extras)


def source_metric(reward: str, source: str) -> str:
    """Returns the metric of a reward's mean score over the rows of one ``data_source``; it clashes with no extra."""
    return f"{reward}/{'data_source extra' if source == 'extra' else source}/mean"


def merge_sums(parts: Iterable[Mapping[str, tuple[float, int]]]) -> dict[str, tuple[float, int]]:
    """Adds sums and counts by name."""
    found: dict[str, tuple[float, int]] = {}
    for name, (total, count) in (item for part in parts for item in part.items()):
        before = found.get(name, (0.0, 0))
        found[name] = before[0] + total, before[1] + count
    return found
