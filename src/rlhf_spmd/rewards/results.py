"""What calls of a reward function gave, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class RewardResult:
    """What the calls of one :meth:`RewardRunner.score` gave, in the order of the rows, while they come in and after.

    ``calls``: the rows of each call of the function; ``overrun``: what is said of a row whose call took too long. ``scores``: the
    function's scores, ``default`` where a call failed, None where the function does not apply, without weights. ``extras``: one dict
    per row, the other numeric entries of what the function returned. ``timeouts``: rows whose call overran. ``errors``: by row, why
    its call failed.
    """

    def __init__(self, calls: list[Sequence[int]], num_rows: int, default: float, overrun: str) -> None:
        self.calls, self.overrun, self.unanswered = calls, overrun, len(calls)
        self.scores: list[float | None] = [default] * num_rows
        self.extras: list[dict[str, float]] = [{} for _ in range(num_rows)]
        self.errors: dict[int, str] = {}
        self.timeouts = 0

    @property
    def failures(self) -> int:
        """Rows whose call raised, returned no finite score, or ended its worker."""
        return len(self.errors) - self.timeouts

    @property
    def first_error(self) -> str | None:
        """Of the lowest row that failed, None without one."""
        first = min(self.errors, default=None)
        return None if first is None else f"row {first}: {self.errors[first]}"

    def take(self, call: int, results: list[Any] | str) -> None:
        """What a worker answered; a message in place of the list is why the whole call failed."""
        if isinstance(results, str):
            self.fail(call, results)
            return
        for index, result in zip(self.calls[call], results, strict=True):
            if result is None:
                self.timeouts += 1
                self.errors[index] = self.overrun
            elif isinstance(result, str):
                self.errors[index] = result
            else:
                self.scores[index], self.extras[index] = result
        self.unanswered -= 1

    def fail(self, call: int, message: str) -> None:
        self.errors |= dict.fromkeys(self.calls[call], message)
        self.unanswered -= 1

    def time_out(self, call: int) -> None:
        self.timeouts += len(self.calls[call])
        self.fail(call, self.overrun)

    def extra_sums(self) -> dict[str, tuple[float, int]]:
        """For each extra: its sum over rows and the number of rows that have it, so that a mean over ranks can be taken."""
        sums: dict[str, tuple[float, int]] = {}
        for row in self.extras:
            for key, value in row.items():
                total, count = sums.get(key, (0.0, 0))
                sums[key] = (total + value, count + 1)
        return sums
