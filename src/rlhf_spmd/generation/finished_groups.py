"""Rows that leave a call before it ends: whole groups, in a fixed number of chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rlhf_spmd.generation.sequence import Completion, Request, SequenceState


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
        self.num_chunks, self.send, self.begin = num_chunks, send, begin
        self.num_sent = self.num_finished = 0
        self._unfinished = Counter(request.group_id for request in requests)  # group -> rows that have not ended
        self.num_groups = len(self._unfinished)
        self._ended: dict[int, list[SequenceState]] = {}  # the ended rows of unfinished groups
        self._unsent: list[SequenceState] = []  # rows of finished groups
        self._new: list[SequenceState] = []  # those of them that ``begin`` has not seen

    def note(self, row: SequenceState) -> None:
        """``row`` has ended and will not change any more."""
        group = row.request.group_id
        self._unfinished[group] -= 1
        self._ended.setdefault(group, []).append(row)
        if not self._unfinished[group]:
            finished = self._ended.pop(group)
            self._unsent += finished
            self._new += finished
            self.num_finished += 1

    def hand_out(self, completion: Callable[[SequenceState], Completion]) -> None:
        """Send what is due. Call it between two steps; ``completion`` makes that of an ended row."""
        if self.begin is not None and self._new:
            self.begin([completion(row) for row in self._new])
        self._new = []
        due = min(self.num_finished * self.num_chunks // self.num_groups, self.num_chunks - 1)
        if due > self.num_sent:
            self.num_sent = due
            self.send([completion(row) for row in self._unsent])
            self._unsent = []
