"""What is asked for, what is being generated, and what comes out. Torch-free but for the completion's log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One row to generate. ``row_id`` (stable, unique) keys its random draws; rows of one prompt share ``group_id``.

    ``min_new_tokens``: the row's own ``min_response_length``; the larger of both counts.
    """

    row_id: int
    group_id: int
    prompt_ids: Sequence[int]
    max_new_tokens: int
    min_new_tokens: int = 0


@dataclass(eq=False)
class Episode:
    """What a row has been through with its environment. ``mask``: for each response token whether the model drew it."""

    mask: list[bool] = field(default_factory=list)
    reward: float = 0.0
    num_turns: int = 0


@dataclass(frozen=True, eq=False)
class Completion:
    """``token_ids`` with the stop token if there was one; log-probs on the CPU, one per token.

    ``log_probs``: fp32 (fp64 for an fp64 model) [tokens], under the sampling temperature, of the whole vocabulary (before
    penalties, masks, top-k, top-p and min-p), as training computes them; greedy decoding counts as temperature 1.
    ``log_probs_t1``: the same at temperature 1. ``versions`` int64 [tokens]: of the weights that drew each token.
    ``top_log_probs``: ids and log-probs at temperature 1, [tokens, logprobs] each, the likeliest first; None if not asked for.
    ``episode``: with an environment, whose tokens have 0 as log-probs.
    """

    row_id: int
    token_ids: list[int]
    log_probs: Tensor
    log_probs_t1: Tensor
    finish_reason: Literal["stop", "length"]
    versions: Tensor
    top_log_probs: tuple[Tensor, Tensor] | None = None
    episode: Episode | None = None


class Drawn(NamedTuple):
    """What one call notes of the tokens it drew for a row, beside their ids; fields as in ``Completion``."""

    log_probs: Tensor
    log_probs_t1: Tensor
    versions: Tensor
    top_ids: Tensor
    top_log_probs: Tensor


@dataclass(eq=False)
class Progress:
    """A request and what was drawn for it so far, by one call or several. ``step`` keys its draws in all of them."""

    request: Request
    step: int
    token_ids: list[int] = field(default_factory=list)
    parts: list[Drawn] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] | None = None
    episode: Episode | None = None

    @property
    def turn(self) -> list[int]:
        """The tokens since an environment spoke; without one all of them."""
        return self.token_ids[len(self.episode.mask) :] if self.episode else self.token_ids

    def completion(self) -> Completion:
        assert self.finish_reason is not None, f"row {self.request.row_id} has not ended"
        whole = Drawn(*map(torch.cat, zip(*self.parts, strict=True)))
        top = (whole.top_ids, whole.top_log_probs) if whole.top_ids.shape[1] else None
        return Completion(
            self.request.row_id, self.token_ids, *whole[:2], self.finish_reason, whole.versions, top, self.episode
        )

    def to_json(self) -> dict[str, Any]:
        """All but the request, exactly."""
        parts = [[tensor.tolist() for tensor in part] for part in self.parts]
        return {"step": self.step, "token_ids": self.token_ids, "parts": parts, "finish_reason": self.finish_reason}

    @staticmethod
    def from_json(request: Request, state: dict[str, Any], dtype: torch.dtype) -> Progress:
        """``dtype``: of the log-probs."""
        kinds = (dtype, dtype, torch.int64, torch.int64, dtype)
        parts = [
            Drawn(*(torch.tensor(values, dtype=kind) for values, kind in zip(part, kinds, strict=True)))
            for part in state["parts"]
        ]
        return Progress(request, state["step"], state["token_ids"], parts, state["finish_reason"])


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
