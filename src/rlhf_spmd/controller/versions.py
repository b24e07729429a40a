"""Versions of roles' weights, and which of them a generation takes that runs ahead of training: pure, the same on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


class Versions:
    """A role's version is the number of calls that have trained it in the run.

    ``ahead``: steps that generation may be ahead of training (bounded staleness). The generate calls of step k take the weights that
    step k - ahead began with, and do not wait for the updates since: always the same weights, so that a run can be repeated. Only
    weights that some step generated with leave for the ranks that generate; so they are those that the oldest step began with which
    generated, is no older than step k - ahead, and belongs to the run.
    """

    def __init__(self, ahead: int = 0) -> None:
        self.ahead = ahead
        self._newest: Counter[str] = Counter()
        self._step: int | None = None  # the step under way; None: between steps
        self._begun: Mapping[str, int] = {}  # versions at its start
        self._starts: dict[int, Mapping[str, int]] = {}  # step that generated -> versions at its start, for the steps to come

    def newest(self, role: str) -> int:
        return self._newest[role]

    def train(self, role: str) -> None:
        """A call that trains a role was made."""
        self._newest[role] += 1

    def begin_step(self, number: int) -> None:
        self._step, self._begun = number, dict(self._newest)
        self._starts = {step: versions for step, versions in self._starts.items() if step >= number - self.ahead}

    def end_step(self) -> None:
        assert self._step is not None, "begin_step comes first"
        self._starts = {step: versions for step, versions in self._starts.items() if step > self._step - self.ahead}
        self._step = None

    def generating(self, role: str) -> int:
        """The version that a generate call takes: outside steps, as in validations, the newest."""
        if not self.ahead or self._step is None:
            return self._newest[role]
        self._starts.setdefault(self._step, self._begun)
        return self._starts[min(self._starts)].get(role, 0)

    def generating_step(self, number: int) -> int:
        """The step at whose start the weights were as a generate call of step ``number`` takes them."""
        return min(self._starts) if self.ahead and self._step is not None else number

    def to_come(self, role: str) -> set[int]:
        """Those that generate calls of steps to come may take, as far as they exist."""
        first = -1 if self._step is None else self._step + 1 - self.ahead
        return {self._newest[role], *(versions.get(role, 0) for step, versions in self._starts.items() if step >= first)}

    def copy(self) -> Versions:
        other = Versions(self.ahead)
        other._newest, other._step, other._begun = self._newest.copy(), self._step, self._begun
        other._starts = dict(self._starts)
        return other

    def state(self) -> dict[str, Any]:
        """For a checkpoint, between two steps."""
        return {"newest": dict(self._newest), "starts": [[step, dict(versions)] for step, versions in self._starts.items()]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._newest = Counter(state["newest"])
        self._starts = dict(state["starts"]) if self.ahead else {}
