"""A row's three stations: what is asked for (:class:`Request`), the row in flight (:class:`SequenceState`), what came of it
(:class:`Completion`).

Without torch, as are ``scheduler`` and ``page_pool``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


LogitsProcessor = Callable[[list[int], "Tensor"], "Tensor"]  # (tokens drawn so far, logits [vocabulary]) -> logits to draw from


class NotFinite(FloatingPointError):
    """The model gave a token of a row a log-prob that is not finite, or a function left logits to draw from that are not."""

    def __init__(self, row_id: int) -> None:
        super().__init__(
            f"row {row_id}: the log-prob of a drawn token is not finite; look at the weights and at logits_processors, or "
            "compute in float32"
        )
        self.row_id = row_id


class SamplingOverrides(NamedTuple):
    """What of ``SamplingConfig`` the rows of one call may differ in: how a token is drawn from its logits."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True)
class Request:
    """One row to generate. ``row_id`` (stable, unique) keys its random draws; rows of one prompt share ``group_id``.

    ``min_new_tokens``: the row's own ``min_response_length``; the larger of both counts. ``drawing``: None is the call's.
    ``drawn_as``: a seed and a number that key its draws in place of the call's seed and its row id. ``processors``: change its logits
    after all other rules, one after the other; every rank of the replica calls them with the same arguments.
    """

    row_id: int
    group_id: int
    prompt_ids: Sequence[int]
    max_new_tokens: int
    min_new_tokens: int = 0
    drawing: SamplingOverrides | None = None
    drawn_as: tuple[int, int] | None = None
    processors: tuple[LogitsProcessor, ...] = ()


class TokenLogprobs(NamedTuple):
    """What is noted of a response's tokens beside their ids, one of each per token; fields as in ``Completion``."""

    log_probs: Tensor
    log_probs_t1: Tensor
    versions: Tensor
    top_ids: Tensor
    top_log_probs: Tensor


@dataclass(frozen=True, eq=False)
class Completion:
    """``token_ids`` with the stop token if there was one; log-probs on the CPU, one per token.

    ``log_probs``: fp32 (fp64 for an fp64 model) [tokens], under the sampling temperature, of the whole vocabulary (before
    penalties, masks, top-k, top-p and min-p), as training computes them; greedy decoding counts as temperature 1.
    ``log_probs_t1``: the same at temperature 1. ``versions`` int64 [tokens]: of the weights that drew each token.
    ``top_log_probs``: ids and log-probs at temperature 1, [tokens, logprobs] each, the likeliest first; None if not asked for.
    With an environment, ``mask`` says of each token whether the model drew it (others have 0 as log-probs), beside the sum of
    the rewards and the number of turns.
    """

    row_id: int
    token_ids: list[int]
    log_probs: Tensor
    log_probs_t1: Tensor
    finish_reason: Literal["stop", "length"]
    versions: Tensor
    top_log_probs: tuple[Tensor, Tensor] | None = None
    mask: list[bool] | None = None
    reward: float = 0.0
    num_turns: int = 0


@dataclass(eq=False)
class SequenceState:
    """A request on its way, through one call or several; all counters are in tokens.

    ``step`` keys its draws in all calls. ``tokens``: prompt and response so far (``response``: what it begins with), at most
    ``limit``. ``notes``: of the response, as far as earlier calls drew it. ``mask``, ``reward``, ``num_turns``: see ``Completion``.
    ``stopped``: a stop token or string ended it; ``ended``: stopped or at its limit.

    In a lane: ``index``: its line in the runner's token buffer. ``min_new``: tokens to draw before it may stop.
    ``num_computed``: tokens whose keys and values lie in ``pages``. The last token is not computed until the next step needs it,
    so a running row has num_computed < length. ``contents``: interned ids of the prompt's pages, the last one for the tail (see
    ``PrefixTable``); ``claims``: those of them that this row is computing for all. ``held``: not to be scheduled, since its
    environment has yet to answer. ``draft``: guesses of its next tokens, computed together with its last one.
    """

    request: Request
    step: int = 0
    response: InitVar[Sequence[int]] = ()
    notes: TokenLogprobs | None = None
    mask: list[bool] | None = None
    reward: float = 0.0
    num_turns: int = 0
    stopped: bool = False
    ended: bool = False
    index: int = 0
    min_new: int = 0
    contents: tuple[int, ...] = ()
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    claims: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    held: bool = False

    def __post_init__(self, response: Sequence[int]) -> None:
        self.tokens = [*self.request.prompt_ids, *response]
        self.prompt_length = len(self.request.prompt_ids)
        self.limit = self.prompt_length + self.request.max_new_tokens

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def token_ids(self) -> list[int]:
        """Of the response so far."""
        return self.tokens[self.prompt_length :]

    @property
    def turn_start(self) -> int:
        """Where the tokens begin that came since an environment spoke; without one the response."""
        return self.prompt_length + len(self.mask or ())

    def leave_pages(self) -> None:
        """As it stands where nothing of it is computed yet."""
        self.num_computed, self.pages, self.claims, self.draft = 0, [], [], []

    def completion(self, notes: TokenLogprobs | None = None) -> Completion:
        """``notes``: of the whole response, where the row's own are not made yet."""
        notes = notes or self.notes
        reason: Literal["stop", "length"] = "stop" if self.stopped else "length"
        assert self.ended and notes is not None, f"row {self.request.row_id} has not ended"
        top = (notes.top_ids, notes.top_log_probs) if notes.top_ids.shape[1] else None
        row_id, mask = self.request.row_id, self.mask
        return Completion(row_id, self.token_ids, *notes[:2], reason, notes.versions, top, mask, self.reward, self.num_turns)


class PrefixTable:
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
