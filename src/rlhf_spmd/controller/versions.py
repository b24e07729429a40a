"""Versions of roles' weights, and which version generation takes when it runs ahead of training. Pure, the same on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any


class Versions:
    """A role's version is the number of calls that have trained it in this run.

    ``ahead``: how many steps generation may be ahead of training (bounded staleness). Generate calls of step k take the weights with
    which step k - ahead started to generate, and do not wait for later updates. The choice is fixed, so runs can be repeated. Early
    in a run that step does not exist; then they take those of the oldest step since k - ahead.
    """

    def __init__(self, ahead: int = 0) -> None:
        self.ahead = ahead
        self._newest: Counter[str] = Counter()
        self._step: int | None = None  # the current step; None: between steps
        self._sent: dict[str, dict[int, int]] = {}  # role -> step -> the newest version when the step first generated with it

    def copy(self) -> Versions:
        """Return a copy for a trace, which must not change these."""
        other = Versions(self.ahead)
        other._newest, other._step = self._newest.copy(), self._step
        other._sent = {role: dict(sent) for role, sent in self._sent.items()}
        return other

    def newest(self, role: str) -> int:
        return self._newest.get(role, 0)

    def train(self, role: str) -> None:
        """Count a call that trains a role."""
        self._newest[role] += 1

    def begin_step(self, number: int) -> None:
        self._step = number
        self._forget(number - self.ahead)

    def end_step(self) -> None:
        assert self._step is not None, "begin_step comes first"
        self._forget(self._step + 1 - self.ahead)
        self._step = None

    def generating(self, role: str) -> int:
        """Return the version that a generate call takes. Outside steps, such as in validation, that is the newest."""
        if not self.ahead or self._step is None:
            return self._newest[role]
        sent = self._sent.setdefault(role, {})
        sent.setdefault(self._step, self._newest[role])
        return sent[min(sent)]

    def generating_step(self, role: str, number: int) -> int:
        """Return the step that first generated with the weights which a generate call of step ``number`` takes."""
        return min(self._sent[role]) if self.ahead and self._step is not None else number

    def needed_later(self, role: str) -> set[int]:
        """Return the existing versions that generate calls of later steps may take."""
        first = -1 if self._step is None else self._step + 1 - self.ahead
        return {self._newest[role], *(version for step, version in self._sent.get(role, {}).items() if step >= first)}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Call it between two steps."""
        return {
            "newest": dict(self._newest),
            "sent": {role: list(map(list, sent.items())) for role, sent in self._sent.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._newest = Counter(state["newest"])
        self._sent = {role: dict(sent) for role, sent in state["sent"].items()} if self.ahead else {}

    def _forget(self, first: int) -> None:
        """Forget the versions of steps before ``first``."""
        for role, sent in self._sent.items():
            self._sent[role] = {step: version for step, version in sent.items() if step >= first}
