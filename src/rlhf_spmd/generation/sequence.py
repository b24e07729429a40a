"""What is asked for, and what the scheduler knows of it. Without torch, as are ``scheduler`` and ``block_manager``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Drawing(NamedTuple):
    """What of ``SamplingConfig`` the rows of one call may differ in: how a token is drawn from its logits."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True)
class Request:
    """One row to generate. ``row_id`` (stable, unique) keys its random draws; rows of one prompt share ``group_id``.

    ``min_new_tokens``: the row's own ``min_response_length``; the larger of both counts. ``drawing``: None is the call's.
    """

    row_id: int
    group_id: int
    prompt_ids: Sequence[int]
    max_new_tokens: int
    min_new_tokens: int = 0
    drawing: Drawing | None = None


@dataclass(eq=False)
class Row:
    """A request on its way: all of its counters are in tokens.

    ``index``: its line in the runner's token buffer. ``length``: prompt plus generated so far; ``limit``: where it must end.
    ``num_computed``: tokens whose keys and values lie in ``pages``. The last generated token is not computed until the next
    step needs it, so a running row has num_computed < length.
    ``contents``: interned ids of the prompt's pages, the last one for the tail (see ``Interner``); ``claims``: those of
    them that this row is computing for all. ``stopped``: a stop token or string ended it; ``ended``: stopped or at its limit.
    ``held``: not to be scheduled, since its environment has yet to answer.
    ``min_new``: tokens to draw before it may stop. ``draft``: guesses of its next tokens, computed together with its last one.
    """

    index: int
    prompt_length: int
    limit: int
    contents: tuple[int, ...]
    min_new: int = 0
    length: int = 0
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    claims: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    stopped: bool = False
    ended: bool = False
    held: bool = False

    def __post_init__(self) -> None:
        self.length = self.prompt_length

    @property
    def num_new(self) -> int:
        return self.length - self.prompt_length


class Interner:
    """Gives equal prompt prefixes equal integers, one per page: exact content addressing without hashes.

    A prompt of n tokens is cut into (n - 1) // page_size full pages and a tail of 1 .. page_size tokens. The tail holds the
    last prompt token, which every row computes for itself to get its first logits; hence tails are copied, never shared.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._ids: dict[tuple[int, tuple[int, ...]], int] = {}

    def contents(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        parent = -1
        out = []
        for start in range(0, len(prompt_ids), self.page_size):
            key = (parent, tuple(prompt_ids[start : start + self.page_size]))
            parent = self._ids.setdefault(key, len(self._ids))
            out.append(parent)
        return tuple(out)
