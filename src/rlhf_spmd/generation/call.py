"""A call of the generator: its arguments, the limits at which it returns early, and the rows that leave it before it ends."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rlhf_spmd.config.constraints import PositiveFloat, PositiveFraction, PositiveInt, check_fields
from rlhf_spmd.generation.config import GenerationConfig, SamplingConfig
from rlhf_spmd.generation.multi_turn import Environments
from rlhf_spmd.generation.scheduler import GenerationStats
from rlhf_spmd.generation.sequence import Completion, Request, ScheduledStep, SequenceState
from rlhf_spmd.generation.stopping import StopCriteria
from rlhf_spmd.models.decoder import Decoder
from rlhf_spmd.parallel.collectives import Group
from rlhf_spmd.parallel.mesh import Mesh

# (the step just finished, tokens drawn so far in the call) -> whether the call ends; every rank asks after each step
Interrupts = Callable[[ScheduledStep, int], bool]


@dataclass(frozen=True)
class GenerationLimits:
    """Ends a call when the first of these is reached. If all are null, the call ends with its last row.

    - steps: steps of this replica
    - tokens: tokens that this replica draws in this call
    - seconds: seconds by the clock of the replica's first rank
    - fraction: the share of the call's groups that have ended, each with all of its rows
    """

    steps: PositiveInt | None = None
    tokens: PositiveInt | None = None
    seconds: PositiveFloat | None = None
    fraction: PositiveFraction | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a limit out of its range."""
        check_fields(self, "limits")


class LimitWatch:
    """Compares a call on ``rows`` with its ``limits``. All ranks of ``replica`` get the same answers."""

    def __init__(self, limits: GenerationLimits, rows: Sequence[SequenceState], replica: Group) -> None:
        self.limits, self.replica = limits, replica
        self.started = time.perf_counter()
        self.num_steps = 0
        self.unfinished = Counter(row.request.group_id for row in rows)  # group -> rows that have not ended
        fraction = 1.0 if limits.fraction is None else limits.fraction
        self.groups_to_end = math.ceil(fraction * len(self.unfinished) - 1e-9)  # so many more must end before the call does

    def interrupts(self, step: ScheduledStep, num_drawn: int) -> bool:
        """Return True if the call ends after this finished step. ``num_drawn``: tokens drawn in this call so far.

        Collective over the replica: every rank of it must call, in program order, after each step.
        """
        limits = self.limits
        self.num_steps += 1
        if limits.steps is not None and self.num_steps >= limits.steps:
            return True
        if limits.fraction is not None:
            for group in (work.row.request.group_id for work in step.work if work.row.ended):
                self.unfinished[group] -= 1
                self.groups_to_end -= self.unfinished[group] == 0
            if self.groups_to_end <= 0:
                return True
        if limits.tokens is not None and num_drawn >= limits.tokens:
            return True
        if limits.seconds is None:
            return False
        is_late = torch.tensor([time.perf_counter() - self.started >= limits.seconds])
        return bool(self.replica.broadcast(is_late, 0, "generation:limits"))


class FinishedGroups:
    """Hands out groups of ``requests`` while the others are still generated.

    - send: called each time that another 1 / ``num_chunks`` of the groups have ended, with the completions since the last call.
      It is called ``num_chunks`` - 1 times at most: the generate call returns the last chunk
    - begin: called with the completions of each group as it ends, also of the last chunk; None: not called

    Local: not every rank of a replica needs one. The ranks that have one are on the last pipeline stage, where log-probs are.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        num_chunks: int,
        send: Callable[[list[Completion]], None],
        begin: Callable[[list[Completion]], None] | None = None,
    ) -> None:
        self.num_chunks = num_chunks
        self.send, self.begin = send, begin
        self.num_sent = self.num_finished = 0
        self._unfinished = Counter(request.group_id for request in requests)  # group -> rows that have not ended
        self.num_groups = len(self._unfinished)
        self._ended: dict[int, list[SequenceState]] = {}  # the ended rows of unfinished groups
        self._unsent: list[SequenceState] = []  # rows of finished groups
        self._new: list[SequenceState] = []  # those of them that ``begin`` has not seen

    def note(self, row: SequenceState) -> None:
        """Note that ``row`` has ended and will not change any more."""
        group = row.request.group_id
        self._unfinished[group] -= 1
        self._ended.setdefault(group, []).append(row)
        if not self._unfinished[group]:
            finished = self._ended.pop(group)
            self._unsent += finished
            self._new += finished
            self.num_finished += 1

    def hand_out(self, completion: Callable[[SequenceState], Completion]) -> None:
        """Send what is due. Call it between two steps. ``completion``: makes the completion of an ended row."""
        if self.begin is not None and self._new:
            self.begin([completion(row) for row in self._new])
        self._new = []
        num_due = min(self.num_finished * self.num_chunks // self.num_groups, self.num_chunks - 1)
        if num_due > self.num_sent:
            self.num_sent = num_due
            self.send([completion(row) for row in self._unsent])
            self._unsent = []


@dataclass(frozen=True)
class GenerationCall:
    """The arguments of a call of the generator, which its micro-batches and their runners read.

    - stop: ends a response
    - num_drawable: only token ids below this number are drawn
    - version: the version of the weights
    - tick: called after each step
    - stats: what the call counts
    - interrupts: ends the call early
    - environments: answer between the model's turns
    - finished_groups: gets rows as they end
    """

    decoder: Decoder
    mesh: Mesh
    config: GenerationConfig
    sampling: SamplingConfig
    stop: StopCriteria
    num_drawable: int
    seed: int
    version: int
    tick: Callable[[], None]
    stats: GenerationStats = field(default_factory=GenerationStats)
    interrupts: Interrupts | None = None
    environments: Environments | None = None
    finished_groups: FinishedGroups | None = None
