"""Guessing the next tokens from what a group has said before (prompt lookup), without a draft model.

A guess only saves time: the tokens behind it are computed together, each is drawn as it would be one by one, and the first that
differs from the guess ends it.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_spmd.generation.sequence import SequenceState

GRAM = 3  # tokens that must have occurred before


class Speculation:
    """``most`` tokens ahead. ``rows``: by index; those of a group look into their prompt and into each other's responses."""

    def __init__(self, rows: Sequence[SequenceState], most: int) -> None:
        self.most = most
        by_group: dict[int, dict[tuple[int, ...], tuple[list[int], int]]] = {}  # gram -> where it came last: text, end
        self._seen = [by_group.setdefault(row.request.group_id, {}) for row in rows]
        for row in rows:
            self.note(row, row.length)

    def note(self, row: SequenceState, number: int) -> None:
        """The last ``number`` tokens of ``row`` have not been noted yet."""
        text, seen = row.tokens, self._seen[row.index]
        for end in range(max(len(text) - number, GRAM), len(text)):
            seen[tuple(text[end - GRAM : end])] = (text, end)

    def guess(self, row: SequenceState) -> list[int]:
        """At most so many that the row cannot pass its limit."""
        text, end = self._seen[row.index].get(tuple(row.tokens[-GRAM:]), (row.tokens, row.length))
        return text[end : end + min(self.most, row.limit - row.length - 1)]
