"""Limits at which a call returns before all of its rows have ended."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlhf_spmd.config.constraints import PositiveFloat, PositiveFraction, PositiveInt
from rlhf_spmd.config.schema import check_fields
from rlhf_spmd.generation.sequence import ScheduledStep, SequenceState
from rlhf_spmd.parallel.collectives import Group

# (the step just finished, tokens drawn so far in the call) -> whether the call ends; every rank asks after each step
Interrupts = Callable[[ScheduledStep, int], bool]


@dataclass(frozen=True)
class GenerationLimits:
    """Ends a call when the first of these is reached. If all are null, the call ends with its last row.

    - steps: steps of this replica
    - tokens: tokens that this replica draws in this call
    - seconds: by the clock of the replica's first rank
    - fraction: the share of the call's groups that have ended, each with all of its rows
    """

    steps: PositiveInt | None = None
    tokens: PositiveInt | None = None
    seconds: PositiveFloat | None = None
    fraction: PositiveFraction | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        check_fields(self, "limits")


class LimitWatch:
    """Compares a call on ``rows`` with its ``limits``. All ranks of ``replica`` get the same answers."""

    def __init__(self, limits: GenerationLimits, rows: Sequence[SequenceState], replica: Group) -> None:
        self.limits, self.replica = limits, replica
        self.started = time.perf_counter()
        self.num_steps = 0
        self.unfinished = Counter(row.request.group_id for row in rows)
        fraction = 1.0 if limits.fraction is None else limits.fraction
        self.missing = math.ceil(fraction * len(self.unfinished) - 1e-9)  # groups that must end before the call does

    def interrupts(self, step: ScheduledStep, num_drawn: int) -> bool:
        """Whether the call ends after this finished step. ``num_drawn``: tokens drawn in this call so far.

        Collective over the replica: every rank of it must call, in program order, after each step.
        """
        limits = self.limits
        self.num_steps += 1
        if limits.steps is not None and self.num_steps >= limits.steps:
            return True
        if limits.fraction is not None:
            for group in (work.row.request.group_id for work in step.work if work.row.ended):
                self.unfinished[group] -= 1
                self.missing -= self.unfinished[group] == 0
            if self.missing <= 0:
                return True
        if limits.tokens is not None and num_drawn >= limits.tokens:
            return True
        if limits.seconds is None:
            return False
        late = torch.tensor([time.perf_counter() - self.started >= limits.seconds])
        return bool(self.replica.broadcast(late, 0, "generation:limits"))
