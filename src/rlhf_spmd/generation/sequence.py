"""A row of generation from request to completion, and the work of one step.

:class:`Request` says what to generate, :class:`SequenceState` is the row in flight, :class:`Completion` is the result.
:class:`ScheduledStep` is what the scheduler hands to the runner. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


LogitsProcessor = Callable[[list[int], "Tensor"], "Tensor"]  # (tokens drawn so far, logits [vocabulary]) -> new logits


class NotFinite(FloatingPointError):
    """The log-prob of a drawn token is not finite, or a logits processor returned logits that are not."""

    def __init__(self, row_id: int) -> None:
        super().__init__(
            f"row {row_id}: the log-prob of a drawn token is not finite; look at the weights and at "
            "logits_processors, or compute in float32"
        )
        self.row_id = row_id


class SamplingOverrides(NamedTuple):
    """The fields of ``SamplingConfig`` that may differ between the rows of one call."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True)
class Request:
    """One row to generate. Rows of one prompt share ``group_id``.

    - row_id: a stable and unique number, which keys the random draws
    - min_new_tokens: the row's own ``min_response_length``; the larger of the two counts
    - overrides: how this row is sampled; None: as the call says
    - draw_key: a seed and a number that key the draws in place of the call's seed and ``row_id``
    - processors: change the logits after all other rules, in order; every rank of the replica calls them with equal arguments
    - is_continued: prompts of later rows may begin with this row's prompt and response, whose pages they find
    - num_continued: so many tokens of the prompt are prompt and response of an earlier row
    - cache_salt: only rows with an equal one share the pages of prompts
    """

    row_id: int
    group_id: int
    prompt_ids: Sequence[int]
    max_new_tokens: int
    min_new_tokens: int = 0
    overrides: SamplingOverrides | None = None
    draw_key: tuple[int, int] | None = None
    processors: tuple[LogitsProcessor, ...] = ()
    cache_salt: str | None = None
    is_continued: bool = False
    num_continued: int = 0


class TokenLogprobs(NamedTuple):
    """What is known of a response's tokens beside their ids, with one entry per token. The fields are those of ``Completion``."""

    log_probs: Tensor
    log_probs_t1: Tensor
    versions: Tensor
    top_ids: Tensor
    top_log_probs: Tensor


