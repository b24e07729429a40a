"""What reward functions returned, row by row, and whether a run can go on with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlhf_spmd.config.constraints import LARGEST
from rlhf_spmd.config.words import printable
from rlhf_spmd.rewards.answers import Verdict
from rlhf_spmd.rewards.config import RewardConfig


class RewardError(RuntimeError):
    """The reward cannot go on: a worker does not start, or too many calls fail. Ends the run with class ``reward``."""

    exit_class = "reward"  # how the run ends: process/program.py


# -- what a function returned


def read_result(value: Any) -> tuple[float, dict[str, float]]:
    """Return (score, extras) from what a reward function returned. Extras that are not finite in float32 are left out.

    Raises TypeError, KeyError, ValueError or OverflowError if there is no valid score.
    """
    if not isinstance(value, dict):
        return _number(value), {}
    if "score" not in value:
        raise KeyError(f"the returned dict has no 'score', only {sorted(map(str, value))}")
    extras = {}
    for key, entry in value.items():
        if key != "score":
            with suppress(TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several elements
                extras[str(key)] = _number(entry)
    return _number(value["score"]), extras


class ReadAnswer(NamedTuple):
    """The answer that a reward function has read in a response. ``text``: None if it has read none."""

    text: str | None


def read_answer(value: Any) -> ReadAnswer | None:
    """Return the answer of a :class:`Verdict`, or verl's entry ``pred`` of a dict; None for a function that reads no answers."""
    if isinstance(value, Verdict):
        return ReadAnswer(value.answer)
    if isinstance(value, dict) and "pred" in value:
        return ReadAnswer(None if value["pred"] is None else str(value["pred"]))
    return None


def _number(value: Any) -> float:
    """Return a Python or NumPy number or a one-element tensor as a float. Text is refused, even if it looks like a number."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        hint = "; a function with an argument completions takes and returns lists" if isinstance(value, list) else ""
        kind = type(value).__name__
        raise TypeError(
            f"{repr(value)[:80]}, a {kind}, is not a number: a score is a float, an int or a bool, or None where there is none{hint}"
        )
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    if abs(number) > LARGEST[float]:
        raise ValueError(f"{number} is not finite in float32")
    return number


# -- the results of a step


@dataclass(frozen=True)
class RowResult:
    """The result of a row.

    - score: what the function returned, without weight; ``default`` if the call failed; None if the function does not apply
    - extras: the other numbers that it returned
    - answer: the answer that it has read in the response; None if it reads no answers
    - error: why the call failed; None if it has not
    - timed_out: True if the call failed because it took too long
    """

    score: float | None
    extras: Mapping[str, float] = field(default_factory=dict)
    answer: ReadAnswer | None = None
    error: str | None = None
    timed_out: bool = False


class RewardResult:
    """The results of one :meth:`RewardRunner.score`, in the order of its rows.

    - scores, extras: those of every row
    - answers: the text of :class:`ReadAnswer`, by position, for the rows whose function reads answers
    - errors: why the call failed, by position
    - timeouts: the number of rows whose call took too long
    - failures: the number of rows whose call raised, returned no finite score, or ended its worker
    - first_error: the error of the first such row, with its entry of ``names``; None without errors
    """

    def __init__(self, rows: Sequence[RowResult], names: Sequence[Any]) -> None:
        self.scores = [row.score for row in rows]
        self.extras = [row.extras for row in rows]
        self.answers = {position: row.answer.text for position, row in enumerate(rows) if row.answer is not None}
        self.errors = {position: row.error for position, row in enumerate(rows) if row.error is not None}
        self.timeouts = sum(row.timed_out for row in rows)
        self.failures = len(self.errors) - self.timeouts
        lines = (printable(f"row {names[position]}: {error}") for position, error in self.errors.items())
        self.first_error = next(lines, None)

    def extra_sums(self) -> dict[str, tuple[float, int]]:
        """Return sum and number of rows for each extra, so that ranks can take a mean."""
        return merge_sums({key: (value, 1) for key, value in extras.items()} for extras in self.extras)


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
    """Raise RewardError if too many calls of a step failed.

    Too many are: more than ``max_failure_rate``, all of the first step, or all of two steps in a row. ``failed``
    (failures and time-outs) and ``calls`` are summed over ranks, so that all ranks decide alike.

    - again: all calls of the step before failed, too
    - rows: what was scored, for the message of a program without steps
    """
    all_failed = failed == calls and (first_step or again)
    if failed and (all_failed or failed / calls > config.max_failure_rate):
        limit = "" if all_failed else f", more than {where}.max_failure_rate = {config.max_failure_rate}"
        step = rows or ("the first step" if first_step else f"this step{', as of the step before' if all_failed else ''}")
        raise RewardError(
            f"{where}.{config.scorer} failed in {failed} of {calls} calls of {step}{limit}; first error: {first_error}"
        )


# -- metrics


def source_metric(reward: str, source: str) -> str:
    """Return the metric of a reward's mean score over the rows of one ``data_source``. No extra has the same metric."""
    return f"{reward}/{'data_source extra' if source == 'extra' else source}/mean"


def merge_sums(parts: Iterable[Mapping[str, tuple[float, int]]]) -> dict[str, tuple[float, int]]:
    """Return sums and counts added by name."""
    sums: dict[str, tuple[float, int]] = {}
    for name, (total, count) in (item for part in parts for item in part.items()):
        other_total, other_count = sums.get(name, (0.0, 0))
        sums[name] = (other_total + total, other_count + count)
    return sums
