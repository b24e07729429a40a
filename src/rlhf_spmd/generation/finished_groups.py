"""Rows that leave a call before it has ended: whole groups of them, in a fixed number of portions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlhf_spmd.generation.sequence import Completion, Request, SequenceState

if TYPE_CHECKING:
    from rlhf_spmd.generation.decode_micro_batches import DecodeMicroBatch


class FinishedGroups:
    """Hands out the rows of ``requests`` while they are generated: after each 1 / ``number`` of their groups that has ended, ``send``
    gets the completions of the whole groups since the last time. ``number`` - 1 times at most: the last portion is what is left at the
    end, which the call returns. ``begin``, if there is one, gets the completions of each whole group as it ends, the last one's too.

    Local: the ranks of a replica need not all have one. A rank that has is one of the last stage, where log-probs are.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        number: int,
        send: Callable[[list[Completion]], None],
        begin: Callable[[list[Completion]], None] | None = None,
    ) -> None:
        self.number, self.send, self.begin = number, send, begin
        self.num_sent = self.num_whole = 0
        self._unfinished = Counter(request.group_id for request in requests)  # group -> how many of its rows have not ended
        self.num_groups = len(self._unfinished)
        self._ended: dict[int, list[tuple[DecodeMicroBatch, SequenceState]]] = {}  # of groups of which some rows have ended
        self._whole: list[tuple[DecodeMicroBatch, SequenceState]] = []  # not yet sent
        self._new: list[tuple[DecodeMicroBatch, SequenceState]] = []  # of these, those that have not begun

    def note(self, lane: DecodeMicroBatch, row: SequenceState) -> None:
        """``row`` has ended, and nothing of it changes any more."""
        group = row.request.group_id
        self._unfinished[group] -= 1
        self._ended.setdefault(group, []).append((lane, row))
        if not self._unfinished[group]:
            whole = self._ended.pop(group)
            self._whole += whole
            self._new += whole
            self.num_whole += 1

    def hand_out(self) -> None:
        """Between two steps: send what is due."""
        if self.begin is not None and self._new:
            self.begin([lane.completion(row) for lane, row in self._new])
        self._new = []
        due = min(self.num_whole * self.number // self.num_groups, self.number - 1)
        if due > self.num_sent:
            self.num_sent = due
            self.send([lane.completion(row) for lane, row in self._whole])
            self._whole = []
