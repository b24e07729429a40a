"""What calls of a reward function gave, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_spmd.rewards.config import RewardConfig


@dataclass
class RewardResult:
    """What the calls of one :meth:`RewardRunner.score` gave, in the order of the rows.

    ``scores``: the function's scores, ``default`` where a call failed, None where the function does not apply, without weights.
    ``extras``: one dict per row, the other numeric entries of what the function returned. ``failures``: rows whose call raised,
    returned no finite score, or ended its worker; ``timeouts``: rows whose call overran (not in ``failures``). ``first_error``:
    message of the lowest row that failed, None without one.
    """

    scores: list[float | None]
    extras: list[dict[str, float]]
    failures: int = 0
    timeouts: int = 0
    first_error: str | None = None

    def extra_sums(self) -> dict[str, tuple[float, int]]:
        """For each extra: its sum over rows and the number of rows that have it, so that a mean over ranks can be taken."""
        sums: dict[str, tuple[float, int]] = {}
        for row in self.extras:
            for key, value in row.items():
                total, count = sums.get(key, (0.0, 0))
                sums[key] = (total + value, count + 1)
        return sums


class Pending:
    """The results of one call of ``RewardRunner.score`` while they come in. ``calls``: the rows of each call of the function."""

    def __init__(self, config: RewardConfig, where: str, calls: list[Sequence[int]], num_rows: int) -> None:
        self._config, self._where, self.calls = config, where, calls
        self._scores: list[float | None] = [config.default] * num_rows
        self._extras: list[dict[str, float]] = [{} for _ in range(num_rows)]
        self._errors: dict[int, str] = {}
        self._timeouts = 0
        self.unanswered = len(calls)

    def take(self, call: int, seconds: float, results: list[Any] | str) -> None:
        if seconds > self._config.timeout_s:
            self.time_out(call)
        elif isinstance(results, str):
            self.fail(call, results)
        else:
            pairs = list(zip(self.calls[call], results, strict=True))
            for index, result in pairs:
                if result is None:
                    self._timeouts += 1
                    self._errors[index] = self._overran
                elif isinstance(result, str):
                    self._errors[index] = result
                else:
                    self._scores[index], self._extras[index] = result
            self.unanswered -= 1

    @property
    def _overran(self) -> str:
        return f"no score within {self._where}.timeout_s = {self._config.timeout_s}"

    def fail(self, call: int, message: str) -> None:
        self._errors |= dict.fromkeys(self.calls[call], message)
        self.unanswered -= 1

    def time_out(self, call: int) -> None:
        self._timeouts += len(self.calls[call])
        self.fail(call, self._overran)

    def result(self) -> RewardResult:
        first = min(self._errors, default=None)
        message = None if first is None else f"row {first}: {self._errors[first]}"
        return RewardResult(self._scores, self._extras, len(self._errors) - self._timeouts, self._timeouts, message)