@dataclass(frozen=True, eq=False)
class Completion:
    """The response to a request. All tensors are on the CPU and have one entry per token.

    - token_ids: the response, with the stop token if there was one
    - log_probs: [tokens], fp32 (fp64 for an fp64 model), at the sampling temperature (1 for greedy decoding). They are those of
      the whole vocabulary before penalties, masks, top-k, top-p and min-p, as training computes them
    - log_probs_t1: the same at temperature 1
    - versions: int64 [tokens], the version of the weights that drew each token
    - top_log_probs: ids and log-probs at temperature 1 of the likeliest tokens, [tokens, logprobs] each; None if not asked for
    - mask: with an environment, whether the model drew each token; the others have log-prob 0
    - reward: with an environment, the sum of its rewards
    - num_turns: with an environment, the number of the model's turns
    - observations: the messages that stand for each run of the environment's tokens; a text is one of the role ``tool``
    - failure: why the environment failed. It ended the row, whose reward is nan then. None: it has not failed
    - retries: how often the row was begun again because the environment had failed
    - num_cached: tokens of the prompt that were in the cache when the row first started
    - experts: if they are recorded, those that each token of prompt and response took, [tokens, mixtures, experts of a token]
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
    observations: list[list[dict[str, Any]]] = field(default_factory=list)
    experts: Tensor | None = None
    failure: str | None = None
    retries: int = 0
    num_cached: int = 0


@dataclass(eq=False)
class SequenceState:
    """A request in flight, through one call or several. All counters are in tokens.

    - step: keys the row's draws in all calls
    - response: the tokens that the response begins with
    - logprob_parts: the log-probs of the tokens that each of the earlier calls drew
    - mask, reward, num_turns, observations, failure, retries: see :class:`Completion`
    - num_cached: see :class:`Completion`; None before the row first started
    - stopped: a stop token or stop string ended the row
    - ended: the row stopped or reached its limit
    - experts: if recorded, the experts of the tokens that earlier calls computed

    The other fields belong to the micro-batch that the row is in, and begin anew in another one:

    - buffer_line: the row's line in the runner's token buffer
    - min_new_tokens: tokens to draw before the row may stop
    - prefix_ids: identify the prompt up to the end of each of its pages (:class:`~.page_allocator.PrefixTable`)
    - continued_id: identifies the ``num_continued`` tokens, if they end within a page
    - num_computed: tokens whose keys and values lie in ``pages``. The last token is computed only when the next step needs it, so
      a running row has num_computed < length
    - pages: the row's pages of the cache, in the order of its tokens
    - state_slot: the slot of the row's states in layers with linear attention, while it has pages; -1: it has none
    - pending_prefixes: those ``prefix_ids`` whose pages this row is computing for all rows
    - on_hold: the row waits for its environment and is not scheduled
    """

    request: Request
    step: int = 0
    response: InitVar[Sequence[int]] = ()
    logprob_parts: list[TokenLogprobs] = field(default_factory=list)
    mask: list[bool] | None = None
    reward: float = 0.0
    num_turns: int = 0
    observations: list[list[dict[str, Any]]] = field(default_factory=list)
    failure: str | None = None
    retries: int = 0
    num_cached: int | None = None
    stopped: bool = False
    ended: bool = False
    experts: Tensor | None = None
    # -- what belongs to the micro-batch that the row is in
    buffer_line: int = 0
    min_new_tokens: int = 0
    prefix_ids: tuple[int, ...] = ()
    continued_id: int | None = None
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    state_slot: int = -1
    pending_prefixes: list[int] = field(default_factory=list)
    on_hold: bool = False

    def __post_init__(self, response: Sequence[int]) -> None:
        self.tokens = [*self.request.prompt_ids, *response]
        self.prompt_length = len(self.request.prompt_ids)
        self.limit = self.prompt_length + self.request.max_new_tokens

    @property
    def token_logprobs(self) -> TokenLogprobs | None:
        """Return the log-probs of the tokens that earlier calls drew; None if they drew none."""
        import torch  # here: schedulers are tested without

        if len(self.logprob_parts) > 1:
            self.logprob_parts = [TokenLogprobs(*map(torch.cat, zip(*self.logprob_parts, strict=True)))]
        return self.logprob_parts[0] if self.logprob_parts else None

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def token_ids(self) -> list[int]:
        """Return the response so far."""
        return self.tokens[self.prompt_length :]

    @property
    def turn_start(self) -> int:
        """Return where the model's current turn begins in ``tokens``; without an environment, where the response begins."""
        return self.prompt_length + len(self.mask or ())

    def leave_pages(self) -> None:
        """Forget what was computed: the row has no pages any more."""
        self.num_computed = 0
        self.pages = []
        self.state_slot = -1
        self.pending_prefixes = []

    def rewind(self, num_new: int) -> None:
        """Go back to the first ``num_new`` tokens of the response, without pages."""
        del self.tokens[self.prompt_length + num_new :]
        self.stopped = self.ended = False
        self.leave_pages()

    def begin_again(self) -> None:
        """Go back to the prompt, without pages."""
        self.rewind(0)
        self.mask, self.observations = [], []
        self.reward, self.num_turns = 0.0, 0
        self.retries += 1

    def completion(self, token_logprobs: TokenLogprobs | None = None, experts: Tensor | None = None) -> Completion:
        """Return the ended row's completion. ``token_logprobs``, ``experts``: those of the whole row, if it has not taken them yet."""
        logprobs = token_logprobs or self.token_logprobs
        assert self.ended and logprobs is not None, f"row {self.request.row_id} has not ended"
        return Completion(
            self.request.row_id,
            self.token_ids,
            logprobs.log_probs,
            logprobs.log_probs_t1,
            "stop" if self.stopped else "length",
            logprobs.versions,
            (logprobs.top_ids, logprobs.top_log_probs) if logprobs.top_ids.shape[1] else None,
            self.mask,
            self.reward,
            self.num_turns,
            self.observations,
            self.experts if experts is None else experts,
            self.failure,
            self.retries,
            self.num_cached or 0,
        )


class SequenceWork(NamedTuple):
    """Compute ``num_tokens`` tokens of ``row`` from ``start`` on. If ``samples``, draw the next token."""

    row: SequenceState
    start: int
    num_tokens: int
    samples: bool

    @property
    def decodes(self) -> bool:
        """Return True if this computes one token and draws the next one, which can be repeated without the host."""
        return self.samples and self.num_tokens == 1

    def num_draws(self, repeats: int) -> int:
        """Return the tokens that are drawn if rows that decode draw ``repeats`` tokens each; 0: they draw one, as all others do."""
        if not self.samples:
            return 0
        return min(repeats, self.row.limit - self.row.length) if repeats and self.decodes else 1


@dataclass
class ScheduledStep:
    """What one step computes.

    - copies: (source, destination) pages to copy before anything is written
    - state_copies: the same of state slots; each source is read before any destination is written
    - repeats: tokens that each row which decodes draws before the host looks at them; 0: the host looks at each token
    """

    work: list[SequenceWork] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    repeats: int = 0
