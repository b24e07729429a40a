"""Guessing the next tokens from what a group has said before (prompt lookup), without a draft model.

A guess only saves time: the tokens behind it are computed together, each is drawn as it would be one by one, and the first that
differs from the guess ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlhf_spmd.generation.progress import Progress
from rlhf_spmd.generation.sequence import Row

GRAM = 3  # tokens that must have occurred before


class Speculation:
    """``most`` tokens ahead. Rows of a group look into their prompt and into each other's responses."""

    def __init__(self, rows: Sequence[Progress], most: int) -> None:
        self.most = most
        self._texts = [[*row.request.prompt_ids, *row.token_ids] for row in rows]
        by_group: dict[int, dict[tuple[int, ...], tuple[list[int], int]]] = {}
        self._seen = [
            by_group.setdefault(row.request.group_id, {}) for row in rows
        ]  # gram -> what followed it last: text, place
        for text, seen in zip(self._texts, self._seen, strict=True):
            for place in range(GRAM, len(text)):
                seen[tuple(text[place - GRAM : place])] = (text, place)

    def note(self, index: int, tokens: Iterable[int]) -> None:
        """Row ``index`` has drawn these."""
        text, seen = self._texts[index], self._seen[index]
        for token in tokens:
            if len(text) >= GRAM:
                seen[tuple(text[-GRAM:])] = (text, len(text))
            text.append(token)

    def guess(self, row: Row) -> list[int]:
        """At most so many that the row cannot pass its limit."""
        text = self._texts[row.index]
        source, place = self._seen[row.index].get(tuple(text[-GRAM:]), (text, len(text)))
        return source[place : place + min(self.most, row.limit - row.length - 1)]
