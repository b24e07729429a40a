"""Versions of roles' weights, and which of them a generation takes that runs ahead of training: pure, the same on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


class Versions:
    """A role's version is the number of calls that have trained it in the run.

    ``ahead``: steps that generation may be ahead of training (bounded staleness). The generate calls of step k take the weights that
    step k - ahead began to generate with, and do not wait for the updates since: always the same, so that a run can be repeated.
    Only what was the newest when a step generated is on the ranks that generate. So these are the weights of the oldest such step
    from k - ahead on that the run had.
    """

    def __init__(self, ahead: int = 0) -> None:
        self.ahead = ahead
        self._newest: Counter[str] = Counter()
        self._step: int | None = None  # the step under way; None: between steps
        self._sent: dict[str, dict[int, int]] = {}  # role -> step -> the newest version when the step first generated with it

    def copy(self) -> Versions:
        """For a trace of what is to come."""
        other = Versions(self.ahead)
        other._newest, other._step = self._newest.copy(), self._step
        other._sent = {role: dict(sent) for role, sent in self._sent.items()}
        return other

    def newest(self, role: str) -> int:
        return self._newest.get(role, 0)

    def train(self, role: str) -> None:
        """A call that trains a role was made."""
        self._newest[role] += 1

    def begin_step(self, number: int) -> None:
        self._step = number
        self._forget(number - self.ahead)

    def end_step(self) -> None:
        assert self._step is not None, "begin_step comes first"
        self._forget(self._step + 1 - self.ahead)
        self._step = None

    def generating(self, role: str) -> int:
        """The version that a generate call takes: outside steps, as in validations, the newest."""
        if not self.ahead or self._step is None:
            return self._newest[role]
        sent = self._sent.setdefault(role, {})
        sent.setdefault(self._step, self._newest[role])
        return sent[min(sent)]

    def generating_step(self, role: str, number: int) -> int:
        """The step that first generated with the weights that a generate call of step ``number`` takes."""
        return min(self._sent[role]) if self.ahead and self._step is not None else number

    def to_come(self, role: str) -> set[int]:
        """Those that generate calls of steps to come may take, as far as they exist."""
        first = -1 if self._step is None else self._step + 1 - self.ahead
        return {self._newest[role], *(version for step, version in self._sent.get(role, {}).items() if step >= first)}

    def state(self) -> dict[str, Any]:
        """For a checkpoint, between two steps."""
        return {
            "newest": dict(self._newest),
            "sent": {role: list(map(list, sent.items())) for role, sent in self._sent.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._newest = Counter(state["newest"])
        self._sent = {role: dict(sent) for role, sent in state["sent"].items()} if self.ahead else {}

    def _forget(self, first: int) -> None:
        """What came before step ``first``."""
        for role, sent in self._sent.items():
            self._sent[role] = {step: version for step, version in sent.items() if step >= first}
