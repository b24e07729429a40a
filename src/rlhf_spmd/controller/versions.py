"""Versions of roles' weights, and which of them a generation takes that runs ahead of training: pure, the same on every rank."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any


class Versions:
    """A role's version is the number of calls that have trained it in the run.

    ``ahead``: steps that generation may be ahead of training (bounded staleness). The generate calls of step k take the weights that
    step k - ahead began with, or those that the run began with: always the same ones, so that a run can be repeated. They do not wait
    for the updates of the last ``ahead`` steps.
    """

    def __init__(self, ahead: int = 0) -> None:
        self.ahead = ahead
        self._newest: Counter[str] = Counter()
        self._starts: deque[tuple[int, Mapping[str, int]]] = deque(maxlen=ahead + 1)  # of steps: number, versions by role
        self._in_step = False

    def newest(self, role: str) -> int:
        return self._newest[role]

    def train(self, role: str) -> None:
        """A call that trains a role was made."""
        self._newest[role] += 1

    def begin_step(self, number: int) -> None:
        self._starts.append((number, dict(self._newest)))
        self._in_step = True

    def end_step(self) -> None:
        self._in_step = False

    def generating(self, role: str) -> int:
        """The version that a generate call takes: outside steps, as in validations, the newest."""
        return self._starts[0][1].get(role, 0) if self.ahead and self._in_step else self._newest[role]

    def generating_step(self, number: int) -> int:
        """The step at whose start the weights were as a generate call of step ``number`` takes them."""
        return self._starts[0][0] if self.ahead and self._in_step else number

    def to_come(self, role: str) -> set[int]:
        """Those that generate calls of steps to come may take, as far as they exist."""
        later = list(self._starts)[-self.ahead :] if self.ahead else []
        return {self._newest[role], *(versions.get(role, 0) for _, versions in later)}

    def copy(self) -> Versions:
        other = Versions(self.ahead)
        other._newest, other._in_step = self._newest.copy(), self._in_step
        other._starts.extend(self._starts)
        return other

    def state(self) -> dict[str, Any]:
        """For a checkpoint, between two steps."""
        later = list(self._starts)[-self.ahead :] if self.ahead else []
        return {"newest": dict(self._newest), "starts": [[number, dict(versions)] for number, versions in later]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._newest = Counter(state["newest"])
        self._starts.clear()
        starts = state["starts"][-self.ahead :] if self.ahead else []
        self._starts.extend((number, versions) for number, versions in starts)
